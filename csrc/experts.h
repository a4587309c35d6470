// SPDX-License-Identifier: Apache-2.0
// A layer's feed-forward experts, of which every token goes through a few (Shazeer et al. 2017; gated as in Mixtral,
// Jiang et al. 2024).
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "packed_linear.h"

namespace pagoda {

// A map of an expert; the bias is of whole panels, or null.
struct ExpertMap {
    PackedLinear weight;
    const float* bias;

    const float* bias_of(int64_t panel) const { return bias == nullptr ? nullptr : bias + panel * kPanel; }
};

struct Expert {
    ExpertMap gate, up, down;
    bool shares_packing;  // rows that are packed for the gate are packed for `up` too
    bool one_map;         // the gate is `up` (Nemotron-H)
};

// The experts of a layer, or those of them from `first` on: the others are elsewhere.
class Experts {
   public:
    // `correction` [num_experts] is added to scores for the choice, or null. To `counts` [num_experts] the tokens of each
    // expert are added, here or elsewhere.
    Experts(const KernelTable& table, int64_t hidden, const ExpertRouting& routing, const float* correction,
            const Gate& activation, int first, int64_t* counts)
        : table(table), hidden(hidden), routing(routing), correction(correction), activation(activation), first(first),
          counts(counts) {}

    void add(const ExpertMap& gate, const ExpertMap& up, const ExpertMap& down);

    int64_t size() const { return static_cast<int64_t>(held.size()); }
    // Multiplications for each token.
    int64_t work() const { return routing.per_token * 3 * hidden * inner; }

    const KernelTable& table;
    int64_t hidden, inner = 0;
    ExpertRouting routing;
    const float* correction;
    Gate activation;
    int first;
    int64_t* counts;
    std::vector<Expert> held;
    // Bytes of a packed row of any expert: for the gate, for `up` where the gate's packing does not serve it, and for `down`.
    int64_t gate_row = 0, up_row = 0, down_row = 0;
    int64_t pack_scratch = 0;  // bytes, of each thread
};

// To `order` the experts that have rows, those with most of them first, so that threads end together; returns how many.
// Rows of expert e are those from starts[e] to starts[e + 1].
int64_t order_experts(const int64_t* starts, int64_t held, int64_t* order);

// out [n, hidden] = for each row of x [n, hidden] the sum of what its experts give, weighted as its logits
// [n, num_experts] say, in the order of their numbers; those elsewhere give nothing.
size_t experts_scratch(const Experts& experts, int64_t n);
void compute_experts(const Experts& experts, const float* x, int64_t row_stride, const float* logits, int64_t n,
                     float* out, void* scratch);

}  // namespace pagoda
