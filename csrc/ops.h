// SPDX-License-Identifier: Apache-2.0
// Operations on all tokens of a step, shared out among threads. No result depends on how.
//
// All threads of a team call an operation together, from inside a parallel region (`in_team`); it ends with a
// barrier. Those that need memory to work in are given `scratch` of the size that the function before them says.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <vector>

#include "kernels.h"
#include "outputs.h"

namespace pagoda {

// A weight [outputs, inputs] in panels; see kPanel.
struct PanelShape {
    Dtype dtype;
    int64_t inputs, outputs;
    int64_t group = 0;  // inputs that share a scale of 8-bit floats, which are multiplied as numbers of `dtype`; 0 for none

    int64_t panels() const { return (outputs + kPanel - 1) / kPanel; }
    int64_t padded_inputs() const { return dtype == Dtype::bf16 ? (inputs + 1) / 2 * 2 : inputs; }
    SmallPanel small(const void* panel) const { return {dtype, inputs, group, panel}; }
    int64_t panel_bytes() const { return group ? small(nullptr).bytes() : padded_inputs() * kPanel * size_of(dtype); }
    // Rows that are best multiplied together; never more.
    int64_t rows_at_once(const KernelTable& table) const { return group ? kSmallRows : table.linear_rows; }
    // Outputs [rows, cols] of one panel, plus its bias unless that is null.
    void multiply(const KernelTable& table, const void* panel, const void* packed, int rows, const float* bias, float* out,
                  int64_t out_stride, int cols, const Prefetch& ahead) const {
        if (group) return table.small_panel(small(panel), packed, row_bytes(table), rows, bias, out, out_stride, cols);
        table.linear_panel(dtype, panel, packed, row_bytes(table), rows, inputs, bias, out, out_stride, cols, ahead);
    }
    int64_t bytes() const { return panels() * panel_bytes(); }
    // Bytes from one packed row of activations to the next: an odd number of cache lines, so that rows do not
    // displace each other.
    int64_t row_bytes(const KernelTable& table) const {
        return ((padded_inputs() * table.packed_size(dtype) + 63) / 64 | 1) * 64;
    }
};

// A quantized weight [outputs, inputs] in panels.
struct QuantizedShape {
    int64_t inputs, outputs;
    QuantizedFormat format;

    int64_t panels() const { return (outputs + kPanel - 1) / kPanel; }
    int64_t bytes() const { return panels() * format.panel_bytes(); }

    // Signed codes, a float scale and maybe a zero point for each output.
    static QuantizedShape int8(int64_t outputs, int64_t inputs, bool zero_points) {
        return {inputs, outputs, {8, false, zero_points, 1, (inputs + 3) / 4 * 4}};
    }
    // Codes below 2^bits, a float16 scale, and maybe offset, for each output and group of inputs.
    static QuantizedShape grouped(int64_t outputs, int64_t inputs, int bits, int64_t group_size, bool offsets) {
        return {inputs, outputs, {bits, true, offsets, inputs / group_size, group_size}};
    }
    // Blocks of so many inputs; see BlockFormat.
    static QuantizedShape in_blocks(int64_t outputs, int64_t inputs, int bits, int64_t group_size,
                                    int64_t block_size, bool integer_scales, bool minima, Codebook codebook, bool whole_rows,
                                    const Lattice& lattice);
};

// Calls `body` in all threads, or in this one alone if the work is not worth waking others.
template <class Body>
void in_team(bool worth_it, Body body) {
#pragma omp parallel if (worth_it)
    body();
}

void pack_weight(const PanelShape& shape, const void* weight, void* packed);
// Of 8-bit floats [outputs, inputs], with scales [outputs, groups].
void pack_small(const PanelShape& shape, const uint8_t* values, const float* scales, void* packed);

// Rows of the weight that was packed, which has those of ids from `first_id` on; zeros where it has none.
void embedding(const KernelTable& table, const PanelShape& shape, const void* packed, int64_t first_id,
               const int64_t* ids, int64_t n, float* out);

size_t linear_scratch(const KernelTable& table, const PanelShape& shape, int64_t n);
void linear(const KernelTable& table, const PanelShape& shape, const void* packed, const float* bias,
            const float* x, int64_t row_stride, int64_t n, const Outputs& out, void* scratch);

// Of a dense weight, codes [outputs, inputs] with a scale for each output, or 4-bit ones with one for each group
// (float16). Zero points null: magnitudes of both signs have one range. Called by one thread.
void quantize_int8(const KernelTable& table, const PanelShape& shape, const void* weight, void* codes,
                   float* scales, int32_t* zero_points);
void quantize_int4(const KernelTable& table, const PanelShape& shape, int64_t group_size, const void* weight,
                   uint8_t* codes, void* scales);

// Rows of them in blocks of their own, of each tensor of `blocks` the first row's place. Called by one thread.
void quantize_blocks(const KernelTable& table, const PanelShape& shape, int bits, int64_t group_size, const void* weight,
                     const RoundedBlocks& blocks);

// Codes [outputs, inputs], scales and offsets, or zero points, [outputs, groups]; null if the format has none.
void pack_quantized(const QuantizedShape& shape, const void* codes, const void* scales, const void* offsets,
                    void* packed);

// Tensors of a weight in blocks: codes [outputs, inputs] bytes; scales [outputs, groups], float16 or signed bytes; scales of
// blocks [outputs, blocks] float16, null where there are no integers; and minima like them, null if there are none.
struct BlockTensors {
    const uint8_t* codes;
    const void *scales, *minima, *block_scales, *block_minima;
};
// Throws std::invalid_argument: codes are not those of points of the lattice.
void pack_blocks(const QuantizedShape& shape, const BlockTensors& tensors, void* packed);

// The same of a quantized weight, as numbers. With `order`, the map's input `i` is the activation's element order[i].
void quantized_embedding(const KernelTable& table, const QuantizedShape& shape, const void* packed,
                         const int64_t* order, int64_t first_id, const int64_t* ids, int64_t n, float* out);

size_t quantized_scratch(const KernelTable& table, const QuantizedShape& shape, const int64_t* order, int64_t n);
void quantized_linear(const KernelTable& table, const QuantizedShape& shape, const void* packed,
                      const int64_t* order, const float* bias, const float* x, int64_t row_stride, int64_t n,
                      const Outputs& out, void* scratch);

// The rows of x [.., d] with these numbers.
void copy_rows(const float* x, int64_t d, const int64_t* rows, int64_t n, float* out);

// sum = x + delta, out = rms_norm(sum).
void add_rms_norm(const KernelTable& table, const float* x, const float* delta, const float* weight, float eps,
                  int64_t n, int64_t d, float* sum, float* out);

struct HeadShape {
    int num_heads, num_kv_heads, head_dim, block_size;

    bool operator==(const HeadShape& other) const {
        return num_heads == other.num_heads && num_kv_heads == other.num_kv_heads && head_dim == other.head_dim &&
               block_size == other.block_size;
    }
};

// Cached tokens that a layer's queries see: all of them, or some of the last. What threads share out among themselves.
//
// Queries of a sequence are cut into tiles, whose rows meet the same keys and values; contexts into splits at multiples
// of kSplit, whose results are merged in order within segments, and then those of segments. Tiles of several sequences whose splits begin in the same blocks go
// through those blocks together, as in cascade attention (Juravsky et al. 2024, Hydragen); each then goes on alone
// from the softmax that it has so far. No row's arithmetic depends on its company.
// Tokens of segments (pagoda/messages/segments.py) and of splits, both powers of two: a split is no longer than a segment.
struct ContextParts {
    int64_t segment, split;

    explicit ContextParts(int64_t segment_) : segment(segment_), split(segment_ < kSplit ? segment_ : kSplit) {}
};

// The most that items of a plan need.
struct PlanSizes {
    int max_rows = 0;         // of a head in an item
    int max_heads = 0;        // in an item
    int max_head_rows = 0;    // of all heads in an item
    int64_t max_queries = 0;  // lanes of an item's packed queries, for every element of head_dim
    int64_t num_split_rows = 0;

    PlanSizes or_more(const PlanSizes& other) const;
};

// Cold segments of a sequence, one behind the other, that are read together.
struct ColdRun {
    int64_t sequence, count;

    bool operator<(const ColdRun& other) const {
        return sequence != other.sequence ? sequence < other.sequence : count < other.count;
    }
};

struct AttentionPlan : PlanSizes {
    struct Tile {
        int64_t first_token, num_tokens, first_position;
        int64_t sequence;
        int64_t begin, end;   // cached tokens that one of the rows sees; begins at a multiple of kKeyTile
        int64_t first_split;  // of those in `splits`
    };
    // Where the results of a tile over one split are among the rows of partial results: those of the first head from
    // `row` on, those of the next head_rows later. Tokens before `resume` are done together with other tiles.
    struct Split {
        int64_t row = -1, head_rows = 0, resume = 0;
    };
    // Some heads of the tiles members[first_member...] over the cached tokens from begin to end.
    struct Item {
        int64_t first_member, num_members;
        int kv_head, heads;
        int64_t begin, end;
        int64_t split;  // in `splits`, of the first member; -1 for a whole context
        bool resumes;   // from what is there

        int64_t work() const { return (end - begin) * heads; }
    };

    AttentionPlan(const class AttentionMetadata& metadata, const Reach& reach);
    // Of all tokens of a sequence over some of its cold segments, of which they see everything; tokens count from their begin.
    AttentionPlan(const class AttentionMetadata& metadata, const ColdRun& run);
    // Over one segment of each sequence, which begins at one of `starts`, or over none of it.
    AttentionPlan(const class AttentionMetadata& metadata, const Reach& reach, const std::vector<int64_t>& starts);

    int group;  // rows of a token
    ContextParts parts;
    std::vector<Tile> tiles;
    std::vector<int64_t> members;  // tiles; those up to tiles.size() are the tiles themselves
    std::vector<Split> splits;
    std::vector<Item> shared;  // done before `items`
    std::vector<Item> items;
    std::vector<Item> merged;  // after them, of the tiles that are split

    int rows_of(int64_t tile) const {
        return static_cast<int>(tiles[static_cast<size_t>(tile)].num_tokens) * group;
    }
    int num_splits(const Tile& tile) const {
        return static_cast<int>((tile.end + parts.split - 1) / parts.split - tile.begin / parts.split);
    }

   private:
    void add_tiles(int64_t sequence, const AttentionMetadata& metadata, const std::function<void(Tile&)>& place);
    void add_items(const AttentionMetadata& metadata);
};

// Segments that lie outside of the cache, as one layer reads them: a cache of the same layer's keys and values, and the
// numbers of the segments' blocks there.
struct StagedRun {
    const Cache* cache;
    const int32_t* blocks;
};

// Brings cold segments to memory, one after the other.
class SegmentSource {
   public:
    virtual ~SegmentSource() = default;
    // The run number `index` of AttentionMetadata::cold of the layer with this cache, once it is there; it stays until
    // the next call.
    virtual StagedRun take(const Cache& cache, int64_t index) = 0;
    // A layer needs no further segment.
    virtual void release(const Cache& cache) = 0;
    // Throws what went wrong since the last call.
    virtual void rethrow() = 0;
};

// What attention needs to know about a step, the same for all layers.
class AttentionMetadata {
   public:
    // Lengths of `n` sequences and their block ids [n, width], of a cache of so many blocks; `draft_lens`, or null, are how
    // many of their last tokens are drafts. Throws std::invalid_argument if they have not the blocks of their contexts,
    // std::out_of_range if the cache lacks a block.
    AttentionMetadata(const HeadShape& shape, int64_t num_blocks, int64_t n, const int64_t* query_lens,
                      const int64_t* context_lens, const int64_t* draft_lens, const int64_t* block_tables, int64_t width,
                      ContextParts parts);

    // The first segments of sequences are cold: they come from `source` in such runs, those of a sequence one behind the
    // other, and tables lack their blocks. Throws std::invalid_argument if queries are among them.
    void set_cold(std::vector<ColdRun> runs, std::unique_ptr<SegmentSource> source);

    struct Sequence {
        int64_t first_token, query_len, context_len;
        int64_t kept_len;  // of the context without drafts, behind which no state is kept
        int64_t cold_len = 0;        // of the context that is in cold segments
        int64_t first_carried = -1;  // of its tokens among those of all sequences with cold segments
    };

    const int32_t* blocks_of(int64_t sequence) const { return blocks.data() + sequence * width; }

    // Of layers with such a reach. The first call for one comes from one thread alone.
    const AttentionPlan& plan(const Reach& reach) const;

    const AttentionPlan& cold_plan(const ColdRun& run) const { return cold_plans_.at(run); }

    // Of layers with such a reach, with what cold segments need.
    PlanSizes sizes(const Reach& reach) const;

    // The rank that has the first segment of a sequence, as one of context-parallel ranks sees it.
    int first_rank(int64_t sequence, int own) const {
        const int32_t block = blocks_of(sequence)[0];
        return block < 0 ? -1 - block : own;
    }
    // Rounds in which so many context-parallel ranks exchange what each found in one segment of each sequence.
    int64_t num_rounds(int size) const { return (longest_context_ + size * parts.segment - 1) / (size * parts.segment); }
    // Of a rank's segments in each round. The first call for a reach comes from one thread alone.
    const std::vector<AttentionPlan>& rounds(const Reach& reach, int rank, int size) const;

    // Cached tokens that each K/V head reads, on average; those that sequences share count once.
    int64_t num_tokens_read(const Reach& reach) const;

    HeadShape shape;
    int64_t num_blocks;  // that ids are below
    int64_t num_tokens = 0, width;
    std::vector<Sequence> sequences;
    std::vector<int64_t> token_rows;  // place of each token, block * block_size + offset; -1 on another rank
    std::vector<int32_t> token_sequences;
    bool spread = false;  // some blocks are on other ranks: -1 - *r* on rank *r*
    std::vector<int32_t> blocks;
    ContextParts parts;
    std::vector<ColdRun> cold;
    int64_t num_carried = 0;  // tokens of sequences with cold segments
    std::unique_ptr<SegmentSource> source;
    mutable StagedRun staged{};  // what the threads of a team are at

   private:
    int64_t longest_context_ = 1;
    mutable std::map<Reach, AttentionPlan> plans_;  // of reaches up to the longest context
    mutable std::map<Reach, std::vector<AttentionPlan>> rounds_;
    std::map<ColdRun, AttentionPlan> cold_plans_;
};

// RMS norms of queries and keys, null for none: of each head, or of all heads of a token together.
struct HeadNorms {
    const float *queries, *keys;
    float eps;
    bool all_heads;
};

// Cosines and sines [n, r / 2], by which the first r elements of every head are rotated; r may be 0.
struct Rotary {
    const float *cosines, *sines;
    int64_t r;
};

constexpr float kLog2E = 1.44269504f;

// How scores become weights.
struct AttentionOptions {
    float scale;
    Reach reach;
    float softcap = 0;             // c of c tanh(score / c); 0 for none
    const float* sinks = nullptr;  // [heads], scores of no token; or null
    RelativeScores relative{};
};

// Norms and rotates queries and keys of qkv [n, heads + 2 kv_heads, head_dim], and caches keys and values.
void rotate_and_cache(const KernelTable& table, const AttentionMetadata& metadata, const Cache& cache,
                      const float* qkv, const HeadNorms& norms, const Rotary& rotary, float* queries);

// Norms elements of latents [n, head_dim], as many as a value has, rotates those behind them, and caches both, and behind them
// the key for an indexer with which a row begins; rotates queries [n, heads, those behind].
void rotate_and_cache_latents(const KernelTable& table, const AttentionMetadata& metadata, const Cache& cache,
                              const float* queries, const float* latents, const float* norm, float eps,
                              const Rotary& rotary, float* out);

// Queries [n, heads, value_dim] and, of latents, the elements of each behind these [n, heads, head_dim - value_dim].
struct Queries {
    const float *first, *rest;
};

// The first of a step's calls for a reach: it makes the plan.
size_t attention_scratch(const AttentionMetadata& metadata, const Cache& cache, const Reach& reach);
// out [n, heads, value_dim].
void attention(const KernelTable& table, const AttentionMetadata& metadata, const Cache& cache, const Queries& queries,
               const AttentionOptions& options, float* out, void* scratch);

// Ranks over which contexts are spread. `all_gather` is called by the first thread alone: the bytes of every rank, one behind the other.
struct ContextRanks {
    int rank, size;
    std::function<void(const void*, int64_t, void*)> all_gather;
};

// The same over contexts that are spread. Called by all threads of a team.
size_t context_attention_scratch(const AttentionMetadata& metadata, const Cache& cache, const Reach& reach,
                                 const ContextRanks& ranks);
void context_attention(const KernelTable& table, const AttentionMetadata& metadata, const Cache& cache, const Queries& queries,
                       const AttentionOptions& options, const ContextRanks& ranks, float* out, void* scratch);

}  // namespace pagoda
