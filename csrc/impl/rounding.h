// SPDX-License-Identifier: Apache-2.0
// Weights to codes and scales, as pagoda/backend/reference/quantized.py says.
#pragma once

#include "quantized.h"

namespace {

#if defined(__AVX512F__)
PAGODA_INLINE void store_bytes(uint8_t* p, ints x) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(x));
}
PAGODA_INLINE void store_unsigned_bytes(uint8_t* p, ints x) { store_bytes(p, x); }
#elif defined(__AVX2__)
PAGODA_INLINE void store_bytes(uint8_t* p, ints x) {
    const __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
    _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm_packs_epi16(words, words));
}
PAGODA_INLINE void store_unsigned_bytes(uint8_t* p, ints x) {
    const __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
    _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm_packus_epi16(words, words));
}
#else
PAGODA_INLINE void store_unsigned_bytes(uint8_t* p, ints x) { store_bytes(p, x); }  // which drops high bits
#endif

// Codes round(x / scale) + zero_code, within [lowest, highest_code]; those of a scale of zero are all zero_code.
template <class T>
PAGODA_INLINE void put_codes(const T* x, int64_t n, float scale, float zero_code, float lowest, float highest_code,
                             uint8_t* codes) {
    const vec divisor = broadcast(scale == 0.0f ? INFINITY : scale);
    const auto code = [&](vec v) {
        const vec step = add(round_to_int(div(v, divisor)), broadcast(zero_code));
        return to_ints(max(broadcast(lowest), min(broadcast(highest_code), step)));
    };
    int64_t i = 0;
    for (; i + kWidth <= n; i += kWidth) store_bytes(codes + i, code(load(x + i)));
    if (i < n) {
        uint8_t last[kWidth];
        store_bytes(last, code(load_first(x + i, n - i)));
        std::memcpy(codes + i, last, static_cast<size_t>(n - i));
    }
}

// The lowest and the highest, and something that is NaN if one of them is not finite, else zero.
struct Range {
    float low, high, poison;
};

template <class T>
PAGODA_INLINE Range range_of(const T* x, int64_t n) {
    vec low = broadcast(INFINITY), high = broadcast(-INFINITY), poison = zero();
    for (int64_t i = 0; i < n; i += kWidth) {
        // What is behind the last counts as the first.
        const vec v = n - i >= kWidth ? load(x + i) : load_last(x + i, n - i, x[0]);
        low = min(low, v);
        high = max(high, v);
        poison = fma(v, zero(), poison);
    }
    return {-reduce_max(sub(zero(), low)), reduce_max(high), sum(poison)};
}

void round_to_int8(Dtype dtype, const void* weight, int64_t inputs, void* codes, float* scale, int32_t* zero_point) {
    with_type(dtype, [&](auto* type) {
        const auto* row = static_cast<decltype(type)>(const_cast<void*>(weight));
        const Range range = range_of(row, inputs);
        if (zero_point != nullptr) {
            const float low = range.low < 0.0f ? range.low : 0.0f, high = range.high > 0.0f ? range.high : 0.0f;
            *scale = (high - low) / 255.0f + range.poison;
            const float lowest = std::nearbyint(low / *scale);
            *zero_point = lowest > -256.0f && lowest <= 0.0f ? -128 - static_cast<int32_t>(lowest) : 0;
            put_codes(row, inputs, *scale, static_cast<float>(*zero_point), -128.0f, 127.0f,
                      static_cast<uint8_t*>(codes));
            return;
        }
        const float peak = range.high > -range.low ? range.high : -range.low;
        *scale = peak / 127.0f + range.poison;
        put_codes(row, inputs, *scale, 0.0f, -127.0f, 127.0f, static_cast<uint8_t*>(codes));
    });
}

template <class T>
PAGODA_INLINE float signed_peak(const T* x, int64_t n, const Range& range) {
    if (range.high != -range.low) return range.high > -range.low ? range.high : range.low;
    for (int64_t i = 0; i < n; ++i) {
        const float v = as_float(x[i]);
        if (v == range.high || v == range.low) return v;
    }
    return range.poison;
}

void round_to_int4(Dtype dtype, const void* weight, int64_t inputs, int64_t group_size, uint8_t* codes,
                   void* scales_) {
    auto* scales = static_cast<uint16_t*>(scales_);
    with_type(dtype, [&](auto* type) {
        const auto* row = static_cast<decltype(type)>(const_cast<void*>(weight));
        for (int64_t g = 0; g < inputs / group_size; ++g) {
            const auto* group = row + g * group_size;
            const Range range = range_of(group, group_size);
            const float exact = signed_peak(group, group_size, range) / -8.0f + range.poison;
            const f16 scale = to_f16(exact);
            scales[g] = scale.bits;
            put_codes(group, group_size, as_float(scale), 8.0f, 0.0f, 15.0f, codes + g * group_size);
        }
    });
}

// The float16 next to `wanted` or above it, whose products with integers up to kLargestInteger reach what is wanted.
constexpr float kLargestInteger = 127.0f;

inline f16 unit_of(float wanted) {
    f16 unit = to_f16(wanted);
    if (as_float(unit) < wanted) ++unit.bits;
    return unit;
}

// The integer of so many units, as it was rounded, not beyond kLargestInteger.
inline float bounded(float integer, float lowest) {
    return integer < lowest ? lowest : integer > kLargestInteger ? kLargestInteger : integer;
}

template <class T>
PAGODA_INLINE void put_offsets(const T* x, int64_t n, float base, float step, float top, uint8_t* codes) {
    const vec divisor = broadcast(step == 0.0f ? INFINITY : step);
    for (int64_t i = 0; i < n; i += kWidth) {
        const vec offset = round_to_int(div(sub(load(x + i), broadcast(base)), divisor));
        store_unsigned_bytes(codes + i, to_ints(max(zero(), min(broadcast(top), offset))));
    }
}

// In 8 bits minima are rounded down and scales up, so that no weight is beyond the extreme codes.
void round_to_blocks(Dtype dtype, const void* weight, int64_t inputs, int bits, int64_t group_size,
                     const pagoda::RoundedBlocks& blocks, float* scratch) {
    const int64_t groups = inputs / group_size;
    const float top = static_cast<float>((1 << bits) - 1);
    const bool covers = bits == 8;
    float *widths = scratch, *highest = scratch + groups;
    with_type(dtype, [&](auto* type) {
        const auto* row = static_cast<decltype(type)>(const_cast<void*>(weight));
        float *lowest = widths, deepest = 0.0f, widest = 0.0f, poison = 0.0f;
        for (int64_t g = 0; g < groups; ++g) {
            const Range range = range_of(row + g * group_size, group_size);
            lowest[g] = range.low < 0.0f ? range.low : 0.0f;
            highest[g] = range.high;
            poison += range.poison;
            deepest = lowest[g] < deepest ? lowest[g] : deepest;
        }
        const f16 minimum = unit_of(-deepest / kLargestInteger + poison);
        const float unit = as_float(minimum), divisor = unit == 0.0f ? INFINITY : unit;
        std::memcpy(blocks.minimum, &minimum, sizeof(minimum));
        for (int64_t g = 0; g < groups; ++g) {
            const float units = lowest[g] / divisor;
            const float integer = bounded(covers ? std::floor(units) : std::nearbyint(units), -kLargestInteger);
            blocks.minima[g] = integer == integer ? static_cast<int8_t>(integer) : 0;
            const float base = covers ? static_cast<float>(blocks.minima[g]) * unit : lowest[g];
            widths[g] = (highest[g] - base) / top;
            widest = std::max(widest, std::fabs(widths[g]));
        }
        const f16 scale = unit_of(widest / kLargestInteger + poison);
        const float step_unit = as_float(scale), step_divisor = step_unit == 0.0f ? INFINITY : step_unit;
        std::memcpy(blocks.scale, &scale, sizeof(scale));
        for (int64_t g = 0; g < groups; ++g) {
            const float units = widths[g] / step_divisor;
            const float integer = bounded(covers ? std::ceil(units) : std::nearbyint(units), 1.0f);
            blocks.scales[g] = integer == integer ? static_cast<int8_t>(integer) : 0;
            put_offsets(row + g * group_size, group_size, static_cast<float>(blocks.minima[g]) * unit,
                        static_cast<float>(blocks.scales[g]) * step_unit, top, blocks.codes + g * group_size);
        }
    });
}

}  // namespace
