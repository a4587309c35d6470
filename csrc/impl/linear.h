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
    if (ahead.lines > 0) _mm_prefetch(from + 64 * ahead.lines * i, _MM_HINT_T1);
    if (ahead.lines > 1) _mm_prefetch(from + 64 * (ahead.lines * i + 1), _MM_HINT_T1);
}

template <int Rows, class T>
PAGODA_INLINE void linear_tile(const T* panel, const float* x, int stride, int64_t k, const Prefetch&, float* c) {
    multiply<Rows, kRegisterCols>([=](int r, int64_t i) { return x[i * stride + r]; }, panel, kPanel, k, c, kPanel);
}

#ifdef __AVX512BF16__

using PackedPair = uint32_t;

template <int Rows>
PAGODA_INLINE void linear_tile(const bf16* panel, const PackedPair* x, int stride, int64_t k,
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
            const __m512i pair = _mm512_set1_epi32(static_cast<int>(x[i * stride + r]));
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

#else

using PackedPair = float[2];

template <int Rows>
PAGODA_INLINE void linear_tile(const bf16* panel, const PackedPair* packed, int stride, int64_t k,
                               const Prefetch& ahead, float* c) {
    const float* x = packed[0];
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
            const vec first = broadcast(x[2 * (i * stride + r)]);
#pragma GCC unroll 2
            for (int j = 0; j < kRegisterCols; ++j) sums[r][j] = fma(first, even[j], sums[r][j]);
            const vec second = broadcast(x[2 * (i * stride + r) + 1]);
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

int64_t packed_size(Dtype dtype) { return dtype == Dtype::bf16 ? sizeof(PackedPair) / 2 : 4; }

PAGODA_INLINE void put_pair(bf16 first, bf16 second, uint32_t& pair) {
    pair = first.bits | static_cast<uint32_t>(second.bits) << 16;
}
PAGODA_INLINE void put_pair(bf16 first, bf16 second, float (&pair)[2]) {
    pair[0] = as_float(first);
    pair[1] = as_float(second);
}

// To [k, rows]; in bf16 to [k / 2, rows] pairs, with a zero behind an odd k.
void pack_rows(Dtype dtype, const void* x, int64_t row_stride, int rows, int64_t k, void* packed) {
    with_type(dtype, [&](auto* type) {
        using T = Pointee<decltype(type)>;
        for (int r = 0; r < rows; ++r) {
            const T* row = static_cast<const T*>(x) + r * row_stride;
            if constexpr (std::is_same_v<T, bf16>) {
                auto* pairs = static_cast<PackedPair*>(packed);
                for (int64_t i = 0; i < k / 2; ++i) {
                    put_pair(row[2 * i], row[2 * i + 1], pairs[i * rows + r]);
                }
                if (k % 2 != 0) put_pair(row[k - 1], bf16{0}, pairs[k / 2 * rows + r]);
            } else {
                auto* floats = static_cast<float*>(packed);
                for (int64_t i = 0; i < k; ++i) floats[i * rows + r] = as_float(row[i]);
            }
        }
    });
}

void store_outputs(const float* c, int rows, const float* bias, Dtype dtype, void* out, int64_t out_stride,
                   int cols) {
    with_type(dtype, [&](auto* type) {
        auto* to = static_cast<decltype(type)>(out);
        for (int r = 0; r < rows; ++r) {
            for_vectors(cols, [&](auto get, auto put) {
                const vec sums = get(c + r * kPanel);
                put(to + r * out_stride, bias ? add(sums, get(bias)) : sums);
            });
        }
    });
}

void linear_panel(Dtype dtype, const void* panel, const void* packed, int rows, int64_t k,
                  const float* bias, Dtype out_dtype, void* out, int64_t out_stride, int cols, Prefetch ahead) {
    alignas(64) float c[kTileRows * kPanel];
    with_type(dtype, [&](auto* type) {
        using T = Pointee<decltype(type)>;
        using X = std::conditional_t<std::is_same_v<T, bf16>, PackedPair, float>;
        constexpr int per_column = std::is_same_v<T, bf16> ? 2 : 1;
        for (int column = 0; column < kPanel; column += kRegisterCols * kWidth) {
            const T* weights = static_cast<const T*>(panel) + per_column * column;
            for (int row = 0; row < rows; row += kRegisterRows) {
                const X* x = static_cast<const X*>(packed) + row;
                const int left = rows - row < kRegisterRows ? rows - row : kRegisterRows;
                with_count<kRegisterRows>(left, [&](auto count) {
                    linear_tile<decltype(count)::value>(weights, x, rows, k, ahead, c + row * kPanel + column);
                });
            }
        }
    });
    store_outputs(c, rows, bias, out_dtype, out, out_stride, cols);
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
