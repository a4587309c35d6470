// SPDX-License-Identifier: Apache-2.0
// Vectors of sampling; see ../impl/sampling.h, whose functions these are.
#pragma once

#include "vec.h"

namespace {

struct Longs {
    int64x2_t parts[kWidth / 2];
};

PAGODA_INLINE Longs no_longs() { return {{vdupq_n_s64(0), vdupq_n_s64(0), vdupq_n_s64(0), vdupq_n_s64(0)}}; }
PAGODA_INLINE Longs to_longs(vec x) {
    return {{vcvtnq_s64_f64(vcvt_f64_f32(vget_low_f32(x.low))), vcvtnq_s64_f64(vcvt_high_f64_f32(x.low)),
             vcvtnq_s64_f64(vcvt_f64_f32(vget_low_f32(x.high))), vcvtnq_s64_f64(vcvt_high_f64_f32(x.high))}};
}
PAGODA_INLINE Longs add(Longs a, Longs b) {
    for (int i = 0; i < kWidth / 2; ++i) a.parts[i] = vaddq_s64(a.parts[i], b.parts[i]);
    return a;
}
PAGODA_INLINE void store(int64_t* p, Longs x) {
    for (int i = 0; i < kWidth / 2; ++i) vst1q_s64(p + 2 * i, x.parts[i]);
}

using Lanes = uint32_t;
constexpr uint32_t kLaneBits[] = {1, 2, 4, 8, 16, 32, 64, 128};
PAGODA_INLINE Lanes lanes_of(bools found) {
    return vaddvq_u32(vandq_u32(found.low, vld1q_u32(kLaneBits))) +
           vaddvq_u32(vandq_u32(found.high, vld1q_u32(kLaneBits + 4)));
}
PAGODA_INLINE Lanes above(vec x, float bound) { return lanes_of(is_above(x, broadcast(bound))); }
PAGODA_INLINE Lanes below(vec x, float bound) { return lanes_of(is_above(broadcast(bound), x)); }
PAGODA_INLINE Lanes not_above(vec x, float bound) { return lanes_of(is_least(broadcast(bound), x)); }
PAGODA_INLINE Lanes not_below(vec x, float bound) { return lanes_of(is_least(x, broadcast(bound))); }

PAGODA_INLINE vec where_set(vec x, uint32_t bits) {
    const bools set = {vtstq_u32(vdupq_n_u32(bits), vld1q_u32(kLaneBits)),
                       vtstq_u32(vdupq_n_u32(bits), vld1q_u32(kLaneBits + 4))};
    return selected(set, x, broadcast(-INFINITY));
}

}  // namespace
