// SPDX-License-Identifier: Apache-2.0
// Scores of an indexer: keys of a tile of cached tokens by the queries of one token.
#pragma once

#include "lanes.h"

namespace {

// Elements of a key that lie `step` apart, as floats kKeyTile apart.
void index_key(pagoda::Dtype dtype, const void* key, int64_t d, int64_t step, float scale, float* out) {
    if (dtype == pagoda::Dtype::i8) {
        const auto* codes = static_cast<const int8_t*>(key);
        for (int64_t i = 0; i < d; ++i) out[i * kKeyTile] = scale * static_cast<float>(codes[i * step]);
        return;
    }
    const auto widen = [&](const auto* typed) {
        for (int64_t i = 0; i < d; ++i) out[i * kKeyTile] = F32Math::lane(typed[i * step]);
    };
    if (dtype == pagoda::Dtype::e4m3) return widen(static_cast<const e4m3*>(key));
    with_type(dtype, [&](auto* type) { widen(static_cast<decltype(type)>(const_cast<void*>(key))); });
}

constexpr int kIndexHeads = 4, kIndexVectors = 2;

// The sum over heads of weights times positive products, of keys [d, kKeyTile] and queries [heads, d].
void index_scores(const float* keys, int64_t d, const float* queries, const float* weights, int64_t heads, float* out) {
    constexpr int strip = kIndexVectors * kWidth;
    static_assert(kKeyTile % strip == 0);
    for (int first = 0; first < kKeyTile; first += strip) {
        vec totals[kIndexVectors];
        for (vec& total : totals) total = zero();
        for (int64_t head = 0; head < heads; head += kIndexHeads) {
            const int64_t left = heads - head < kIndexHeads ? heads - head : kIndexHeads;
            const float* rows[kIndexHeads];
            for (int64_t h = 0; h < kIndexHeads; ++h) rows[h] = queries + (head + (h < left ? h : 0)) * d;
            vec sums[kIndexHeads][kIndexVectors];
            for (auto& row : sums) {
                for (vec& each : row) each = zero();
            }
            for (int64_t i = 0; i < d; ++i) {
                vec columns[kIndexVectors];
#pragma GCC unroll 2
                for (int v = 0; v < kIndexVectors; ++v) columns[v] = load(keys + i * kKeyTile + first + v * kWidth);
#pragma GCC unroll 4
                for (int h = 0; h < kIndexHeads; ++h) {
                    const vec q = broadcast(rows[h][i]);
#pragma GCC unroll 2
                    for (int v = 0; v < kIndexVectors; ++v) sums[h][v] = fma(q, columns[v], sums[h][v]);
                }
            }
            for (int64_t h = 0; h < left; ++h) {
                const vec weight = broadcast(weights[head + h]);
                for (int v = 0; v < kIndexVectors; ++v) totals[v] = fma(weight, max(sums[h][v], zero()), totals[v]);
            }
        }
        for (int v = 0; v < kIndexVectors; ++v) store(out + first + v * kWidth, totals[v]);
    }
}

}  // namespace
