// SPDX-License-Identifier: Apache-2.0
// What each instruction set provides: operations on one tile, one row or one panel. Who works on which is
// decided in linear.cpp, quantized.cpp, rows.cpp and attention.cpp, for all instruction sets.
#pragma once

#include <cmath>
#include <cstdint>

#include "block_formats.h"

namespace pagoda {

// Weights have one of the first three, caches any. Activations are floats between operations.
enum class Dtype : int { f32 = 0, bf16 = 1, f16 = 2, i8 = 3, e4m3 = 4 };

inline int64_t size_of(Dtype dtype) { return dtype == Dtype::f32 ? 4 : dtype >= Dtype::i8 ? 1 : 2; }

// Columns of a weight panel. In memory a panel holds, for every input, the weights of its 32 outputs; in bf16
// for every two inputs the 32 pairs.
constexpr int kPanel = 32;
// Rows of a packed tile of activations: with two vectors of outputs, 24 accumulators of 32 registers.
constexpr int kTileRows = 12;
// Rows that kernels of quantized weights are given at once: a multiple of all their register tiles.
constexpr int kQuantizedRows = 24;
// The most rows of either that an instruction set asks for.
constexpr int kMostPanelRows = 128;
// Outputs whose weights lie together in the matrices of an adapter.
constexpr int kLowRankBlock = 16;
// Cached tokens of one softmax step.
constexpr int kKeyTile = 64;
// Cached tokens that are attended to as one, always from a multiple of it. Its results are merged in order.
constexpr int kSplit = 512;
constexpr int kMaxHeadDim = 1024;
// Experts of a layer.
constexpr int kMaxExperts = 1024;

// How attention multiplies. All work on lanes of 32 bits: a float, or a pair of 16-bit numbers of which one
// instruction multiplies both, to floats (bf16) or to exact sums of integers (i16).
enum class Math : int { f32 = 0, bf16 = 1, i16 = 2 };

// Elements of a lane, which lie side by side in the cache too: along head_dim in keys, along tokens in values.
inline int pair_of(Math math) { return math == Math::f32 ? 1 : 2; }
inline int value_pair(Math math, int block_size) { return block_size == 1 ? 1 : pair_of(math); }

// Keys and values of one layer in blocks, as `math` reads them; p is its pair_of, q its value_pair. Latents are rows of
// values that are keys as well: those of queries, while their first value_dim elements are what is summed up.
struct Cache {
    Dtype dtype;
    Math math;            // what it was laid out for
    void* keys;           // [blocks, kv_heads, head_dim / p, block_size, p]; null of latents
    void* values;         // [blocks, kv_heads, block_size / q, head_dim, q]
    float* key_scales;    // [blocks, kv_heads, block_size] of i8, else null
    float* value_scales;  // the same; of latents these are one
    int64_t num_blocks, num_kv_heads, block_size, head_dim;
    int64_t value_dim;    // head_dim but of latents
    int64_t key_stride, value_stride, scale_stride;  // bytes from block to block
    int64_t index_dim = 0;  // elements at the end of a latent's row that are a key for an indexer

    bool holds_latents() const { return keys == nullptr; }
};

// A context that nothing limits.
constexpr int64_t kUnlimited = int64_t{1} << 62;

// Cached tokens that a token sees up to itself: the last `window`, from a multiple of `chunk` on. As many behind it too
// where attention is not causal.
struct Reach {
    int64_t window = kUnlimited, chunk = kUnlimited;
    bool causal = true;

    int64_t first(int64_t position) const {
        const int64_t of_window = position - window + 1, of_chunk = position / chunk * chunk;
        return of_window > of_chunk ? of_window : of_chunk;
    }
    // The last one that a token of a sequence of `length` sees.
    int64_t last(int64_t position, int64_t length) const {
        if (causal) return position;
        return window < length - position ? position + window - 1 : length - 1;
    }
    // The same for all positions before `end`, in the least numbers.
    Reach up_to(int64_t end) const { return {window < end ? window : end, chunk < end ? chunk : end, causal}; }
    bool operator<(const Reach& other) const {
        if (causal != other.causal) return other.causal;
        return window != other.window ? window < other.window : chunk < other.chunk;
    }
};

// What is added to scores by the distance of a key from its query, as powers of two: numbers of each head, or the sums of
// a number of the query and one of the key in the bucket of their distance.
struct RelativeScores {
    const float* of_distances = nullptr;  // of each head from `reach` in front of a query on, head_stride apart; or null
    int64_t head_stride = 0;
    int64_t reach = -1;  // the largest distance; -1 where nothing is added
    const int32_t* buckets = nullptr;  // [2 reach + 1], of a key from `reach` in front of its query on
    const float *of_queries = nullptr, *of_keys = nullptr;  // [n, heads, num_buckets]
    int64_t num_heads = 0, num_buckets = 0;
    float scale = 0;  // of the numbers of queries and keys
    const float* slopes = nullptr;  // [heads], of what is added to scores by the place of a key behind its query; or null
};

// The queries that meet each of some K/V heads, and where the heads' keys and values are. Queries are of one sequence,
// or of several whose tokens lie in the same blocks as far as they are attended to from here.
struct AttendTile {
    Cache cache;
    const void* queries;       // of head after head, packed_queries apart, as pack_query leaves them
    const float* factors;      // [heads, rows], what brings scores to powers of two
    const int64_t* positions;  // [rows], the last cached token that each sees
    const int64_t* firsts;     // [rows], the first cached token that each sees
    int rows;                  // of one head
    int kv_head, heads;        // the first, and how many
    float softcap;             // c of c tanh(score / c), as a power of two; 0 for none
    const int32_t* blocks;     // of the sequence
    int64_t end;               // behind the last cached token that is attended to from here, in one call or in several
    int num_kv_heads;
    int block_size;
    int head_dim;
    int padded_row;  // head_dim rounded up to 16
    int padded_dim;  // elements of a value, of which latents have fewer, rounded up to 16
    RelativeScores relative;
    const int64_t* own_positions;  // [rows]
    int64_t first_token;           // of the sequence, in the step
    int group;                     // rows of a token
};

// Totals of a row that is not finished: vectors of any instruction set, added up at the end.
constexpr int kTotals = 16;

// A softmax that is not finished, of rows of some heads. Those of the next head come head_rows later.
struct Partial {
    float* highest;  // [rows], as a power of two
    float* totals;   // [rows, kTotals]
    float* out;      // [rows, padded_dim]
    int64_t head_rows;

    // From a row on.
    Partial from(int64_t row, int padded_dim) const {
        return {highest + row, totals + row * kTotals, out + row * padded_dim, head_rows};
    }
};

// The softmax of rows of one head over splits, or over segments, that were merged.
struct Softmax {
    float* highest;  // [rows], as a power of two
    float* total;    // [rows]
    float* out;      // [rows, padded_dim]

    Softmax from(int64_t row, int padded_dim) const { return {highest + row, total + row, out + row * padded_dim}; }
};

// How a quantized weight lies in a panel, group by group of inputs: for every four inputs the codes of 32 outputs,
// four bytes each, or in 4 bits for every eight inputs (the first four in the low halves of bytes); then 32 scales
// and, where there are some, 32 offsets, both float16. Where all inputs are one group scales are floats, and instead
// of offsets there are zero points, 32-bit integers that all codes of an output are too high by.
struct QuantizedFormat {
    int bits;
    bool grouped, offsets;
    int64_t groups;
    int64_t group_inputs;  // a multiple of four; codes of inputs that are not there count for nothing
    BlockFormat blocks = {};

    // A row of activations has one scale, and codes of more than eight bits.
    bool has_row_scale() const { return !grouped || blocks.whole_rows; }

    // Whether the next panel is to be fetched while so many rows are multiplied. Unpacking codes takes time in which memory would
    // idle, and blocks are read by every other line; codes that are used as they lie the processor reads ahead best by itself.
    bool fetches(int64_t rows) const { return rows > 1 || bits < 8 || blocks.groups > 0; }

    // The code that counts for nothing.
    int zero() const {
        if (blocks.groups == 0) return 1 << (bits - 1);
        if (blocks.codebook == Codebook::kTernary) return 1;
        return offsets ? 0 : blocks.codebook != Codebook::kNone ? 128 : 1 << (bits - 1);
    }
    int64_t code_bytes() const { return group_inputs * kPanel * bits / 8; }
    int64_t scale_size() const { return grouped ? 2 : 4; }
    int64_t group_bytes() const { return code_bytes() + kPanel * scale_size() * (offsets ? 2 : 1); }
    int64_t panel_bytes() const {
        return blocks.groups == 0 ? groups * group_bytes() : num_blocks() * block_bytes();
    }

    // ---- of blocks

    // Bytes of the codes of 32 inputs.
    int64_t unit_bytes() const { return 4 * kPanel * bits; }
    int64_t units() const { return groups * group_inputs / kUnitInputs; }
    int64_t units_of_block() const { return blocks.groups * blocks.group_inputs / kUnitInputs; }
    int64_t num_blocks() const { return units() / units_of_block(); }
    // Integers of the scales, and minima, of all groups of a block.
    int64_t integer_bytes() const {
        if (!blocks.integer_scales) return 0;
        if (blocks.has_points()) return (blocks.groups + 1) / 2 * kPanel;
        return blocks.groups * kPanel * (offsets && bits != 2 ? 2 : 1);
    }
    int64_t header_bytes() const { return integer_bytes() + kPanel * (offsets ? 4 : 2); }
    int64_t block_bytes() const {
        const int64_t units = units_of_block();
        if (blocks.lattice.inputs == 0) return header_bytes() + units * unit_bytes();
        if (!blocks.has_points()) return header_bytes() + trit_words(units) * 4 * kPanel;
        return header_bytes() + units * (number_bytes() + sign_bytes() + num_bits() * bit_bytes());
    }

    // ---- of points, for 32 inputs

    int64_t number_bytes() const { return kUnitInputs / blocks.lattice.inputs * kPanel; }
    int64_t sign_bytes() const { return blocks.lattice.sign_inputs == 1 ? 4 * kPanel : 0; }
    int num_bits() const { return blocks.lattice.high_bits + (blocks.lattice.sign_inputs == 8 ? 1 : 0); }
    int64_t bit_bytes() const { return number_bytes() / 8; }
    static int64_t trit_words(int64_t units) { return (units * (kUnitInputs / 4) + kTritsOfByte - 1) / kTritsOfByte; }

    // Of 16 inputs the codes of 0, 4, 8 and 12 are neighbours, then those of 1, 5, 9 and 13, and so on: so they come out of tables.
    bool transposed() const { return blocks.has_points(); }

    // Of input `i` of the group; not of blocks.
    int code(const uint8_t* group, int output, int64_t i) const {
        const int64_t inputs = 32 / bits;
        const int byte = group[i / inputs * 4 * kPanel + output * 4 + i % 4];
        return bits == 8 ? byte : i % inputs < 4 ? byte & 15 : byte >> 4;
    }
};

// What four neighbouring codes of eight bits lack to the integers that they stand for, in units of kWideUnit.
struct WideQuad {
    int32_t offset;  // of their weights in a panel
    int32_t codes;   // four bytes
};
constexpr int kWideUnit = 128;

// Activations that are rounded together: lane i has those whose number is i in remainder. Nearly all of them are codes
// of eight bits: those up to so many times the highest of a lane that is typical, the lanes being sorted by their highest.
constexpr int kLanes = 32, kTypicalLane = 4;
constexpr float kNarrowSpan = 1.75f;
// The largest code that has eight bits of units; sums of codes' magnitudes times 255 fit 32 bits up to the other one.
constexpr float kLargestCode = 127 * kWideUnit, kLargestSum = 1 << 23;

// A row of activations as the products of integers take it: codes, and for each group the integer that its sum
// starts at so that the codes' zero counts for nothing, the scale, and the scale times the sum of codes. Where a row has
// one scale, the first, codes are of more than eight bits: those that do not fit theirs come again as wide quads, and
// totals are sums of codes. In blocks, starts are the numbers of the groups' first wide quads.
struct QuantizedRow {
    void* codes;
    int32_t* starts;
    float* scales;
    float* totals;
    int32_t* sum;  // of codes; this and what follows only where a row has one scale
    int32_t* num_wide;
    WideQuad* wide;

    QuantizedRow(const QuantizedFormat& format, int64_t code_size, void* memory) : codes(memory) {
        starts = reinterpret_cast<int32_t*>(static_cast<char*>(memory) + codes_bytes(format, code_size));
        scales = reinterpret_cast<float*>(starts + format.groups);
        totals = scales + format.groups;
        sum = reinterpret_cast<int32_t*>(totals + format.groups);
        num_wide = sum + 1;
        wide = reinterpret_cast<WideQuad*>(num_wide + 1);
    }

    // The row that lies so many bytes later.
    QuantizedRow from(int64_t bytes) const {
        const auto later = [bytes](auto* part) { return reinterpret_cast<decltype(part)>(reinterpret_cast<char*>(part) + bytes); };
        QuantizedRow row = *this;
        row.codes = later(static_cast<char*>(codes));
        row.starts = later(starts), row.scales = later(scales), row.totals = later(totals);
        row.sum = later(sum), row.num_wide = later(num_wide), row.wide = later(wide);
        return row;
    }

    // The number behind the last wide quad of a group, in blocks.
    int32_t end_of_wide(const QuantizedFormat& format, int64_t group) const {
        return group + 1 < format.groups ? starts[group + 1] : *num_wide;
    }

    // Whole vectors.
    static int64_t codes_bytes(const QuantizedFormat& format, int64_t code_size) {
        return (format.groups * format.group_inputs + 15) / 16 * 16 * code_size;
    }
    // An odd number of cache lines, so that rows do not displace each other.
    static int64_t bytes(const QuantizedFormat& format, int64_t code_size) {
        // More quads than there may be: one behind the last counts for nothing, and whole vectors are written.
        const int64_t quads = code_size == 1 ? format.groups * format.group_inputs / 4 + 4 : 0;
        const int64_t wide = format.has_row_scale() ? 8 + quads * 8 : 0;
        return ((codes_bytes(format, code_size) + 12 * format.groups + wide + 63) / 64 | 1) * 64;
    }
};

// Rows that kernels of 8-bit floats are given at once: they go by numbers that were widened for all of them.
constexpr int kSmallRows = 96;

// 8-bit floats (E4M3) of 32 outputs: of each group of inputs 32 floats, the scales times 2^8, then the codes as a dense panel
// has numbers of `dtype`, that of activations. The last group may be cut off.
struct SmallPanel {
    Dtype dtype;
    int64_t inputs, group;
    const void* memory;

    int64_t side_by_side() const { return dtype == Dtype::bf16 ? 2 : 1; }
    static int64_t scale_bytes() { return kPanel * 4; }
    // Scales of the group whose first input this is.
    const uint8_t* group_at(int64_t first) const {
        return static_cast<const uint8_t*>(memory) + first * kPanel + first / group * scale_bytes();
    }
    int64_t bytes() const {
        const int64_t padded = (inputs + side_by_side() - 1) / side_by_side() * side_by_side();
        return padded * kPanel + (inputs + group - 1) / group * scale_bytes();
    }
};

// Memory to bring to the cache meanwhile: so many lines, 0 to 2, for every two lines of a panel that are read.
struct Prefetch {
    const void* from = nullptr;
    int lines = 0;

    // Of a panel, null for none, in the course of the tile-th pass of so many over another.
    static Prefetch share(const void* panel, int64_t panel_bytes, int64_t tile, int64_t tiles) {
        if (panel == nullptr || tile > 1) return {};
        if (tiles == 1) return {panel, 2};
        return {static_cast<const char*>(panel) + tile * (panel_bytes / 2), 1};
    }
};

// The highest of a row's outputs seen so far.
struct Argmax {
    float value;
    int32_t finite;  // 1 if all outputs are
    int64_t column;  // the first of equal ones
};

// Weights of tokens are multiples of 2 to the power of minus this.
constexpr int kWeightBits = 40;
// Logits whose maximum is kept. Masks of tokens are in words of 32 bits.
constexpr int64_t kSampleBlock = 128;
// Tokens are sorted into buckets by powers of two first; the last one is beyond all that may count.
constexpr int kSampleBuckets = 1024;
constexpr float kBucketsPerPower = 25;

// How the logits of a row become weights, and which tokens count: 2 to the power of (x - highest) * scale.
struct Weighing {
    float highest, scale;
    float lowest_power;  // powers below are left out
    float lowest;        // logits below are left out
    float mean = 0;      // of powers; powers further from it than `farthest` are left out
    float farthest = INFINITY;
    float first_bucket = 0, bucket_end = kSampleBuckets;  // for `weigh`: others are left out
};

// Some tokens of a block, one after the other.
struct WeighedTokens {
    alignas(64) int64_t weights[kSampleBlock + 16];
    alignas(64) float distances[kSampleBlock + 16];  // of powers from the mean
    alignas(64) int32_t buckets[kSampleBlock + 16];
    alignas(64) int32_t places[kSampleBlock + 16];  // in the block
};

// The rows that an operation on one row of each input reads and writes, and the numbers that it is given.
struct RowOperands {
    const float* const* inputs;
    const float* const* weights;
    float* const* outputs;
    const double* numbers;
    int64_t inputs_width;  // of the first input
    int64_t width;         // of the first output
};

// Scores of experts: a softmax over all of them, a sigmoid of each, or what is given.
enum class Scores { softmax, sigmoid, given };

// How a token's experts are chosen and weighed; see pagoda/checkpoints/expert_routing.py.
struct ExpertRouting {
    int num_experts, per_token;
    bool renormalize;     // the weights of a token's experts to add up to one
    Scores scores;
    int groups;           // of experts, one after the other, of which
    int groups_per_token;  // some are chosen first, by their best expert or
    bool best_two;        // by the sum of their two best
    float factor;         // of all weights
    bool weighs_inputs;   // weights are for what experts are given, not for what they give

    // True where scores decide that logits alone do not.
    bool by_scores(const float* correction) const { return correction != nullptr || (groups > 1 && best_two); }
};

// Inputs that a convolution sees.
constexpr int kMaxConvWidth = 16;
// Columns of a delta rule's state that are carried on together, the most rows, and what divides their number.
constexpr int kDeltaStrip = 32, kMaxDeltaKey = 256, kDeltaKeyMultiple = 4, kKeptChannels = 16;
// The same of a selective scan, whose rows are filled up with zeros to a multiple of kScanRows.
constexpr int kScanStrip = 32, kMaxScanState = 256, kScanRows = 4;

// Some channels of one token of a short convolution.
struct ConvRow {
    const float *x, *in_gate, *out_gate;  // gates are null for none
    float* const* taps;                   // inputs from the oldest on; the newest is set to in_gate * x
    int64_t width;
    const float* weight;  // of the oldest input, those of others weight_stride apart
    int64_t weight_stride;
    const float* bias;  // or null
    bool silu;
    int64_t d;
    float* out;
};

// One token of kScanStrip columns of a selective scan's state [n, kScanStrip]; n is a multiple of kScanRows.
struct ScanStep {
    float* state;
    int64_t n;
    const float *b, *c;        // [n]
    const float *x, *dt;       // [kScanStrip], as those that follow
    const float *bias, *skip;  // of dt, and the factor of x in the output
    const float* decay;        // factors within the exponent; with by_element [n, kScanStrip]
    bool by_element;
    float least, most;  // dt behind its softplus
    float* out;
};

// Gates of experts; see ExpertActivation in pagoda/backend/base.py.
enum class GateKind : int { silu, swiglu_oai, gelu_tanh, relu, clamped_silu };
struct Gate {
    GateKind kind;
    float alpha, limit;
};

// A row of inputs rounded to groups with integer scales and minima; see quantize_blocks in pagoda/backend/block_rounding.py.
struct RoundedBlocks {
    uint8_t* codes;           // [inputs]
    int8_t *scales, *minima;  // [groups]
    void *scale, *minimum;    // the float16 that those are multiplied by
};

// An operation of a graph that works on every row by itself.
struct RowKernel {
    const char* name;
    void (*run)(const RowOperands&);
};

struct KernelTable {
    // Bytes that one activation takes when packed for weights of the dtype.
    int64_t (*packed_size)(Dtype);
    // A row of k activations as `linear_panel` reads it: rounded to bf16 for weights of bf16.
    void (*pack_row)(Dtype, const float* x, int64_t k, void* packed);
    // Outputs [rows, cols] of one panel, rows at most linear_rows, row_bytes apart; bias [kPanel] or null.
    void (*linear_panel)(Dtype, const void* panel, const void* packed, int64_t row_bytes, int rows, int64_t k,
                         const float* bias, float* out, int64_t out_stride, int cols, Prefetch);
    int linear_rows;
    // Outputs [rows, 16] times a scale of one block of an adapter's weights, which are floats or bf16; rows are packed
    // and at most kTileRows.
    void (*low_rank_down)(Dtype, const void* block, const void* packed, int64_t row_bytes, int rows, int64_t k,
                          float scale, float* out);
    // Adds outputs of the blocks from this one on to rows out[rows].
    void (*low_rank_up)(Dtype, const void* blocks, const void* packed, int64_t row_bytes, int rows, int64_t k,
                        float* const* out, int64_t outputs);
    // The weights [inputs] of one output of a dense panel.
    void (*widen_row)(Dtype, const void* panel, int output, int64_t inputs, float* out);
    // The same of 8-bit floats, of at most kSmallRows rows.
    void (*small_panel)(const SmallPanel&, const void* packed, int64_t row_bytes, int rows, const float* bias, float* out,
                        int64_t out_stride, int cols);
    void (*widen_small_row)(const SmallPanel&, int output, float* out);
    // Bytes of a code of an activation.
    int64_t code_size;
    void (*quantize_row)(const QuantizedFormat&, const float* x, int64_t inputs, void* packed);
    // Outputs [n, cols] of one panel for quantized rows that lie row_bytes apart; bias [kPanel] or null; `next` is
    // the panel that will be read next or null.
    void (*quantized_panel)(const QuantizedFormat&, const void* panel, void* rows, int64_t row_bytes, int64_t n,
                            const float* bias, float* out, int64_t out_stride, int cols, const void* next);
    int quantized_rows;  // that are best multiplied together
    // Weights of one output of a panel; that of input `i` is for element order[i], if there is an order.
    void (*dequantize_row)(const QuantizedFormat&, const void* panel, int output, const int64_t* order,
                           int64_t inputs, float* out);
    // Takes outputs [rows, cols] that lie kPanel apart, of the columns from `first` on, into those seen so far.
    void (*argmax)(const float* outputs, int rows, int cols, int64_t first, Argmax* seen);
    // A weight's row of inputs to codes and scales: one scale for all, or for each group. `zero_point` is null for none.
    void (*round_to_int8)(Dtype, const void* weight, int64_t inputs, void* codes, float* scale, int32_t* zero_point);
    void (*round_to_int4)(Dtype, const void* weight, int64_t inputs, int64_t group_size, uint8_t* codes,
                          void* scales);
    // The same with groups of `group_size`; scratch has two floats for each. The scale is not finite where weights are not.
    void (*round_to_blocks)(Dtype, const void* weight, int64_t inputs, int bits, int64_t group_size, const RoundedBlocks&,
                            float* scratch);
    // The parts' elements, added up in order as floats and rounded once. `out` may be one of the parts.
    void (*add_up)(Dtype, const void* const* parts, int count, int64_t d, void* out);
    // sum = x + delta, out = rms_norm(sum); with delta null there is no sum.
    void (*rms_norm)(const float* x, const float* delta, const float* weight, float eps, int64_t d, float* sum,
                     float* out);
    void (*silu_and_mul)(const float* gate_up, int64_t d, float* out);
    const RowKernel* row_kernels;  // up to one without a name
    // The experts that logits [experts] choose, in order of their numbers, and their weights. What `correction` [experts]
    // adds to scores counts for the choice only; or null.
    void (*route)(const float* logits, const ExpertRouting& routing, const float* correction, int32_t* numbers,
                  float* weights);
    // Activation of d gates times what it is for.
    void (*gate)(const Gate& gate, const float* gates, const float* ups, int64_t d, float* out);
    // out = sum of weights[i] * rows[places[i]], in this order; a place below zero counts for nothing.
    void (*weighted_sum)(const float* rows, const int64_t* places, const float* weights, int n, int64_t d,
                         float* out);
    // RMS norm where weight is not null, then rotation of the pairs (i, i + r / 2) of the first r elements.
    void (*norm_and_rotate)(const float* x, const float* weight, float eps, const float* cosines,
                            const float* sines, int64_t r, int64_t d, float* out);
    // How queries of the first dtype and a cache of the second are multiplied.
    Math (*math)(Dtype activations, Dtype cache);
    // A row of d elements in the dtype of the cache; `scale` is set for i8.
    void (*to_cache)(Dtype cache, const float* x, int64_t d, void* out, float* scale);
    // Puts one of `rows` queries where `attend` reads it, in memory of packed_queries lanes. Returns what scores
    // are to be multiplied by.
    float (*pack_query)(Math, const float* x, int64_t d, int row, int rows, void* packed);
    // Takes the cached tokens from `begin`, a multiple of kKeyTile, to `end` into the softmax, within one split; scratch
    // has attend_scratch floats.
    void (*attend)(const AttendTile&, int64_t begin, int64_t end, float* scratch, Partial);
    // Takes the rows of one head over the next split into `whole`.
    void (*merge)(int rows, int padded_dim, Softmax whole, Partial split);
    // The same of the next segment.
    void (*merge_segment)(int rows, int padded_dim, Softmax whole, Softmax segment);
    // result = out / total.
    void (*normalize)(const float* out, float total, int64_t d, float* result);
    // The sum of weights of logits [n], and of weights times powers.
    int64_t (*total_weight)(const Weighing&, const float* x, int64_t n);
    int64_t (*total_product)(const Weighing&, const float* x, int64_t n);
    // The tokens that count of logits [n], at most kSampleBlock; returns their number.
    int64_t (*weigh)(const Weighing&, const float* x, int64_t n, WeighedTokens& tokens);
    // The highest of each kSampleBlock of logits [n]; false if a logit is not finite.
    bool (*block_maxima)(const float* x, int64_t n, float* maxima);
    // Logits above the bound.
    int64_t (*count_above)(const float* x, int64_t n, float bound);
    // Makes logits -inf whose bit is not set.
    void (*forbid_unset)(float* x, int64_t n, const uint32_t* bits);
    void (*conv_row)(const ConvRow&);
    // One token of the gated delta rule for kDeltaStrip columns of a state [d, kDeltaStrip]; d is a multiple of four.
    // `kept` is the part that is kept of the state or, by_channel, of each of its rows.
    void (*delta_step)(float* state, int64_t d, const float* query, const float* key, const float* value,
                       const float* kept, bool by_channel, float beta, float scale, float* out);
    // e^(rate softplus(x + bias)) of rows [n]; n is a multiple of kKeptChannels.
    void (*kept_channels)(const float* x, const float* bias, float rate, int64_t n, float* out);
    void (*scan_step)(const ScanStep&);
    // A key of an indexer, whose d elements lie `step` apart in the cache, as floats kKeyTile apart.
    void (*index_key)(Dtype cache, const void* key, int64_t d, int64_t step, float scale, float* out);
    // Scores [kKeyTile] of keys [d, kKeyTile]: the sum over queries [heads, d] of weights times positive products.
    void (*index_scores)(const float* keys, int64_t d, const float* queries, const float* weights, int64_t heads,
                         float* out);
};

inline int64_t packed_queries(int rows, int64_t d) { return (int64_t{rows} + kTileRows) * d; }

// Keys and values of a tile, their scales, and what is added to scores; of each row of a head its weights and four
// numbers, of each row one.
inline int64_t attend_scratch(int rows, int heads, int padded_row) {
    return kKeyTile * (2 * int64_t{padded_row} + 3) + int64_t{rows} * kKeyTile + (4 + heads) * (int64_t{rows} + 16);
}

// Of the instruction sets in instruction_sets.cpp; those of the processors that this is compiled for exist.
extern const KernelTable kAvx2;
extern const KernelTable kAvxVnni;
extern const KernelTable kAvx512;
extern const KernelTable kAvx512Vnni;
extern const KernelTable kAvx512Bf16;
extern const KernelTable kNeon;
extern const KernelTable kNeonDotprod;
extern const KernelTable kNeonI8mm;
extern const KernelTable kNeonBf16;

}  // namespace pagoda
