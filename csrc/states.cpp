// SPDX-License-Identifier: Apache-2.0
#include "states.h"

#include <algorithm>
#include <cmath>
#include <type_traits>

namespace pagoda {

namespace {

// Channels that are carried on together, in the first cache.
constexpr int64_t kChannels = 64;

// Calls `run(token)` for the tokens of a sequence in order, `load(block)` before the first one, with -1 for none if it
// begins the sequence, and `save(block)` behind the last one that is no draft and, before it, wherever a block is full.
template <class Load, class Save, class Run>
void carry_on(const AttentionMetadata& metadata, int64_t sequence, Load load, Save save, Run run) {
    const auto& own = metadata.sequences[static_cast<size_t>(sequence)];
    const int32_t* blocks = metadata.blocks_of(sequence);
    const int64_t size = metadata.shape.block_size;
    const int64_t begin = own.context_len - own.query_len, end = own.context_len;
    load(begin > 0 ? blocks[(begin - 1) / size] : -1);
    for (int64_t position = begin; position < end; ++position) {
        run(own.first_token + position - begin);
        const int64_t done = position + 1;
        if (done == own.kept_len || (done < own.kept_len && done % size == 0)) save(blocks[position / size]);
    }
}

// Calls f(kept), with a constant for the convolutions that models have.
template <class F>
void with_kept(int64_t kept, F f) {
    if (kept == 2) return f(std::integral_constant<int64_t, 2>{});
    if (kept == 3) return f(std::integral_constant<int64_t, 3>{});
    f(kept);
}

// Channels from `first` on, of one half.
void convolve(const KernelTable& table, const AttentionMetadata& metadata, const ShortConv& conv, const float* x,
              int64_t sequence, int half, int64_t first, int64_t count, float* out) {
    const StateCache& cache = conv.cache;
    const int64_t kept = cache.floats, channels = cache.units;
    const int64_t row = conv.gated ? 3 * channels : channels, own = cache.first_of(half) + first;
    alignas(64) float inputs[kMaxConvWidth][kChannels] = {};
    float* taps[kMaxConvWidth];  // from the oldest to the newest
    for (int64_t i = 0; i <= kept; ++i) taps[i] = inputs[i];
    carry_on(
        metadata, sequence,
        [&](int32_t block) {
            if (block < 0) return;
            const float* __restrict from = cache.at(half, block) + first * kept;
            with_kept(kept, [&](auto n) {
                for (int64_t i = 0; i < n; ++i) {
                    float* __restrict tap = taps[i];
                    for (int64_t c = 0; c < count; ++c) tap[c] = from[c * n + i];
                }
            });
        },
        [&](int32_t block) {
            float* __restrict to = cache.at(half, block) + first * kept;
            with_kept(kept, [&](auto n) {
                for (int64_t i = 0; i < n; ++i) {
                    const float* __restrict tap = taps[i];
                    for (int64_t c = 0; c < count; ++c) to[c * n + i] = tap[c];
                }
            });
        },
        [&](int64_t token) {
            const float* in = x + token * row + own;
            ConvRow one{in, nullptr, nullptr, taps, kept + 1, conv.weight + own, channels,
                        conv.bias == nullptr ? nullptr : conv.bias + own, conv.silu, count, out + token * channels + own};
            if (conv.gated) one.in_gate = in, one.out_gate = in + channels, one.x = in + 2 * channels;
            table.conv_row(one);
            std::rotate(taps, taps + 1, taps + kept + 1);
        });
}

// Some columns of the values of one head.
void carry_strip(const KernelTable& table, const AttentionMetadata& metadata, const GatedDelta& layer, const float* qkv,
                 const float* gates, int64_t sequence, int64_t head, int64_t strip, float* out) {
    const StateCache& cache = layer.cache;
    const int64_t d = layer.key_dim, heads = cache.units, first = strip * kDeltaStrip;
    const int64_t count = std::min<int64_t>(kDeltaStrip, layer.value_dim - first);
    const int64_t keys = layer.key_heads * d, row = 2 * keys + heads * layer.value_dim;
    const int64_t key_head = head / (heads / layer.key_heads);
    const int half = head < cache.units_of(0) ? 0 : 1;
    const int64_t offset = (head - cache.first_of(half)) * cache.floats + first * d;
    alignas(64) float state[kMaxDeltaKey * kDeltaStrip];
    alignas(64) float query[kMaxDeltaKey], key[kMaxDeltaKey], factors[kMaxDeltaKey];
    alignas(64) float value[kDeltaStrip] = {}, result[kDeltaStrip];
    // x / sqrt(sum of squares + eps) is an RMS norm of weights 1 / sqrt(d).
    constexpr float kEps = 1e-6f;
    const auto length = static_cast<float>(d);
    std::fill_n(factors, d, 1.0f / std::sqrt(length));
    const float scale = 1.0f / std::sqrt(length), decay = layer.decay[head];
    // Parts that are kept, and what they are made of, filled up with zeros.
    alignas(64) float kept[kMaxDeltaKey], x[kMaxDeltaKey] = {}, bias[kMaxDeltaKey] = {};
    const int64_t channels = layer.by_channel ? d : 1;
    const int64_t padded = (channels + kKeptChannels - 1) / kKeptChannels * kKeptChannels;
    std::copy_n(layer.dt_bias + head * channels, channels, bias);
    carry_on(
        metadata, sequence,
        [&](int32_t block) {
            if (block < 0 || count < kDeltaStrip) std::fill_n(state, d * kDeltaStrip, 0.0f);
            if (block < 0) return;
            const float* from = cache.at(half, block) + offset;
            for (int64_t i = 0; i < d; ++i) std::copy_n(from + i * count, count, state + i * kDeltaStrip);
        },
        [&](int32_t block) {
            float* to = cache.at(half, block) + offset;
            for (int64_t i = 0; i < d; ++i) std::copy_n(state + i * kDeltaStrip, count, to + i * count);
        },
        [&](int64_t token) {
            const float *in = qkv + token * row, *gate = gates + token * heads * (1 + channels);
            table.rms_norm(in + key_head * d, nullptr, factors, kEps / length, d, nullptr, query);
            table.rms_norm(in + keys + key_head * d, nullptr, factors, kEps / length, d, nullptr, key);
            std::copy_n(in + 2 * keys + head * layer.value_dim + first, count, value);
            const float beta = 1.0f / (1.0f + std::exp(-gate[head]));
            if (layer.by_channel) {
                std::copy_n(gate + heads + head * d, d, x);
                table.kept_channels(x, bias, decay, padded, kept);
            } else {
                const float sum = gate[heads + head] + bias[0];
                kept[0] = std::exp(decay * (sum > 20.0f ? sum : std::log1p(std::exp(sum))));
            }
            table.delta_step(state, d, query, key, value, kept, layer.by_channel, beta, scale, result);
            std::copy_n(result, count, out + (token * heads + head) * layer.value_dim + first);
        });
}

// Neighbouring columns of a scan that are carried on together: of one head, or one of each of some heads.
struct ScanColumns {
    int64_t head, first, count;  // the first head, and the first column of it
    bool across;                 // columns are of heads of one column each
};

ScanColumns columns_of(const SelectiveScan& layer, int half, int64_t strip) {
    const int64_t first_head = layer.cache.first_of(half), heads = layer.cache.units_of(half);
    if (layer.head_dim == 1 && layer.groups == 1) {
        const int64_t first = strip * kScanStrip;
        return {first_head + first, 0, std::min<int64_t>(kScanStrip, heads - first), true};
    }
    const int64_t strips = (layer.head_dim + kScanStrip - 1) / kScanStrip, first = strip % strips * kScanStrip;
    return {first_head + strip / strips, first, std::min<int64_t>(kScanStrip, layer.head_dim - first), false};
}

int64_t strips_of(const SelectiveScan& layer, int half) {
    const int64_t heads = layer.cache.units_of(half);
    if (layer.head_dim == 1 && layer.groups == 1) return (heads + kScanStrip - 1) / kScanStrip;
    return heads * ((layer.head_dim + kScanStrip - 1) / kScanStrip);
}

void scan_strip(const KernelTable& table, const AttentionMetadata& metadata, const SelectiveScan& layer, const ScanRows& rows,
                int64_t sequence, int half, const ScanColumns& own, float* out) {
    const StateCache& cache = layer.cache;
    const int64_t n = layer.state_dim, heads = cache.units, count = own.count;
    const int64_t padded = (n + kScanRows - 1) / kScanRows * kScanRows, column = own.head * layer.head_dim + own.first;
    const int64_t offset = (own.head - cache.first_of(half)) * cache.floats + own.first * n;
    // Distances of a state's rows and columns in the cache.
    const int64_t row = own.across ? 1 : count, along = own.across ? n : 1;
    const int64_t group = own.head / (heads / layer.groups) * n;
    alignas(64) float state[kMaxScanState * kScanStrip], decay[kMaxScanState * kScanStrip];
    alignas(64) float x[kScanStrip] = {}, dt[kScanStrip] = {}, bias[kScanStrip] = {}, skip[kScanStrip] = {}, result[kScanStrip];
    alignas(64) float b[kMaxScanState] = {}, c[kMaxScanState] = {};
    // Every column's number of those that heads have.
    const auto spread = [&](const float* of_heads, float* to) {
        for (int64_t i = 0; i < count; ++i) to[i] = of_heads[own.head + (own.across ? i : 0)];
    };
    spread(layer.dt_bias, bias);
    spread(layer.skip, skip);
    std::fill_n(decay, (layer.by_element ? padded : 1) * kScanStrip, 0.0f);
    for (int64_t i = 0; i < (layer.by_element ? n : 1); ++i) spread(layer.decay + i * heads, decay + i * kScanStrip);
    const ScanStep step{state, padded, b, c, x, dt, bias, skip, decay, layer.by_element, layer.dt_min, layer.dt_max, result};
    carry_on(
        metadata, sequence,
        [&](int32_t block) {
            std::fill_n(state, padded * kScanStrip, 0.0f);
            if (block < 0) return;
            const float* from = cache.at(half, block) + offset;
            for (int64_t i = 0; i < n; ++i) {
                for (int64_t j = 0; j < count; ++j) state[i * kScanStrip + j] = from[i * row + j * along];
            }
        },
        [&](int32_t block) {
            float* to = cache.at(half, block) + offset;
            for (int64_t i = 0; i < n; ++i) {
                for (int64_t j = 0; j < count; ++j) to[i * row + j * along] = state[i * kScanStrip + j];
            }
        },
        [&](int64_t token) {
            std::copy_n(rows.x + token * rows.x_stride + column, count, x);
            std::copy_n(rows.b + token * rows.b_stride + layer.b_first + group, n, b);
            std::copy_n(rows.c + token * rows.c_stride + layer.c_first + group, n, c);
            spread(rows.dt + token * heads, dt);
            table.scan_step(step);
            std::copy_n(result, count, out + token * heads * layer.head_dim + column);
        });
}

}  // namespace

void short_conv(const KernelTable& table, const AttentionMetadata& metadata, const ShortConv& conv, const float* x,
                float* out) {
    const auto parts = [&](int half) { return (conv.cache.units_of(half) + kChannels - 1) / kChannels; };
    const int64_t of_first = parts(0), of_both = of_first + parts(1);
    const auto sequences = static_cast<int64_t>(metadata.sequences.size());
#pragma omp for schedule(dynamic)
    for (int64_t item = 0; item < sequences * of_both; ++item) {
        const int64_t part = item % of_both;
        const int half = part < of_first ? 0 : 1;
        const int64_t first = (part - half * of_first) * kChannels;
        const int64_t count = std::min(kChannels, conv.cache.units_of(half) - first);
        convolve(table, metadata, conv, x, item / of_both, half, first, count, out);
    }
}

void gated_delta(const KernelTable& table, const AttentionMetadata& metadata, const GatedDelta& layer, const float* qkv,
                 const float* gates, float* out) {
    const int64_t strips = (layer.value_dim + kDeltaStrip - 1) / kDeltaStrip, heads = layer.cache.units;
    const auto sequences = static_cast<int64_t>(metadata.sequences.size());
#pragma omp for schedule(dynamic)
    for (int64_t item = 0; item < sequences * heads * strips; ++item) {
        const int64_t head = item / strips % heads;
        carry_strip(table, metadata, layer, qkv, gates, item / strips / heads, head, item % strips, out);
    }
}

void selective_scan(const KernelTable& table, const AttentionMetadata& metadata, const SelectiveScan& layer,
                    const ScanRows& rows, float* out) {
    const int64_t of_first = strips_of(layer, 0), of_both = of_first + strips_of(layer, 1);
    const auto sequences = static_cast<int64_t>(metadata.sequences.size());
#pragma omp for schedule(dynamic)
    for (int64_t item = 0; item < sequences * of_both; ++item) {
        const int64_t strip = item % of_both;
        const int half = strip < of_first ? 0 : 1;
        const ScanColumns own = columns_of(layer, half, strip - half * of_first);
        scan_strip(table, metadata, layer, rows, item / of_both, half, own, out);
    }
}

}  // namespace pagoda
