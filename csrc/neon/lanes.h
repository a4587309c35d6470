// SPDX-License-Identifier: Apache-2.0
// Lanes of attention; see ../impl/lanes.h and ../impl/key_tiles.h, whose functions these are.
#pragma once

#include "vec.h"

namespace {

using ivec = ints;
// The first numbers of eight pairs, and the second ones.
struct WordPairs {
    int16x8_t first, second;
};

PAGODA_INLINE ivec no_ints() { return {vdupq_n_s32(0), vdupq_n_s32(0)}; }
PAGODA_INLINE WordPairs load_lanes(const i16_pair* p) {
    const int16x8x2_t pairs = vld2q_s16(&p->first);
    return {pairs.val[0], pairs.val[1]};
}
PAGODA_INLINE WordPairs load_lanes(const i8_pair* p) {
    const int8x8x2_t pairs = vld2_s8(&p->first);
    return {vmovl_s8(pairs.val[0]), vmovl_s8(pairs.val[1])};
}
PAGODA_INLINE ivec add_pairs(ivec sum, const WordPairs& columns, const i16_pair* x) {
    const int16x4_t pair = vreinterpret_s16_s32(vdup_n_s32(bits_of(x)));
    sum.low = vmlal_lane_s16(sum.low, vget_low_s16(columns.first), pair, 0);
    sum.high = vmlal_high_lane_s16(sum.high, columns.first, pair, 0);
    sum.low = vmlal_lane_s16(sum.low, vget_low_s16(columns.second), pair, 1);
    sum.high = vmlal_high_lane_s16(sum.high, columns.second, pair, 1);
    return sum;
}
PAGODA_INLINE vec as_floats(ivec x) { return {vcvtq_f32_s32(x.low), vcvtq_f32_s32(x.high)}; }
PAGODA_INLINE void store_rounded(int16_t* p, vec x) {
    vst1q_s16(p, vcombine_s16(vmovn_s32(vcvtnq_s32_f32(x.low)), vmovn_s32(vcvtnq_s32_f32(x.high))));
}

// ---- keys that are transposed

PAGODA_INLINE int32x4_t four_lanes(const float* p) { return vreinterpretq_s32_f32(vld1q_f32(p)); }
PAGODA_INLINE int32x4_t four_lanes(const bf16_pair* p) { return vreinterpretq_s32_u16(vld1q_u16(&p->first.bits)); }
PAGODA_INLINE int32x4_t four_lanes(const i16_pair* p) { return vreinterpretq_s32_s16(vld1q_s16(&p->first)); }
PAGODA_INLINE int32x4_t four_lanes(const i8_pair* p) { return vreinterpretq_s32_s16(vmovl_s8(vld1_s8(&p->first))); }
PAGODA_INLINE int32x4_t four_lanes(const bf16* p) { return vreinterpretq_s32_f32(widened(vld1_u16(&p->bits))); }
PAGODA_INLINE int32x4_t four_lanes(const f16* p) {
    return vreinterpretq_s32_f32(vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(&p->bits))));
}
PAGODA_INLINE int32x4_t four_lanes(const e4m3* p) {
    const float lanes[] = {as_float(p[0]), as_float(p[1]), as_float(p[2]), as_float(p[3])};
    return vreinterpretq_s32_f32(vld1q_f32(lanes));
}
template <class Cell>
PAGODA_INLINE ivec four_lanes_of_rows(const Cell* p, int64_t step) {
    return {four_lanes(p), four_lanes(p + step)};
}
PAGODA_INLINE ivec zip_low_lanes(ivec a, ivec b) { return {vzip1q_s32(a.low, b.low), vzip1q_s32(a.high, b.high)}; }
PAGODA_INLINE ivec zip_high_lanes(ivec a, ivec b) { return {vzip2q_s32(a.low, b.low), vzip2q_s32(a.high, b.high)}; }
PAGODA_INLINE int32x4_t low_lanes(int32x4_t a, int32x4_t b) {
    return vreinterpretq_s32_s64(vzip1q_s64(vreinterpretq_s64_s32(a), vreinterpretq_s64_s32(b)));
}
PAGODA_INLINE int32x4_t high_lanes(int32x4_t a, int32x4_t b) {
    return vreinterpretq_s32_s64(vzip2q_s64(vreinterpretq_s64_s32(a), vreinterpretq_s64_s32(b)));
}
PAGODA_INLINE ivec low_lanes(ivec a, ivec b) { return {low_lanes(a.low, b.low), low_lanes(a.high, b.high)}; }
PAGODA_INLINE ivec high_lanes(ivec a, ivec b) { return {high_lanes(a.low, b.low), high_lanes(a.high, b.high)}; }
PAGODA_INLINE ivec shuffle_bytes(ivec x, const uint8_t (&order)[16]) {
    const uint8x16_t places = vld1q_u8(order);
    return {vreinterpretq_s32_u8(vqtbl1q_u8(vreinterpretq_u8_s32(x.low), places)),
            vreinterpretq_s32_u8(vqtbl1q_u8(vreinterpretq_u8_s32(x.high), places))};
}
PAGODA_INLINE void store_lanes(void* p, ivec x) {
    vst1q_s32(static_cast<int32_t*>(p), x.low);
    vst1q_s32(static_cast<int32_t*>(p) + 4, x.high);
}

#ifdef __ARM_FEATURE_BF16_VECTOR_ARITHMETIC

struct Bf16Pairs {
    bfloat16x8_t low, high;
};
PAGODA_INLINE Bf16Pairs load_pairs(const void* p) {
    const auto* from = static_cast<const uint16_t*>(p);
    return {vreinterpretq_bf16_u16(vld1q_u16(from)), vreinterpretq_bf16_u16(vld1q_u16(from + 8))};
}
PAGODA_INLINE Bf16Pairs broadcast_pair(const void* p) {
    int32_t bits;
    std::memcpy(&bits, p, 4);
    // Of a pair of ones that it knows, GCC 12 makes an instruction of fp16.
    if (__builtin_constant_p(bits)) asm("" : "+r"(bits));
    const bfloat16x8_t pairs = vreinterpretq_bf16_s32(vdupq_n_s32(bits));
    return {pairs, pairs};
}
PAGODA_INLINE vec add_pairs(vec sum, const Bf16Pairs& a, const Bf16Pairs& b) {
    return {vbfdotq_f32(sum.low, a.low, b.low), vbfdotq_f32(sum.high, a.high, b.high)};
}

#endif

}  // namespace
