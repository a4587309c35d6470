// SPDX-License-Identifier: Apache-2.0
// Rows times one panel of a quantized weight. Sums of products are of integers and exact; only scales round.
#pragma once

#include <algorithm>

#include "ints.h"

namespace {

using pagoda::QuantizedRow;

// ---- activations

PAGODA_INLINE vec load_up_to(const float* p, int64_t n) {
    return n >= kWidth ? load(p) : load_first(p, n);
}

// What the codes of some inputs stand for.
struct CodeScale {
    float scale;
    int32_t sum;
};

// Inputs that are not finite make the scale NaN, and with it every output.
PAGODA_INLINE CodeScale quantize(const float* x, int64_t n, Code* codes) {
    vec highest_seen = zero(), poison = zero();
    for (int64_t i = 0; i < n; i += kWidth) {
        const vec v = load_up_to(x + i, n - i);
        highest_seen = max(magnitude(v), highest_seen);
        poison = fma(v, zero(), poison);
    }
    const float range = reduce_max(highest_seen);
    float inverse = 127.0f / range;
    // So small that the inverse is infinite, it is as good as zero.
    const bool vanishes = !(inverse <= std::numeric_limits<float>::max());
    if (vanishes) inverse = 0.0f;
    ints total = broadcast_ints(0);
    for (int64_t i = 0; i < n; i += kWidth) {
        const ints rounded = to_ints(mul(load_up_to(x + i, n - i), broadcast(inverse)));
        store_codes(codes + i, rounded);
        total = add_ints(total, rounded);
    }
    return {(vanishes ? 0.0f : range / 127.0f) + sum(poison), sum(total)};
}

using pagoda::kLanes;

constexpr int kLaneVectors = kLanes / kWidth;

// Of numbers that are not below zero, the lowest that more than so many are as low as or lower; infinite if NaN leaves no
// such number.
PAGODA_INLINE float lowest_but(const vec (&x)[kLaneVectors], int others) {
    float lowest = -1.0f;
    for (int reached = 0; reached <= others && lowest < INFINITY;) {
        vec rest = broadcast(-INFINITY);
        for (const vec& v : x) rest = max(rest, negative_above(v, lowest));
        lowest = -reduce_max(rest);
        reached = 0;
        for (const vec& v : x) reached += count_up_to(v, lowest);
    }
    return lowest;
}

// The step that makes 127 of what narrow codes stay within, and keeps the codes of all within bounds: see rounded_rows
// in pagoda/backend/reference/quantized.py.
PAGODA_INLINE float wide_step(const vec (&highest)[kLaneVectors], int64_t n) {
    const float share = static_cast<float>((n + kLanes - 1) / kLanes) / pagoda::kLargestSum;
    vec folded[kLaneVectors], top = zero();
    for (int i = 0; i < kLaneVectors; ++i) {
        folded[i] = mul(highest[i], broadcast(share));
        top = max(top, highest[i]);
    }
    for (int width = kLaneVectors / 2; width > 0; width /= 2) {
        for (int i = 0; i < width; ++i) folded[i] = add(folded[i], folded[i + width]);
    }
    const float highest_of_all = reduce_max(top);
    const float narrow = std::min(pagoda::kNarrowSpan * lowest_but(highest, pagoda::kTypicalLane), highest_of_all);
    return std::max({narrow / 127.0f, highest_of_all / pagoda::kLargestCode, sum(folded[0])});
}

// All inputs of a row, as codes of up to 15 bits. Inputs that are not finite make the scale NaN.
PAGODA_INLINE void quantize_wide(const QuantizedFormat& format, const float* x, int64_t n, const QuantizedRow& row) {
    vec highest_seen[kLaneVectors], poison = zero();
    for (vec& highest : highest_seen) highest = zero();
    // As bits, where what is not finite is higher than all numbers.
    for (int64_t i = 0; i < n; i += kLanes) {
        for (int j = 0; j < kLaneVectors; ++j) {
            const int64_t first = i + j * kWidth;
            if (first >= n) break;
            highest_seen[j] = max_bits(highest_seen[j], magnitude(load_up_to(x + first, n - first)));
        }
    }
    for (const vec& highest : highest_seen) poison = fma(highest, zero(), poison);
    const float step = wide_step(highest_seen, n);
    float inverse = 1.0f / step;
    // So small that the inverse is infinite, it is as good as zero.
    const bool vanishes = !(inverse <= std::numeric_limits<float>::max());
    if (vanishes) inverse = 0.0f;
    auto* codes = static_cast<Code*>(row.codes);
    int wide = 0;
    int32_t total = 0;
    for (int64_t g = 0; g < format.groups; ++g) {
        const int64_t end = g + 1 < format.groups ? (g + 1) * format.group_inputs : n;
        ints of_group = broadcast_ints(0);
        row.starts[g] = wide;
        for (int64_t i = g * format.group_inputs; i < end; i += kWidth) {
            const ints rounded = to_ints(mul(load_up_to(x + i, end - i), broadcast(inverse)));
            wide += store_wide_codes(codes + i, i, rounded, row.wide + wide);
            of_group = add_ints(of_group, rounded);
        }
        total = sum(of_group);
        row.totals[g] = static_cast<float>(total);
    }
    if constexpr (kByteCodes) row.wide[wide] = {0, 0};
    *row.num_wide = wide;
    *row.scales = (vanishes ? 0.0f : step) + sum(poison);
    if (format.grouped) return;
    *row.sum = total;
    *row.starts = static_cast<int32_t>(static_cast<uint32_t>(taken_too_low(format) - 128) * static_cast<uint32_t>(total));
}

void quantize_row(const QuantizedFormat& format, const float* x, int64_t inputs, void* packed) {
    const QuantizedRow row(format, sizeof(Code), packed);
    if (format.has_row_scale()) return quantize_wide(format, x, inputs, row);
    float transposed[pagoda::kBlockRowGroup];
    for (int64_t g = 0; g < format.groups; ++g) {
        const int64_t first = g * format.group_inputs;
        const int64_t n = inputs - first < format.group_inputs ? inputs - first : format.group_inputs;
        const float* own = x + first;
        if (format.transposed()) {
            for (int i = 0; i < pagoda::kBlockRowGroup; ++i) transposed[i] = own[i % 4 * 4 + i / 4];
            own = transposed;
        }
        const CodeScale result = quantize(own, n, static_cast<Code*>(row.codes) + first);
        row.starts[g] = static_cast<int32_t>(static_cast<uint32_t>(taken_too_low(format) - format.zero()) *
                                             static_cast<uint32_t>(result.sum));
        row.scales[g] = result.scale;
        row.totals[g] = result.scale * static_cast<float>(result.sum);
    }
}

// ---- products

// sums += codes of a panel, from `codes` on, times those of rows that lie `stride` codes apart. `High` codes may be above 127.
template <bool High, int Rows, int Cols>
PAGODA_INLINE void add_quads(const ints (&codes)[Cols], const Code* x, int64_t stride,
                             ints (&sums)[Rows][Cols]) {
    WeightQuads weights[Cols];
#pragma GCC unroll 2
    for (int j = 0; j < Cols; ++j) weights[j] = weight_quads<High>(codes[j]);
#pragma GCC unroll 8
    for (int r = 0; r < Rows; ++r) {
        const RowQuad quad = row_quad(x + r * stride);
#pragma GCC unroll 2
        for (int j = 0; j < Cols; ++j) sums[r][j] = add_products(sums[r][j], weights[j], quad);
    }
}

template <int Bits, int Rows, int Cols>
PAGODA_INLINE void add_group(const uint8_t* codes, const Code* x, int64_t stride, int64_t inputs,
                             const Prefetch& ahead, int64_t& lines, ints (&sums)[Rows][Cols]) {
    // One code of 8 bits, or two of 4 bits, in a byte.
    constexpr int step = 4 * (8 / Bits);
#ifdef __ARM_FEATURE_MATMUL_INT8
    if constexpr (Rows > 1) {
        constexpr int lines_of_eight = 8 / step;
        const int64_t eights = inputs / 8;
        add_eights<Rows, Cols>(eights, x, stride, sums, [&](int64_t i, ints (&first)[Cols], ints (&second)[Cols]) {
            const uint8_t* own = codes + i * lines_of_eight * 4 * kPanel;
            for (int line = 0; line < lines_of_eight; ++line) fetch_ahead(ahead, lines++);
#pragma GCC unroll 2
            for (int j = 0; j < Cols; ++j) {
                const ints bytes = load_ints(own + j * kVectorBytes);
                first[j] = Bits == 8 ? bytes : low_nibbles(bytes);
                second[j] = Bits == 8 ? load_ints(own + 4 * kPanel + j * kVectorBytes) : high_nibbles(bytes);
            }
        });
        codes += eights * lines_of_eight * 4 * kPanel, x += eights * 8, inputs -= eights * 8;
    }
#endif
    for (int64_t i = 0; i < inputs; i += step, codes += 4 * kPanel) {
        fetch_ahead(ahead, lines++);
        ints bytes[Cols], nibbles[Cols];
#pragma GCC unroll 2
        for (int j = 0; j < Cols; ++j) bytes[j] = load_ints(codes + j * kVectorBytes);
        if constexpr (Bits == 8) {
            add_quads<true, Rows, Cols>(bytes, x + i, stride, sums);
        } else {
#pragma GCC unroll 2
            for (int j = 0; j < Cols; ++j) nibbles[j] = low_nibbles(bytes[j]);
            add_quads<false, Rows, Cols>(nibbles, x + i, stride, sums);
#pragma GCC unroll 2
            for (int j = 0; j < Cols; ++j) nibbles[j] = high_nibbles(bytes[j]);
            add_quads<false, Rows, Cols>(nibbles, x + i + 4, stride, sums);
        }
    }
}

// What rows' wide quads, and the weights' zero points, add to the sums of a panel from `column` on.
template <int Rows, int Cols>
PAGODA_INLINE void add_wide(const QuantizedFormat& format, const uint8_t* panel, int column, const QuantizedRow& row,
                            int64_t row_bytes, ints (&sums)[Rows][Cols]) {
    const auto of_row = [&](const auto* first, int r) {
        return reinterpret_cast<decltype(first)>(reinterpret_cast<const char*>(first) + r * row_bytes);
    };
    if constexpr (kByteCodes) {
        const uint8_t* codes = panel + 4 * column;
        // One of each of four rows at once, as each of a row waits for the one before it; that behind the last counts for
        // nothing.
        constexpr int at_once = Rows == 1 ? 2 : 1;
#pragma GCC unroll 2
        for (int first = 0; first < Rows; first += 4) {
            constexpr int most_rows = Rows < 4 ? Rows : 4;
            ints units[most_rows][at_once][Cols];
            int counts[most_rows], most = 0;
#pragma GCC unroll 4
            for (int r = 0; r < most_rows; ++r) {
                for (auto& some : units[r]) {
                    for (ints& one : some) one = broadcast_ints(0);
                }
                counts[r] = first + r < Rows ? *of_row(row.num_wide, first + r) : 0;
                most = counts[r] > most ? counts[r] : most;
            }
            if (most == 0) continue;
            for (int k = 0; k < most; k += at_once) {
#pragma GCC unroll 4
                for (int r = 0; r < most_rows; ++r) {
                    if (first + r >= Rows) continue;
#pragma GCC unroll 2
                    for (int i = 0; i < at_once; ++i) {
                        const WideQuad& wide = of_row(row.wide, first + r)[k + i < counts[r] ? k + i : counts[r]];
                        const RowQuad quad = row_quad(reinterpret_cast<const Code*>(&wide.codes));
#pragma GCC unroll 2
                        for (int j = 0; j < Cols; ++j) {
                            const auto weights = weight_quads<true>(load_ints(codes + wide.offset + j * kVectorBytes));
                            units[r][i][j] = add_products(units[r][i][j], weights, quad);
                        }
                    }
                }
            }
#pragma GCC unroll 4
            for (int r = 0; r < most_rows; ++r) {
                if (first + r >= Rows) continue;
#pragma GCC unroll 2
                for (int j = 0; j < Cols; ++j) {
                    ints all = units[r][0][j];
                    if (at_once == 2) all = add_ints(all, units[r][at_once - 1][j]);
                    sums[first + r][j] = add_ints(sums[first + r][j], times_wide_unit(all));
                }
            }
        }
    }
    if (!format.offsets) return;
    const uint8_t* zero_points = panel + format.code_bytes() + 4 * (kPanel + column);
#pragma GCC unroll 2
    for (int j = 0; j < Cols; ++j) {
        const ints own = load_ints(zero_points + j * kVectorBytes);
#pragma GCC unroll 8
        for (int r = 0; r < Rows; ++r) {
            sums[r][j] = subtract_ints(sums[r][j], multiply_ints(own, broadcast_ints(*of_row(row.sum, r))));
        }
    }
}

// c [Rows, Cols vectors] of a panel from its column on; Scale is the type of a weight's scale.
template <int Rows, int Cols, int Bits, class Scale>
PAGODA_INLINE void quantized_tile(const QuantizedFormat& format, const uint8_t* panel, int column,
                                  const QuantizedRow& row, int64_t row_bytes, const Prefetch& ahead,
                                  float* c) {
    int64_t lines = 0;
    const int64_t stride = row_bytes / static_cast<int64_t>(sizeof(Code)), meta = row_bytes / 4;
    const Code* x = static_cast<const Code*>(row.codes);
    vec results[Rows][Cols];
#pragma GCC unroll 8
    for (int r = 0; r < Rows; ++r) {
        for (int j = 0; j < Cols; ++j) results[r][j] = zero();
    }
    for (int64_t g = 0; g < format.groups; ++g, panel += format.group_bytes()) {
        ints sums[Rows][Cols];
#pragma GCC unroll 8
        for (int r = 0; r < Rows; ++r) {
            for (int j = 0; j < Cols; ++j) sums[r][j] = broadcast_ints(row.starts[r * meta + g]);
        }
        add_group<Bits, Rows, Cols>(panel + 4 * column, x + g * format.group_inputs, stride,
                                    format.group_inputs, ahead, lines, sums);
        constexpr bool one_group = std::is_same_v<Scale, float>;
        if constexpr (one_group) add_wide<Rows, Cols>(format, panel, column, row, row_bytes, sums);
        const auto* scales = reinterpret_cast<const Scale*>(panel + format.code_bytes()) + column;
#pragma GCC unroll 2
        for (int j = 0; j < Cols; ++j) {
            const vec scale = load(scales + j * kWidth);
#pragma GCC unroll 8
            for (int r = 0; r < Rows; ++r) {
                const vec both = mul(scale, broadcast(row.scales[r * meta + g]));
                results[r][j] = fma(to_floats(sums[r][j]), both, results[r][j]);
            }
        }
        if (one_group || !format.offsets) continue;
#pragma GCC unroll 2
        for (int j = 0; j < Cols; ++j) {
            const vec offset = load(scales + kPanel + j * kWidth);
#pragma GCC unroll 8
            for (int r = 0; r < Rows; ++r) {
                results[r][j] = fma(offset, broadcast(row.totals[r * meta + g]), results[r][j]);
            }
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < Rows; ++r) {
        for (int j = 0; j < Cols; ++j) store(c + r * kPanel + j * kWidth, results[r][j]);
    }
}

// Rows of a register tile: accumulators of integers, and with groups as many of floats, have to fit.
#if defined(__AVX512VNNI__)
constexpr int kInt8Rows = 8, kGroupedRows = 6;
#elif defined(__AVX512F__)
constexpr int kInt8Rows = 8, kGroupedRows = 4;
#elif defined(PAGODA_AVX_VNNI)
constexpr int kInt8Rows = 6, kGroupedRows = 3;
#elif defined(__ARM_FEATURE_DOTPROD)
constexpr int kInt8Rows = 6, kGroupedRows = 4;
#else
constexpr int kInt8Rows = 4, kGroupedRows = 2;
#endif

template <int MaxRows, int Bits, class Scale>
void quantized_panel(const QuantizedFormat& format, const uint8_t* panel, char* rows,
                     int64_t row_bytes, int64_t n, const float* bias, float* out, int64_t out_stride, int cols,
                     const void* next) {
    alignas(64) float c[MaxRows * kPanel];
    const int64_t tiles = (n + MaxRows - 1) / MaxRows;
    for (int64_t tile = 0; tile < tiles; ++tile) {
        const int64_t first = n * tile / tiles;
        const int count = static_cast<int>(n * (tile + 1) / tiles - first);
        const QuantizedRow row(format, sizeof(Code), rows + first * row_bytes);
        const auto ahead = Prefetch::share(next, format.panel_bytes(), tile, tiles);
        for (int column = 0; column < kPanel; column += kRegisterCols * kWidth) {
            with_count<MaxRows>(count, [&](auto known) {
                quantized_tile<decltype(known)::value, kRegisterCols, Bits, Scale>(format, panel, column, row,
                                                                                   row_bytes, ahead, c + column);
            });
        }
        store_outputs(c, count, bias, out + first * out_stride, out_stride, cols);
    }
}

void quantized_panel(const QuantizedFormat& format, const void* panel_, void* rows_, int64_t row_bytes, int64_t n,
                     const float* bias, float* out, int64_t out_stride, int cols, const void* next) {
    const auto* panel = static_cast<const uint8_t*>(panel_);
    auto* rows = static_cast<char*>(rows_);
    if (!format.grouped) {
        quantized_panel<kInt8Rows, 8, float>(format, panel, rows, row_bytes, n, bias, out, out_stride,
                                             cols, next);
    } else if (format.bits == 8) {
        quantized_panel<kGroupedRows, 8, f16>(format, panel, rows, row_bytes, n, bias, out, out_stride,
                                              cols, next);
    } else {
        quantized_panel<kGroupedRows, 4, f16>(format, panel, rows, row_bytes, n, bias, out, out_stride,
                                              cols, next);
    }
}

// ---- weights

PAGODA_INLINE float as_float(const void* p, int64_t i, bool half) {
    return half ? as_float(static_cast<const f16*>(p)[i]) : static_cast<const float*>(p)[i];
}

void dequantize_row(const QuantizedFormat& format, const void* panel_, int lane, const int64_t* order,
                    int64_t inputs, float* out) {
    const auto* panel = static_cast<const uint8_t*>(panel_);
    for (int64_t i = 0; i < inputs; ++i) {
        const int64_t g = i / format.group_inputs, within = i % format.group_inputs;
        const uint8_t* group = panel + g * format.group_bytes();
        const uint8_t* scales = group + format.code_bytes();
        const float scale = as_float(scales, lane, format.grouped);
        int32_t zero_point = 0;
        if (!format.grouped && format.offsets) std::memcpy(&zero_point, scales + 4 * (kPanel + lane), 4);
        const float code = static_cast<float>(format.code(group, lane, within) - format.zero() - zero_point);
        const float offset = format.offsets && format.grouped ? as_float(scales, kPanel + lane, true) : 0.0f;
        out[order ? order[i] : i] = code * scale + offset;
    }
}

}  // namespace
