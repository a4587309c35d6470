// SPDX-License-Identifier: Apache-2.0
// Vectors of eight floats, or of as many integers, in two of NEON's 32 registers: kernels have tiles of the shapes that 16
// registers of 256 bits take. ../vec.h says what functions mean.
#pragma once

#include <arm_neon.h>

namespace {

constexpr int kWidth = 8;
struct vec {
    float32x4_t low, high;
};
struct ints {
    int32x4_t low, high;
};
struct bools {
    uint32x4_t low, high;
};

PAGODA_INLINE ints as_ints(vec x) { return {vreinterpretq_s32_f32(x.low), vreinterpretq_s32_f32(x.high)}; }
PAGODA_INLINE vec selected(bools where, vec x, vec other) {
    return {vbslq_f32(where.low, x.low, other.low), vbslq_f32(where.high, x.high, other.high)};
}
PAGODA_INLINE bools is_above(vec a, vec b) { return {vcgtq_f32(a.low, b.low), vcgtq_f32(a.high, b.high)}; }
PAGODA_INLINE bools is_least(vec a, vec b) { return {vcgeq_f32(a.low, b.low), vcgeq_f32(a.high, b.high)}; }

PAGODA_INLINE vec zero() { return {vdupq_n_f32(0.0f), vdupq_n_f32(0.0f)}; }
PAGODA_INLINE vec broadcast(float x) { return {vdupq_n_f32(x), vdupq_n_f32(x)}; }
PAGODA_INLINE vec load(const float* p) { return {vld1q_f32(p), vld1q_f32(p + 4)}; }
PAGODA_INLINE float32x4_t widened(uint16x4_t x) { return vreinterpretq_f32_u32(vshll_n_u16(x, 16)); }
PAGODA_INLINE vec load(const bf16* p) { return {widened(vld1_u16(&p->bits)), widened(vld1_u16(&p->bits + 4))}; }
PAGODA_INLINE vec load(const f16* p) {
    return {vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(&p->bits))),
            vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(&p->bits + 4)))};
}
PAGODA_INLINE vec load_even(const bf16* p) {
    const auto even = [](const uint16_t* q) {
        return vreinterpretq_f32_u32(vshlq_n_u32(vreinterpretq_u32_u16(vld1q_u16(q)), 16));
    };
    return {even(&p->bits), even(&p->bits + 8)};
}
PAGODA_INLINE vec load_odd(const bf16* p) {
    const auto odd = [](const uint16_t* q) {
        return vreinterpretq_f32_u32(vandq_u32(vreinterpretq_u32_u16(vld1q_u16(q)), vdupq_n_u32(0xffff0000)));
    };
    return {odd(&p->bits), odd(&p->bits + 8)};
}
PAGODA_INLINE void store(float* p, vec x) {
    vst1q_f32(p, x.low);
    vst1q_f32(p + 4, x.high);
}
PAGODA_INLINE uint32x4_t bf16_bits(float32x4_t x) {
    const uint32x4_t bits = vreinterpretq_u32_f32(x), odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
    const uint32x4_t rounded = vshrq_n_u32(vaddq_u32(bits, vaddq_u32(odd, vdupq_n_u32(0x7fff))), 16);
    return vbslq_u32(vceqq_f32(x, x), rounded, vdupq_n_u32(0x7fc0));
}
PAGODA_INLINE void store(bf16* p, vec x) {
    vst1q_u16(&p->bits, vcombine_u16(vmovn_u32(bf16_bits(x.low)), vmovn_u32(bf16_bits(x.high))));
}
PAGODA_INLINE void store(f16* p, vec x) {
    vst1_u16(&p->bits, vreinterpret_u16_f16(vcvt_f16_f32(x.low)));
    vst1_u16(&p->bits + 4, vreinterpret_u16_f16(vcvt_f16_f32(x.high)));
}
PAGODA_INLINE vec rounded_to_bf16(vec x) {
    return {vreinterpretq_f32_u32(vshlq_n_u32(bf16_bits(x.low), 16)),
            vreinterpretq_f32_u32(vshlq_n_u32(bf16_bits(x.high), 16))};
}
PAGODA_INLINE vec add(vec a, vec b) { return {vaddq_f32(a.low, b.low), vaddq_f32(a.high, b.high)}; }
PAGODA_INLINE vec sub(vec a, vec b) { return {vsubq_f32(a.low, b.low), vsubq_f32(a.high, b.high)}; }
PAGODA_INLINE vec mul(vec a, vec b) { return {vmulq_f32(a.low, b.low), vmulq_f32(a.high, b.high)}; }
PAGODA_INLINE vec div(vec a, vec b) { return {vdivq_f32(a.low, b.low), vdivq_f32(a.high, b.high)}; }
PAGODA_INLINE vec fma(vec a, vec b, vec c) { return {vfmaq_f32(c.low, a.low, b.low), vfmaq_f32(c.high, a.high, b.high)}; }
// The second where one of them is NaN, as on x86.
PAGODA_INLINE vec max(vec a, vec b) { return selected(is_above(a, b), a, b); }
PAGODA_INLINE vec min(vec a, vec b) { return selected(is_above(b, a), a, b); }
PAGODA_INLINE float sum(vec x) { return vaddvq_f32(vaddq_f32(x.low, x.high)); }
PAGODA_INLINE float reduce_max(vec x) {
    const float32x4_t both = max(x, {x.high, x.high}).low;
    float lanes[4];
    vst1q_f32(lanes, both);
    const float first = lanes[0] > lanes[2] ? lanes[0] : lanes[2], second = lanes[1] > lanes[3] ? lanes[1] : lanes[3];
    return first > second ? first : second;
}
PAGODA_INLINE vec max_bits(vec a, vec b) {
    const auto highest = [](float32x4_t x, float32x4_t y) {
        return vreinterpretq_f32_u32(vmaxq_u32(vreinterpretq_u32_f32(x), vreinterpretq_u32_f32(y)));
    };
    return {highest(a.low, b.low), highest(a.high, b.high)};
}
PAGODA_INLINE float highest_bits(vec x) {
    const uint32_t bits = vmaxvq_u32(vreinterpretq_u32_f32(max_bits(x, {x.high, x.high}).low));
    float highest;
    std::memcpy(&highest, &bits, 4);
    return highest;
}
PAGODA_INLINE vec absolute(vec x) { return {vabsq_f32(x.low), vabsq_f32(x.high)}; }
PAGODA_INLINE vec round_to_int(vec x) { return {vrndnq_f32(x.low), vrndnq_f32(x.high)}; }
PAGODA_INLINE vec power_of_two(vec n) {
    const auto power = [](float32x4_t x) {
        return vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(vcvtnq_s32_f32(x), vdupq_n_s32(127)), 23));
    };
    return {power(n.low), power(n.high)};
}
constexpr float kLowestPower = -127;
PAGODA_INLINE vec times_power_of_two(vec x, vec n) { return mul(x, power_of_two(n)); }
PAGODA_INLINE vec unless_below(vec a, vec b, vec x) { return selected(is_above(b, a), zero(), x); }

PAGODA_INLINE vec load_small_floats(const uint8_t* p) {
    const uint16x8_t wide = vreinterpretq_u16_s16(vmovl_s8(vreinterpret_s8_u8(vld1_u8(p))));
    const float16x8_t halves = vreinterpretq_f16_u16(vandq_u16(vshlq_n_u16(wide, 7), vdupq_n_u16(0xbfff)));
    return {vcvt_f32_f16(vget_low_f16(halves)), vcvt_high_f32_f16(halves)};
}
PAGODA_INLINE float32x4_t nan_above_448(float32x4_t x) {
    const uint32x4_t is_nan = vceqq_f32(vabsq_f32(x), vdupq_n_f32(480.0f));
    return vreinterpretq_f32_u32(vorrq_u32(vreinterpretq_u32_f32(x), is_nan));
}
PAGODA_INLINE vec nan_above_448(vec x) { return {nan_above_448(x.low), nan_above_448(x.high)}; }

PAGODA_INLINE float as_float(f16 x) {
    __fp16 half;
    std::memcpy(&half, &x.bits, 2);
    return half;
}
PAGODA_INLINE f16 to_f16(float x) {
    const auto half = static_cast<__fp16>(x);
    f16 result;
    std::memcpy(&result.bits, &half, 2);
    return result;
}

}  // namespace
