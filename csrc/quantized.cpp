// SPDX-License-Identifier: Apache-2.0
#include <cstring>
#include <vector>

#include "ops.h"
#include "panels.h"

namespace pagoda {

namespace {

// Rows that are shared out together where there are few panels.
constexpr int64_t kRows = 24;

// Four codes of an output, zeros where there are fewer.
uint32_t load_codes(const uint8_t* codes, int64_t n) {
    uint32_t word = 0;
    if (n >= 4) {
        std::memcpy(&word, codes, 4);
    } else if (n > 0) {
        std::memcpy(&word, codes, static_cast<size_t>(n));
    }
    return word;
}

// Inputs of one output that are packed before those of the next: the lines they go to stay in the cache.
constexpr int64_t kInputsAtOnce = 256;

// Codes of one output, of n inputs, to a panel.
void pack_codes(const QuantizedFormat& format, const uint8_t* codes, int64_t n, uint8_t* to) {
    const int64_t step = 32 / format.bits;
    // Signed codes become unsigned ones.
    const uint32_t flip = format.grouped ? 0 : 0x80808080;
    for (int64_t i = 0; i < n; i += step, to += 4 * kPanel) {
        uint32_t word = load_codes(codes + i, n - i) ^ flip;
        if (format.bits == 4) word |= load_codes(codes + i + 4, n - i - 4) << 4;
        std::memcpy(to, &word, 4);
    }
}

void pack_panel(const QuantizedShape& shape, const uint8_t* codes, const char* scales, const char* offsets,
                int64_t outputs, uint8_t* to) {
    const QuantizedFormat& format = shape.format;
    const auto item = static_cast<size_t>(format.scale_size());
    for (int64_t g = 0; g < format.groups; ++g, to += format.group_bytes()) {
        const int64_t first = g * format.group_inputs;
        const int64_t end = std::min(first + format.group_inputs, shape.inputs);
        for (int64_t begin = first; begin < end; begin += kInputsAtOnce) {
            uint8_t* words = to + (begin - first) * format.bits / 8 * kPanel;
            const int64_t n = std::min(kInputsAtOnce, end - begin);
            for (int64_t j = 0; j < outputs; ++j) {
                pack_codes(format, codes + j * shape.inputs + begin, n, words + 4 * j);
            }
        }
        for (int64_t j = 0; j < outputs; ++j) {
            const int64_t from = (j * format.groups + g) * static_cast<int64_t>(item);
            uint8_t* scale = to + format.code_bytes() + j * static_cast<int64_t>(item);
            std::memcpy(scale, scales + from, item);
            if (format.offsets) std::memcpy(scale + kPanel * item, offsets + from, item);
        }
    }
}

void reorder(const float* x, int64_t row_stride, const int64_t* order, int64_t inputs, int64_t n, float* to) {
    parallel_for_rows(n, [&](int64_t row) {
        for (int64_t i = 0; i < inputs; ++i) to[row * inputs + i] = x[row * row_stride + order[i]];
    });
}

int64_t packed_rows_bytes(const KernelTable& table, const QuantizedShape& shape, int64_t n) {
    return n * QuantizedRow::bytes(shape.format, table.code_size);
}

}  // namespace

void pack_quantized(const QuantizedShape& shape, const void* codes, const void* scales, const void* offsets,
                    void* packed) {
    const QuantizedFormat& format = shape.format;
    const int64_t scale_row = format.groups * format.scale_size();
#pragma omp parallel for schedule(static)
    for (int64_t panel = 0; panel < shape.panels(); ++panel) {
        const int64_t first = panel * kPanel;
        const int64_t outputs = std::min<int64_t>(kPanel, shape.outputs - first);
        char* to = at(packed, panel * format.panel_bytes());
        if (outputs < kPanel) std::memset(to, 0, static_cast<size_t>(format.panel_bytes()));
        const auto* own_codes = static_cast<const uint8_t*>(codes) + first * shape.inputs;
        const char* own_offsets = offsets ? at(offsets, first * scale_row) : nullptr;
        pack_panel(shape, own_codes, at(scales, first * scale_row), own_offsets, outputs,
                   reinterpret_cast<uint8_t*>(to));
    }
}

void quantize_int8(const KernelTable& table, const PanelShape& shape, const void* weight, void* codes,
                   float* scales, int32_t* zero_points) {
    const int64_t row_bytes = shape.inputs * size_of(shape.dtype);
#pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < shape.outputs; ++i) {
        table.round_to_int8(shape.dtype, at(weight, i * row_bytes), shape.inputs, at(codes, i * shape.inputs),
                            scales + i, zero_points ? zero_points + i : nullptr);
    }
}

void quantize_int4(const KernelTable& table, const PanelShape& shape, int64_t group_size, const void* weight,
                   uint8_t* codes, void* scales) {
    const int64_t row_bytes = shape.inputs * size_of(shape.dtype);
#pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < shape.outputs; ++i) {
        table.round_to_int4(shape.dtype, at(weight, i * row_bytes), shape.inputs, group_size,
                            codes + i * shape.inputs, at(scales, i * (shape.inputs / group_size) * 2));
    }
}

void quantize_blocks(const KernelTable& table, const PanelShape& shape, int bits, int64_t group_size, const void* weight,
                     const RoundedBlocks& blocks) {
    const int64_t row_bytes = shape.inputs * size_of(shape.dtype), groups = shape.inputs / group_size;
#pragma omp parallel
    {
        std::vector<float> scratch(static_cast<size_t>(2 * groups));
#pragma omp for schedule(static)
        for (int64_t i = 0; i < shape.outputs; ++i) {
            const RoundedBlocks row{blocks.codes + i * shape.inputs, blocks.scales + i * groups, blocks.minima + i * groups,
                                    at(blocks.scale, 2 * i), at(blocks.minimum, 2 * i)};
            table.round_to_blocks(shape.dtype, at(weight, i * row_bytes), shape.inputs, bits, group_size, row,
                                  scratch.data());
        }
    }
}

void quantized_embedding(const KernelTable& table, const QuantizedShape& shape, const void* packed,
                         const int64_t* order, int64_t first_id, const int64_t* ids, int64_t n, float* out) {
    parallel_for_rows(n, [&](int64_t i) {
        const int64_t row = ids[i] - first_id;
        float* to = out + i * shape.inputs;
        if (row < 0 || row >= shape.outputs) {
            std::fill_n(to, shape.inputs, 0.0f);
            return;
        }
        table.dequantize_row(shape.format, at(packed, row / kPanel * shape.format.panel_bytes()),
                             static_cast<int>(row % kPanel), order, shape.inputs, to);
    });
}

size_t quantized_scratch(const KernelTable& table, const QuantizedShape& shape, const int64_t* order, int64_t n) {
    const int64_t reordered = order ? n * shape.inputs * size_of(Dtype::f32) : 0;
    return sizeof(WorkQueue) + static_cast<size_t>(packed_rows_bytes(table, shape, n) + reordered);
}

void quantized_linear(const KernelTable& table, const QuantizedShape& shape, const void* packed,
                      const int64_t* order, const float* bias, const float* x, int64_t row_stride, int64_t n,
                      const Outputs& out, void* scratch) {
    const QuantizedFormat& format = shape.format;
    const int64_t row_bytes = QuantizedRow::bytes(format, table.code_size);
    WorkQueue& queue = WorkQueue::reset(scratch);
    scratch = at(scratch, sizeof(WorkQueue));
    out.begin(n);
    if (order) {
        auto* reordered = reinterpret_cast<float*>(at(scratch, packed_rows_bytes(table, shape, n)));
        reorder(x, row_stride, order, shape.inputs, n, reordered);
        x = reordered;
        row_stride = shape.inputs;
    }
    parallel_for_rows(n, [&](int64_t row) {
        table.quantize_row(format, x + row * row_stride, shape.inputs, at(scratch, row * row_bytes));
    });
    const auto multiply = [&](int64_t panel, int64_t first, int64_t rows, float* to, int64_t stride, int64_t next) {
        const int64_t column = panel * kPanel;
        table.quantized_panel(format, at(packed, panel * format.panel_bytes()), at(scratch, first * row_bytes), row_bytes,
                              rows, bias ? bias + column : nullptr, to, stride,
                              static_cast<int>(std::min<int64_t>(kPanel, shape.outputs - column)),
                              next >= 0 ? at(packed, next * format.panel_bytes()) : nullptr);
    };
    for_output_panels(table, queue, shape.outputs, n, row_bytes, kRows, format.fetches(n), out, multiply);
}

}  // namespace pagoda
