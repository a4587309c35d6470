// SPDX-License-Identifier: Apache-2.0
// A weight of a linear layer in panels, of whatever format.
#pragma once

#include <cstddef>
#include <cstdint>
#include <variant>

#include "ops.h"

namespace pagoda {

// A linear layer without bias, dense or quantized.
class PackedLinear {
   public:
    PackedLinear(const PanelShape& shape, const void* panels) : shape_(shape), panels_(panels) {}
    // With `order`, the map's input `i` is the activation's element order[i].
    PackedLinear(const QuantizedShape& shape, const void* panels, const int64_t* order)
        : shape_(shape), panels_(panels), order_(order) {}

    int64_t inputs() const;
    int64_t outputs() const;
    int64_t num_panels() const { return (outputs() + kPanel - 1) / kPanel; }
    const void* panel(int64_t index) const;

    // Bytes of the panels.
    int64_t bytes() const;

    // ---- computed as a whole, by all threads of a team

    size_t scratch_bytes(const KernelTable& table, int64_t n) const;
    // Rows of x [n, inputs] times the weight, plus `bias` unless it is null.
    void linear(const KernelTable& table, const float* bias, const float* x, int64_t n, const Outputs& out,
                void* scratch) const;
    // Rows of the weight, which has those of ids from `first_id` on; zeros where it has none.
    void embedding(const KernelTable& table, int64_t first_id, const int64_t* ids, int64_t n, float* out) const;

    // ---- computed in pieces; rows of activations are packed by its user

    // Whether rows that are packed for one are packed for the other too.
    bool packs_like(const PackedLinear& other) const;
    // Rows that are best multiplied together; never more.
    int64_t rows_at_once(const KernelTable& table) const;
    // Bytes of a packed row.
    int64_t packed_row(const KernelTable& table) const;
    // Bytes of scratch that `pack` needs.
    int64_t pack_scratch_bytes() const;
    // Packs the rows that row(0) to row(n - 1) point to.
    template <class Row>
    void pack(const KernelTable& table, Row row, int n, char* packed, float* scratch) const {
        for (int i = 0; i < n; ++i) pack_row(table, row(i), packed + i * packed_row(table), scratch);
    }
    // Outputs [n, cols] of one panel, plus its bias unless that is null; `next` is what will be read next, or null.
    void multiply(const KernelTable& table, int64_t panel, void* packed, int n, const float* bias, float* out,
                  int64_t out_stride, int cols, const void* next) const;

   private:
    void pack_row(const KernelTable& table, const float* row, void* packed, float* scratch) const;

    std::variant<PanelShape, QuantizedShape> shape_;
    const void* panels_;
    const int64_t* order_ = nullptr;
};

}  // namespace pagoda
