// SPDX-License-Identifier: Apache-2.0
// What adapters add to linear layers: out += up (scale * down x), with down and up of each row's own adapter (LoRA,
// Hu et al. 2021). Rows of one adapter go through its weights together, in tiles; rows without one are not touched.
#pragma once

#include <cstdint>
#include <unordered_map>
#include <vector>

#include "kernels.h"

namespace pagoda {

// What an adapter adds to some outputs of a layer, which follow one another. Both matrices lie in blocks of 16 outputs,
// whose weights are side by side for every input, or in bf16 for every two inputs.
struct LowRankPart {
    int64_t rank = 0;  // none: the adapter adds nothing here
    float scale = 0;
    const void* down = nullptr;  // [rank, inputs]
    const void* up = nullptr;    // [outputs, rank]

    int64_t blocks() const { return (rank + kLowRankBlock - 1) / kLowRankBlock; }
};

// All adapters of one layer of these inputs, whose outputs are of several parts.
class LowRankMaps {
   public:
    LowRankMaps(int dtype, int64_t inputs, std::vector<int64_t> outputs);

    // The adapter's parts, as many as there are parts of outputs.
    void set(int64_t adapter, std::vector<LowRankPart> parts);
    void remove(int64_t adapter) { adapters_.erase(adapter); }

    // Outputs that one thread computes at a time.
    struct Chunk {
        size_t part;
        int64_t first, outputs;  // of the part
        int64_t column;          // of all outputs
    };

    // Null if the adapter adds nothing to the layer.
    const std::vector<LowRankPart>* find(int64_t adapter) const {
        const auto found = adapters_.find(adapter);
        return found == adapters_.end() ? nullptr : &found->second;
    }

    Dtype dtype;
    int64_t inputs;
    std::vector<Chunk> chunks;
    int64_t most_blocks = 0;  // of ranks, of all parts of any adapter there has been

    int64_t block_bytes(int64_t num_inputs) const {
        const int64_t padded = dtype == Dtype::bf16 ? (num_inputs + 1) / 2 * 2 : num_inputs;
        return padded * kLowRankBlock * size_of(dtype);
    }

   private:
    size_t num_parts_;
    std::unordered_map<int64_t, std::vector<LowRankPart>> adapters_;
};

// Rows of a step that have an adapter, those of each adapter together.
struct AdaptedRows {
    struct Tile {
        int64_t adapter;
        int64_t first, rows;  // of `rows`
    };

    // Of n rows, or of those `selected`; adapters below 0 are none.
    void assign(const int64_t* adapters, const int64_t* selected, int64_t n);
    int64_t size() const { return static_cast<int64_t>(rows.size()); }

    std::vector<int64_t> rows;
    std::vector<Tile> tiles;
};

size_t low_rank_scratch(const KernelTable& table, const LowRankMaps& maps, int64_t rows);
void add_low_rank(const KernelTable& table, const LowRankMaps& maps, const AdaptedRows& adapted, const float* x,
                  int64_t row_stride, float* out, int64_t out_stride, void* scratch);

}  // namespace pagoda
