// SPDX-License-Identifier: Apache-2.0
// Layers that keep one state of all tokens so far, in the blocks of their KV group: a block has the state behind its last
// computed token, so that a full one is a snapshot.
//
// Every number of a state is carried on token by token, so no result depends on how a sequence is cut into steps.
#pragma once

#include <cstdint>

#include "ops.h"

namespace pagoda {

// States of one layer: `units` alike of so many floats, one behind the other. The first half of them lies where the keys
// of a block would, the others where its values would.
struct StateCache {
    float* halves[2];
    int64_t strides[2];  // floats from block to block
    int64_t units, floats;
    int64_t num_blocks, block_size;

    int64_t units_of(int half) const { return half == 0 ? (units + 1) / 2 : units / 2; }
    int64_t first_of(int half) const { return half == 0 ? 0 : (units + 1) / 2; }
    float* at(int half, int32_t block) const { return halves[half] + block * strides[half]; }
};

// Units are channels, whose floats are their last inputs, the oldest first.
struct ShortConv {
    StateCache cache;
    const float* weight;  // [floats + 1, channels], that of the oldest input first
    const float* bias;    // [channels] or null
    bool gated;           // inputs are b, c and x of all channels: c * conv(b * x)
    bool silu;            // of the result
};

// out [n, channels] of rows x [n, channels] or, if gated, [n, 3 channels].
void short_conv(const KernelTable& table, const AttentionMetadata& metadata, const ShortConv& conv, const float* x,
                float* out);

// Units are the heads of values, whose floats are strips of kDeltaStrip columns: [key_dim, columns] each.
struct GatedDelta {
    StateCache cache;
    const float* decay;    // [heads], factors within the exponent
    const float* dt_bias;  // [heads] or, by_channel, [heads, key_dim]
    int64_t key_heads, key_dim, value_dim;
    bool by_channel;  // rows of a state are kept each in a part of its own
};

// out [n, heads * value_dim] of qkv [n, 2 key_heads key_dim + heads value_dim] and gates [n, 2 heads] or, by_channel,
// [n, heads + heads key_dim].
void gated_delta(const KernelTable& table, const AttentionMetadata& metadata, const GatedDelta& layer, const float* qkv,
                 const float* gates, float* out);

// Units are heads, whose floats are strips of kScanStrip columns: [state_dim, columns] each.
struct SelectiveScan {
    StateCache cache;
    const float* decay;  // [heads], or with by_element [state_dim, heads]
    const float *dt_bias, *skip;  // [heads]
    bool by_element;
    int64_t groups, head_dim, state_dim;
    int64_t b_first, c_first;  // elements of rows of b and c before their own
    float dt_min, dt_max;
};

// Rows of a selective scan, and how far each is from the next.
struct ScanRows {
    const float *x, *b, *c, *dt;
    int64_t x_stride, b_stride, c_stride;
};

// out [n, heads * head_dim] of x, the first of its rows, and of dt [n, heads].
void selective_scan(const KernelTable& table, const AttentionMetadata& metadata, const SelectiveScan& layer,
                    const ScanRows& rows, float* out);

}  // namespace pagoda
