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

// S = kept S + k (beta (v - k kept S)), out = scale q S; d is a multiple of kDeltaSums.
template <bool by_channel>
PAGODA_INLINE void delta_rows(float* state, int64_t d, const float* query, const float* key, const float* value,
                              const float* kept, float beta, float scale, float* out) {
    DeltaSums seen, found;
    for (int64_t i = 0; i < d; i += kDeltaSums) {
        for (int s = 0; s < kDeltaSums; ++s) {
            const vec k = broadcast(by_channel ? key[i + s] * kept[i + s] : key[i + s]);
            const float* row = state + (i + s) * pagoda::kDeltaStrip;
            for (int j = 0; j < kDeltaVectors; ++j) seen.parts[s][j] = fma(k, load(row + j * kWidth), seen.parts[s][j]);
        }
    }
    const vec rate = broadcast(beta);
    vec delta[kDeltaVectors];
    for (int j = 0; j < kDeltaVectors; ++j) {
        const vec own = by_channel ? seen.total(j) : mul(broadcast(kept[0]), seen.total(j));
        delta[j] = mul(rate, sub(load(value + j * kWidth), own));
    }
    for (int64_t i = 0; i < d; i += kDeltaSums) {
        for (int s = 0; s < kDeltaSums; ++s) {
            const vec k = broadcast(key[i + s]), q = broadcast(query[i + s]), part = broadcast(kept[by_channel ? i + s : 0]);
            float* row = state + (i + s) * pagoda::kDeltaStrip;
            for (int j = 0; j < kDeltaVectors; ++j) {
                const vec next = fma(k, delta[j], mul(part, load(row + j * kWidth)));
                store(row + j * kWidth, next);
                found.parts[s][j] = fma(q, next, found.parts[s][j]);
            }
        }
    }
    for (int j = 0; j < kDeltaVectors; ++j) store(out + j * kWidth, mul(broadcast(scale), found.total(j)));
}

void delta_step(float* state, int64_t d, const float* query, const float* key, const float* value, const float* kept,
                bool by_channel, float beta, float scale, float* out) {
    by_channel ? delta_rows<true>(state, d, query, key, value, kept, beta, scale, out)
               : delta_rows<false>(state, d, query, key, value, kept, beta, scale, out);
}

// log(1 + e^x) is max(x, 0) + log(1 + u) with u = e^-|x|, and that 2 atanh(s) with s = u / (2 + u), at most 1/3: the first
// nine terms of its series are within 2e-10 of it.
PAGODA_INLINE vec softplus(vec x) {
    const vec u = exp(sub(zero(), absolute(x))), s = div(u, add(broadcast(2.0f), u)), square = mul(s, s);
    vec p = broadcast(1.0f / 17);
    for (const float next : {15.0f, 13.0f, 11.0f, 9.0f, 7.0f, 5.0f, 3.0f, 1.0f}) p = fma(p, square, broadcast(1.0f / next));
    return add(max(x, zero()), mul(add(s, s), p));
}

void kept_channels(const float* x, const float* bias, float rate, int64_t n, float* out) {
    static_assert(pagoda::kKeptChannels % kWidth == 0);
    for (int64_t i = 0; i < n; i += kWidth) {
        store(out + i, exp(mul(broadcast(rate), softplus(add(load(x + i), load(bias + i))))));
    }
}

// Some vectors of columns, so many that their sums stay in registers: S = kept S + b (dt x), out = c S + skip x.
template <bool by_element, int vectors>
PAGODA_INLINE void scan_columns(const pagoda::ScanStep& step, int64_t first) {
    constexpr int kRows = pagoda::kScanRows;
    vec dt[vectors], added[vectors], kept[vectors], parts[kRows][vectors];
    for (int j = 0; j < vectors; ++j) {
        const int64_t at = first + j * kWidth;
        const vec soft = softplus(add(load(step.dt + at), load(step.bias + at)));
        dt[j] = min(broadcast(step.most), max(broadcast(step.least), soft));
        added[j] = mul(dt[j], load(step.x + at));
        if (!by_element) kept[j] = exp(mul(dt[j], load(step.decay + at)));
        for (int s = 0; s < kRows; ++s) parts[s][j] = zero();
    }
    for (int64_t i = 0; i < step.n; i += kRows) {
        for (int s = 0; s < kRows; ++s) {
            const vec b = broadcast(step.b[i + s]), c = broadcast(step.c[i + s]);
            for (int j = 0; j < vectors; ++j) {
                const int64_t at = (i + s) * pagoda::kScanStrip + first + j * kWidth;
                const vec factor = by_element ? exp(mul(dt[j], load(step.decay + at))) : kept[j];
                const vec next = fma(b, added[j], mul(factor, load(step.state + at)));
                store(step.state + at, next);
                parts[s][j] = fma(c, next, parts[s][j]);
            }
        }
    }
    for (int j = 0; j < vectors; ++j) {
        const int64_t at = first + j * kWidth;
        const vec total = add(add(parts[0][j], parts[1][j]), add(parts[2][j], parts[3][j]));
        store(step.out + at, fma(load(step.skip + at), load(step.x + at), total));
    }
}

void scan_step(const pagoda::ScanStep& step) {
    static_assert(pagoda::kScanRows == 4);
    constexpr int kVectors = 2;
    for (int64_t first = 0; first < pagoda::kScanStrip; first += kVectors * kWidth) {
        step.by_element ? scan_columns<true, kVectors>(step, first) : scan_columns<false, kVectors>(step, first);
    }
}

}  // namespace
