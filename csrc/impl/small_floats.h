// SPDX-License-Identifier: Apache-2.0
// Rows times one panel of 8-bit floats; see SmallPanel in kernels.h. Numbers become those that dense weights have, some
// inputs at a time, and are multiplied like them: rows are rounded no further. A group's sum is multiplied by its scale.
#pragma once

#include "ints.h"

namespace {

using pagoda::kSmallRows;
using pagoda::SmallPanel;

// Inputs of a panel that are widened at once: they stay in the first cache while all rows go by.
constexpr int64_t kWidenedInputs = 128;

template <class T>
PAGODA_INLINE void widen(const uint8_t* from, int64_t count, T* to) {
    for (int64_t i = 0; i < count; i += kWidth) store(to + i, load_small_floats(from + i));
}

// sums [rows, kPanel] += rows times so many inputs of a panel.
template <class T, class X>
PAGODA_INLINE void add_widened(const T* weights, const X* x, int64_t stride, int64_t inputs, int rows, float* sums) {
    constexpr int per_column = std::is_same_v<T, bf16> ? 2 : 1, columns = kRegisterCols * kWidth;
    alignas(64) float part[kRegisterRows * kPanel];
    for (int column = 0; column < kPanel; column += columns) {
        for (int row = 0; row < rows; row += kRegisterRows) {
            with_count<kRegisterRows>(rows - row < kRegisterRows ? rows - row : kRegisterRows, [&](auto count) {
                constexpr int some = decltype(count)::value;
                linear_tile<some>(weights + per_column * column, x + row * stride, stride, inputs, Prefetch{}, part);
                for (int r = 0; r < some; ++r) {
                    float* to = sums + (row + r) * kPanel + column;
                    for (int j = 0; j < columns; j += kWidth) store(to + j, add(load(to + j), load(part + r * kPanel + j)));
                }
            });
        }
    }
}

void small_panel(const SmallPanel& panel, const void* packed, int64_t row_bytes, int rows, const float* bias, float* out,
                 int64_t out_stride, int cols) {
    alignas(64) float c[kSmallRows * kPanel], sums[kSmallRows * kPanel];
    const int size = rows * kPanel;
    std::fill_n(c, size, 0.0f);
    with_type(panel.dtype, [&](auto* type) {
        constexpr bool is_pair = std::is_same_v<Pointee<decltype(type)>, bf16>;
        using T = std::conditional_t<is_pair, bf16, float>;
        using X = std::conditional_t<is_pair, PackedBf16, float>;
        alignas(64) T widened[kWidenedInputs * kPanel];
        for (int64_t first = 0; first < panel.inputs; first += panel.group) {
            const uint8_t* scales = panel.group_at(first);
            const int64_t inputs = std::min(panel.group, panel.inputs - first);
            std::fill_n(sums, size, 0.0f);
            for (int64_t begin = 0; begin < inputs; begin += kWidenedInputs) {
                const int64_t some = std::min(kWidenedInputs, inputs - begin);
                widen(scales + panel.scale_bytes() + begin * kPanel, (some + is_pair) / (1 + is_pair) * (1 + is_pair) * kPanel, widened);
                const X* x = static_cast<const X*>(packed) + first + begin;
                add_widened(widened, x, row_bytes / static_cast<int64_t>(sizeof(X)), some, rows, sums);
            }
            for (int i = 0; i < size; i += kWidth) {
                const vec scale = load(reinterpret_cast<const float*>(scales) + i % kPanel);
                store(c + i, fma(load(sums + i), scale, load(c + i)));
            }
        }
    });
    store_outputs(c, rows, bias, out, out_stride, cols);
}

void widen_small_row(const SmallPanel& panel, int output, float* out) {
    const int side_by_side = panel.dtype == Dtype::bf16 ? 2 : 1;
    for (int64_t i = 0; i < panel.inputs; ++i) {
        const int64_t first = i / panel.group * panel.group, within = i - first;
        const uint8_t* scales = panel.group_at(first);
        const uint8_t* codes = scales + panel.scale_bytes() + within / side_by_side * side_by_side * kPanel;
        const e4m3 code{codes[output * side_by_side + within % side_by_side]};
        out[i] = as_float(code) * (reinterpret_cast<const float*>(scales)[output] * 0x1p-8f);
    }
}

}  // namespace
