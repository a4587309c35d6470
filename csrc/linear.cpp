// SPDX-License-Identifier: Apache-2.0
#include <cstring>

#include "ops.h"
#include "panels.h"

namespace pagoda {

namespace {

// How far apart the weights of one output lie in a panel: one input, or one pair of inputs.
struct Column {
    int64_t inputs;       // in one element
    int64_t elements;     // of a column
    int64_t element_size;

    explicit Column(const PanelShape& shape)
        : inputs(shape.dtype == Dtype::bf16 ? 2 : 1),
          elements(shape.padded_inputs() / inputs),
          element_size(inputs * size_of(shape.dtype)) {}
};

// Rows that are shared out together at most where there are few panels.
constexpr int64_t kSharedRows = 32;

// Elements of a column that are packed before those of the next: the lines of a panel they go to stay in the cache.
constexpr int64_t kElementsAtOnce = 64;

// The elements of a row from `begin` to `end`; the last pair of an odd row has no second half.
template <class Element>
void pack_elements(const char* row, int64_t row_bytes, int64_t begin, int64_t end, char* to) {
    const auto size = static_cast<int64_t>(sizeof(Element));
    const int64_t whole = std::min(end, row_bytes / size);
    for (int64_t i = begin; i < whole; ++i) {
        std::memcpy(to + i * kPanel * size, row + i * size, sizeof(Element));
    }
    if (whole == end) return;
    Element element{};
    std::memcpy(&element, row + whole * size, static_cast<size_t>(row_bytes - whole * size));
    std::memcpy(to + whole * kPanel * size, &element, sizeof(Element));
}

template <class Element>
void pack_panel(const Column& column, const char* rows, int64_t row_bytes, int64_t outputs, char* to) {
    for (int64_t begin = 0; begin < column.elements; begin += kElementsAtOnce) {
        const int64_t end = std::min(begin + kElementsAtOnce, column.elements);
        for (int64_t j = 0; j < outputs; ++j) {
            pack_elements<Element>(rows + j * row_bytes, row_bytes, begin, end, to + j * column.element_size);
        }
    }
}

}  // namespace

void pack_weight(const PanelShape& shape, const void* weight, void* packed) {
    const Column column(shape);
    const int64_t row_bytes = shape.inputs * size_of(shape.dtype);
#pragma omp parallel for schedule(static)
    for (int64_t panel = 0; panel < shape.panels(); ++panel) {
        char* to = at(packed, panel * shape.panel_bytes());
        const int64_t first = panel * kPanel;
        const int64_t outputs = std::min<int64_t>(kPanel, shape.outputs - first);
        if (outputs < kPanel) std::memset(to, 0, static_cast<size_t>(shape.panel_bytes()));
        const char* rows = at(weight, first * row_bytes);
        if (column.element_size == 4) {
            pack_panel<uint32_t>(column, rows, row_bytes, outputs, to);
        } else {
            pack_panel<uint16_t>(column, rows, row_bytes, outputs, to);
        }
    }
}

void pack_small(const PanelShape& shape, const uint8_t* values, const float* scales, void* packed) {
    const int64_t groups = (shape.inputs + shape.group - 1) / shape.group;
#pragma omp parallel for schedule(static)
    for (int64_t panel = 0; panel < shape.panels(); ++panel) {
        auto* to = reinterpret_cast<uint8_t*>(at(packed, panel * shape.panel_bytes()));
        std::memset(to, 0, static_cast<size_t>(shape.panel_bytes()));
        const SmallPanel place = shape.small(to);
        const int64_t first = panel * kPanel, pair = place.side_by_side();
        const int outputs = static_cast<int>(std::min<int64_t>(kPanel, shape.outputs - first));
        for (int64_t g = 0; g < groups; ++g) {
            const int64_t begin = g * shape.group, end = std::min(begin + shape.group, shape.inputs);
            uint8_t* of_group = to + (place.group_at(begin) - to);
            uint8_t* codes = of_group + place.scale_bytes();
            for (int j = 0; j < outputs; ++j) {
                const float scale = scales[(first + j) * groups + g] * 256.0f;
                std::memcpy(of_group + 4 * j, &scale, 4);
                const uint8_t* row = values + (first + j) * shape.inputs;
                for (int64_t i = begin; i < end; ++i) {
                    const int64_t within = i - begin;
                    codes[within / pair * pair * kPanel + j * pair + within % pair] = row[i];
                }
            }
        }
    }
}

void embedding(const KernelTable& table, const PanelShape& shape, const void* packed, int64_t first_id,
               const int64_t* ids, int64_t n, float* out) {
    parallel_for_rows(n, [&](int64_t i) {
        const int64_t row = ids[i] - first_id;
        float* to = out + i * shape.inputs;
        if (row < 0 || row >= shape.outputs) {
            std::fill_n(to, shape.inputs, 0.0f);
            return;
        }
        if (shape.group) {
            const void* panel = at(packed, row / kPanel * shape.panel_bytes());
            return table.widen_small_row(shape.small(panel), static_cast<int>(row % kPanel), to);
        }
        table.widen_row(shape.dtype, at(packed, row / kPanel * shape.panel_bytes()), static_cast<int>(row % kPanel),
                        shape.inputs, to);
    });
}

size_t linear_scratch(const KernelTable& table, const PanelShape& shape, int64_t n) {
    return sizeof(WorkQueue) + static_cast<size_t>(n * shape.row_bytes(table));
}

void linear(const KernelTable& table, const PanelShape& shape, const void* packed, const float* bias,
            const float* x, int64_t row_stride, int64_t n, const Outputs& out, void* scratch) {
    const int64_t row_bytes = shape.row_bytes(table);
    WorkQueue& queue = WorkQueue::reset(scratch);
    scratch = at(scratch, sizeof(WorkQueue));
    out.begin(n);
    parallel_for_rows(n, [&](int64_t row) {
        table.pack_row(shape.dtype, x + row * row_stride, shape.inputs, at(scratch, row * row_bytes));
    });
    const auto multiply = [&](int64_t panel, int64_t first, int64_t rows, float* to, int64_t stride, int64_t next) {
        const int64_t column = panel * kPanel, at_once = shape.rows_at_once(table), tiles = (rows + at_once - 1) / at_once;
        const int columns = static_cast<int>(std::min<int64_t>(kPanel, shape.outputs - column));
        const void* next_panel = next >= 0 ? at(packed, next * shape.panel_bytes()) : nullptr;
        for (int64_t tile = 0; tile < tiles; ++tile) {
            const int64_t begin = rows * tile / tiles, end = rows * (tile + 1) / tiles;
            shape.multiply(table, at(packed, panel * shape.panel_bytes()), at(scratch, (first + begin) * row_bytes),
                           static_cast<int>(end - begin), bias ? bias + column : nullptr, to + begin * stride, stride,
                           columns, Prefetch::share(next_panel, shape.panel_bytes(), tile, tiles));
        }
    };
    // A single row takes no time in which memory would idle: there the processor reads ahead best by itself.
    const int64_t shared = std::min<int64_t>(shape.rows_at_once(table), kSharedRows);
    for_output_panels(table, queue, shape.outputs, n, row_bytes, shared, n > 1, out, multiply);
}

}  // namespace pagoda
