// SPDX-License-Identifier: Apache-2.0
// Rows times panels of bf16 weights, two rows and two outputs at a time (`bfmmla`): one row goes as two equal ones, so every
// sum is made by one instruction in one order.
#pragma once

#include "vec.h"

namespace {

template <int Rows>
PAGODA_INLINE void linear_tile(const bf16* panel, const bf16* x, int64_t stride, int64_t k, const Prefetch& ahead, float* c) {
    constexpr int kPairs = (Rows + 1) / 2;
    // Of two rows and four outputs: those of the first two, and of the others.
    float32x4_t sums[kPairs][kRegisterCols][4];
#pragma GCC unroll 6
    for (auto& pair : sums) {
#pragma GCC unroll 2
        for (auto& column : pair) {
#pragma GCC unroll 4
            for (float32x4_t& some : column) some = vdupq_n_f32(0.0f);
        }
    }
    const auto add_four = [&](const auto& load_row, const auto& load_weights) {
        bfloat16x8_t rows[kPairs];
#pragma GCC unroll 6
        for (int pair = 0; pair < kPairs; ++pair) {
            const int r = 2 * pair, other = r + 1 < Rows ? r + 1 : r;
            rows[pair] = vreinterpretq_bf16_u16(vcombine_u16(load_row(r), load_row(other)));
        }
#pragma GCC unroll 4
        for (int four = 0; four < 2 * kRegisterCols; ++four) {
            const uint32x4_t first = load_weights(0, four), second = load_weights(1, four);
            const bfloat16x8_t left = vreinterpretq_bf16_u32(vzip1q_u32(first, second));
            const bfloat16x8_t right = vreinterpretq_bf16_u32(vzip2q_u32(first, second));
#pragma GCC unroll 6
            for (int pair = 0; pair < kPairs; ++pair) {
                auto& own = sums[pair][four / 2];
                own[four % 2 * 2] = vbfmmlaq_f32(own[four % 2 * 2], left, rows[pair]);
                own[four % 2 * 2 + 1] = vbfmmlaq_f32(own[four % 2 * 2 + 1], right, rows[pair]);
            }
        }
    };
    const int64_t pairs = (k + 1) / 2;
    int64_t i = 0;
    for (; i + 2 <= pairs; i += 2) {
        fetch_ahead(ahead, i);
        fetch_ahead(ahead, i + 1);
        add_four([&](int r) { return vld1_u16(&x[r * stride + 2 * i].bits); },
                 [&](int pair, int four) {
                     return vreinterpretq_u32_u16(vld1q_u16(&panel[(i + pair) * 2 * kPanel + 8 * four].bits));
                 });
    }
    if (i < pairs) {
        add_four(
            [&](int r) {
                uint32_t last;
                std::memcpy(&last, x + r * stride + 2 * i, 4);
                return vreinterpret_u16_u32(vset_lane_u32(last, vdup_n_u32(0), 0));
            },
            [&](int pair, int four) {
                return pair == 1 ? vdupq_n_u32(0) : vreinterpretq_u32_u16(vld1q_u16(&panel[i * 2 * kPanel + 8 * four].bits));
            });
    }
#pragma GCC unroll 6
    for (int pair = 0; pair < kPairs; ++pair) {
#pragma GCC unroll 2
        for (int j = 0; j < kRegisterCols; ++j) {
            const auto& own = sums[pair][j];
            float* to = c + 2 * pair * kPanel + j * kWidth;
            store(to, {vuzp1q_f32(own[0], own[1]), vuzp1q_f32(own[2], own[3])});
            if (2 * pair + 1 < Rows) store(to + kPanel, {vuzp2q_f32(own[0], own[1]), vuzp2q_f32(own[2], own[3])});
        }
    }
}

}  // namespace
