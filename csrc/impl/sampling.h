// SPDX-License-Identifier: Apache-2.0
// Weights of tokens from their logits.
//
// Every operation is a single one of IEEE 754, so all instruction sets, and PyTorch element by element, give the
// same bits.
#pragma once

#include <cmath>

#include "products.h"

namespace {

using pagoda::kSampleBlock;
using pagoda::WeighedTokens;
using pagoda::Weighing;

// Whole numbers of 64 bits, as many as a vector has floats.
#ifdef __aarch64__
}  // namespace

#include "../neon/sampling.h"

namespace {
#elif defined(__AVX512F__)

struct Longs {
    __m512i low, high;
};

PAGODA_INLINE Longs no_longs() { return {_mm512_setzero_si512(), _mm512_setzero_si512()}; }
PAGODA_INLINE Longs to_longs(vec x) {
    return {_mm512_cvtps_epi64(_mm512_castps512_ps256(x)), _mm512_cvtps_epi64(_mm512_extractf32x8_ps(x, 1))};
}
PAGODA_INLINE Longs add(Longs a, Longs b) {
    return {_mm512_add_epi64(a.low, b.low), _mm512_add_epi64(a.high, b.high)};
}
PAGODA_INLINE void store(int64_t* p, Longs x) {
    _mm512_storeu_si512(p, x.low);
    _mm512_storeu_si512(p + kWidth / 2, x.high);
}
// A bit for each element.
using Lanes = uint32_t;
PAGODA_INLINE Lanes above(vec x, float bound) { return _mm512_cmp_ps_mask(x, broadcast(bound), _CMP_GT_OQ); }
PAGODA_INLINE Lanes below(vec x, float bound) { return _mm512_cmp_ps_mask(x, broadcast(bound), _CMP_LT_OQ); }
PAGODA_INLINE Lanes not_above(vec x, float bound) { return _mm512_cmp_ps_mask(x, broadcast(bound), _CMP_LE_OQ); }
PAGODA_INLINE Lanes not_below(vec x, float bound) { return _mm512_cmp_ps_mask(x, broadcast(bound), _CMP_GE_OQ); }

// Adds some lanes of a vector, from place `first` of a block on, behind so many tokens.
PAGODA_INLINE void append(Lanes lanes, vec weight, vec distance, vec bucket, int64_t first, WeighedTokens& tokens,
                          int64_t count) {
    const auto mask = static_cast<__mmask16>(lanes);
    const Longs weights = to_longs(_mm512_maskz_compress_ps(mask, weight));
    store(tokens.weights + count, weights);
    store(tokens.distances + count, _mm512_maskz_compress_ps(mask, distance));
    _mm512_storeu_si512(tokens.buckets + count, _mm512_cvttps_epi32(_mm512_maskz_compress_ps(mask, bucket)));
    const __m512i places = _mm512_add_epi32(_mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15),
                                            _mm512_set1_epi32(static_cast<int>(first)));
    _mm512_storeu_si512(tokens.places + count, _mm512_maskz_compress_epi32(mask, places));
}
// x where the bit of an element is set, else -inf; `bits` are of this vector's elements.
PAGODA_INLINE vec where_set(vec x, uint32_t bits) {
    return _mm512_mask_mov_ps(broadcast(-INFINITY), static_cast<__mmask16>(bits), x);
}

#else

struct Longs {
    __m256i low, high;
};

PAGODA_INLINE Longs no_longs() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
// Added to a whole number below 2^51, this leaves the number in the low bits.
PAGODA_INLINE __m256i to_longs(__m128 x) {
    const __m256d offset = _mm256_set1_pd(6755399441055744.0);
    const __m256d moved = _mm256_add_pd(_mm256_cvtps_pd(x), offset);
    return _mm256_sub_epi64(_mm256_castpd_si256(moved), _mm256_castpd_si256(offset));
}
PAGODA_INLINE Longs to_longs(vec x) {
    return {to_longs(_mm256_castps256_ps128(x)), to_longs(_mm256_extractf128_ps(x, 1))};
}
PAGODA_INLINE Longs add(Longs a, Longs b) {
    return {_mm256_add_epi64(a.low, b.low), _mm256_add_epi64(a.high, b.high)};
}
PAGODA_INLINE void store(int64_t* p, Longs x) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), x.low);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p + kWidth / 2), x.high);
}
using Lanes = uint32_t;
template <int Predicate>
PAGODA_INLINE Lanes compared(vec x, float bound) {
    return static_cast<Lanes>(_mm256_movemask_ps(_mm256_cmp_ps(x, broadcast(bound), Predicate)));
}
PAGODA_INLINE Lanes above(vec x, float bound) { return compared<_CMP_GT_OQ>(x, bound); }
PAGODA_INLINE Lanes below(vec x, float bound) { return compared<_CMP_LT_OQ>(x, bound); }
PAGODA_INLINE Lanes not_above(vec x, float bound) { return compared<_CMP_LE_OQ>(x, bound); }
PAGODA_INLINE Lanes not_below(vec x, float bound) { return compared<_CMP_GE_OQ>(x, bound); }

PAGODA_INLINE vec where_set(vec x, uint32_t bits) {
    const __m256i own = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
    const __m256i set = _mm256_cmpeq_epi32(_mm256_and_si256(_mm256_set1_epi32(static_cast<int>(bits)), own), own);
    return _mm256_blendv_ps(broadcast(-INFINITY), x, _mm256_castsi256_ps(set));
}

#endif

#ifndef __AVX512F__
PAGODA_INLINE void append(Lanes lanes, vec weight, vec distance, vec bucket, int64_t first, WeighedTokens& tokens,
                          int64_t count) {
    alignas(32) int64_t weights[kWidth];
    alignas(32) float distances[kWidth], buckets[kWidth];
    store(weights, to_longs(weight));
    store(distances, distance);
    store(buckets, bucket);
    for (; lanes != 0; lanes &= lanes - 1, ++count) {
        const int lane = __builtin_ctz(lanes);
        tokens.weights[count] = weights[lane];
        tokens.distances[count] = distances[lane];
        tokens.buckets[count] = static_cast<int32_t>(buckets[lane]);
        tokens.places[count] = static_cast<int32_t>(first) + lane;
    }
}
#endif

PAGODA_INLINE int64_t sum(Longs x) {
    int64_t lanes[kWidth], total = 0;
    store(lanes, x);
    for (const int64_t lane : lanes) total += lane;
    return total;
}

// Calls f(offset, x) for all vectors of the n elements at p; behind the last one there is -inf.
template <class F>
PAGODA_INLINE void for_logits(const float* p, int64_t n, F f) {
    int64_t i = 0;
    for (; i + kWidth <= n; i += kWidth) f(i, load(p + i));
    if (i < n) f(i, load_last(p + i, n - i, -INFINITY));
}

// 2^(y + kWeightBits) for y up to 0, without fused operations. The polynomial is that of `exp2`.
PAGODA_INLINE vec weight_of(vec y) {
    const vec bounded = max(broadcast(-60.0f), y);
    const vec n = round_to_int(bounded);
    const vec r = sub(bounded, n);
    vec p = broadcast(1.32647273e-3f);
    p = add(mul(p, r), broadcast(9.67151299e-3f));
    p = add(mul(p, r), broadcast(5.55073358e-2f));
    p = add(mul(p, r), broadcast(2.40222424e-1f));
    p = add(mul(p, r), broadcast(6.93147004e-1f));
    p = add(mul(p, r), broadcast(1.0f));
    return mul(p, power_of_two(add(n, broadcast(pagoda::kWeightBits))));
}

PAGODA_INLINE vec power_of(const Weighing& how, vec x) {
    return mul(sub(x, broadcast(how.highest)), broadcast(how.scale));
}
PAGODA_INLINE vec distance_of(const Weighing& how, vec power) { return absolute(sub(power, broadcast(how.mean))); }

// The weights of logits as floats, 0 for those that are left out.
PAGODA_INLINE vec counting_weight(const Weighing& how, vec x, vec power) {
    vec weight = unless_below(power, broadcast(how.lowest_power), weight_of(power));
    weight = unless_below(x, broadcast(how.lowest), weight);
    return unless_below(broadcast(how.farthest), distance_of(how, power), weight);
}

int64_t total_weight(const Weighing& how, const float* x, int64_t n) {
    Longs total = no_longs();
    for_logits(x, n, [&](int64_t, vec v) {
        total = add(total, to_longs(counting_weight(how, v, power_of(how, v))));
    });
    return sum(total);
}

int64_t total_product(const Weighing& how, const float* x, int64_t n) {
    Longs total = no_longs();
    for_logits(x, n, [&](int64_t, vec v) {
        const vec power = power_of(how, v);
        // Of tokens that are left out the power may be infinite.
        total = add(total, to_longs(mul(counting_weight(how, v, power), max(broadcast(-60.0f), power))));
    });
    return sum(total);
}

int64_t weigh(const Weighing& how, const float* x, int64_t n, WeighedTokens& tokens) {
    int64_t count = 0;
    for_logits(x, n, [&](int64_t i, vec v) {
        const vec power = power_of(how, v), distance = distance_of(how, power);
        const vec bucket =
            min(mul(distance, broadcast(pagoda::kBucketsPerPower)), broadcast(pagoda::kSampleBuckets - 1));
        const Lanes counting = not_below(power, how.lowest_power) & not_below(v, how.lowest) &
                               not_above(distance, how.farthest) & not_below(bucket, how.first_bucket) &
                               below(bucket, how.bucket_end);
        if (counting == 0) return;
        append(counting, weight_of(power), distance, bucket, i, tokens, count);
        count += __builtin_popcount(counting);
    });
    return count;
}

bool block_maxima(const float* x, int64_t n, float* maxima) {
    vec poison = zero();
    for (int64_t begin = 0; begin < n; begin += kSampleBlock, ++maxima) {
        const int64_t size = n - begin < kSampleBlock ? n - begin : kSampleBlock;
        vec top = broadcast(-INFINITY);
        int64_t i = 0;
        for (; i + kWidth <= size; i += kWidth) {
            const vec v = load(x + begin + i);
            top = max(v, top);
            poison = fma(v, zero(), poison);
        }
        if (i < size) {
            const vec v = load_last(x + begin + i, size - i, x[begin]);
            top = max(v, top);
            poison = fma(v, zero(), poison);
        }
        *maxima = reduce_max(top);
    }
    return sum(poison) == 0.0f;
}

int64_t count_above(const float* x, int64_t n, float bound) {
    int64_t count = 0;
    for_logits(x, n, [&](int64_t, vec v) { count += __builtin_popcount(above(v, bound)); });
    return count;
}

void forbid_unset(float* x, int64_t n, const uint32_t* bits) {
    for (int64_t i = 0; i < n; i += kWidth) {
        const uint32_t own = bits[i / 32] >> (i % 32);
        if (i + kWidth <= n) {
            store(x + i, where_set(load(x + i), own));
        } else {
            store_first(x + i, n - i, where_set(load_first(x + i, n - i), own));
        }
    }
}

}  // namespace
