// SPDX-License-Identifier: Apache-2.0
// Attention over cached latents that an indexer chooses for each token (DeepSeek-AI 2025).
//
// Rows of the chosen tokens are copied, for some tokens at a time, and attended to as whole contexts. A token is scored and
// computed by itself, so no result depends on how a sequence is cut into steps.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "ops.h"

namespace pagoda {

struct IndexedQueries {
    Queries attention;
    const float *index, *weights;  // [n, index heads, index_dim], [n, index heads]
};

class IndexedAttention {
   public:
    IndexedAttention(const Cache& cache, int64_t num_heads, int64_t index_heads, int64_t most, float scale);

    size_t scratch(const AttentionMetadata& metadata) const;
    // Called by all threads of a team; out [n, heads, value_dim].
    void run(const KernelTable& table, const AttentionMetadata& metadata, const IndexedQueries& queries, float* out,
             void* scratch);

   private:
    struct Memory;
    struct Part;

    // The next tokens of a step that are computed together, from `first` on.
    Part part(const AttentionMetadata& metadata, int64_t first) const;
    AttentionMetadata of_chosen(const Part& part) const;
    void score(const KernelTable& table, const AttentionMetadata& metadata, const Part& part, const IndexedQueries& queries,
               const Memory& memory) const;
    void choose(const Part& part, const Memory& memory) const;
    void copy(const AttentionMetadata& metadata, const Part& part, const Memory& memory) const;

    const Cache& cache_;
    int64_t num_heads_, index_heads_, most_;
    float scale_;
    std::optional<AttentionMetadata> chosen_;  // what a team is at
    mutable int threads_ = 1;                  // of a team, as scratch memory was measured for
};

}  // namespace pagoda
