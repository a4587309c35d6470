// SPDX-License-Identifier: Apache-2.0
// Vectors of floats, as wide as the file that includes this is compiled for.
//
// Everything is in an unnamed namespace: an inline function that the linker shared between files could bring
// instructions of one set into code that runs on another.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

namespace {

struct bf16 {
    uint16_t bits;
};
struct f16 {
    uint16_t bits;
};
struct e4m3 {
    uint8_t bits;
};

// `vpdpbusd` on 256 bits, or instructions that do the same, for tests on processors without it.
#if !defined(__AVX512F__) && (defined(__AVXVNNI__) || defined(PAGODA_EMULATE_AVX_VNNI))
#define PAGODA_AVX_VNNI
#endif

#define PAGODA_INLINE inline __attribute__((always_inline))

// To the first cache, and to the second: more of what memory is asked for there may be on its way at once (Zen 4: of the
// first 24 lines, which is half of what memory can give).
PAGODA_INLINE void prefetch_l1(const void* p) { __builtin_prefetch(p, 0, 3); }
PAGODA_INLINE void prefetch_l2(const void* p) { __builtin_prefetch(p, 0, 2); }

}  // namespace

#ifdef __aarch64__
#include "neon/vec.h"
#else
#include <immintrin.h>
#endif

namespace {

#ifdef __AVX512F__

constexpr int kWidth = 16;
using vec = __m512;

PAGODA_INLINE vec zero() { return _mm512_setzero_ps(); }
PAGODA_INLINE vec broadcast(float x) { return _mm512_set1_ps(x); }
PAGODA_INLINE vec load(const float* p) { return _mm512_loadu_ps(p); }
PAGODA_INLINE vec load(const bf16* p) {
    const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}
PAGODA_INLINE vec load(const f16* p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
// Of the pairs at p: the first elements, the second elements.
PAGODA_INLINE vec load_even(const bf16* p) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_loadu_si512(p), 16));
}
PAGODA_INLINE vec load_odd(const bf16* p) {
    const __m512i high = _mm512_set1_epi32(static_cast<int>(0xffff0000));
    return _mm512_castsi512_ps(_mm512_and_si512(_mm512_loadu_si512(p), high));
}
PAGODA_INLINE void store(float* p, vec x) { _mm512_storeu_ps(p, x); }
PAGODA_INLINE __m512i bf16_bits(vec x) {
    const __m512i bits = _mm512_castps_si512(x);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i rounded = _mm512_srli_epi32(
        _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff))), 16);
    const __mmask16 is_nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    return _mm512_mask_mov_epi32(rounded, is_nan, _mm512_set1_epi32(0x7fc0));
}
PAGODA_INLINE void store(bf16* p, vec x) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(bf16_bits(x)));
}
PAGODA_INLINE void store(f16* p, vec x) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                        _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
PAGODA_INLINE vec rounded_to_bf16(vec x) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(bf16_bits(x), 16));
}
PAGODA_INLINE vec add(vec a, vec b) { return _mm512_add_ps(a, b); }
PAGODA_INLINE vec sub(vec a, vec b) { return _mm512_sub_ps(a, b); }
PAGODA_INLINE vec mul(vec a, vec b) { return _mm512_mul_ps(a, b); }
PAGODA_INLINE vec div(vec a, vec b) { return _mm512_div_ps(a, b); }
PAGODA_INLINE vec fma(vec a, vec b, vec c) { return _mm512_fmadd_ps(a, b, c); }
PAGODA_INLINE vec max(vec a, vec b) { return _mm512_max_ps(a, b); }
PAGODA_INLINE vec min(vec a, vec b) { return _mm512_min_ps(a, b); }
PAGODA_INLINE float sum(vec x) { return _mm512_reduce_add_ps(x); }
PAGODA_INLINE float reduce_max(vec x) { return _mm512_reduce_max_ps(x); }
// The highest of the bits of numbers, none below zero: NaN if one of them is.
PAGODA_INLINE vec max_bits(vec a, vec b) {
    return _mm512_castsi512_ps(_mm512_max_epu32(_mm512_castps_si512(a), _mm512_castps_si512(b)));
}
PAGODA_INLINE float highest_bits(vec x) {
    const __m512i bits = _mm512_castps_si512(x);
    const __m256i upper = _mm512_maskz_extracti64x4_epi64(0xf, bits, 1);
    const __m256i four = _mm256_max_epu32(_mm512_castsi512_si256(bits), upper);
    __m128i half = _mm_max_epu32(_mm256_castsi256_si128(four), _mm256_extracti128_si256(four, 1));
    half = _mm_max_epu32(half, _mm_shuffle_epi32(half, 0x4e));
    return _mm_cvtss_f32(_mm_castsi128_ps(_mm_max_epu32(half, _mm_shuffle_epi32(half, 0xb1))));
}
PAGODA_INLINE vec absolute(vec x) { return _mm512_abs_ps(x); }
PAGODA_INLINE vec round_to_int(vec x) {
    return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
// 2 to the power of n, a whole number from -126 to 127.
PAGODA_INLINE vec power_of_two(vec n) {
    const __m512i biased = _mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127));
    return _mm512_castsi512_ps(_mm512_slli_epi32(biased, 23));
}
// x, about 1, times 2 to the power of n, a whole number of kLowestPower or more; that one makes it 0.
constexpr float kLowestPower = -160;
PAGODA_INLINE vec times_power_of_two(vec x, vec n) { return _mm512_scalef_ps(x, n); }
// x where a >= b or either is NaN, else 0.
PAGODA_INLINE vec unless_below(vec a, vec b, vec x) {
    return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(a, b, _CMP_NLT_UQ), x);
}

#elif defined(__AVX2__)

constexpr int kWidth = 8;
using vec = __m256;

PAGODA_INLINE vec zero() { return _mm256_setzero_ps(); }
PAGODA_INLINE vec broadcast(float x) { return _mm256_set1_ps(x); }
PAGODA_INLINE vec load(const float* p) { return _mm256_loadu_ps(p); }
PAGODA_INLINE vec load(const bf16* p) {
    const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
}
PAGODA_INLINE vec load(const f16* p) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
PAGODA_INLINE __m256i load_pairs(const bf16* p) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
}
// Of the pairs at p: the first elements, the second elements.
PAGODA_INLINE vec load_even(const bf16* p) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(load_pairs(p), 16));
}
PAGODA_INLINE vec load_odd(const bf16* p) {
    const __m256i high = _mm256_set1_epi32(static_cast<int>(0xffff0000));
    return _mm256_castsi256_ps(_mm256_and_si256(load_pairs(p), high));
}
PAGODA_INLINE void store(float* p, vec x) { _mm256_storeu_ps(p, x); }
PAGODA_INLINE __m256i bf16_bits(vec x) {
    const __m256i bits = _mm256_castps_si256(x);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i rounded = _mm256_srli_epi32(
        _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))), 16);
    const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    return _mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7fc0), is_nan);
}
PAGODA_INLINE void store(bf16* p, vec x) {
    const __m256i bits = bf16_bits(x);
    const __m128i packed =
        _mm_packus_epi32(_mm256_castsi256_si128(bits), _mm256_extracti128_si256(bits, 1));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), packed);
}
PAGODA_INLINE void store(f16* p, vec x) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p),
                     _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
PAGODA_INLINE vec rounded_to_bf16(vec x) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(bf16_bits(x), 16));
}
PAGODA_INLINE vec add(vec a, vec b) { return _mm256_add_ps(a, b); }
PAGODA_INLINE vec sub(vec a, vec b) { return _mm256_sub_ps(a, b); }
PAGODA_INLINE vec mul(vec a, vec b) { return _mm256_mul_ps(a, b); }
PAGODA_INLINE vec div(vec a, vec b) { return _mm256_div_ps(a, b); }
PAGODA_INLINE vec fma(vec a, vec b, vec c) { return _mm256_fmadd_ps(a, b, c); }
PAGODA_INLINE vec max(vec a, vec b) { return _mm256_max_ps(a, b); }
PAGODA_INLINE vec min(vec a, vec b) { return _mm256_min_ps(a, b); }
PAGODA_INLINE float sum(vec x) {
    __m128 half = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    half = _mm_add_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_add_ss(half, _mm_movehdup_ps(half)));
}
PAGODA_INLINE float reduce_max(vec x) {
    __m128 half = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    half = _mm_max_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_max_ss(half, _mm_movehdup_ps(half)));
}
// The highest of the bits of numbers, none below zero: NaN if one of them is.
PAGODA_INLINE vec max_bits(vec a, vec b) {
    return _mm256_castsi256_ps(_mm256_max_epu32(_mm256_castps_si256(a), _mm256_castps_si256(b)));
}
PAGODA_INLINE float highest_bits(vec x) {
    const __m256i bits = _mm256_castps_si256(x);
    __m128i half = _mm_max_epu32(_mm256_castsi256_si128(bits), _mm256_extracti128_si256(bits, 1));
    half = _mm_max_epu32(half, _mm_shuffle_epi32(half, 0x4e));
    return _mm_cvtss_f32(_mm_castsi128_ps(_mm_max_epu32(half, _mm_shuffle_epi32(half, 0xb1))));
}
PAGODA_INLINE vec absolute(vec x) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), x); }
PAGODA_INLINE vec round_to_int(vec x) {
    return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
// 2 to the power of n, a whole number from -126 to 127.
PAGODA_INLINE vec power_of_two(vec n) {
    const __m256i biased = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
    return _mm256_castsi256_ps(_mm256_slli_epi32(biased, 23));
}
// x, about 1, times 2 to the power of n, a whole number of kLowestPower or more; that one makes it 0.
constexpr float kLowestPower = -127;
PAGODA_INLINE vec times_power_of_two(vec x, vec n) { return mul(x, power_of_two(n)); }
// x where a >= b or either is NaN, else 0.
PAGODA_INLINE vec unless_below(vec a, vec b, vec x) {
    return _mm256_and_ps(_mm256_cmp_ps(a, b, _CMP_NLT_UQ), x);
}

#endif

#ifdef __AVX2__
PAGODA_INLINE float as_float(f16 x) { return _cvtsh_ss(x.bits); }
PAGODA_INLINE f16 to_f16(float x) { return {_cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT)}; }

// Numbers of E4M3 times 2^-8: behind the sign, the bits of halves but for the bias of the exponent.
#ifdef __AVX512F__
PAGODA_INLINE vec load_small_floats(const uint8_t* p) {
    const __m256i wide = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    return _mm512_cvtph_ps(_mm256_and_si256(_mm256_slli_epi16(wide, 7), _mm256_set1_epi16(~0x4000)));
}
// Where E4M3 has NaN, halves go on.
PAGODA_INLINE vec nan_above_448(vec x) {
    const __mmask16 is_nan = _mm512_cmp_ps_mask(_mm512_abs_ps(x), broadcast(480.0f), _CMP_EQ_OQ);
    return _mm512_mask_mov_ps(x, is_nan, broadcast(NAN));
}
#else
PAGODA_INLINE vec load_small_floats(const uint8_t* p) {
    const __m128i wide = _mm_cvtepi8_epi16(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
    return _mm256_cvtph_ps(_mm_and_si128(_mm_slli_epi16(wide, 7), _mm_set1_epi16(~0x4000)));
}
PAGODA_INLINE vec nan_above_448(vec x) {
    const vec magnitude = _mm256_andnot_ps(_mm256_set1_ps(-0.0f), x);
    return _mm256_or_ps(x, _mm256_cmp_ps(magnitude, broadcast(480.0f), _CMP_EQ_OQ));
}
#endif
#endif

// The first n elements at p, zeros behind them.
template <class T>
PAGODA_INLINE vec load_first(const T* p, int64_t n) {
    T whole[kWidth] = {};
    std::memcpy(whole, p, static_cast<size_t>(n) * sizeof(T));
    return load(whole);
}

// The same with `filler` behind them.
template <class T>
PAGODA_INLINE vec load_last(const T* p, int64_t n, T filler) {
    T whole[kWidth];
    for (T& element : whole) element = filler;
    std::memcpy(whole, p, static_cast<size_t>(n) * sizeof(T));
    return load(whole);
}

template <class T>
PAGODA_INLINE void store_first(T* p, int64_t n, vec x) {
    T whole[kWidth];
    store(whole, x);
    std::memcpy(p, whole, static_cast<size_t>(n) * sizeof(T));
}

// Calls f(offset, load, store) for all of d elements, the last few in a vector of their own.
template <class F>
PAGODA_INLINE void for_vectors(int64_t d, F f) {
    int64_t i = 0;
    for (; i + kWidth <= d; i += kWidth) {
        f([&](const auto* p) { return load(p + i); }, [&](auto* p, vec x) { store(p + i, x); });
    }
    if (i < d) {
        f([&](const auto* p) { return load_first(p + i, d - i); },
          [&](auto* p, vec x) { store_first(p + i, d - i, x); });
    }
}

// e^x within 2 units in the last place; exactly 1 at 0, and 0 where the result would not be a normal number.
// The polynomial is that of Cephes (Moshier 1992).
PAGODA_INLINE vec exp(vec x) {
    const vec lowest = broadcast(-87.33654f);
    const vec bounded = max(lowest, min(broadcast(88.02969f), x));
    const vec n = round_to_int(mul(bounded, broadcast(1.44269504f)));
    vec r = fma(n, broadcast(-0.693359375f), bounded);
    r = fma(n, broadcast(2.12194440e-4f), r);
    vec p = broadcast(1.9875691500e-4f);
    p = fma(p, r, broadcast(1.3981999507e-3f));
    p = fma(p, r, broadcast(8.3334519073e-3f));
    p = fma(p, r, broadcast(4.1665795894e-2f));
    p = fma(p, r, broadcast(1.6666665459e-1f));
    p = fma(p, r, broadcast(5.0000001201e-1f));
    p = fma(mul(p, r), r, add(r, broadcast(1.0f)));
    return unless_below(x, lowest, mul(p, power_of_two(n)));
}

// 2^x within 2 units in the last place, for x up to 127; exactly 1 at 0, and 0 from kLowestPower down. The
// polynomial has the least relative error of its degree between -1/2 and 1/2.
PAGODA_INLINE vec exp2(vec x) {
    const vec bounded = max(broadcast(kLowestPower), x);
    const vec n = round_to_int(bounded);
    const vec r = sub(bounded, n);
    vec p = broadcast(1.32647273e-3f);
    p = fma(p, r, broadcast(9.67151299e-3f));
    p = fma(p, r, broadcast(5.55073358e-2f));
    p = fma(p, r, broadcast(2.40222424e-1f));
    p = fma(p, r, broadcast(6.93147004e-1f));
    p = fma(p, r, broadcast(1.0f));
    return times_power_of_two(p, n);
}

PAGODA_INLINE float exp2(float x) {
    float lanes[kWidth];
    store(lanes, exp2(broadcast(x)));
    return lanes[0];
}

PAGODA_INLINE vec load(const e4m3* p) { return nan_above_448(mul(load_small_floats(&p->bits), broadcast(256.0f))); }
PAGODA_INLINE float as_float(e4m3 x) {
    if ((x.bits & 127) == 127) return NAN;
    return as_float(f16{static_cast<uint16_t>((static_cast<int8_t>(x.bits) * 128) & 0xbfff)}) * 256.0f;
}
// Rounded half to even; what lies beyond 448 becomes 448.
PAGODA_INLINE e4m3 to_e4m3(float x) {
    constexpr float kLeastNormal = 0x1p-6f, kHighest = 448.0f;
    const auto bits_of_float = [](float value) {
        uint32_t bits;
        std::memcpy(&bits, &value, 4);
        return bits;
    };
    const uint32_t sign = bits_of_float(x) >> 24 & 128;
    float highest = std::fabs(x);
    if (!(highest <= INFINITY)) return {static_cast<uint8_t>(sign | 127)};
    if (highest > kHighest) highest = kHighest;
    if (highest < kLeastNormal) {
        // Added to that, a number is a multiple of 2^-9.
        constexpr float kUnits = 24576.0f;
        return {static_cast<uint8_t>(sign | (bits_of_float(highest + kUnits) - bits_of_float(kUnits)))};
    }
    const uint32_t bits = bits_of_float(highest);
    return {static_cast<uint8_t>(sign | (((bits + 0x7ffff + (bits >> 20 & 1)) >> 20) - (120 << 3)))};
}

PAGODA_INLINE float as_float(float x) { return x; }
PAGODA_INLINE float as_float(bf16 x) {
    const uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
    float result;
    std::memcpy(&result, &bits, 4);
    return result;
}

}  // namespace
