// SPDX-License-Identifier: Apache-2.0
// Rows times one panel of a quantized weight by tiles. Sums of products are of integers and exact, and what is rounded is
// rounded as in quantized.h, blocks.h and whole_rows.h: results have the same bits as those of vectors, which compute few
// rows.
#pragma once

#include "blocks.h"
#include "quantized.h"
#include "tile_products.h"

namespace {

// Rows up to which weights are read, and unpacked, no slower by vectors.
constexpr int64_t kVectorRows = 4;

// Sums of a block of rows as integers.
struct alignas(64) BlockSums {
    uint8_t sums[kBlockRows * kPanelRow];

    PAGODA_INLINE ints at(int row, int vector) const { return load_ints(sums + row * kPanelRow + vector * kVectorBytes); }
};

constexpr int kVectors = kPanel / kWidth;

// Calls f(Count of rows, first row) for some rows at a time.
template <int Most, class F>
PAGODA_INLINE void for_some_rows(int rows, F f) {
    for (int row = 0; row < rows; row += Most) {
        with_count<Most>(rows - row < Most ? rows - row : Most, [&](auto count) { f(count, row); });
    }
}

// Calls f(first row, rows) for blocks of rows: all whole ones, then the rest.
template <class F>
PAGODA_INLINE void for_blocks(int64_t rows, F f) {
    for (int64_t row = 0; row < rows; row += kBlockRows) {
        f(row, static_cast<int>(rows - row < kBlockRows ? rows - row : kBlockRows));
    }
}

// The largest number of words, up to a tile's, that so many are a multiple of.
constexpr int even_depth(int64_t words) {
    int depth = words < kTileSide ? static_cast<int>(words) : kTileSide;
    while (words % depth != 0) --depth;
    return depth;
}

// ---- one group of all inputs

void tile_channel_panel(const QuantizedFormat& format, const uint8_t* panel, char* rows, int64_t row_bytes, int64_t n,
                        const float* bias, float* out, int64_t out_stride, int cols, const void* next) {
    alignas(64) uint8_t sums[kMostPanelRows * kPanelRow];
    alignas(64) float c[kInt8Rows * kPanel];
    for (int64_t first = 0; first < n; first += kMostPanelRows) {
        const int count = static_cast<int>(n - first < kMostPanelRows ? n - first : kMostPanelRows);
        const auto ahead = first == 0 && next != nullptr ? Prefetch{next, 2} : Prefetch{};
        char* own = rows + first * row_bytes;
        sum_panel<ByteProduct>(own, row_bytes, count, reinterpret_cast<const char*>(panel), format.group_inputs / 4, ahead,
                               sums);
        const auto* scales = reinterpret_cast<const float*>(panel + format.code_bytes());
        for_some_rows<kInt8Rows>(count, [&](auto known, int row) {
            constexpr int some = decltype(known)::value;
            const QuantizedRow of_rows(format, sizeof(Code), own + row * row_bytes);
            ints totals[some][kVectors];
            for (int r = 0; r < some; ++r) {
                const ints start = broadcast_ints(*of_rows.from(r * row_bytes).starts);
                for (int j = 0; j < kVectors; ++j) {
                    totals[r][j] = add_ints(start, load_ints(sums + (row + r) * kPanelRow + j * kVectorBytes));
                }
            }
            add_wide<some, kVectors>(format, panel, 0, of_rows, row_bytes, totals);
            for (int r = 0; r < some; ++r) {
                const vec own_scale = broadcast(*of_rows.from(r * row_bytes).scales);
                for (int j = 0; j < kVectors; ++j) {
                    const vec both = mul(load(scales + j * kWidth), own_scale);
                    store(c + r * kPanel + j * kWidth, fma(to_floats(totals[r][j]), both, zero()));
                }
            }
            store_outputs(c, some, bias, out + (first + row) * out_stride, out_stride, cols);
        });
    }
}

// ---- groups of inputs

// Words of a group that are unpacked at once: 8 KiB of a panel.
constexpr int64_t kUnpackedWords = 64;

// Codes of four bits of so many words, an even number, to eight bits.
PAGODA_INLINE void unpack_nibbles(const uint8_t* codes, int64_t words, uint8_t* to) {
    for (int64_t i = 0; i < words; i += 2, codes += kPanelRow, to += 2 * kPanelRow) {
        for (int j = 0; j < kVectors; ++j) {
            const ints both = load_ints(codes + j * kVectorBytes);
            store_ints(to + j * kVectorBytes, low_nibbles(both));
            store_ints(to + kPanelRow + j * kVectorBytes, high_nibbles(both));
        }
    }
}

// results [rows, kPanel] of so many rows from `rows` on, a whole number of blocks or less than one.
template <int Bits>
void tile_group_rows(const QuantizedFormat& format, const uint8_t* panel, char* rows, int64_t row_bytes, int count,
                     const char* next, float* results) {
    Tiles tiles;
    const int64_t words = format.group_inputs / 4;
    const int depth = even_depth(words);
    alignas(64) uint8_t unpacked[kUnpackedWords * kPanelRow];
    const int64_t at_once = Bits == 8 ? words : kUnpackedWords / (2 * depth) * (2 * depth);
    const int64_t group_lines = (format.group_bytes() + 63) / 64;
    for (int i = 0; i < count * kPanel; ++i) results[i] = 0.0f;
    for (int64_t g = 0; g < format.groups; ++g, panel += format.group_bytes()) {
        if (next != nullptr) {
            for (int64_t line = 0; line < group_lines; ++line) _mm_prefetch(next + 64 * line, _MM_HINT_T1);
            next += format.group_bytes();
        }
        const auto* scales = reinterpret_cast<const f16*>(panel + format.code_bytes());
        for_blocks(count, [&](int64_t row, int in_block) {
            char* own = rows + row * row_bytes;
            const QuantizedRow block_rows(format, sizeof(Code), own);
            BlockSums block;
            for (int64_t first = 0; first < words; first += at_once) {
                const int64_t here = words - first < at_once ? words - first : at_once;
                const uint8_t* codes = panel + first * kPanelRow;
                if constexpr (Bits == 4) {
                    // Once for all blocks, if they are all of the group.
                    if (row == 0 || here < words) unpack_nibbles(panel + first / 2 * kPanelRow, here, unpacked);
                    codes = unpacked;
                }
                const Factors factors{static_cast<const char*>(block_rows.codes) + g * format.group_inputs + 4 * first, row_bytes,
                                      reinterpret_cast<const char*>(codes), kPanelRow};
                sum_block<ByteProduct, 2>(tiles, {in_block, depth}, factors, here, block.sums, kPanelRow, first > 0,
                                          nothing_ahead);
            }
            for (int r = 0; r < in_block; ++r) {
                const QuantizedRow of_row = block_rows.from(r * row_bytes);
                const ints start = broadcast_ints(of_row.starts[g]);
                const vec scale = broadcast(of_row.scales[g]), total = broadcast(of_row.totals[g]);
                for (int j = 0; j < kVectors; ++j) {
                    float* to = results + (row + r) * kPanel + j * kWidth;
                    const vec both = mul(load(scales + j * kWidth), scale);
                    vec result = fma(to_floats(add_ints(start, block.at(r, j))), both, load(to));
                    if (format.offsets) result = fma(load(scales + kPanel + j * kWidth), total, result);
                    store(to, result);
                }
            }
        });
    }
}

// Calls f(first row, rows) for all whole blocks of up to kMostPanelRows, and for what is left: tiles have one shape in each.
template <class F>
PAGODA_INLINE void for_shapes(int64_t n, F f) {
    for (int64_t first = 0, count; first < n; first += count) {
        const int64_t whole = (n - first) / kBlockRows * kBlockRows;
        count = whole == 0 ? n - first : whole < kMostPanelRows ? whole : kMostPanelRows;
        f(first, static_cast<int>(count));
    }
}

template <int Bits>
void tile_grouped_panel(const QuantizedFormat& format, const uint8_t* panel, char* rows, int64_t row_bytes, int64_t n,
                        const float* bias, float* out, int64_t out_stride, int cols, const void* next) {
    alignas(64) float results[kMostPanelRows * kPanel];
    for_shapes(n, [&](int64_t first, int count) {
        tile_group_rows<Bits>(format, panel, rows + first * row_bytes, row_bytes, count,
                              first == 0 ? static_cast<const char*>(next) : nullptr, results);
        store_outputs(results, count, bias, out + first * out_stride, out_stride, cols);
    });
}

// ---- blocks of ggml

// Asks for what is read next while so many units of a panel go by.
PAGODA_INLINE void fetch_units(const void* next, int64_t unit_bytes, int64_t first, int units) {
    if (next == nullptr) return;
    const char* from = static_cast<const char*>(next) + first * unit_bytes;
    for (int64_t byte = 0; byte < units * unit_bytes; byte += 64) _mm_prefetch(from + byte, _MM_HINT_T1);
}

// results [count, kPanel] += the units of a piece, whose first group of rows is `at`.
template <class B>
void tile_piece(Tiles& tiles, const QuantizedFormat& format, const Piece& piece, int units, char* rows, int64_t row_bytes,
                int count, int64_t at, float* results) {
    constexpr int words = kRowGroup / 4;
    for_blocks(count, [&](int64_t row, int in_block) {
        const QuantizedRow block_rows(format, sizeof(Code), rows + row * row_bytes);
        const auto* codes = static_cast<const char*>(block_rows.codes) + at * kRowGroup;
        for (int u = 0; u < units; ++u) {
            BlockSums halves[kHalves];
            for (int half = 0; half < kHalves; ++half) {
                const int group = u * kHalves + half;
                const Factors factors{codes + group * kRowGroup, row_bytes,
                                      reinterpret_cast<const char*>(piece.codes) + group * words * kPanelRow, kPanelRow};
                sum_block<ByteProduct, 2>(tiles, {in_block, words}, factors, words, halves[half].sums, kPanelRow, false,
                                          nothing_ahead);
            }
            const int64_t group = at + u * kHalves;
            for (int j = 0; j < kVectors; ++j) {
                GroupScales scales[kHalves];
                for (int part = 0; part < B::groups_of_unit; ++part) {
                    const int from = (u * B::groups_of_unit + part) * kPanel + j * kWidth;
                    scales[part] = {load(piece.scales + from), B::minima ? load(piece.minima + from) : zero()};
                }
                for (int r = 0; r < in_block; ++r) {
                    const QuantizedRow of_row = block_rows.from(r * row_bytes);
                    ints sums[kHalves];
                    for (int half = 0; half < kHalves; ++half) {
                        const ints start = broadcast_ints(B::minima ? 0 : of_row.starts[group + half]);
                        sums[half] = add_ints(start, halves[half].at(r, j));
                    }
                    float* to = results + (row + r) * kPanel + j * kWidth;
                    store(to, add_unit<B>(load(to), sums, scales, of_row.scales + group, of_row.totals + group));
                }
            }
        }
    });
}

// The same of a piece of a panel whose blocks are whole rows, before rows' scales: `at` is the first group.
template <class B>
void tile_whole_piece(Tiles& tiles, const QuantizedFormat& format, const uint8_t* piece_codes, const Piece& piece, int groups,
                      char* rows, int64_t row_bytes, int count, int64_t at, float* results) {
    constexpr int words = B::group / 4, most_rows = kWholeRows;
    for_blocks(count, [&](int64_t row, int in_block) {
        const QuantizedRow block_rows(format, sizeof(Code), rows + row * row_bytes);
        const auto* codes = static_cast<const char*>(block_rows.codes) + at * B::group;
        uint32_t wide[(kBlockRows + most_rows - 1) / most_rows];
        for_some_rows<most_rows>(in_block, [&](auto known, int first) {
            wide[first / most_rows] =
                wide_groups<decltype(known)::value>(format, block_rows.from(first * row_bytes), row_bytes, at, groups);
        });
        for (int g = 0; g < groups; ++g) {
            const uint8_t* weights = piece_codes + g * words * kPanelRow;
            BlockSums block;
            const Factors factors{codes + g * B::group, row_bytes, reinterpret_cast<const char*>(weights), kPanelRow};
            sum_block<ByteProduct, 2>(tiles, {in_block, words}, factors, words, block.sums, kPanelRow, false, nothing_ahead);
            GroupScales scales[kVectors];
            for (int j = 0; j < kVectors; ++j) {
                const int from = g * kPanel + j * kWidth;
                scales[j] = {load(piece.scales + from), load(piece.minima + from)};
            }
            for_some_rows<most_rows>(in_block, [&](auto known, int first) {
                constexpr int some = decltype(known)::value;
                const QuantizedRow of_rows = block_rows.from(first * row_bytes);
                ints sums[some][kVectors];
                if ((wide[first / most_rows] >> g & 1) != 0) {
                    ints of_wide[1][some][kVectors];
                    sum_wide<some, kVectors>(format, weights, of_rows, row_bytes, at + g, 1, of_wide);
                    for (int r = 0; r < some; ++r) {
                        for (int j = 0; j < kVectors; ++j) sums[r][j] = add_ints(of_wide[0][r][j], block.at(first + r, j));
                    }
                } else {
                    for (int r = 0; r < some; ++r) {
                        for (int j = 0; j < kVectors; ++j) sums[r][j] = block.at(first + r, j);
                    }
                }
                float* to = results + (row + first) * kPanel;
                vec totals[some][kVectors];
                for (int r = 0; r < some; ++r) {
                    for (int j = 0; j < kVectors; ++j) totals[r][j] = load(to + r * kPanel + j * kWidth);
                }
                add_group_sums<some, kVectors>(sums, scales, of_rows.totals + at + g, row_bytes / 4, totals);
                for (int r = 0; r < some; ++r) {
                    for (int j = 0; j < kVectors; ++j) store(to + r * kPanel + j * kWidth, totals[r][j]);
                }
            });
        }
    });
}

template <class B>
void tile_block_panel(const QuantizedFormat& format, const uint8_t* panel, char* rows, int64_t row_bytes, int64_t n,
                      const float* bias, float* out, int64_t out_stride, int cols, const void* next) {
    alignas(64) float results[kMostPanelRows * kPanel];
    const int64_t all = format.units(), unit_bytes = format.panel_bytes() / all;
    for_shapes(n, [&](int64_t first_row, int count) {
        Tiles tiles;
        Piece piece;
        char* own = rows + first_row * row_bytes;
        for (int i = 0; i < count * kPanel; ++i) results[i] = 0.0f;
        for (int64_t first = 0; first < all; first += kPieceUnits) {
            const int units = static_cast<int>(all - first < kPieceUnits ? all - first : kPieceUnits);
            fetch_units(next, unit_bytes, first, units);
            if constexpr (B::whole) {
                const uint8_t* codes = unpack_whole_piece<B>(format, panel, first, units, piece);
                tile_whole_piece<B>(tiles, format, codes, piece, units / B::units_of_group, own, row_bytes, count,
                                    first / B::units_of_group, results);
            } else {
                unpack_piece<B>(format, panel, first, units, piece);
                tile_piece<B>(tiles, format, piece, units, own, row_bytes, count, first * kHalves, results);
            }
        }
        next = nullptr;
        if constexpr (B::whole) scale_rows(format, own, row_bytes, count, results);
        store_outputs(results, count, bias, out + first_row * out_stride, out_stride, cols);
    });
}

void tile_quantized_panel(const QuantizedFormat& format, const void* panel_, void* rows_, int64_t row_bytes, int64_t n,
                          const float* bias, float* out, int64_t out_stride, int cols, const void* next) {
    if (n <= kVectorRows) {
        return kAvx512Bf16.quantized_panel(format, panel_, rows_, row_bytes, n, bias, out, out_stride, cols, next);
    }
    const auto* panel = static_cast<const uint8_t*>(panel_);
    auto* rows = static_cast<char*>(rows_);
    if (format.blocks.groups != 0) {
        with_blocks(format, [&](auto blocks) {
            tile_block_panel<decltype(blocks)>(format, panel, rows, row_bytes, n, bias, out, out_stride, cols, next);
        });
    } else if (!format.grouped) {
        tile_channel_panel(format, panel, rows, row_bytes, n, bias, out, out_stride, cols, next);
    } else if (format.bits == 8) {
        tile_grouped_panel<8>(format, panel, rows, row_bytes, n, bias, out, out_stride, cols, next);
    } else {
        tile_grouped_panel<4>(format, panel, rows, row_bytes, n, bias, out, out_stride, cols, next);
    }
}

}  // namespace
