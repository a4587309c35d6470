// SPDX-License-Identifier: Apache-2.0
// Rows times one panel of a weight whose blocks are whole rows of inputs: those that are made when a model is loaded.
//
// A row of activations has one scale, and codes of more than eight bits; see QuantizedRow. For each group of inputs its
// exact sum is multiplied by the group's scale, and the sum of its codes by the group's minimum, both in one order
// whatever the number of rows; the row's scale comes last.
#pragma once

namespace {

// Rows of a register tile of 8-bit codes: sums of integers and of floats, and codes, have to fit.
#if defined(__AVX512VNNI__)
constexpr int kWholeRows = 5;
#else
constexpr int kWholeRows = kGroupedRows;
#endif

// What wide quads of some rows add to sums of a panel's columns, [Rows][Cols] for each of the groups from `first` on whose
// bit of `wide` is set: `weights` are the panel's codes in 8 bits from the first of these groups on. Apart from the loops
// that it would take registers from.
template <int Rows, int Cols, bool High = true>
__attribute__((noinline)) void sum_wide([[maybe_unused]] const QuantizedFormat& format, [[maybe_unused]] const uint8_t* weights,
                                        [[maybe_unused]] const QuantizedRow& row, [[maybe_unused]] int64_t row_bytes,
                                        [[maybe_unused]] int64_t first, [[maybe_unused]] uint32_t wide,
                                        [[maybe_unused]] ints (*sums)[Rows][Cols]) {
    if constexpr (kByteCodes) {
        const int64_t from = first * format.group_inputs * kPanel;
        for (int g = 0; wide >> g != 0; ++g) {
            if ((wide >> g & 1) == 0) continue;
            for (int r = 0; r < Rows; ++r) {
                const QuantizedRow own = row.from(r * row_bytes);
                ints units[Cols];
                for (ints& some : units) some = broadcast_ints(0);
                const int32_t end = own.end_of_wide(format, first + g);
                for (int32_t k = own.starts[first + g]; k < end; ++k) {
                    const RowQuad quad = row_quad(reinterpret_cast<const Code*>(&own.wide[k].codes));
                    for (int j = 0; j < Cols; ++j) {
                        const ints codes = load_ints(weights + own.wide[k].offset - from + j * kVectorBytes);
                        units[j] = add_products(units[j], weight_quads<High>(codes), quad);
                    }
                }
                for (int j = 0; j < Cols; ++j) sums[g][r][j] = times_wide_unit(units[j]);
            }
        }
    }
}

// Bit i says whether one of some rows has a wide quad in group first + i.
template <int Rows>
PAGODA_INLINE uint32_t wide_groups([[maybe_unused]] const QuantizedFormat& format, [[maybe_unused]] const QuantizedRow& row,
                                   [[maybe_unused]] int64_t row_bytes, [[maybe_unused]] int64_t first,
                                   [[maybe_unused]] int groups) {
    uint32_t found = 0;
    if constexpr (kByteCodes) {
#pragma GCC unroll 8
        for (int r = 0; r < Rows; ++r) {
            const QuantizedRow own = row.from(r * row_bytes);
            int32_t begin = own.starts[first];
            if (begin == own.end_of_wide(format, first + groups - 1)) continue;
            for (int g = 0; g < groups; ++g) {
                const int32_t end = own.end_of_wide(format, first + g);
                found |= static_cast<uint32_t>(end != begin) << g;
                begin = end;
            }
        }
    }
    return found;
}

// What a sum of a group has to begin at, whose row's codes add up to `total`, for products of codes that are taken too low.
template <class B>
PAGODA_INLINE ints first_sum(const float& total) {
    return broadcast_ints(kSignedCodes && B::high ? 128 * static_cast<int32_t>(total) : 0);
}

// results += sums of a group times its scale, and the totals of the rows' codes times its minimum.
template <int Rows, int Cols>
PAGODA_INLINE void add_group_sums(const ints (&sums)[Rows][Cols], const GroupScales (&scales)[Cols], const float* totals,
                                  int64_t meta, vec (&results)[Rows][Cols]) {
#pragma GCC unroll 8
    for (int r = 0; r < Rows; ++r) {
        const vec total = broadcast(totals[r * meta]);
#pragma GCC unroll 2
        for (int j = 0; j < Cols; ++j) {
            results[r][j] = fma(to_floats(sums[r][j]), scales[j].scale, results[r][j]);
            results[r][j] = fma(scales[j].minimum, total, results[r][j]);
        }
    }
}

// The same of one group, whose words begin at `unit`.
template <class B, int Rows>
__attribute__((noinline)) void sum_wide_of_group(const QuantizedFormat& format, const uint8_t* unit, const QuantizedRow& row,
                                                 int64_t row_bytes, int64_t g, ints (*sums)[Rows][1]) {
    alignas(64) uint8_t codes[B::units_of_group * kQuads * kRowBytes];
    for (int u = 0; u < B::units_of_group; ++u) {
        ints quads[kQuads];
        unpack_unit<B>(unit + u * (B::bits * kRowBytes), quads);
        for (int q = 0; q < kQuads; ++q) store_ints(codes + (u * kQuads + q) * kRowBytes, quads[q]);
    }
    sum_wide<Rows, 1, B::high>(format, codes, row, row_bytes, g, 1, sums);
}

// The first group from g on in which one of some rows has a wide quad; none is beyond all.
template <class B, int Rows>
__attribute__((noinline)) int64_t next_wide_group([[maybe_unused]] const QuantizedFormat& format,
                                                  [[maybe_unused]] const QuantizedRow& row, [[maybe_unused]] int64_t row_bytes,
                                                  [[maybe_unused]] int64_t g) {
    int64_t next = format.groups;
    if constexpr (kByteCodes) {
        for (int r = 0; r < Rows && g < format.groups; ++r) {
            const QuantizedRow own = row.from(r * row_bytes);
            const int32_t k = own.starts[g];
            if (k < *own.num_wide) next = std::min<int64_t>(next, own.wide[k].offset / (B::group * kPanel));
        }
    }
    return next;
}

// c [Rows, kPanel] of a panel, before rows' scales.
template <class B, int Rows>
PAGODA_INLINE void whole_direct_tile(const QuantizedFormat& format, const uint8_t* panel, const QuantizedRow& row,
                                     int64_t row_bytes, Fetching& ahead, float* c) {
    // Of a sum, as each product waits for the one before it.
    constexpr int kParts = Rows == 1 ? 4 : Rows <= 4 || Rows == 8 ? 2 : 1;
    const int64_t stride = row_bytes / static_cast<int64_t>(sizeof(Code)), meta = row_bytes / 4;
    for (int column = 0; column < kPanel; column += kWidth) {
        const Code* x = static_cast<const Code*>(row.codes);
        const uint8_t* unit = panel + format.header_bytes() + 4 * column;
        const GroupScales of_block = block_scales<B>(format, panel, column);
        int64_t wide = next_wide_group<B, Rows>(format, row, row_bytes, 0);
        vec results[Rows][1];
#pragma GCC unroll 8
        for (int r = 0; r < Rows; ++r) results[r][0] = zero();
        for (int64_t g = 0; g < format.groups; ++g) {
            ints parts[Rows][kParts];
#pragma GCC unroll 8
            for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 8
                for (ints& part : parts[r]) part = broadcast_ints(0);
                if constexpr (kSignedCodes) parts[r][0] = first_sum<B>(row.totals[r * meta + g]);
            }
            if (g == wide) {
                ints of_wide[1][Rows][1];
                sum_wide_of_group<B, Rows>(format, unit, row, row_bytes, g, of_wide);
#pragma GCC unroll 8
                for (int r = 0; r < Rows; ++r) parts[r][0] = add_ints(parts[r][0], of_wide[0][r][0]);
                wide = next_wide_group<B, Rows>(format, row, row_bytes, g + 1);
            }
#pragma GCC unroll 2
            for (int u = 0; u < B::units_of_group; ++u, unit += B::bits * kRowBytes, x += kUnitInputs) {
                ahead.step();
                ints quads[kQuads];
                unpack_unit<B>(unit, quads);
#pragma GCC unroll 8
                for (int q = 0; q < kQuads; ++q) {
                    const WeightQuads weights = weight_quads<B::high>(quads[q]);
#pragma GCC unroll 8
                    for (int r = 0; r < Rows; ++r) {
                        ints& part = parts[r][q % kParts];
                        part = add_products(part, weights, row_quad(x + r * stride + 4 * q));
                    }
                }
            }
            ints sums[Rows][1];
#pragma GCC unroll 8
            for (int r = 0; r < Rows; ++r) {
                sums[r][0] = parts[r][0];
#pragma GCC unroll 8
                for (int p = 1; p < kParts; ++p) sums[r][0] = add_ints(sums[r][0], parts[r][p]);
            }
            const GroupScales scales[1] = {group_scales<B>(format, panel, of_block, g, column)};
            add_group_sums<Rows, 1>(sums, scales, row.totals + g, meta, results);
        }
#pragma GCC unroll 8
        for (int r = 0; r < Rows; ++r) store(c + r * kPanel + column, results[r][0]);
    }
}

// Codes of a piece in 8 bits: those of the panel where they are, else unpacked to `piece`.
template <class B>
PAGODA_INLINE const uint8_t* unpack_whole_piece(const QuantizedFormat& format, const uint8_t* panel, int64_t first,
                                                int units, Piece& piece) {
    const uint8_t* unit = panel + format.header_bytes() + first * (B::bits * kRowBytes);
    for (int column = 0; column < kPanel; column += kWidth) {
        if constexpr (B::bits < 8) {
            for (int u = 0; u < units; ++u) {
                ints quads[kQuads];
                unpack_unit<B>(unit + u * (B::bits * kRowBytes) + 4 * column, quads);
#pragma GCC unroll 8
                for (int q = 0; q < kQuads; ++q) {
                    store_ints(piece.codes + (u * kQuads + q) * kRowBytes + 4 * column, quads[q]);
                }
            }
        }
        const GroupScales of_block = block_scales<B>(format, panel, column);
        for (int g = 0; g < units / B::units_of_group; ++g) {
            const auto scales = group_scales<B>(format, panel, of_block, first / B::units_of_group + g, column);
            store(piece.scales + g * kPanel + column, scales.scale);
            store(piece.minima + g * kPanel + column, scales.minimum);
        }
    }
    return B::bits < 8 ? piece.codes : unit;
}

// c [Rows, kPanel] += some groups of a piece, from group `first` of rows on, of the columns from `column` on.
template <class B, int Rows, int Cols>
PAGODA_INLINE void whole_tile(const QuantizedFormat& format, const uint8_t* piece_codes, const Piece& piece, int groups,
                              int column, const QuantizedRow& row, int64_t row_bytes, int64_t first, uint32_t wide,
                              Fetching& ahead, float* c) {
    const int64_t stride = row_bytes / static_cast<int64_t>(sizeof(Code)), meta = row_bytes / 4;
    const Code* x = static_cast<const Code*>(row.codes) + first * B::group;
    const uint8_t* codes = piece_codes + 4 * column;
    ints of_wide[kPieceUnits][Rows][Cols];
    if (wide != 0) sum_wide<Rows, Cols, B::high>(format, codes, row, row_bytes, first, wide, of_wide);
    vec results[Rows][Cols];
#pragma GCC unroll 8
    for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 2
        for (int j = 0; j < Cols; ++j) results[r][j] = load(c + r * kPanel + column + j * kWidth);
    }
    for (int g = 0; g < groups; ++g) {
        ahead.step();
        ints sums[Rows][Cols];
#pragma GCC unroll 8
        for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 2
            for (int j = 0; j < Cols; ++j) sums[r][j] = first_sum<B>(row.totals[r * meta + first + g]);
        }
        if (__builtin_expect(wide >> g & 1, 0)) {
#pragma GCC unroll 8
            for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 2
                for (int j = 0; j < Cols; ++j) sums[r][j] = add_ints(sums[r][j], of_wide[g][r][j]);
            }
        }
#ifdef __ARM_FEATURE_MATMUL_INT8
        add_eights<Rows, Cols>(B::group / 8, x, stride, sums, [&](int64_t i, ints (&one)[Cols], ints (&other)[Cols]) {
#pragma GCC unroll 2
            for (int j = 0; j < Cols; ++j) {
                one[j] = load_ints(codes + 2 * i * kRowBytes + j * kVectorBytes);
                other[j] = load_ints(codes + (2 * i + 1) * kRowBytes + j * kVectorBytes);
            }
        });
        codes += B::group / 4 * kRowBytes, x += B::group;
#else
        // Rolled up, GCC 12 copies every sum.
#pragma GCC unroll 16
        for (int q = 0; q < B::group / 4; ++q, codes += kRowBytes, x += 4) {
            ints quads[Cols];
#pragma GCC unroll 2
            for (int j = 0; j < Cols; ++j) quads[j] = load_ints(codes + j * kVectorBytes);
            add_quads<B::high, Rows, Cols>(quads, x, stride, sums);
        }
#endif
        GroupScales scales[Cols];
#pragma GCC unroll 2
        for (int j = 0; j < Cols; ++j) {
            const int at = g * kPanel + column + j * kWidth;
            scales[j] = {load(piece.scales + at), load(piece.minima + at)};
        }
        add_group_sums<Rows, Cols>(sums, scales, row.totals + first + g, meta, results);
    }
#pragma GCC unroll 8
    for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 2
        for (int j = 0; j < Cols; ++j) store(c + r * kPanel + column + j * kWidth, results[r][j]);
    }
}

// c [n, kPanel] of a panel, before rows' scales; `next` is what will be read next or null.
template <class B>
void whole_pieces(const QuantizedFormat& format, const uint8_t* panel, char* rows, int64_t row_bytes, int64_t n,
                  const void* next, float* c) {
    Piece piece;
    for (int64_t i = 0; i < n * kPanel; ++i) c[i] = 0.0f;
    const int64_t tiles = (n + kWholeRows - 1) / kWholeRows, all = format.units();
    Fetching ahead(next, format.panel_bytes(), format.groups * tiles * kColumnPasses);
    for (int64_t first = 0; first < all; first += kPieceUnits) {
        const int units = static_cast<int>(all - first < kPieceUnits ? all - first : kPieceUnits);
        const int groups = units / B::units_of_group;
        const int64_t group = first / B::units_of_group;
        const uint8_t* codes = unpack_whole_piece<B>(format, panel, first, units, piece);
        for (int64_t tile = 0; tile < tiles; ++tile) {
            const int64_t begin = n * tile / tiles;
            const int count = static_cast<int>(n * (tile + 1) / tiles - begin);
            const QuantizedRow row(format, sizeof(Code), rows + begin * row_bytes);
            with_count<kWholeRows>(count, [&](auto known) {
                constexpr int some = decltype(known)::value;
                const uint32_t wide = wide_groups<some>(format, row, row_bytes, group, groups);
                for (int column = 0; column < kPanel; column += kRegisterCols * kWidth) {
                    whole_tile<B, some, kRegisterCols>(format, codes, piece, groups, column, row, row_bytes, group, wide,
                                                       ahead, c + begin * kPanel);
                }
            });
        }
    }
}

// c [n, kPanel] times the scales of rows.
PAGODA_INLINE void scale_rows(const QuantizedFormat& format, char* rows, int64_t row_bytes, int64_t n, float* c) {
    const QuantizedRow first(format, sizeof(Code), rows);
    for (int64_t r = 0; r < n; ++r, c += kPanel) {
        const vec scale = broadcast(*first.from(r * row_bytes).scales);
        for (int column = 0; column < kPanel; column += kWidth) store(c + column, mul(load(c + column), scale));
    }
}

}  // namespace
