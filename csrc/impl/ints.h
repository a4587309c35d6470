// SPDX-License-Identifier: Apache-2.0
// Vectors of integers, and products of codes of weights and of activations, which are exact.
#pragma once

#include "linear.h"

namespace {

using pagoda::QuantizedFormat;

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
    return kSignedCodes && (format.bits == 8 || (format.blocks.codebook != pagoda::Codebook::kNone && format.zero() == 128)) ? 128 : 0;
}

}  // namespace
