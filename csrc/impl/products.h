// SPDX-License-Identifier: Apache-2.0
// Dispatch on counts and types, and the product that other kernels are made of.
#pragma once

#include <type_traits>

#include "../kernels.h"
#include "../vec.h"

namespace {

using pagoda::Dtype;
using pagoda::kTileRows;

template <int N>
struct Count {
    static constexpr int value = N;
};

// Calls f(Count<n>) for an n known at run time, 1 to Max.
template <int Max, class F>
PAGODA_INLINE void with_count(int n, F f) {
    if (n == Max) {
        f(Count<Max>{});
    } else if constexpr (Max > 1) {
        with_count<Max - 1>(n, f);
    }
}

// Calls f(pointer of the type of such activations) with a null pointer.
template <class F>
PAGODA_INLINE void with_type(Dtype dtype, F f) {
    switch (dtype) {
        case Dtype::f32: return f(static_cast<float*>(nullptr));
        case Dtype::bf16: return f(static_cast<bf16*>(nullptr));
        case Dtype::f16: return f(static_cast<f16*>(nullptr));
        case Dtype::i8:
        case Dtype::e4m3: return;
    }
}

template <class T>
using Pointee = std::remove_pointer_t<T>;

// Accumulators of Rows x Cols vectors have to fit the registers, with a vector for each column and one more.
constexpr int kRegisterRows = kWidth == 16 ? kTileRows : 6;
constexpr int kRegisterCols = 2;

// c [Rows, Cols vectors] = a b; a(r, i) reads a, b is [k, b_stride].
template <int Rows, int Cols, class A, class B>
PAGODA_INLINE void multiply(A a, const B* b, int64_t b_stride, int64_t k, float* c, int64_t c_stride) {
    vec sums[Rows][Cols];
#pragma GCC unroll 12
    for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 8
        for (int j = 0; j < Cols; ++j) sums[r][j] = zero();
    }
    for (int64_t i = 0; i < k; ++i) {
        vec columns[Cols];
#pragma GCC unroll 8
        for (int j = 0; j < Cols; ++j) columns[j] = load(b + i * b_stride + j * kWidth);
#pragma GCC unroll 12
        for (int r = 0; r < Rows; ++r) {
            const vec x = broadcast(a(r, i));
#pragma GCC unroll 8
            for (int j = 0; j < Cols; ++j) sums[r][j] = fma(x, columns[j], sums[r][j]);
        }
    }
#pragma GCC unroll 12
    for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 8
        for (int j = 0; j < Cols; ++j) store(c + r * c_stride + j * kWidth, sums[r][j]);
    }
}

}  // namespace
