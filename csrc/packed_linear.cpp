// SPDX-License-Identifier: Apache-2.0
#include "packed_linear.h"

#include <algorithm>

#include "panels.h"

namespace pagoda {

namespace {

bool same_rows(const PanelShape& a, const PanelShape& b) { return a.dtype == b.dtype && a.inputs == b.inputs; }
bool same_rows(const QuantizedShape& a, const QuantizedShape& b) {
    return a.inputs == b.inputs && a.format.grouped == b.format.grouped && a.format.groups == b.format.groups &&
           a.format.group_inputs == b.format.group_inputs && a.format.zero() == b.format.zero() &&
           a.format.blocks.whole_rows == b.format.blocks.whole_rows && a.format.transposed() == b.format.transposed();
}
template <class A, class B>
bool same_rows(const A&, const B&) {
    return false;
}

int64_t panel_bytes(const PanelShape& shape) { return shape.panel_bytes(); }
int64_t panel_bytes(const QuantizedShape& shape) { return shape.format.panel_bytes(); }

}  // namespace

int64_t PackedLinear::inputs() const {
    return std::visit([](const auto& shape) { return shape.inputs; }, shape_);
}

int64_t PackedLinear::outputs() const {
    return std::visit([](const auto& shape) { return shape.outputs; }, shape_);
}

const void* PackedLinear::panel(int64_t index) const {
    return at(panels_, index * std::visit([](const auto& shape) { return panel_bytes(shape); }, shape_));
}

bool PackedLinear::packs_like(const PackedLinear& other) const {
    const bool same = std::visit([](const auto& a, const auto& b) { return same_rows(a, b); }, shape_, other.shape_);
    if (!same || order_ == other.order_) return same;
    return order_ && other.order_ && std::equal(order_, order_ + inputs(), other.order_);
}

int64_t PackedLinear::rows_at_once(const KernelTable& table) const {
    const auto* dense = std::get_if<PanelShape>(&shape_);
    return dense ? dense->rows_at_once(table) : table.quantized_rows;
}

int64_t PackedLinear::packed_row(const KernelTable& table) const {
    if (const auto* quantized = std::get_if<QuantizedShape>(&shape_)) {
        return QuantizedRow::bytes(quantized->format, table.code_size);
    }
    const auto& dense = std::get<PanelShape>(shape_);
    return dense.row_bytes(table);
}

int64_t PackedLinear::pack_scratch_bytes() const { return order_ ? inputs() * size_of(Dtype::f32) : 0; }

void PackedLinear::pack_row(const KernelTable& table, const float* row, void* packed, float* scratch) const {
    if (const auto* dense = std::get_if<PanelShape>(&shape_)) {
        table.pack_row(dense->dtype, row, dense->inputs, packed);
        return;
    }
    const auto& shape = std::get<QuantizedShape>(shape_);
    if (order_) {
        for (int64_t j = 0; j < shape.inputs; ++j) scratch[j] = row[order_[j]];
        row = scratch;
    }
    table.quantize_row(shape.format, row, shape.inputs, packed);
}

void PackedLinear::multiply(const KernelTable& table, int64_t panel_index, void* packed, int n, const float* bias,
                            float* out, int64_t out_stride, int cols, const void* next) const {
    const void* weights = panel(panel_index);
    if (const auto* dense = std::get_if<PanelShape>(&shape_)) {
        // A single row takes no time in which memory would idle: there the processor reads ahead best by itself.
        if (n == 1) next = nullptr;
        const auto ahead = Prefetch::share(next, dense->panel_bytes(), 0, 1);
        return dense->multiply(table, weights, packed, n, bias, out, out_stride, cols, ahead);
    }
    const auto& shape = std::get<QuantizedShape>(shape_);
    if (!shape.format.fetches(n)) next = nullptr;
    table.quantized_panel(shape.format, weights, packed, packed_row(table), n, bias, out, out_stride, cols, next);
}

int64_t PackedLinear::bytes() const {
    return std::visit([](const auto& shape) { return shape.bytes(); }, shape_);
}

size_t PackedLinear::scratch_bytes(const KernelTable& table, int64_t n) const {
    if (const auto* dense = std::get_if<PanelShape>(&shape_)) return linear_scratch(table, *dense, n);
    return quantized_scratch(table, std::get<QuantizedShape>(shape_), order_, n);
}

void PackedLinear::linear(const KernelTable& table, const float* bias, const float* x, int64_t n, const Outputs& out,
                          void* scratch) const {
    if (const auto* dense = std::get_if<PanelShape>(&shape_)) {
        return pagoda::linear(table, *dense, panels_, bias, x, dense->inputs, n, out, scratch);
    }
    const auto& shape = std::get<QuantizedShape>(shape_);
    quantized_linear(table, shape, panels_, order_, bias, x, shape.inputs, n, out, scratch);
}

void PackedLinear::embedding(const KernelTable& table, int64_t first_id, const int64_t* ids, int64_t n,
                             float* out) const {
    if (const auto* dense = std::get_if<PanelShape>(&shape_)) {
        return pagoda::embedding(table, *dense, panels_, first_id, ids, n, out);
    }
    quantized_embedding(table, std::get<QuantizedShape>(shape_), panels_, order_, first_id, ids, n, out);
}

}  // namespace pagoda
