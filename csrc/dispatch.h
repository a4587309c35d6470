// SPDX-License-Identifier: Apache-2.0
// Experts of several ranks that have tokens of their own: a token goes to those ranks alone that hold one of its
// experts, and what these give is added up where it came from (expert parallelism, as in GShard, Lepikhin et al. 2020).
#pragma once

#include <cstdint>
#include <vector>

#include "experts.h"
#include "lowering.h"

namespace pagoda {

class Dispatch {
   public:
    // `first_experts` has the first expert of each rank of the group.
    Dispatch(const Experts& experts, Group& group, std::vector<int64_t> first_experts);

    // Bytes for n tokens of this rank, where all ranks have `all` together.
    size_t scratch(int64_t n, int64_t all) const;

    // out [n, hidden] = what the experts of all ranks give for x [n, hidden], by its logits [n, num_experts]. Called by all
    // threads of a team, on all ranks.
    void compute(const float* x, const float* logits, int64_t n, int64_t all, float* out, void* scratch);

   private:
    struct Memory;

    int64_t row() const { return experts_.hidden + experts_.routing.num_experts; }
    int64_t most_ranks() const;
    // Finds the ranks that each token goes to, and sends it there.
    void send(const float* x, const float* logits, int64_t n, const Memory& memory);

    const Experts& experts_;
    Experts held_;                      // the same, which count nothing
    std::vector<int64_t> uncounted_;
    Group& group_;
    std::vector<int64_t> first_experts_;
    std::vector<int64_t> sent_;         // rows [size, size] that go from each rank to each
    int64_t received_ = 0;
};

}  // namespace pagoda
