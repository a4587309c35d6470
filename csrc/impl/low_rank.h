// SPDX-License-Identifier: Apache-2.0
// Rows times the weights of an adapter; see ../low_rank.h.
#pragma once

#include "lanes.h"
#include "linear.h"

namespace {

using pagoda::kLowRankBlock;

// Vectors of a block of outputs.
constexpr int kBlockVectors = kLowRankBlock / kWidth;
// A sum over many inputs is made of so many, each of every so manieth element, lest each addition waits for the one
// before it. They and the rows of a call have to fit the registers.
constexpr int kDownSums = kWidth == 16 ? 4 : 2;
constexpr int kDownRows = kWidth == 16 ? 6 : 2;
constexpr int kUpRows = kWidth == 16 ? kTileRows : 4;
// Weights are read once by a few rows: bytes ahead of which memory is asked for them. An adapter's lie in one piece.
constexpr int64_t kAhead = 2048;

PAGODA_INLINE void fetch_weights(const void* weights) {
    prefetch_l1(static_cast<const char*>(weights) + kAhead);
}

// Adds the products of the i-th element of inputs, a pair of them in bf16, with a block of outputs.
template <int Rows>
PAGODA_INLINE void add_products(const float* block, const float* x, int64_t stride, int64_t i,
                                vec (&sums)[Rows][kBlockVectors]) {
    fetch_weights(block + i * kLowRankBlock);
#pragma GCC unroll 2
    for (int j = 0; j < kBlockVectors; ++j) {
        const vec weights = load(block + i * kLowRankBlock + j * kWidth);
#pragma GCC unroll 12
        for (int r = 0; r < Rows; ++r) sums[r][j] = fma(broadcast(x[r * stride + i]), weights, sums[r][j]);
    }
}

#ifdef PAGODA_BF16_PAIRS

template <int Rows>
PAGODA_INLINE void add_products(const bf16* block, const PackedBf16* x, int64_t stride, int64_t i,
                                vec (&sums)[Rows][kBlockVectors]) {
    fetch_weights(block + i * 2 * kLowRankBlock);
#pragma GCC unroll 2
    for (int j = 0; j < kBlockVectors; ++j) {
        const Bf16Pairs weights = load_pairs(block + (i * kLowRankBlock + j * kWidth) * 2);
#pragma GCC unroll 12
        for (int r = 0; r < Rows; ++r) {
            sums[r][j] = add_pairs(sums[r][j], weights, broadcast_pair(x + r * stride + 2 * i));
        }
    }
}

#else

template <int Rows>
PAGODA_INLINE void add_products(const bf16* block, const PackedBf16* x, int64_t stride, int64_t i,
                                vec (&sums)[Rows][kBlockVectors]) {
    fetch_weights(block + i * 2 * kLowRankBlock);
#pragma GCC unroll 2
    for (int j = 0; j < kBlockVectors; ++j) {
        const bf16* pairs = block + (i * kLowRankBlock + j * kWidth) * 2;
        const vec even = load_even(pairs), odd = load_odd(pairs);
#pragma GCC unroll 12
        for (int r = 0; r < Rows; ++r) {
            sums[r][j] = fma(broadcast(x[r * stride + 2 * i]), even, sums[r][j]);
            sums[r][j] = fma(broadcast(x[r * stride + 2 * i + 1]), odd, sums[r][j]);
        }
    }
}

#endif

template <int Rows, class T, class X>
PAGODA_INLINE void down_tile(const T* block, const X* x, int64_t stride, int64_t elements, float scale, float* out) {
    vec sums[kDownSums][Rows][kBlockVectors];
#pragma GCC unroll 4
    for (int s = 0; s < kDownSums; ++s) {
#pragma GCC unroll 12
        for (int r = 0; r < Rows; ++r) {
            for (int j = 0; j < kBlockVectors; ++j) sums[s][r][j] = zero();
        }
    }
    int64_t i = 0;
    for (; i + kDownSums <= elements; i += kDownSums) {
#pragma GCC unroll 4
        for (int s = 0; s < kDownSums; ++s) add_products<Rows>(block, x, stride, i + s, sums[s]);
    }
    for (; i < elements; ++i) add_products<Rows>(block, x, stride, i, sums[0]);
#pragma GCC unroll 12
    for (int r = 0; r < Rows; ++r) {
        for (int j = 0; j < kBlockVectors; ++j) {
            vec total = add(sums[0][r][j], sums[1][r][j]);
            if constexpr (kDownSums == 4) total = add(total, add(sums[2][r][j], sums[3][r][j]));
            store(out + r * kLowRankBlock + j * kWidth, mul(total, broadcast(scale)));
        }
    }
}

template <int Rows, class T, class X>
PAGODA_INLINE void up_tile(const T* blocks, const X* x, int64_t stride, int64_t elements, float* const* out,
                           int64_t outputs) {
    constexpr int64_t per_element = sizeof(T) == 2 ? 2 : 1;
    for (int64_t first = 0; first < outputs; first += kLowRankBlock) {
        vec sums[Rows][kBlockVectors];
#pragma GCC unroll 12
        for (int r = 0; r < Rows; ++r) {
            for (int j = 0; j < kBlockVectors; ++j) sums[r][j] = zero();
        }
        for (int64_t i = 0; i < elements; ++i) add_products<Rows>(blocks, x, stride, i, sums);
        blocks += elements * per_element * kLowRankBlock;
        if (outputs - first >= kLowRankBlock) {
#pragma GCC unroll 12
            for (int r = 0; r < Rows; ++r) {
                for (int j = 0; j < kBlockVectors; ++j) {
                    float* to = out[r] + first + j * kWidth;
                    store(to, add(load(to), sums[r][j]));
                }
            }
            continue;
        }
        for (int r = 0; r < Rows; ++r) {
            alignas(64) float last[kLowRankBlock];
            for (int j = 0; j < kBlockVectors; ++j) store(last + j * kWidth, sums[r][j]);
            for (int64_t i = first; i < outputs; ++i) out[r][i] += last[i - first];
        }
    }
}

// Calls f(weights, activations, elements of k inputs), with the types that weights of the dtype have.
template <class F>
PAGODA_INLINE void with_low_rank_types(Dtype dtype, const void* weights, const void* packed, int64_t k, F f) {
    if (dtype == Dtype::bf16) {
        f(static_cast<const bf16*>(weights), static_cast<const PackedBf16*>(packed), (k + 1) / 2);
    } else {
        f(static_cast<const float*>(weights), static_cast<const float*>(packed), k);
    }
}

void low_rank_down(Dtype dtype, const void* block, const void* packed, int64_t row_bytes, int rows, int64_t k,
                   float scale, float* out) {
    with_low_rank_types(dtype, block, packed, k, [&](const auto* weights, const auto* x, int64_t elements) {
        const int64_t stride = row_bytes / static_cast<int64_t>(sizeof(*x));
        for (int row = 0; row < rows; row += kDownRows) {
            with_count<kDownRows>(rows - row < kDownRows ? rows - row : kDownRows, [&](auto count) {
                down_tile<decltype(count)::value>(weights, x + row * stride, stride, elements, scale,
                                                  out + row * kLowRankBlock);
            });
        }
    });
}

void low_rank_up(Dtype dtype, const void* blocks, const void* packed, int64_t row_bytes, int rows, int64_t k,
                 float* const* out, int64_t outputs) {
    with_low_rank_types(dtype, blocks, packed, k, [&](const auto* weights, const auto* x, int64_t elements) {
        const int64_t stride = row_bytes / static_cast<int64_t>(sizeof(*x));
        for (int row = 0; row < rows; row += kUpRows) {
            with_count<kUpRows>(rows - row < kUpRows ? rows - row : kUpRows, [&](auto count) {
                up_tile<decltype(count)::value>(weights, x + row * stride, stride, elements, out + row, outputs);
            });
        }
    });
}

}  // namespace
