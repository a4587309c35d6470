// SPDX-License-Identifier: Apache-2.0
// Rows times one panel of a weight in ggml's blocks; see BlockFormat in kernels.h. As everywhere, sums of products are
// of integers and exact, and only scales and minima round. Activations have a scale for every 16 inputs: with one for 32
// their rounding takes twice as much from a model's closeness. Where blocks are whole rows see whole_rows.h.
//
// Codes of any width become codes of 8 bits on their way: in registers where there are few rows, and for many rows in a
// piece of scratch memory that stays in the first cache. Both add up in one order.
#pragma once

#include "quantized.h"

namespace {

using pagoda::Codebook;
using pagoda::kTritsOfByte;
using pagoda::kUnitInputs;


constexpr int kQuads = kUnitInputs / 4;
constexpr int kRowBytes = 4 * kPanel;  // four inputs of a panel in 8 bits
constexpr int kRowGroup = pagoda::kBlockRowGroup;
constexpr int kHalves = kUnitInputs / kRowGroup;  // of a unit
static_assert(kHalves == 2);
// Rows that go by one piece after the other; their sums and the piece stay in the first cache.
constexpr int kPieceRows = 96;

template <int Inputs, int High, int Signs>
struct PointsOf;
using NoPoints = PointsOf<0, 0, 0>;

template <int Bits, Codebook Book, bool Integers, bool Minima, int Group, bool Whole = false, class P = NoPoints>
struct Blocks {
    using Points = P;
    static constexpr int bits = Bits, group = Group;
    static constexpr Codebook codebook = Book;
    static constexpr bool integers = Integers, minima = Minima, whole = Whole;
    static constexpr bool looked_up = Book != Codebook::kNone && Book != Codebook::kTernary;
    static constexpr bool high = Bits == 8 || looked_up;  // codes may be above 127
    static constexpr int groups_of_unit = Group < kUnitInputs ? kUnitInputs / Group : 1;
    static constexpr int units_of_group = Group < kUnitInputs ? 1 : Group / kUnitInputs;
};

// ---- codes

#if defined(__AVX512F__)

template <int N>
PAGODA_INLINE ints shifted_right(ints x) {
    if constexpr (N > 0) return _mm512_srli_epi16(x, N);
    if constexpr (N < 0) return _mm512_slli_epi16(x, -N);
    return x;
}
PAGODA_INLINE ints masked(ints x, char mask) { return _mm512_and_si512(x, _mm512_set1_epi8(mask)); }
// (x & mask) | rest.
PAGODA_INLINE ints masked_or(ints x, char mask, ints rest) {
    return _mm512_ternarylogic_epi32(x, _mm512_set1_epi8(mask), rest, 0xea);
}
PAGODA_INLINE ints looked_up(const uint8_t (&numbers)[16], ints codes) {
    const __m128i table = _mm_loadu_si128(reinterpret_cast<const __m128i*>(numbers));
    return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(table), codes);
}
PAGODA_INLINE ints load_signed_bytes(const uint8_t* p) {
    return _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
PAGODA_INLINE ints low_half_of_bytes(ints x) { return _mm512_and_si512(x, _mm512_set1_epi32(15)); }
PAGODA_INLINE ints high_half_of_bytes(ints x) { return low_half_of_bytes(_mm512_srli_epi32(x, 4)); }
PAGODA_INLINE ints add_bytes(ints a, ints b) { return _mm512_add_epi8(a, b); }
PAGODA_INLINE ints average_bytes(ints a, ints b) { return _mm512_avg_epu8(a, b); }
// One less; 0 stays.
PAGODA_INLINE ints less_one_bytes(ints x) { return _mm512_subs_epu8(x, _mm512_set1_epi8(1)); }
PAGODA_INLINE void store_ints(uint8_t* p, ints x) { _mm512_storeu_si512(p, x); }

#elif defined(__AVX2__)

template <int N>
PAGODA_INLINE ints shifted_right(ints x) {
    if constexpr (N > 0) return _mm256_srli_epi16(x, N);
    if constexpr (N < 0) return _mm256_slli_epi16(x, -N);
    return x;
}
PAGODA_INLINE ints masked(ints x, char mask) { return _mm256_and_si256(x, _mm256_set1_epi8(mask)); }
PAGODA_INLINE ints masked_or(ints x, char mask, ints rest) { return _mm256_or_si256(masked(x, mask), rest); }
PAGODA_INLINE ints looked_up(const uint8_t (&numbers)[16], ints codes) {
    const __m128i table = _mm_loadu_si128(reinterpret_cast<const __m128i*>(numbers));
    return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(table), codes);
}
PAGODA_INLINE ints load_signed_bytes(const uint8_t* p) {
    return _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
}
PAGODA_INLINE ints low_half_of_bytes(ints x) { return _mm256_and_si256(x, _mm256_set1_epi32(15)); }
PAGODA_INLINE ints high_half_of_bytes(ints x) { return low_half_of_bytes(_mm256_srli_epi32(x, 4)); }
PAGODA_INLINE ints add_bytes(ints a, ints b) { return _mm256_add_epi8(a, b); }
PAGODA_INLINE ints average_bytes(ints a, ints b) { return _mm256_avg_epu8(a, b); }
PAGODA_INLINE ints less_one_bytes(ints x) { return _mm256_subs_epu8(x, _mm256_set1_epi8(1)); }
PAGODA_INLINE void store_ints(uint8_t* p, ints x) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), x); }

#endif

// The quads that a word of a plane of `Width` bits has, or the first `Count` of them, shifted to bit `To`.
template <int Width, int To, int Count = 8 / Width, int I = 0>
PAGODA_INLINE void take_plane(ints word, ints* quads) {
    constexpr char mask = static_cast<char>(((1 << Width) - 1) << To);
    const ints part = shifted_right<I * Width - To>(word);
    quads[I] = To == 0 ? masked(part, mask) : masked_or(part, mask, quads[I]);
    if constexpr (I + 1 < Count) take_plane<Width, To, Count, I + 1>(word, quads);
}

constexpr const uint8_t (&numbers_of(Codebook codebook))[16] {
    switch (codebook) {
        case Codebook::kE2m1: return pagoda::kE2m1Codebook;
        case Codebook::kNf4: return pagoda::kNf4Codebook;
        case Codebook::kFp4: return pagoda::kFp4Codebook;
        case Codebook::kIq1: return pagoda::kIq1Codebook;
        case Codebook::kIq2: return pagoda::kIq2Codebook;
        case Codebook::kIq3Xxs: return pagoda::kIq3XxsCodebook;
        case Codebook::kIq3S: return pagoda::kIq3SCodebook;
        default: return pagoda::kIq4Codebook;
    }
}

// Codes of 32 inputs of a vector of outputs, whose words begin at `unit`.
template <class B>
PAGODA_INLINE void unpack_unit(const uint8_t* unit, ints (&quads)[kQuads]) {
    constexpr int low = B::bits == 8 ? 8 : B::bits >= 4 ? 4 : 2, rows = kQuads * low / 8;
#pragma GCC unroll 8
    for (int i = 0; i < rows; ++i) take_plane<low, 0>(load_ints(unit + i * kRowBytes), quads + i * (8 / low));
    if constexpr (B::bits == 6) {
#pragma GCC unroll 2
        for (int i = 0; i < 2; ++i) take_plane<2, low>(load_ints(unit + (rows + i) * kRowBytes), quads + 4 * i);
    } else if constexpr (B::bits == 3 || B::bits == 5) {
        take_plane<1, low>(load_ints(unit + rows * kRowBytes), quads);
    }
    if constexpr (B::looked_up) {
#pragma GCC unroll 8
        for (ints& quad : quads) quad = looked_up(numbers_of(B::codebook), quad);
    }
}

// Half of a byte for each output, of which two groups share one.
PAGODA_INLINE ints half_bytes(const uint8_t* bytes, int64_t group, int column) {
    const ints both = load_signed_bytes(bytes + group / 2 * kPanel + column);
    return group % 2 == 0 ? low_half_of_bytes(both) : high_half_of_bytes(both);
}

}  // namespace

#include "lattices.h"

namespace {

// Codes of unit `u` of a block, for the vector of outputs that begins with lane `column`.
template <class B>
PAGODA_INLINE void unpack_unit(const QuantizedFormat& format, const uint8_t* block, int64_t u, int column,
                               ints (&quads)[kQuads]) {
    const uint8_t* codes = block + format.header_bytes() + 4 * column;
    if constexpr (B::Points::inputs == 0) {
        unpack_unit<B>(codes + u * (B::bits * kRowBytes), quads);
    } else if constexpr (B::Points::inputs == kTritsOfByte) {
        const int64_t first = u * kQuads;
        unpack_trits_from(static_cast<int>(first % kTritsOfByte), codes + first / kTritsOfByte * kRowBytes, quads);
    } else {
        unpack_points<B>(format, block, u, column, quads);
    }
}

// Codes of the units of a block, one after the other. Points of eight are found for two units at once.
template <class B, int = B::Points::inputs>
struct Units {
    PAGODA_INLINE explicit Units(const uint8_t*) {}
    PAGODA_INLINE void unpack(const QuantizedFormat& format, const uint8_t* block, int64_t u, int column, ints (&quads)[kQuads]) {
        unpack_unit<B>(format, block, u, column, quads);
    }
};
template <class B>
struct Units<B, 0> {
    const uint8_t* words;

    PAGODA_INLINE explicit Units(const uint8_t* words) : words(words) {}
    PAGODA_INLINE void unpack(const QuantizedFormat&, const uint8_t*, int64_t, int, ints (&quads)[kQuads]) {
        unpack_unit<B>(words, quads);
        words += B::bits * kRowBytes;
    }
};
template <class B>
struct Units<B, 8> {
    ints levels[2][kHalves];

    PAGODA_INLINE explicit Units(const uint8_t*) {}
    PAGODA_INLINE void unpack(const QuantizedFormat& format, const uint8_t* block, int64_t u, int column, ints (&quads)[kQuads]) {
        const UnitOfPoints own(format, block, u, column);
        if (u % 2 == 0) {
            const UnitOfPoints next(format, block, u + 1 < format.units_of_block() ? u + 1 : u, column);
            find_levels<typename B::Points, 2>(format.blocks.lattice.table,
                                               {{own.low, own.bits, own.stride}, {next.low, next.bits, next.stride}}, levels);
        }
        unpack_levels<B>(block, u, column, own, levels[u % 2], quads);
    }
};

// ---- scales

struct GroupScales {
    vec scale, minimum;
};

// What a block multiplies those of its groups by, for the vector of outputs that begins with lane `column`.
template <class B>
PAGODA_INLINE GroupScales block_scales(const QuantizedFormat& format, const uint8_t* block, int column) {
    const auto* halves = reinterpret_cast<const f16*>(block + format.integer_bytes()) + column;
    constexpr float unit = pagoda::unit_of_scales(B::codebook);
    const vec scale = load(halves);
    return {unit == 1.0f ? scale : mul(scale, broadcast(unit)), B::minima ? load(halves + kPanel) : zero()};
}

// Of a group of a block; `result` is what block_scales gave.
template <class B>
PAGODA_INLINE GroupScales group_scales(const QuantizedFormat& format, const uint8_t* block, GroupScales result, int64_t group,
                                       int column) {
    if constexpr (B::Points::inputs == 4 || B::Points::inputs == 8) {
        ints half = half_bytes(block, group, column);
        if constexpr (B::Points::signs == kUnitInputs) half = masked(half, 7);
        result.scale = fma(to_floats(half), add(result.scale, result.scale), result.scale);
    } else if constexpr (B::integers) {
        const uint8_t* own = block + group * kPanel + column;
        if constexpr (B::codebook == Codebook::kE2m1) {
            result.scale = mul(result.scale, load_small_floats(own));
            return result;
        }
        const ints scales = load_signed_bytes(own);
        if constexpr (B::bits == 2) {
            result.scale = mul(result.scale, to_floats(low_half_of_bytes(scales)));
            result.minimum = mul(result.minimum, to_floats(high_half_of_bytes(scales)));
        } else {
            result.scale = mul(result.scale, to_floats(scales));
            if constexpr (B::minima) {
                const uint8_t* minima = own + format.blocks.groups * kPanel;
                result.minimum = mul(result.minimum, to_floats(load_signed_bytes(minima)));
            }
        }
    }
    return result;
}

// What the halves of a unit add to a result; `row` and `totals` are the scales and totals of the row's groups.
template <class B>
PAGODA_INLINE vec add_unit(vec result, const ints (&sums)[kHalves], const GroupScales (&scales)[kHalves], const float* row,
                           const float* totals) {
    const vec first = to_floats(sums[0]), second = to_floats(sums[1]);
    if constexpr (B::group == kUnitInputs) {
        const vec both = fma(second, broadcast(row[1]), mul(first, broadcast(row[0])));
        result = fma(both, scales[0].scale, result);
        if constexpr (B::minima) result = fma(scales[0].minimum, broadcast(totals[0] + totals[1]), result);
    } else {
        result = fma(first, mul(scales[0].scale, broadcast(row[0])), result);
        if constexpr (B::minima) result = fma(scales[0].minimum, broadcast(totals[0]), result);
        result = fma(second, mul(scales[1].scale, broadcast(row[1])), result);
        if constexpr (B::minima) result = fma(scales[1].minimum, broadcast(totals[1]), result);
    }
    return result;
}

// ---- few rows

// Rows of a tile whose weights become codes of 8 bits in registers, with their sums.
#if defined(__AVX512VNNI__)
constexpr int kDirectRows = 8;
#elif defined(__AVX512F__)
constexpr int kDirectRows = 4;
#else
constexpr int kDirectRows = 2;
#endif
// Rows up to which codes are unpacked for each tile: more are many enough to have them in 8 bits in the first cache.
#if defined(__AVX512VNNI__)
template <class B>
constexpr int kDirectMost = B::whole && B::bits == 8 ? 4 : 16;
#elif defined(__AVX512F__)
template <class B>
constexpr int kDirectMost = B::whole ? kPieceRows : kDirectRows;
#else
template <class B>
constexpr int kDirectMost = kDirectRows;
#endif

// Brings what is read next, or nothing if that is null, to the second cache: evenly in so many steps, so that memory is
// busy from the first to the last of them.
struct Fetching {
    const char *line, *end;
    int64_t step_bytes;

    Fetching(const void* next, int64_t bytes, int64_t steps)
        : line(static_cast<const char*>(next)), end(next == nullptr ? line : line + bytes),
          step_bytes(64 * ((bytes + 64 * steps - 1) / (64 * steps))) {}
    PAGODA_INLINE void step() {
        const char* stop = end - line < step_bytes ? end : line + step_bytes;
        for (; line < stop; line += 64) prefetch_l2(line);
    }
};

// c [Rows, kPanel] of a panel.
template <class B, int Rows>
PAGODA_INLINE void direct_tile(const QuantizedFormat& format, const uint8_t* panel, const QuantizedRow& row,
                               int64_t row_bytes, Fetching& ahead, float* c) {
    const int64_t stride = row_bytes / static_cast<int64_t>(sizeof(Code)), meta = row_bytes / 4;
    const int64_t units = format.units_of_block(), header = format.header_bytes(), block_bytes = format.block_bytes();
    for (int column = 0; column < kPanel; column += kWidth) {
        const Code* x = static_cast<const Code*>(row.codes);
        int64_t at = 0;  // the row's group
        vec results[Rows];
#pragma GCC unroll 8
        for (vec& result : results) result = zero();
        for (const uint8_t* block = panel; at < format.groups; block += block_bytes) {
            const GroupScales of_block = block_scales<B>(format, block, column);
            Units<B> all(block + header + 4 * column);
            for (int64_t u = 0; u < units; ++u, x += kUnitInputs, at += kHalves) {
                ahead.step();
                ints quads[kQuads], sums[Rows][kHalves];
                all.unpack(format, block, u, column, quads);
#pragma GCC unroll 8
                for (int r = 0; r < Rows; ++r) {
                    for (int half = 0; half < kHalves; ++half) {
                        sums[r][half] = broadcast_ints(B::minima ? 0 : row.starts[r * meta + at + half]);
                    }
                }
#pragma GCC unroll 8
                for (int q = 0; q < kQuads; ++q) {
                    const WeightQuads weights = weight_quads<B::high>(quads[q]);
#pragma GCC unroll 8
                    for (int r = 0; r < Rows; ++r) {
                        ints& sum = sums[r][q / (kQuads / kHalves)];
                        sum = add_products(sum, weights, row_quad(x + r * stride + 4 * q));
                    }
                }
                GroupScales scales[kHalves];
                for (int g = 0; g < B::groups_of_unit; ++g) {
                    scales[g] = group_scales<B>(format, block, of_block, u * B::groups_of_unit + g, column);
                }
#pragma GCC unroll 8
                for (int r = 0; r < Rows; ++r) {
                    results[r] = add_unit<B>(results[r], sums[r], scales, row.scales + r * meta + at,
                                             row.totals + r * meta + at);
                }
            }
        }
#pragma GCC unroll 8
        for (int r = 0; r < Rows; ++r) store(c + r * kPanel + column, results[r]);
    }
}

// ---- many rows

constexpr int kPieceUnits = 8;
constexpr int kColumnPasses = kPanel / (kRegisterCols * kWidth);
// Some inputs of a panel in 8 bits.
struct Piece {
    alignas(64) uint8_t codes[kPieceUnits * kQuads * kRowBytes];
    alignas(64) float scales[kPieceUnits * 2 * kPanel];
    alignas(64) float minima[kPieceUnits * 2 * kPanel];
};

template <class B>
PAGODA_INLINE void unpack_piece(const QuantizedFormat& format, const uint8_t* panel, int64_t first, int units,
                                Piece& piece) {
    const int64_t units_of_block = format.units_of_block();
    for (int u = 0; u < units; ++u) {
        const uint8_t* block = panel + (first + u) / units_of_block * format.block_bytes();
        const int64_t within = (first + u) % units_of_block;
#pragma GCC unroll 4
        for (int column = 0; column < kPanel; column += kWidth) {
            ints quads[kQuads];
            unpack_unit<B>(format, block, within, column, quads);
            const auto of_block = block_scales<B>(format, block, column);
#pragma GCC unroll 8
            for (int q = 0; q < kQuads; ++q) store_ints(piece.codes + (u * kQuads + q) * kRowBytes + 4 * column, quads[q]);
#pragma GCC unroll 2
            for (int part = 0; part < B::groups_of_unit; ++part) {
                const int64_t g = within * B::groups_of_unit + part;
                const auto scales = group_scales<B>(format, block, of_block, g, column);
                const int to = (u * B::groups_of_unit + part) * kPanel + column;
                store(piece.scales + to, scales.scale);
                if constexpr (B::minima) store(piece.minima + to, scales.minimum);
            }
        }
    }
}

// c [Rows, kPanel] += a piece from `column` on times rows, whose group `at` is the first of the piece.
template <int Group, bool Minima, bool High, int Rows, int Cols>
PAGODA_INLINE void piece_tile(const Piece& piece, int units, int column, const QuantizedRow& row, int64_t row_bytes,
                              int64_t at, Fetching& ahead, float* c) {
    const int64_t stride = row_bytes / static_cast<int64_t>(sizeof(Code)), meta = row_bytes / 4;
    const Code* x = static_cast<const Code*>(row.codes) + at * kRowGroup;
    const uint8_t* codes = piece.codes + 4 * column;
    const float *scales = piece.scales + column, *minima = piece.minima + column;
    for (int u = 0; u < units; ++u, at += kHalves) {
        ahead.step();
        vec first[Rows][Cols];
#pragma GCC unroll 2
        for (int half = 0; half < kHalves; ++half) {
            ints sums[Rows][Cols];
#pragma GCC unroll 8
            for (int r = 0; r < Rows; ++r) {
                for (int j = 0; j < Cols; ++j) sums[r][j] = broadcast_ints(Minima ? 0 : row.starts[r * meta + at + half]);
            }
#pragma GCC unroll 4
            for (int q = 0; q < kRowGroup / 4; ++q, codes += kRowBytes, x += 4) {
                ints quads[Cols];
                for (int j = 0; j < Cols; ++j) quads[j] = load_ints(codes + j * kVectorBytes);
                add_quads<High, Rows, Cols>(quads, x, stride, sums);
            }
            // The same operations in the same order as add_unit. Results stay in the cache: registers hold two sums each.
            const bool whole = Group == kUnitInputs;
#pragma GCC unroll 2
            for (int j = 0; j < Cols; ++j) {
                const vec scale = load(scales + j * kWidth);
                const vec minimum = Minima ? load(minima + j * kWidth) : zero();
#pragma GCC unroll 8
                for (int r = 0; r < Rows; ++r) {
                    const vec products = to_floats(sums[r][j]), own = broadcast(row.scales[r * meta + at + half]);
                    if (whole && half == 0) {
                        first[r][j] = mul(products, own);
                        continue;
                    }
                    float* to = c + r * kPanel + column + j * kWidth;
                    const float* totals = row.totals + r * meta + at;
                    vec result = load(to);
                    if (whole) {
                        result = fma(fma(products, own, first[r][j]), scale, result);
                        if (Minima) result = fma(minimum, broadcast(totals[0] + totals[1]), result);
                    } else {
                        result = fma(products, mul(scale, own), result);
                        if (Minima) result = fma(minimum, broadcast(totals[half]), result);
                    }
                    store(to, result);
                }
            }
            if (!whole || half == 1) scales += kPanel, minima += kPanel;
        }
    }
}

template <int Group, bool Minima, bool High, int Rows>
void piece_tiles(const Piece& piece, int units, const QuantizedRow& row, int64_t row_bytes, int64_t at, Fetching& ahead,
                 float* c) {
    for (int column = 0; column < kPanel; column += kRegisterCols * kWidth) {
        piece_tile<Group, Minima, High, Rows, kRegisterCols>(piece, units, column, row, row_bytes, at, ahead, c);
    }
}

// c [n, kPanel] of a panel; `next` is what will be read next or null.
template <class B>
void pieces(const QuantizedFormat& format, const uint8_t* panel, char* rows, int64_t row_bytes, int64_t n,
            const void* next, float* c) {
    Piece piece;
    for (int64_t i = 0; i < n * kPanel; ++i) c[i] = 0.0f;
    const int64_t tiles = (n + kGroupedRows - 1) / kGroupedRows, all = format.units();
    Fetching ahead(next, format.panel_bytes(), all * tiles * kColumnPasses);
    for (int64_t first = 0; first < all; first += kPieceUnits) {
        const int units = static_cast<int>(all - first < kPieceUnits ? all - first : kPieceUnits);
        unpack_piece<B>(format, panel, first, units, piece);
        for (int64_t tile = 0; tile < tiles; ++tile) {
            const int64_t begin = n * tile / tiles;
            const int count = static_cast<int>(n * (tile + 1) / tiles - begin);
            const QuantizedRow row(format, sizeof(Code), rows + begin * row_bytes);
            with_count<kGroupedRows>(count, [&](auto known) {
                piece_tiles<B::group, B::minima, B::high, decltype(known)::value>(
                    piece, units, row, row_bytes, first * kHalves, ahead, c + begin * kPanel);
            });
        }
    }
}

}  // namespace

#include "whole_rows.h"

namespace {

// ---- panels

template <class B>
void block_panel(const QuantizedFormat& format, const uint8_t* panel, char* rows, int64_t row_bytes, int64_t n,
                 const float* bias, float* out, int64_t out_stride, int cols, const void* next) {
    alignas(64) float c[kPieceRows * kPanel];
    for (int64_t first = 0; first < n; first += kPieceRows) {
        const int64_t count = std::min<int64_t>(n - first, kPieceRows);
        char* own = rows + first * row_bytes;
        if (count <= kDirectMost<B>) {
            const int64_t tiles = (count + kDirectRows - 1) / kDirectRows, steps = format.units() * kPanel / kWidth;
            Fetching ahead(next, format.panel_bytes(), tiles * steps);
            for (int64_t tile = 0; tile < tiles; ++tile) {
                const int64_t begin = count * tile / tiles;
                const QuantizedRow row(format, sizeof(Code), own + begin * row_bytes);
                with_count<kDirectRows>(static_cast<int>(count * (tile + 1) / tiles - begin), [&](auto known) {
                    constexpr int some = decltype(known)::value;
                    if constexpr (B::whole) {
                        whole_direct_tile<B, some>(format, panel, row, row_bytes, ahead, c + begin * kPanel);
                    } else {
                        direct_tile<B, some>(format, panel, row, row_bytes, ahead, c + begin * kPanel);
                    }
                });
            }
        } else if constexpr (B::whole) {
            whole_pieces<B>(format, panel, own, row_bytes, count, next, c);
        } else {
            pieces<B>(format, panel, own, row_bytes, count, next, c);
        }
        if constexpr (B::whole) scale_rows(format, own, row_bytes, count, c);
        next = nullptr;
        store_outputs(c, static_cast<int>(count), bias, out + first * out_stride, out_stride, cols);
    }
}

// Calls f(Blocks<...>{}) for a format of blocks: those above; TQ1_0 and TQ2_0; NVFP4, MXFP4, NF4, FP4, IQ4_XS and IQ4_NL; Q2_K
// to Q6_K; Q4_0, Q4_1, Q5_0, Q5_1 and Q8_0.
template <class F>
PAGODA_INLINE void with_blocks(const QuantizedFormat& format, F f) {
    const bool integers = format.blocks.integer_scales, minima = format.offsets;
    if (format.blocks.has_points()) return with_points(format.blocks, f);
    if (format.blocks.codebook == Codebook::kTernary) {
        if (format.blocks.lattice.inputs == 0) return f(Blocks<2, Codebook::kTernary, false, false, 32>{});
        return f(Blocks<2, Codebook::kTernary, false, false, 32, false, PointsOf<kTritsOfByte, 0, 0>>{});
    }
    if (format.blocks.whole_rows) {
        if (format.bits == 8) return f(Blocks<8, Codebook::kNone, true, true, 64, true>{});
        if (format.bits == 5) return f(Blocks<5, Codebook::kNone, true, true, 32, true>{});
        return f(Blocks<4, Codebook::kNone, true, true, 32, true>{});
    }
    if (format.blocks.codebook == Codebook::kE2m1) {
        if (integers) return f(Blocks<4, Codebook::kE2m1, true, false, 16>{});
        return f(Blocks<4, Codebook::kE2m1, false, false, 32>{});
    }
    if (format.blocks.codebook == Codebook::kNf4) return f(Blocks<4, Codebook::kNf4, false, false, 32>{});
    if (format.blocks.codebook == Codebook::kFp4) return f(Blocks<4, Codebook::kFp4, false, false, 32>{});
    if (format.blocks.codebook == Codebook::kIq4) {
        if (integers) return f(Blocks<4, Codebook::kIq4, true, false, 32>{});
        return f(Blocks<4, Codebook::kIq4, false, false, 32>{});
    }
    switch (format.bits) {
        case 2: return f(Blocks<2, Codebook::kNone, true, true, 16>{});
        case 3: return f(Blocks<3, Codebook::kNone, true, false, 16>{});
        case 4:
            if (integers) return f(Blocks<4, Codebook::kNone, true, true, 32>{});
            return minima ? f(Blocks<4, Codebook::kNone, false, true, 32>{}) : f(Blocks<4, Codebook::kNone, false, false, 32>{});
        case 5:
            if (integers) return f(Blocks<5, Codebook::kNone, true, true, 32>{});
            return minima ? f(Blocks<5, Codebook::kNone, false, true, 32>{}) : f(Blocks<5, Codebook::kNone, false, false, 32>{});
        case 6: return f(Blocks<6, Codebook::kNone, true, false, 16>{});
        case 8: return f(Blocks<8, Codebook::kNone, false, false, 32>{});
    }
}

void quantized_panel_of(const QuantizedFormat& format, const void* panel, void* rows, int64_t row_bytes, int64_t n,
                        const float* bias, float* out, int64_t out_stride, int cols, const void* next) {
    if (format.blocks.groups == 0) {
        return quantized_panel(format, panel, rows, row_bytes, n, bias, out, out_stride, cols, next);
    }
    with_blocks(format, [&](auto blocks) {
        block_panel<decltype(blocks)>(format, static_cast<const uint8_t*>(panel), static_cast<char*>(rows), row_bytes, n,
                                      bias, out, out_stride, cols, next);
    });
}

void dequantize_row_of(const QuantizedFormat& format, const void* panel_, int lane, const int64_t* order,
                       int64_t inputs, float* out) {
    if (format.blocks.groups == 0) return dequantize_row(format, panel_, lane, order, inputs, out);
    const auto* panel = static_cast<const uint8_t*>(panel_);
    const int column = lane / kWidth * kWidth;
    with_blocks(format, [&](auto known) {
        using B = decltype(known);
        constexpr int groups = B::groups_of_unit;
        const int64_t units = format.units_of_block();
        for (int64_t unit = 0; unit < inputs / kUnitInputs; ++unit) {
            const uint8_t* block = panel + unit / units * format.block_bytes();
            const int64_t within = unit % units;
            ints quads[kQuads];
            unpack_unit<B>(format, block, within, column, quads);
            uint8_t codes[kQuads][kVectorBytes];
            for (int q = 0; q < kQuads; ++q) store_ints(codes[q], quads[q]);
            const auto of_block = block_scales<B>(format, block, column);
            float scales[groups][kWidth], minima[groups][kWidth];
            for (int g = 0; g < groups; ++g) {
                const auto loaded =
                    group_scales<B>(format, block, of_block, within * groups / B::units_of_group + g, column);
                store(scales[g], loaded.scale);
                store(minima[g], loaded.minimum);
            }
            for (int i = 0; i < kUnitInputs; ++i) {
                const int at = format.transposed() ? i / 16 * 16 + i % 4 * 4 + i / 4 % 4 : i;
                const int number = codes[at / 4][4 * (lane - column) + at % 4] - format.zero();
                const float value = static_cast<float>(number) * scales[i / B::group % groups][lane - column] +
                                    minima[i / B::group % groups][lane - column];
                out[unit * kUnitInputs + i] = value;
            }
        }
    });
}

}  // namespace
