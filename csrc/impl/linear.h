// SPDX-License-Identifier: Apache-2.0
// Rows times one panel of a dense weight.
#pragma once

#include <cmath>

#include "products.h"

namespace {

using pagoda::Argmax;
using pagoda::kPanel;
using pagoda::Prefetch;

// With the i-th two lines of a panel.
PAGODA_INLINE void fetch_ahead(const Prefetch& ahead, int64_t i) {
    const char* from = static_cast<const char*>(ahead.from);
    if (ahead.lines > 0) prefetch_l2(from + 64 * ahead.lines * i);
    if (ahead.lines > 1) prefetch_l2(from + 64 * (ahead.lines * i + 1));
}

template <int Rows, class T>
PAGODA_INLINE void linear_tile(const T* panel, const float* x, int64_t stride, int64_t k, const Prefetch&, float* c) {
    multiply<Rows, kRegisterCols>([=](int r, int64_t i) { return x[r * stride + i]; }, panel, kPanel, k, c, kPanel);
}

#ifdef __AVX512BF16__

using PackedBf16 = bf16;

template <int Rows>
PAGODA_INLINE void linear_tile(const bf16* panel, const PackedBf16* x, int64_t stride, int64_t k,
                               const Prefetch& ahead, float* c) {
    vec sums[Rows][2];
#pragma GCC unroll 12
    for (int r = 0; r < Rows; ++r) sums[r][0] = sums[r][1] = zero();
    const int64_t pairs = (k + 1) / 2;
    for (int64_t i = 0; i < pairs; ++i) {
        fetch_ahead(ahead, i);
        const __m512i left = _mm512_loadu_si512(panel + i * 2 * kPanel);
        const __m512i right = _mm512_loadu_si512(panel + i * 2 * kPanel + kPanel);
#pragma GCC unroll 12
        for (int r = 0; r < Rows; ++r) {
            int32_t both;
            std::memcpy(&both, x + r * stride + 2 * i, sizeof(both));
            const __m512i pair = _mm512_set1_epi32(both);
            sums[r][0] = _mm512_dpbf16_ps(sums[r][0], (__m512bh)left, (__m512bh)pair);
            sums[r][1] = _mm512_dpbf16_ps(sums[r][1], (__m512bh)right, (__m512bh)pair);
        }
    }
#pragma GCC unroll 12
    for (int r = 0; r < Rows; ++r) {
        store(c + r * kPanel, sums[r][0]);
        store(c + r * kPanel + kWidth, sums[r][1]);
    }
}

#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)

}  // namespace

#include "../neon/linear.h"

namespace {

using PackedBf16 = bf16;

#else

using PackedBf16 = float;

template <int Rows>
PAGODA_INLINE void linear_tile(const bf16* panel, const PackedBf16* x, int64_t stride, int64_t k,
                               const Prefetch& ahead, float* c) {
    vec sums[Rows][kRegisterCols];
#pragma GCC unroll 12
    for (int r = 0; r < Rows; ++r) {
        for (int j = 0; j < kRegisterCols; ++j) sums[r][j] = zero();
    }
    const int64_t pairs = (k + 1) / 2;
    for (int64_t i = 0; i < pairs; ++i) {
        fetch_ahead(ahead, i);
        vec even[kRegisterCols], odd[kRegisterCols];
#pragma GCC unroll 2
        for (int j = 0; j < kRegisterCols; ++j) {
            even[j] = load_even(panel + i * 2 * kPanel + 2 * j * kWidth);
            odd[j] = load_odd(panel + i * 2 * kPanel + 2 * j * kWidth);
        }
#pragma GCC unroll 12
        for (int r = 0; r < Rows; ++r) {
            const vec first = broadcast(x[r * stride + 2 * i]);
#pragma GCC unroll 2
            for (int j = 0; j < kRegisterCols; ++j) sums[r][j] = fma(first, even[j], sums[r][j]);
            const vec second = broadcast(x[r * stride + 2 * i + 1]);
#pragma GCC unroll 2
            for (int j = 0; j < kRegisterCols; ++j) sums[r][j] = fma(second, odd[j], sums[r][j]);
        }
    }
#pragma GCC unroll 12
    for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 2
        for (int j = 0; j < kRegisterCols; ++j) store(c + r * kPanel + j * kWidth, sums[r][j]);
    }
}

#endif

int64_t packed_size(Dtype dtype) { return dtype == Dtype::bf16 ? sizeof(PackedBf16) : sizeof(float); }

PAGODA_INLINE void put_rounded(bf16* to, int64_t i, vec x) { store(to + i, x); }
PAGODA_INLINE void put_rounded(float* to, int64_t i, vec x) { store(to + i, rounded_to_bf16(x)); }

void pack_row(Dtype dtype, const float* x, int64_t k, void* packed) {
    if (dtype != Dtype::bf16) {
        std::memcpy(packed, x, static_cast<size_t>(k) * sizeof(float));
        return;
    }
    auto* to = static_cast<PackedBf16*>(packed);
    int64_t i = 0;
    for (; i + kWidth <= k; i += kWidth) put_rounded(to, i, load(x + i));
    if (i == k) return;
    PackedBf16 last[kWidth];
    put_rounded(last, 0, load_first(x + i, k - i));
    // With the zero behind an odd k.
    std::memcpy(to + i, last, static_cast<size_t>((k - i + 1) / 2 * 2) * sizeof(PackedBf16));
}

void store_outputs(const float* c, int rows, const float* bias, float* out, int64_t out_stride, int cols) {
    for (int r = 0; r < rows; ++r) {
        for_vectors(cols, [&](auto get, auto put) {
            const vec sums = get(c + r * kPanel);
            put(out + r * out_stride, bias ? add(sums, get(bias)) : sums);
        });
    }
}

void linear_panel(Dtype dtype, const void* panel, const void* packed, int64_t row_bytes, int rows, int64_t k,
                  const float* bias, float* out, int64_t out_stride, int cols, Prefetch ahead) {
    alignas(64) float c[kTileRows * kPanel];
    with_type(dtype, [&](auto* type) {
        using T = Pointee<decltype(type)>;
        using X = std::conditional_t<std::is_same_v<T, bf16>, PackedBf16, float>;
        constexpr int per_column = std::is_same_v<T, bf16> ? 2 : 1;
        const int64_t stride = row_bytes / static_cast<int64_t>(sizeof(X));
        for (int column = 0; column < kPanel; column += kRegisterCols * kWidth) {
            const T* weights = static_cast<const T*>(panel) + per_column * column;
            for (int row = 0; row < rows; row += kRegisterRows) {
                const X* x = static_cast<const X*>(packed) + row * stride;
                const int left = rows - row < kRegisterRows ? rows - row : kRegisterRows;
                with_count<kRegisterRows>(left, [&](auto count) {
                    linear_tile<decltype(count)::value>(weights, x, stride, k, ahead, c + row * kPanel + column);
                });
            }
        }
    });
    store_outputs(c, rows, bias, out, out_stride, cols);
}

void widen_row(Dtype dtype, const void* panel, int output, int64_t inputs, float* out) {
    with_type(dtype, [&](auto* type) {
        using T = Pointee<decltype(type)>;
        constexpr int per_column = std::is_same_v<T, bf16> ? 2 : 1;
        const T* from = static_cast<const T*>(panel) + output * per_column;
        for (int64_t i = 0; i < inputs; ++i) {
            out[i] = as_float(from[i / per_column * per_column * kPanel + i % per_column]);
        }
    });
}

void argmax_outputs(const float* outputs, int rows, int cols, int64_t first, Argmax* seen) {
    for (int r = 0; r < rows; ++r) {
        const float* row = outputs + r * kPanel;
        vec top = broadcast(-INFINITY), poison = zero();
        for (int j = 0; j < cols; j += kWidth) {
            const vec v = cols - j >= kWidth ? load(row + j) : load_last(row + j, cols - j, row[0]);
            top = max(v, top);
            poison = fma(v, zero(), poison);
        }
        if (sum(poison) != 0.0f) seen[r].finite = 0;
        const float value = reduce_max(top);
        if (!(value > seen[r].value)) continue;
        int column = 0;
        while (row[column] != value) ++column;
        seen[r].value = value;
        seen[r].column = first + column;
    }
}

}  // namespace
