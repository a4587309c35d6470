// SPDX-License-Identifier: Apache-2.0
// Rows times one panel of a quantized weight. Sums of products are of integers and exact; only scales round.
#pragma once

#include <algorithm>

#include "linear.h"

namespace {

using pagoda::QuantizedFormat;
using pagoda::QuantizedRow;

#ifdef __aarch64__
}  // namespace

#include "../neon/ints.h"

namespace {
#elif defined(__AVX512F__)

using ints = __m512i;

PAGODA_INLINE ints load_ints(const uint8_t* p) { return _mm512_loadu_si512(p); }
PAGODA_INLINE ints broadcast_ints(int32_t x) { return _mm512_set1_epi32(x); }
PAGODA_INLINE ints add_ints(ints a, ints b) { return _mm512_add_epi32(a, b); }
PAGODA_INLINE ints low_nibbles(ints x) { return _mm512_and_si512(x, _mm512_set1_epi8(15)); }
PAGODA_INLINE ints high_nibbles(ints x) { return low_nibbles(_mm512_srli_epi16(x, 4)); }
PAGODA_INLINE ints multiply_ints(ints a, ints b) { return _mm512_mullo_epi32(a, b); }
PAGODA_INLINE ints subtract_ints(ints a, ints b) { return _mm512_sub_epi32(a, b); }
PAGODA_INLINE ints times_wide_unit(ints x) { return _mm512_slli_epi32(x, 7); }
PAGODA_INLINE vec to_floats(ints x) { return _mm512_cvtepi32_ps(x); }
PAGODA_INLINE ints to_ints(vec x) { return _mm512_cvtps_epi32(x); }
// Codes of what is not finite add up to anything; vectors may overflow where integers of C++ may not.
PAGODA_INLINE int32_t sum(ints x) {
    const __m256i folded = _mm256_add_epi32(_mm512_castsi512_si256(x), _mm512_extracti64x4_epi64(x, 1));
    __m128i half = _mm_add_epi32(_mm256_castsi256_si128(folded), _mm256_extracti128_si256(folded, 1));
    half = _mm_add_epi32(half, _mm_shuffle_epi32(half, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(half, _mm_shuffle_epi32(half, 0xb1)));
}
PAGODA_INLINE vec magnitude(vec x) { return _mm512_abs_ps(x); }
// Negative x where x is above a number, else minus infinity.
PAGODA_INLINE vec negative_above(vec x, float number) {
    const __mmask16 above = _mm512_cmp_ps_mask(x, broadcast(number), _CMP_GT_OQ);
    return _mm512_mask_sub_ps(broadcast(-INFINITY), above, zero(), x);
}
PAGODA_INLINE int count_up_to(vec x, float highest) {
    return __builtin_popcount(_mm512_cmp_ps_mask(x, broadcast(highest), _CMP_LE_OQ));
}

#else

using ints = __m256i;

PAGODA_INLINE ints load_ints(const uint8_t* p) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
}
PAGODA_INLINE ints broadcast_ints(int32_t x) { return _mm256_set1_epi32(x); }
PAGODA_INLINE ints add_ints(ints a, ints b) { return _mm256_add_epi32(a, b); }
PAGODA_INLINE ints low_nibbles(ints x) { return _mm256_and_si256(x, _mm256_set1_epi8(15)); }
PAGODA_INLINE ints high_nibbles(ints x) { return low_nibbles(_mm256_srli_epi16(x, 4)); }
PAGODA_INLINE ints multiply_ints(ints a, ints b) { return _mm256_mullo_epi32(a, b); }
PAGODA_INLINE ints subtract_ints(ints a, ints b) { return _mm256_sub_epi32(a, b); }
PAGODA_INLINE ints times_wide_unit(ints x) { return _mm256_slli_epi32(x, 7); }
PAGODA_INLINE vec to_floats(ints x) { return _mm256_cvtepi32_ps(x); }
PAGODA_INLINE ints to_ints(vec x) { return _mm256_cvtps_epi32(x); }
PAGODA_INLINE int32_t sum(ints x) {
    __m128i half = _mm_add_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
    half = _mm_add_epi32(half, _mm_shuffle_epi32(half, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(half, _mm_shuffle_epi32(half, 0xb1)));
}
PAGODA_INLINE vec magnitude(vec x) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), x); }
// Negative x where x is above a number, else minus infinity.
PAGODA_INLINE vec negative_above(vec x, float number) {
    const vec above = _mm256_cmp_ps(x, broadcast(number), _CMP_GT_OQ);
    return _mm256_blendv_ps(broadcast(-INFINITY), sub(zero(), x), above);
}
PAGODA_INLINE int count_up_to(vec x, float highest) {
    return __builtin_popcount(_mm256_movemask_ps(_mm256_cmp_ps(x, broadcast(highest), _CMP_LE_OQ)));
}

#endif

// Bytes of a vector: four codes of each of kWidth outputs.
constexpr int kVectorBytes = 4 * kWidth;

PAGODA_INLINE int32_t load_codes(const void* p) {
    int32_t codes;
    std::memcpy(&codes, p, 4);
    return codes;
}

using pagoda::WideQuad;

#ifndef __aarch64__
// True where products take weights of 8 bits less 128, if they are above 127: `weight_quads<true>` makes them so.
constexpr bool kSignedCodes = false;
#endif

#if defined(__AVX512VNNI__) || defined(PAGODA_AVX_VNNI)

using Code = int8_t;  // of an activation

using WeightQuads = ints;
using RowQuad = ints;

template <bool>
PAGODA_INLINE WeightQuads weight_quads(ints codes) {
    return codes;
}
PAGODA_INLINE RowQuad row_quad(const Code* x) { return broadcast_ints(load_codes(x)); }
PAGODA_INLINE ints add_products(ints sums, const WeightQuads& weights, const RowQuad& x) {
    // GCC 12 copies every accumulator before and after the intrinsic.
#ifdef __AVX512VNNI__
    asm("vpdpbusd %2, %1, %0" : "+v"(sums) : "v"(weights), "v"(x));
#elif defined(PAGODA_EMULATE_AVX_VNNI)
    const auto add = [&sums](ints codes, ints rest) { sums = add_ints(sums, _mm256_madd_epi16(codes, rest)); };
    add(_mm256_and_si256(weights, _mm256_set1_epi16(255)), _mm256_srai_epi16(_mm256_slli_epi16(x, 8), 8));
    add(_mm256_srli_epi16(weights, 8), _mm256_srai_epi16(x, 8));
#else
    asm("%{vex%} vpdpbusd %2, %1, %0" : "+x"(sums) : "x"(weights), "x"(x));
#endif
    return sums;
}
#endif

#ifdef __AVX512VNNI__

PAGODA_INLINE void store_codes(Code* p, ints x) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(x));
}

// Puts what codes of 8 bits lack of these from `wide` on, and the rest to `codes`; returns the number of quads. Memory of
// four quads is written whatever they are.
PAGODA_INLINE int store_wide_codes(Code* codes, int64_t input, ints x, WideQuad* wide) {
    const __mmask16 lacking = _mm512_cmpgt_epi32_mask(_mm512_abs_epi32(x), _mm512_set1_epi32(127));
    if (lacking == 0) {
        store_codes(codes, x);
        return 0;
    }
    // Rounded to the nearest unit, so that the rest has no more than half of one.
    const ints half = _mm512_set1_epi32(pagoda::kWideUnit / 2);
    const ints units = _mm512_maskz_srai_epi32(lacking, add_ints(x, half), 7);
    store_codes(codes, subtract_ints(x, _mm512_slli_epi32(units, 7)));
    const __m128i words = _mm512_cvtepi32_epi8(units);
    const __mmask8 there = _mm_test_epi32_mask(words, words);
    const __m256i offsets = _mm256_add_epi64(_mm256_set1_epi64x(input * kPanel),
                                             _mm256_set_epi64x(12 * kPanel, 8 * kPanel, 4 * kPanel, 0));
    const __m256i quads = _mm256_or_si256(_mm256_slli_epi64(_mm256_cvtepu32_epi64(words), 32), offsets);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(wide), _mm256_maskz_compress_epi64(there, quads));
    return __builtin_popcount(there);
}

#elif defined(PAGODA_AVX_VNNI)

PAGODA_INLINE void store_codes(Code* p, ints x) {
    const __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
    _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm_packs_epi16(words, words));
}
PAGODA_INLINE bool exceed_bytes(ints x) {
    return _mm256_movemask_epi8(_mm256_cmpgt_epi32(_mm256_abs_epi32(x), _mm256_set1_epi32(127))) != 0;
}

#elif !defined(__aarch64__)

// Products of pairs of 16 bits: of the first and third code of four, and of the second and fourth.
using Code = int16_t;

struct WeightQuads {
    ints even, odd;
};
struct RowQuad {
    ints even, odd;
};

PAGODA_INLINE RowQuad row_quad(const Code* x) {
    return {broadcast_ints(load_codes(x)), broadcast_ints(load_codes(x + 2))};
}

#ifdef __AVX512F__

template <bool>
PAGODA_INLINE WeightQuads weight_quads(ints codes) {
    return {_mm512_and_si512(codes, _mm512_set1_epi16(255)), _mm512_srli_epi16(codes, 8)};
}
PAGODA_INLINE ints add_products(ints sums, const WeightQuads& weights, const RowQuad& x) {
    sums = add_ints(sums, _mm512_madd_epi16(weights.even, x.even));
    return add_ints(sums, _mm512_madd_epi16(weights.odd, x.odd));
}
PAGODA_INLINE void store_codes(Code* p, ints x) {
    const __m256i codes = _mm512_cvtepi32_epi16(x);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                        _mm256_shufflehi_epi16(_mm256_shufflelo_epi16(codes, 0xd8), 0xd8));
}

#else

template <bool>
PAGODA_INLINE WeightQuads weight_quads(ints codes) {
    return {_mm256_and_si256(codes, _mm256_set1_epi16(255)), _mm256_srli_epi16(codes, 8)};
}
PAGODA_INLINE ints add_products(ints sums, const WeightQuads& weights, const RowQuad& x) {
    sums = add_ints(sums, _mm256_madd_epi16(weights.even, x.even));
    return add_ints(sums, _mm256_madd_epi16(weights.odd, x.odd));
}
PAGODA_INLINE void store_codes(Code* p, ints x) {
    const __m128i codes = _mm_packs_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p),
                     _mm_shufflehi_epi16(_mm_shufflelo_epi16(codes, 0xd8), 0xd8));
}

#endif
#endif

constexpr bool kByteCodes = sizeof(Code) == 1;

#if defined(PAGODA_AVX_VNNI) || defined(__ARM_FEATURE_DOTPROD)
PAGODA_INLINE int store_wide_codes(Code* codes, int64_t input, ints x, WideQuad* wide) {
    int count = 0;
    if (!exceed_bytes(x)) {
        store_codes(codes, x);
    } else {
        int32_t all[kWidth];
        std::memcpy(all, &x, sizeof(all));
        for (int i = 0; i < kWidth; i += 4) {
            int8_t units[4];
            for (int j = 0; j < 4; ++j) {
                const int32_t code = all[i + j], unit = code > 127 || code < -127 ? (code + pagoda::kWideUnit / 2) >> 7 : 0;
                units[j] = static_cast<int8_t>(unit);
                codes[i + j] = static_cast<Code>(code - unit * pagoda::kWideUnit);
            }
            if (load_codes(units) != 0) wide[count++] = {static_cast<int32_t>((input + i) * kPanel), load_codes(units)};
        }
    }
    return count;
}
#elif !defined(__AVX512VNNI__)
PAGODA_INLINE int store_wide_codes(Code* codes, int64_t, ints x, WideQuad*) {
    store_codes(codes, x);
    return 0;
}
#endif

// What products take the weights of a format for too low by.
PAGODA_INLINE int taken_too_low(const QuantizedFormat& format) {
    return kSignedCodes && (format.bits == 8 || format.blocks.codebook != pagoda::Codebook::kNone) ? 128 : 0;
}

// ---- activations

PAGODA_INLINE vec load_up_to(const float* p, int64_t n) {
    return n >= kWidth ? load(p) : load_first(p, n);
}

// What the codes of some inputs stand for.
struct CodeScale {
    float scale;
    int32_t sum;
};

// Inputs that are not finite make the scale NaN, and with it every output.
PAGODA_INLINE CodeScale quantize(const float* x, int64_t n, Code* codes) {
    vec highest_seen = zero(), poison = zero();
    for (int64_t i = 0; i < n; i += kWidth) {
        const vec v = load_up_to(x + i, n - i);
        highest_seen = max(magnitude(v), highest_seen);
        poison = fma(v, zero(), poison);
    }
    const float range = reduce_max(highest_seen);
    float inverse = 127.0f / range;
    // So small that the inverse is infinite, it is as good as zero.
    const bool vanishes = !(inverse <= std::numeric_limits<float>::max());
    if (vanishes) inverse = 0.0f;
    ints total = broadcast_ints(0);
    for (int64_t i = 0; i < n; i += kWidth) {
        const ints rounded = to_ints(mul(load_up_to(x + i, n - i), broadcast(inverse)));
        store_codes(codes + i, rounded);
        total = add_ints(total, rounded);
    }
    return {(vanishes ? 0.0f : range / 127.0f) + sum(poison), sum(total)};
}

using pagoda::kLanes;

constexpr int kLaneVectors = kLanes / kWidth;

// Of numbers that are not below zero, the lowest that more than so many are as low as or lower; infinite if NaN leaves no
// such number.
PAGODA_INLINE float lowest_but(const vec (&x)[kLaneVectors], int others) {
    float lowest = -1.0f;
    for (int reached = 0; reached <= others && lowest < INFINITY;) {
        vec rest = broadcast(-INFINITY);
        for (const vec& v : x) rest = max(rest, negative_above(v, lowest));
        lowest = -reduce_max(rest);
        reached = 0;
        for (const vec& v : x) reached += count_up_to(v, lowest);
    }
    return lowest;
}

// The step that makes 127 of what narrow codes stay within, and keeps the codes of all within bounds: see rounded_rows
// in pagoda/backend/reference/quantized.py.
PAGODA_INLINE float wide_step(const vec (&highest)[kLaneVectors], int64_t n) {
    const float share = static_cast<float>((n + kLanes - 1) / kLanes) / pagoda::kLargestSum;
    vec folded[kLaneVectors], top = zero();
    for (int i = 0; i < kLaneVectors; ++i) {
        folded[i] = mul(highest[i], broadcast(share));
        top = max(top, highest[i]);
    }
    for (int width = kLaneVectors / 2; width > 0; width /= 2) {
        for (int i = 0; i < width; ++i) folded[i] = add(folded[i], folded[i + width]);
    }
    const float highest_of_all = reduce_max(top);
    const float narrow = std::min(pagoda::kNarrowSpan * lowest_but(highest, pagoda::kTypicalLane), highest_of_all);
    return std::max({narrow / 127.0f, highest_of_all / pagoda::kLargestCode, sum(folded[0])});
}

// All inputs of a row, as codes of up to 15 bits. Inputs that are not finite make the scale NaN.
PAGODA_INLINE void quantize_wide(const QuantizedFormat& format, const float* x, int64_t n, const QuantizedRow& row) {
    vec highest_seen[kLaneVectors], poison = zero();
    for (vec& highest : highest_seen) highest = zero();
    // As bits, where what is not finite is higher than all numbers.
    for (int64_t i = 0; i < n; i += kLanes) {
        for (int j = 0; j < kLaneVectors; ++j) {
            const int64_t first = i + j * kWidth;
            if (first >= n) break;
            highest_seen[j] = max_bits(highest_seen[j], magnitude(load_up_to(x + first, n - first)));
        }
    }
    for (const vec& highest : highest_seen) poison = fma(highest, zero(), poison);
    const float step = wide_step(highest_seen, n);
    float inverse = 1.0f / step;
    // So small that the inverse is infinite, it is as good as zero.
    const bool vanishes = !(inverse <= std::numeric_limits<float>::max());
    if (vanishes) inverse = 0.0f;
    auto* codes = static_cast<Code*>(row.codes);
    int wide = 0;
    int32_t total = 0;
    for (int64_t g = 0; g < format.groups; ++g) {
        const int64_t end = g + 1 < format.groups ? (g + 1) * format.group_inputs : n;
        ints of_group = broadcast_ints(0);
        row.starts[g] = wide;
        for (int64_t i = g * format.group_inputs; i < end; i += kWidth) {
            const ints rounded = to_ints(mul(load_up_to(x + i, end - i), broadcast(inverse)));
            wide += store_wide_codes(codes + i, i, rounded, row.wide + wide);
            of_group = add_ints(of_group, rounded);
        }
        total = sum(of_group);
        row.totals[g] = static_cast<float>(total);
    }
    if constexpr (kByteCodes) row.wide[wide] = {0, 0};
    *row.num_wide = wide;
    *row.scales = (vanishes ? 0.0f : step) + sum(poison);
    if (format.grouped) return;
    *row.sum = total;
    *row.starts = static_cast<int32_t>(static_cast<uint32_t>(taken_too_low(format) - 128) * static_cast<uint32_t>(total));
}

void quantize_row(const QuantizedFormat& format, const float* x, int64_t inputs, void* packed) {
    const QuantizedRow row(format, sizeof(Code), packed);
    if (format.has_row_scale()) return quantize_wide(format, x, inputs, row);
    for (int64_t g = 0; g < format.groups; ++g) {
        const int64_t first = g * format.group_inputs;
        const int64_t n = inputs - first < format.group_inputs ? inputs - first : format.group_inputs;
        const CodeScale result = quantize(x + first, n, static_cast<Code*>(row.codes) + first);
        row.starts[g] = static_cast<int32_t>(static_cast<uint32_t>(taken_too_low(format) - format.zero()) *
                                             static_cast<uint32_t>(result.sum));
        row.scales[g] = result.scale;
        row.totals[g] = result.scale * static_cast<float>(result.sum);
    }
}

// ---- products

// sums += codes of a panel, from `codes` on, times those of rows that lie `stride` codes apart. `High` codes may be above 127.
template <bool High, int Rows, int Cols>
PAGODA_INLINE void add_quads(const ints (&codes)[Cols], const Code* x, int64_t stride,
                             ints (&sums)[Rows][Cols]) {
    WeightQuads weights[Cols];
#pragma GCC unroll 2
    for (int j = 0; j < Cols; ++j) weights[j] = weight_quads<High>(codes[j]);
#pragma GCC unroll 8
    for (int r = 0; r < Rows; ++r) {
        const RowQuad quad = row_quad(x + r * stride);
#pragma GCC unroll 2
        for (int j = 0; j < Cols; ++j) sums[r][j] = add_products(sums[r][j], weights[j], quad);
    }
}

template <int Bits, int Rows, int Cols>
PAGODA_INLINE void add_group(const uint8_t* codes, const Code* x, int64_t stride, int64_t inputs,
                             const Prefetch& ahead, int64_t& lines, ints (&sums)[Rows][Cols]) {
    // One code of 8 bits, or two of 4 bits, in a byte.
    constexpr int step = 4 * (8 / Bits);
#ifdef __ARM_FEATURE_MATMUL_INT8
    if constexpr (Rows > 1) {
        constexpr int lines_of_eight = 8 / step;
        const int64_t eights = inputs / 8;
        add_eights<Rows, Cols>(eights, x, stride, sums, [&](int64_t i, ints (&first)[Cols], ints (&second)[Cols]) {
            const uint8_t* own = codes + i * lines_of_eight * 4 * kPanel;
            for (int line = 0; line < lines_of_eight; ++line) fetch_ahead(ahead, lines++);
#pragma GCC unroll 2
            for (int j = 0; j < Cols; ++j) {
                const ints bytes = load_ints(own + j * kVectorBytes);
                first[j] = Bits == 8 ? bytes : low_nibbles(bytes);
                second[j] = Bits == 8 ? load_ints(own + 4 * kPanel + j * kVectorBytes) : high_nibbles(bytes);
            }
        });
        codes += eights * lines_of_eight * 4 * kPanel, x += eights * 8, inputs -= eights * 8;
    }
#endif
    for (int64_t i = 0; i < inputs; i += step, codes += 4 * kPanel) {
        fetch_ahead(ahead, lines++);
        ints bytes[Cols], nibbles[Cols];
#pragma GCC unroll 2
        for (int j = 0; j < Cols; ++j) bytes[j] = load_ints(codes + j * kVectorBytes);
        if constexpr (Bits == 8) {
            add_quads<true, Rows, Cols>(bytes, x + i, stride, sums);
        } else {
#pragma GCC unroll 2
            for (int j = 0; j < Cols; ++j) nibbles[j] = low_nibbles(bytes[j]);
            add_quads<false, Rows, Cols>(nibbles, x + i, stride, sums);
#pragma GCC unroll 2
            for (int j = 0; j < Cols; ++j) nibbles[j] = high_nibbles(bytes[j]);
            add_quads<false, Rows, Cols>(nibbles, x + i + 4, stride, sums);
        }
    }
}

// What rows' wide quads, and the weights' zero points, add to the sums of a panel from `column` on.
template <int Rows, int Cols>
PAGODA_INLINE void add_wide(const QuantizedFormat& format, const uint8_t* panel, int column, const QuantizedRow& row,
                            int64_t row_bytes, ints (&sums)[Rows][Cols]) {
    const auto of_row = [&](const auto* first, int r) {
        return reinterpret_cast<decltype(first)>(reinterpret_cast<const char*>(first) + r * row_bytes);
    };
    if constexpr (kByteCodes) {
        const uint8_t* codes = panel + 4 * column;
        // One of each of four rows at once, as each of a row waits for the one before it; that behind the last counts for
        // nothing.
        constexpr int at_once = Rows == 1 ? 2 : 1;
#pragma GCC unroll 2
        for (int first = 0; first < Rows; first += 4) {
            constexpr int most_rows = Rows < 4 ? Rows : 4;
            ints units[most_rows][at_once][Cols];
            int counts[most_rows], most = 0;
#pragma GCC unroll 4
            for (int r = 0; r < most_rows; ++r) {
                for (auto& some : units[r]) {
                    for (ints& one : some) one = broadcast_ints(0);
                }
                counts[r] = first + r < Rows ? *of_row(row.num_wide, first + r) : 0;
                most = counts[r] > most ? counts[r] : most;
            }
            if (most == 0) continue;
            for (int k = 0; k < most; k += at_once) {
#pragma GCC unroll 4
                for (int r = 0; r < most_rows; ++r) {
                    if (first + r >= Rows) continue;
#pragma GCC unroll 2
                    for (int i = 0; i < at_once; ++i) {
                        const WideQuad& wide = of_row(row.wide, first + r)[k + i < counts[r] ? k + i : counts[r]];
                        const RowQuad quad = row_quad(reinterpret_cast<const Code*>(&wide.codes));
#pragma GCC unroll 2
                        for (int j = 0; j < Cols; ++j) {
                            const auto weights = weight_quads<true>(load_ints(codes + wide.offset + j * kVectorBytes));
                            units[r][i][j] = add_products(units[r][i][j], weights, quad);
                        }
                    }
                }
            }
#pragma GCC unroll 4
            for (int r = 0; r < most_rows; ++r) {
                if (first + r >= Rows) continue;
#pragma GCC unroll 2
                for (int j = 0; j < Cols; ++j) {
                    ints all = units[r][0][j];
                    if (at_once == 2) all = add_ints(all, units[r][at_once - 1][j]);
                    sums[first + r][j] = add_ints(sums[first + r][j], times_wide_unit(all));
                }
            }
        }
    }
    if (!format.offsets) return;
    const uint8_t* zero_points = panel + format.code_bytes() + 4 * (kPanel + column);
#pragma GCC unroll 2
    for (int j = 0; j < Cols; ++j) {
        const ints own = load_ints(zero_points + j * kVectorBytes);
#pragma GCC unroll 8
        for (int r = 0; r < Rows; ++r) {
            sums[r][j] = subtract_ints(sums[r][j], multiply_ints(own, broadcast_ints(*of_row(row.sum, r))));
        }
    }
}

// c [Rows, Cols vectors] of a panel from its column on; Scale is the type of a weight's scale.
template <int Rows, int Cols, int Bits, class Scale>
PAGODA_INLINE void quantized_tile(const QuantizedFormat& format, const uint8_t* panel, int column,
                                  const QuantizedRow& row, int64_t row_bytes, const Prefetch& ahead,
                                  float* c) {
    int64_t lines = 0;
    const int64_t stride = row_bytes / static_cast<int64_t>(sizeof(Code)), meta = row_bytes / 4;
    const Code* x = static_cast<const Code*>(row.codes);
    vec results[Rows][Cols];
#pragma GCC unroll 8
    for (int r = 0; r < Rows; ++r) {
        for (int j = 0; j < Cols; ++j) results[r][j] = zero();
    }
    for (int64_t g = 0; g < format.groups; ++g, panel += format.group_bytes()) {
        ints sums[Rows][Cols];
#pragma GCC unroll 8
        for (int r = 0; r < Rows; ++r) {
            for (int j = 0; j < Cols; ++j) sums[r][j] = broadcast_ints(row.starts[r * meta + g]);
        }
        add_group<Bits, Rows, Cols>(panel + 4 * column, x + g * format.group_inputs, stride,
                                    format.group_inputs, ahead, lines, sums);
        constexpr bool one_group = std::is_same_v<Scale, float>;
        if constexpr (one_group) add_wide<Rows, Cols>(format, panel, column, row, row_bytes, sums);
        const auto* scales = reinterpret_cast<const Scale*>(panel + format.code_bytes()) + column;
#pragma GCC unroll 2
        for (int j = 0; j < Cols; ++j) {
            const vec scale = load(scales + j * kWidth);
#pragma GCC unroll 8
            for (int r = 0; r < Rows; ++r) {
                const vec both = mul(scale, broadcast(row.scales[r * meta + g]));
                results[r][j] = fma(to_floats(sums[r][j]), both, results[r][j]);
            }
        }
        if (one_group || !format.offsets) continue;
#pragma GCC unroll 2
        for (int j = 0; j < Cols; ++j) {
            const vec offset = load(scales + kPanel + j * kWidth);
#pragma GCC unroll 8
            for (int r = 0; r < Rows; ++r) {
                results[r][j] = fma(offset, broadcast(row.totals[r * meta + g]), results[r][j]);
            }
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < Rows; ++r) {
        for (int j = 0; j < Cols; ++j) store(c + r * kPanel + j * kWidth, results[r][j]);
    }
}

// Rows of a register tile: accumulators of integers, and with groups as many of floats, have to fit.
#if defined(__AVX512VNNI__)
constexpr int kInt8Rows = 8, kGroupedRows = 6;
#elif defined(__AVX512F__)
constexpr int kInt8Rows = 8, kGroupedRows = 4;
#elif defined(PAGODA_AVX_VNNI)
constexpr int kInt8Rows = 6, kGroupedRows = 3;
#elif defined(__ARM_FEATURE_DOTPROD)
constexpr int kInt8Rows = 6, kGroupedRows = 4;
#else
constexpr int kInt8Rows = 4, kGroupedRows = 2;
#endif

template <int MaxRows, int Bits, class Scale>
void quantized_panel(const QuantizedFormat& format, const uint8_t* panel, char* rows,
                     int64_t row_bytes, int64_t n, const float* bias, float* out, int64_t out_stride, int cols,
                     const void* next) {
    alignas(64) float c[MaxRows * kPanel];
    const int64_t tiles = (n + MaxRows - 1) / MaxRows;
    for (int64_t tile = 0; tile < tiles; ++tile) {
        const int64_t first = n * tile / tiles;
        const int count = static_cast<int>(n * (tile + 1) / tiles - first);
        const QuantizedRow row(format, sizeof(Code), rows + first * row_bytes);
        const auto ahead = Prefetch::share(next, format.panel_bytes(), tile, tiles);
        for (int column = 0; column < kPanel; column += kRegisterCols * kWidth) {
            with_count<MaxRows>(count, [&](auto known) {
                quantized_tile<decltype(known)::value, kRegisterCols, Bits, Scale>(format, panel, column, row,
                                                                                   row_bytes, ahead, c + column);
            });
        }
        store_outputs(c, count, bias, out + first * out_stride, out_stride, cols);
    }
}

void quantized_panel(const QuantizedFormat& format, const void* panel_, void* rows_, int64_t row_bytes, int64_t n,
                     const float* bias, float* out, int64_t out_stride, int cols, const void* next) {
    const auto* panel = static_cast<const uint8_t*>(panel_);
    auto* rows = static_cast<char*>(rows_);
    if (!format.grouped) {
        quantized_panel<kInt8Rows, 8, float>(format, panel, rows, row_bytes, n, bias, out, out_stride,
                                             cols, next);
    } else if (format.bits == 8) {
        quantized_panel<kGroupedRows, 8, f16>(format, panel, rows, row_bytes, n, bias, out, out_stride,
                                              cols, next);
    } else {
        quantized_panel<kGroupedRows, 4, f16>(format, panel, rows, row_bytes, n, bias, out, out_stride,
                                              cols, next);
    }
}

// ---- weights

PAGODA_INLINE float as_float(const void* p, int64_t i, bool half) {
    return half ? as_float(static_cast<const f16*>(p)[i]) : static_cast<const float*>(p)[i];
}

void dequantize_row(const QuantizedFormat& format, const void* panel_, int lane, const int64_t* order,
                    int64_t inputs, float* out) {
    const auto* panel = static_cast<const uint8_t*>(panel_);
    for (int64_t i = 0; i < inputs; ++i) {
        const int64_t g = i / format.group_inputs, within = i % format.group_inputs;
        const uint8_t* group = panel + g * format.group_bytes();
        const uint8_t* scales = group + format.code_bytes();
        const float scale = as_float(scales, lane, format.grouped);
        int32_t zero_point = 0;
        if (!format.grouped && format.offsets) std::memcpy(&zero_point, scales + 4 * (kPanel + lane), 4);
        const float code = static_cast<float>(format.code(group, lane, within) - format.zero() - zero_point);
        const float offset = format.offsets && format.grouped ? as_float(scales, kPanel + lane, true) : 0.0f;
        out[order ? order[i] : i] = code * scale + offset;
    }
}

}  // namespace
