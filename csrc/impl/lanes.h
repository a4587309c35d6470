// SPDX-License-Identifier: Apache-2.0
// The three ways in which attention multiplies, on lanes of 32 bits; see Math in kernels.h.
//
// A way says how cells of the cache become lanes, how lanes are multiplied and summed up, and how scores become
// weights. A cell holds the elements of one lane as the cache stores them.
#pragma once

#include "products.h"

namespace {

using pagoda::kKeyTile;

struct bf16_pair {
    bf16 first, second;
};
struct i8_pair {
    int8_t first, second;
};
struct i16_pair {
    int16_t first, second;
};

template <class Lane>
PAGODA_INLINE int32_t bits_of(const Lane* x) {
    int32_t bits;
    std::memcpy(&bits, x, sizeof(bits));
    return bits;
}

// Of the weights of a tile as whole numbers; 64 products with eight bits stay within 32.
constexpr float kLargestWeight = 32767;
// Of the queries; the products of kMaxHeadDim elements stay within 32 bits.
constexpr float kLargestQuery = 16383;

struct F32Math {
    using Lane = float;
    using Sum = vec;
    static constexpr int pair = 1;

    static Lane lane(float x) { return x; }
    static Lane lane(bf16 x) { return as_float(x); }
    static Lane lane(f16 x) { return as_float(x); }
    static Lane lane(e4m3 x) { return as_float(x); }
    template <class Cell>
    PAGODA_INLINE static vec columns(const Cell* p) {
        return load(p);
    }
    PAGODA_INLINE static Sum nothing() { return zero(); }
    PAGODA_INLINE static Sum add_product(Sum sum, vec columns, const Lane* x) {
        return fma(broadcast(*x), columns, sum);
    }
    PAGODA_INLINE static vec to_float(Sum sum) { return sum; }
    PAGODA_INLINE static vec weighted(Sum sum, float) { return sum; }

    // Turns scores into weights, as lanes; returns their sum in parts.
    PAGODA_INLINE static vec softmax_tile(float* scores, vec base, const float*, float*) {
        vec sums = zero();
        for (int j = 0; j < kKeyTile; j += kWidth) {
            const vec weights = exp2(sub(load(scores + j), base));
            store(scores + j, weights);
            sums = add(sums, weights);
        }
        return sums;
    }
};

#ifdef __AVX512BF16__
using Bf16Pairs = __m512bh;
PAGODA_INLINE Bf16Pairs load_pairs(const void* p) { return (__m512bh)_mm512_loadu_si512(p); }
PAGODA_INLINE Bf16Pairs broadcast_pair(const void* p) {
    int32_t bits;
    std::memcpy(&bits, p, 4);
    return (__m512bh)_mm512_set1_epi32(bits);
}
PAGODA_INLINE vec add_pairs(vec sum, Bf16Pairs a, Bf16Pairs b) { return _mm512_dpbf16_ps(sum, a, b); }
#endif

#ifdef __aarch64__
}  // namespace

#include "../neon/lanes.h"

namespace {
#endif

#if defined(__AVX512BF16__) || defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
// Products of pairs of bf16 are added to sums of floats.
#define PAGODA_BF16_PAIRS

struct Bf16Math {
    using Lane = bf16_pair;
    using Sum = vec;
    static constexpr int pair = 2;

    static Lane lane(bf16_pair x) { return x; }
    static Lane lane(bf16 first, bf16 second) { return {first, second}; }
    PAGODA_INLINE static Bf16Pairs columns(const bf16_pair* p) { return load_pairs(p); }
    PAGODA_INLINE static Sum nothing() { return zero(); }
    PAGODA_INLINE static Sum add_product(Sum sum, Bf16Pairs columns, const Lane* x) {
        return add_pairs(sum, columns, broadcast_pair(x));
    }
    PAGODA_INLINE static vec to_float(Sum sum) { return sum; }
    PAGODA_INLINE static vec weighted(Sum sum, float) { return sum; }

    // The sum is of the rounded weights, so that they add up to 1.
    PAGODA_INLINE static vec softmax_tile(float* scores, vec base, const float*, float*) {
        constexpr uint32_t two_ones = 0x3f803f80;
        const Bf16Pairs ones = broadcast_pair(&two_ones);
        vec sums = zero();
        for (int j = 0; j < kKeyTile; j += 2 * kWidth) {
            const vec first = exp2(sub(load(scores + j), base));
            const vec second = exp2(sub(load(scores + j + kWidth), base));
            auto* weights = reinterpret_cast<bf16*>(scores) + j;
#ifdef __AVX512BF16__
            _mm512_storeu_si512(weights, (__m512i)_mm512_cvtne2ps_pbh(second, first));
#else
            store(weights, first);
            store(weights + kWidth, second);
#endif
            sums = add_pairs(sums, load_pairs(weights), ones);
        }
        return sums;
    }
};

#endif

#ifdef __AVX512F__
using ivec = __m512i;
PAGODA_INLINE ivec no_ints() { return _mm512_setzero_si512(); }
PAGODA_INLINE ivec load_lanes(const i8_pair* p) {
    return _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
PAGODA_INLINE ivec load_lanes(const i16_pair* p) { return _mm512_loadu_si512(p); }
PAGODA_INLINE ivec add_pairs(ivec sum, ivec columns, const i16_pair* x) {
#ifdef __AVX512VNNI__
    // GCC 12 copies sums from register to register, and to memory, with the intrinsic: half as fast.
    asm("vpdpwssd %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(columns), "m"(*x));
    return sum;
#else
    return _mm512_add_epi32(sum, _mm512_madd_epi16(columns, _mm512_set1_epi32(bits_of(x))));
#endif
}
PAGODA_INLINE vec as_floats(ivec x) { return _mm512_cvtepi32_ps(x); }
PAGODA_INLINE void store_rounded(int16_t* p, vec x) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(_mm512_cvtps_epi32(x)));
}
#elif defined(__AVX2__)
using ivec = __m256i;
PAGODA_INLINE ivec no_ints() { return _mm256_setzero_si256(); }
PAGODA_INLINE ivec load_lanes(const i8_pair* p) {
    return _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
PAGODA_INLINE ivec load_lanes(const i16_pair* p) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
}
PAGODA_INLINE ivec add_pairs(ivec sum, ivec columns, const i16_pair* x) {
    return _mm256_add_epi32(sum, _mm256_madd_epi16(columns, _mm256_set1_epi32(bits_of(x))));
}
PAGODA_INLINE vec as_floats(ivec x) { return _mm256_cvtepi32_ps(x); }
PAGODA_INLINE void store_rounded(int16_t* p, vec x) {
    const __m256i whole = _mm256_cvtps_epi32(x);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p),
                     _mm_packs_epi32(_mm256_castsi256_si128(whole), _mm256_extracti128_si256(whole, 1)));
}
#endif

struct I16Math {
    using Lane = i16_pair;
    using Sum = ivec;
    static constexpr int pair = 2;

    static Lane lane(i8_pair x) { return {x.first, x.second}; }
    static Lane lane(int8_t first, int8_t second) { return {first, second}; }
    template <class Cell>
    PAGODA_INLINE static auto columns(const Cell* p) {
        return load_lanes(p);
    }
    PAGODA_INLINE static Sum nothing() { return no_ints(); }
    template <class Columns>
    PAGODA_INLINE static Sum add_product(Sum sum, const Columns& columns, const Lane* x) {
        return add_pairs(sum, columns, x);
    }
    PAGODA_INLINE static vec to_float(Sum sum) { return as_floats(sum); }
    PAGODA_INLINE static vec weighted(Sum sum, float scale) { return mul(as_floats(sum), broadcast(scale)); }

    // Weights take in the scales of the values; those of a tile are whole shares of the largest, `scale` apart.
    PAGODA_INLINE static vec softmax_tile(float* scores, vec base, const float* value_scales, float* scale) {
        vec sums = zero(), largest = zero();
        for (int j = 0; j < kKeyTile; j += kWidth) {
            const vec weights = exp2(sub(load(scores + j), base));
            sums = add(sums, weights);
            const vec scaled = mul(weights, load(value_scales + j));
            store(scores + j, scaled);
            largest = max_bits(largest, scaled);
        }
        const float top = highest_bits(largest);
        const vec factor = broadcast(top > 1e-30f ? kLargestWeight / top : 0.0f);
        auto* whole = reinterpret_cast<int16_t*>(scores);
        for (int j = 0; j < kKeyTile; j += kWidth) store_rounded(whole + j, mul(load(scores + j), factor));
        *scale = top / kLargestWeight;
        return sums;
    }
};

}  // namespace
