// SPDX-License-Identifier: Apache-2.0
// One token of layers that keep a state.
#pragma once

#include "rows.h"

namespace {

void conv_row(const pagoda::ConvRow& row) {
    float* newest = row.taps[row.width - 1];
    for_vectors(row.d, [&](auto get, auto put) {
        vec x = get(row.x);
        if (row.in_gate != nullptr) x = mul(get(row.in_gate), x);
        put(newest, x);
    });
    for_vectors(row.d, [&](auto get, auto put) {
        vec total = mul(get(row.taps[0]), get(row.weight));
        for (int64_t i = 1; i < row.width; ++i) {
            total = fma(get(row.taps[i]), get(row.weight + i * row.weight_stride), total);
        }
        if (row.bias != nullptr) total = add(total, get(row.bias));
        if (row.silu) total = silu(total);
        if (row.out_gate != nullptr) total = mul(get(row.out_gate), total);
        put(row.out, total);
    });
}

// Partial sums along the keys, so that additions need not wait for each other.
constexpr int kDeltaSums = pagoda::kDeltaKeyMultiple, kDeltaVectors = pagoda::kDeltaStrip / kWidth;

struct DeltaSums {
    vec parts[kDeltaSums][kDeltaVectors];

    DeltaSums() {
        for (auto& part : parts) {
            for (vec& each : part) each = zero();
        }
    }
    PAGODA_INLINE vec total(int j) const {
        return add(add(parts[0][j], parts[1][j]), add(parts[2][j], parts[3][j]));
    }
};

// S = decay S + k (beta (v - decay k S)), out = scale q S; d is a multiple of kDeltaSums.
void delta_step(float* state, int64_t d, const float* query, const float* key, const float* value, float decay,
                float beta, float scale, float* out) {
    DeltaSums seen, found;
    for (int64_t i = 0; i < d; i += kDeltaSums) {
        for (int s = 0; s < kDeltaSums; ++s) {
            const vec k = broadcast(key[i + s]);
            const float* row = state + (i + s) * pagoda::kDeltaStrip;
            for (int j = 0; j < kDeltaVectors; ++j) seen.parts[s][j] = fma(k, load(row + j * kWidth), seen.parts[s][j]);
        }
    }
    const vec kept = broadcast(decay), rate = broadcast(beta);
    vec delta[kDeltaVectors];
    for (int j = 0; j < kDeltaVectors; ++j) {
        delta[j] = mul(rate, sub(load(value + j * kWidth), mul(kept, seen.total(j))));
    }
    for (int64_t i = 0; i < d; i += kDeltaSums) {
        for (int s = 0; s < kDeltaSums; ++s) {
            const vec k = broadcast(key[i + s]), q = broadcast(query[i + s]);
            float* row = state + (i + s) * pagoda::kDeltaStrip;
            for (int j = 0; j < kDeltaVectors; ++j) {
                const vec next = fma(k, delta[j], mul(kept, load(row + j * kWidth)));
                store(row + j * kWidth, next);
                found.parts[s][j] = fma(q, next, found.parts[s][j]);
            }
        }
    }
    for (int j = 0; j < kDeltaVectors; ++j) store(out + j * kWidth, mul(broadcast(scale), found.total(j)));
}

}  // namespace
