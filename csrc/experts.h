// A layer's feed-forward experts, of which every token goes through a few (Shazeer et al. 2017; SwiGLU experts as in
// Mixtral, Jiang et al. 2024).
#pragma once

#include <cstddef>
#include <cstdint>
#include <variant>
#include <vector>

#include "ops.h"

namespace pagoda {

// A linear layer without bias, dense or quantized, whose rows of activations are packed by its user.
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

    // Whether rows that are packed for one are packed for the other too.
    bool packs_like(const PackedLinear& other) const;
    // Rows that are best multiplied together; never more.
    int64_t rows_at_once() const;
    // Bytes of a packed row.
    int64_t packed_row(const KernelTable& table) const;
    // Bytes of scratch that `pack` needs.
    int64_t pack_scratch_bytes() const;
    // Packs the rows that row(0) to row(n - 1) point to.
    template <class Row>
    void pack(const KernelTable& table, Row row, int n, char* packed, float* scratch) const {
        for (int i = 0; i < n; ++i) pack_row(table, row(i), packed + i * packed_row(table), scratch);
    }
    // Outputs [n, cols] of one panel; `next` is what will be read next, or null.
    void multiply(const KernelTable& table, int64_t panel, void* packed, int n, float* out, int64_t out_stride,
                  int cols, const void* next) const;

   private:
    void pack_row(const KernelTable& table, const float* row, void* packed, float* scratch) const;

    std::variant<PanelShape, QuantizedShape> shape_;
    const void* panels_;
    const int64_t* order_ = nullptr;
};

struct Expert {
    PackedLinear gate, up, down;
    bool shares_packing;  // rows that are packed for the gate are packed for `up` too
};

struct ExpertRouting {
    int num_experts;
    int per_token;
    bool renormalize;  // the probabilities of a token's experts to add up to one
};

// The experts of a layer, or those of them from `first` on: the others are elsewhere.
class Experts {
   public:
    // To `counts` [num_experts] the tokens of each expert are added, here or elsewhere.
    Experts(const KernelTable& table, int64_t hidden, const ExpertRouting& routing, int first, int64_t* counts)
        : table(table), hidden(hidden), routing(routing), first(first), counts(counts) {}

    void add(const PackedLinear& gate, const PackedLinear& up, const PackedLinear& down);

    int64_t size() const { return static_cast<int64_t>(held.size()); }
    // Multiplications for each token.
    int64_t work() const { return routing.per_token * 3 * hidden * inner; }

    const KernelTable& table;
    int64_t hidden, inner = 0;
    ExpertRouting routing;
    int first;
    int64_t* counts;
    std::vector<Expert> held;
    // Bytes of a packed row of any expert: for the gate, for `up` where the gate's packing does not serve it, and for `down`.
    int64_t gate_row = 0, up_row = 0, down_row = 0;
    int64_t pack_scratch = 0;  // bytes, of each thread
};

// out [n, hidden] = for each row of x [n, hidden] the sum of what its experts give, weighted as its logits
// [n, num_experts] say, in the order of their numbers; those elsewhere give nothing.
size_t experts_scratch(const Experts& experts, int64_t n);
void compute_experts(const Experts& experts, const float* x, int64_t row_stride, const float* logits, int64_t n,
                     float* out, void* scratch);

}  // namespace pagoda
