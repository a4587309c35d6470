// SPDX-License-Identifier: Apache-2.0
// Integers of quantized weights and activations; see ../impl/ints.h, whose functions these are.
#pragma once

#include "vec.h"

namespace {

PAGODA_INLINE uint8x16_t bytes_of(int32x4_t x) { return vreinterpretq_u8_s32(x); }
PAGODA_INLINE ints of_bytes(uint8x16_t low, uint8x16_t high) {
    return {vreinterpretq_s32_u8(low), vreinterpretq_s32_u8(high)};
}

PAGODA_INLINE ints load_ints(const uint8_t* p) { return of_bytes(vld1q_u8(p), vld1q_u8(p + 16)); }
PAGODA_INLINE void store_ints(uint8_t* p, ints x) {
    vst1q_u8(p, bytes_of(x.low));
    vst1q_u8(p + 16, bytes_of(x.high));
}
PAGODA_INLINE ints broadcast_ints(int32_t x) { return {vdupq_n_s32(x), vdupq_n_s32(x)}; }
PAGODA_INLINE ints add_ints(ints a, ints b) { return {vaddq_s32(a.low, b.low), vaddq_s32(a.high, b.high)}; }
PAGODA_INLINE ints subtract_ints(ints a, ints b) { return {vsubq_s32(a.low, b.low), vsubq_s32(a.high, b.high)}; }
PAGODA_INLINE ints multiply_ints(ints a, ints b) { return {vmulq_s32(a.low, b.low), vmulq_s32(a.high, b.high)}; }
PAGODA_INLINE ints times_wide_unit(ints x) { return {vshlq_n_s32(x.low, 7), vshlq_n_s32(x.high, 7)}; }
PAGODA_INLINE vec to_floats(ints x) { return {vcvtq_f32_s32(x.low), vcvtq_f32_s32(x.high)}; }
PAGODA_INLINE ints to_ints(vec x) { return {vcvtnq_s32_f32(x.low), vcvtnq_s32_f32(x.high)}; }
PAGODA_INLINE int32_t sum(ints x) { return vaddvq_s32(vaddq_s32(x.low, x.high)); }
PAGODA_INLINE vec magnitude(vec x) { return absolute(x); }
PAGODA_INLINE vec negative_above(vec x, float number) {
    return selected(is_above(x, broadcast(number)), sub(zero(), x), broadcast(-INFINITY));
}
PAGODA_INLINE int count_up_to(vec x, float highest) {
    const bools found = is_least(broadcast(highest), x);
    return static_cast<int>(vaddvq_u32(vshrq_n_u32(found.low, 31)) + vaddvq_u32(vshrq_n_u32(found.high, 31)));
}

// ---- codes of fewer bits

template <class F>
PAGODA_INLINE ints each_byte(ints x, F f) {
    return of_bytes(f(bytes_of(x.low)), f(bytes_of(x.high)));
}
PAGODA_INLINE ints masked(ints x, char mask) {
    return each_byte(x, [mask](uint8x16_t y) { return vandq_u8(y, vdupq_n_u8(static_cast<uint8_t>(mask))); });
}
PAGODA_INLINE ints masked_or(ints x, char mask, ints rest) {
    const ints kept = masked(x, mask);
    return {vorrq_s32(kept.low, rest.low), vorrq_s32(kept.high, rest.high)};
}
PAGODA_INLINE ints low_nibbles(ints x) { return masked(x, 15); }
PAGODA_INLINE ints high_nibbles(ints x) {
    return each_byte(x, [](uint8x16_t y) { return vshrq_n_u8(y, 4); });
}
template <int N>
PAGODA_INLINE ints shifted_right(ints x) {
    if constexpr (N > 0) return each_byte(x, [](uint8x16_t y) { return vshrq_n_u8(y, N); });
    if constexpr (N < 0) return each_byte(x, [](uint8x16_t y) { return vshlq_n_u8(y, -N); });
    return x;
}
PAGODA_INLINE ints looked_up(const uint8_t (&numbers)[16], ints codes) {
    const uint8x16_t table = vld1q_u8(numbers);
    return each_byte(codes, [table](uint8x16_t y) { return vqtbl1q_u8(table, y); });
}
PAGODA_INLINE ints load_signed_bytes(const uint8_t* p) {
    const int16x8_t words = vmovl_s8(vreinterpret_s8_u8(vld1_u8(p)));
    return {vmovl_s16(vget_low_s16(words)), vmovl_high_s16(words)};
}
PAGODA_INLINE ints low_half_of_bytes(ints x) {
    return {vandq_s32(x.low, vdupq_n_s32(15)), vandq_s32(x.high, vdupq_n_s32(15))};
}
PAGODA_INLINE ints high_half_of_bytes(ints x) {
    return low_half_of_bytes({vshrq_n_s32(x.low, 4), vshrq_n_s32(x.high, 4)});
}
template <class F>
PAGODA_INLINE ints each_pair_of_bytes(ints a, ints b, F f) {
    return of_bytes(f(bytes_of(a.low), bytes_of(b.low)), f(bytes_of(a.high), bytes_of(b.high)));
}
PAGODA_INLINE ints add_bytes(ints a, ints b) {
    return each_pair_of_bytes(a, b, [](uint8x16_t x, uint8x16_t y) { return vaddq_u8(x, y); });
}
PAGODA_INLINE ints less_one_bytes(ints x) {
    return each_pair_of_bytes(x, x, [](uint8x16_t one, uint8x16_t) { return vqsubq_u8(one, vdupq_n_u8(1)); });
}
PAGODA_INLINE ints average_bytes(ints a, ints b) {
    return each_pair_of_bytes(a, b, [](uint8x16_t x, uint8x16_t y) { return vrhaddq_u8(x, y); });
}
PAGODA_INLINE int16x8_t to_words(ints x) { return vcombine_s16(vmovn_s32(x.low), vmovn_s32(x.high)); }
PAGODA_INLINE void store_bytes(uint8_t* p, ints x) { vst1_u8(p, vreinterpret_u8_s8(vmovn_s16(to_words(x)))); }

// ---- products

#ifdef __ARM_FEATURE_DOTPROD

using Code = int8_t;
using WeightQuads = ints;
using RowQuad = int8x16_t;

PAGODA_INLINE RowQuad row_quad(const Code* x) {
    int32_t codes;
    std::memcpy(&codes, x, 4);
    return vreinterpretq_s8_s32(vdupq_n_s32(codes));
}
PAGODA_INLINE void store_codes(Code* p, ints x) { vst1_s8(p, vmovn_s16(to_words(x))); }
PAGODA_INLINE bool exceed_bytes(ints x) {
    return vmaxvq_u32(vreinterpretq_u32_s32(vmaxq_s32(vabsq_s32(x.low), vabsq_s32(x.high)))) > 127;
}

#ifdef __ARM_FEATURE_MATMUL_INT8

constexpr bool kSignedCodes = false;
template <bool>
PAGODA_INLINE WeightQuads weight_quads(ints codes) {
    return codes;
}
PAGODA_INLINE ints add_products(ints sums, const WeightQuads& weights, const RowQuad& x) {
    return {vusdotq_s32(sums.low, bytes_of(weights.low), x), vusdotq_s32(sums.high, bytes_of(weights.high), x)};
}

// sums += products of 8 inputs after the other, of which `load` gives the two quads of weights; two rows and two outputs at
// a time (`usmmla`). Meanwhile the first of two rows' vectors hold both rows' sums of the first two outputs of four.
template <int Rows, int Cols, class Load>
PAGODA_INLINE void add_eights(int64_t eights, const Code* x, int64_t stride, ints (&sums)[Rows][Cols], Load load) {
    constexpr int paired = Rows / 2 * 2;
    const auto each_pair = [&](auto f) {
#pragma GCC unroll 8
        for (int r = 0; r < paired; r += 2) {
#pragma GCC unroll 2
            for (int j = 0; j < Cols; ++j) {
                f(sums[r][j].low, sums[r + 1][j].low);
                f(sums[r][j].high, sums[r + 1][j].high);
            }
        }
    };
    each_pair([](int32x4_t& a, int32x4_t& b) {
        const int32x4_t first = vzip1q_s32(a, b);
        b = vzip2q_s32(a, b), a = first;
    });
    for (int64_t i = 0; i < eights; ++i, x += 8) {
        ints first[Cols], second[Cols];
        load(i, first, second);
        int8x16_t rows[paired / 2 + 1];
#pragma GCC unroll 4
        for (int r = 0; r < paired; r += 2) {
            rows[r / 2] = vcombine_s8(vld1_s8(x + r * stride), vld1_s8(x + (r + 1) * stride));
        }
        const auto add_four = [&](int j, int32x4_t one, int32x4_t other, auto half) {
            const uint8x16_t left = bytes_of(vzip1q_s32(one, other)), right = bytes_of(vzip2q_s32(one, other));
#pragma GCC unroll 4
            for (int r = 0; r < paired; r += 2) {
                sums[r][j].*half = vusmmlaq_s32(sums[r][j].*half, left, rows[r / 2]);
                sums[r + 1][j].*half = vusmmlaq_s32(sums[r + 1][j].*half, right, rows[r / 2]);
            }
        };
#pragma GCC unroll 2
        for (int j = 0; j < Cols; ++j) {
            add_four(j, first[j].low, second[j].low, &ints::low);
            add_four(j, first[j].high, second[j].high, &ints::high);
        }
        if constexpr (paired < Rows) {
            const RowQuad quads[] = {row_quad(x + paired * stride), row_quad(x + paired * stride + 4)};
#pragma GCC unroll 2
            for (int j = 0; j < Cols; ++j) {
                sums[paired][j] = add_products(add_products(sums[paired][j], first[j], quads[0]), second[j], quads[1]);
            }
        }
    }
    each_pair([](int32x4_t& a, int32x4_t& b) {
        const int32x4_t first = vuzp1q_s32(a, b);
        b = vuzp2q_s32(a, b), a = first;
    });
}

#else

// Both sides of `sdot` are signed.
constexpr bool kSignedCodes = true;
template <bool High>
PAGODA_INLINE WeightQuads weight_quads(ints codes) {
    if constexpr (!High) return codes;
    return each_byte(codes, [](uint8x16_t y) { return veorq_u8(y, vdupq_n_u8(128)); });
}
PAGODA_INLINE ints add_products(ints sums, const WeightQuads& weights, const RowQuad& x) {
    return {vdotq_s32(sums.low, vreinterpretq_s8_s32(weights.low), x),
            vdotq_s32(sums.high, vreinterpretq_s8_s32(weights.high), x)};
}

#endif
#else

// Products of 16 bits.
using Code = int16_t;
// Of each of four inputs, the codes of eight outputs.
struct WeightQuads {
    int16x8_t inputs[4];
};
using RowQuad = int16x4_t;

constexpr bool kSignedCodes = false;
template <bool>
PAGODA_INLINE WeightQuads weight_quads(ints codes) {
    const auto even = [](int32x4_t x) { return vreinterpretq_s16_u16(vandq_u16(vreinterpretq_u16_s32(x), vdupq_n_u16(255))); };
    const auto odd = [](int32x4_t x) { return vreinterpretq_s16_u16(vshrq_n_u16(vreinterpretq_u16_s32(x), 8)); };
    const int16x8_t first = even(codes.low), second = odd(codes.low), third = even(codes.high), fourth = odd(codes.high);
    return {{vuzp1q_s16(first, third), vuzp1q_s16(second, fourth), vuzp2q_s16(first, third), vuzp2q_s16(second, fourth)}};
}
PAGODA_INLINE RowQuad row_quad(const Code* x) { return vld1_s16(x); }
PAGODA_INLINE ints add_products(ints sums, const WeightQuads& weights, const RowQuad& x) {
    sums.low = vmlal_lane_s16(sums.low, vget_low_s16(weights.inputs[0]), x, 0);
    sums.high = vmlal_high_lane_s16(sums.high, weights.inputs[0], x, 0);
    sums.low = vmlal_lane_s16(sums.low, vget_low_s16(weights.inputs[1]), x, 1);
    sums.high = vmlal_high_lane_s16(sums.high, weights.inputs[1], x, 1);
    sums.low = vmlal_lane_s16(sums.low, vget_low_s16(weights.inputs[2]), x, 2);
    sums.high = vmlal_high_lane_s16(sums.high, weights.inputs[2], x, 2);
    sums.low = vmlal_lane_s16(sums.low, vget_low_s16(weights.inputs[3]), x, 3);
    sums.high = vmlal_high_lane_s16(sums.high, weights.inputs[3], x, 3);
    return sums;
}
PAGODA_INLINE void store_codes(Code* p, ints x) { vst1q_s16(p, to_words(x)); }

#endif

}  // namespace
