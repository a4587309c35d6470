// SPDX-License-Identifier: Apache-2.0
#include <omp.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "ops.h"

namespace pagoda {

namespace {

int round_up_to_16(int64_t d) { return static_cast<int>((d + 15) / 16 * 16); }

// Elements of a head, rounded up: of queries and keys, and of values and results.
struct Widths {
    int row, value;

    explicit Widths(const Cache& cache) : row(round_up_to_16(cache.head_dim)), value(round_up_to_16(cache.value_dim)) {}
};

// Memory that is handed out in whole cache lines; with none, what it would take is counted.
class Pieces {
   public:
    explicit Pieces(float* memory) : memory_(memory) {}

    float* take(int64_t n) {
        float* piece = memory_ == nullptr ? nullptr : memory_ + taken_;
        taken_ += (n + 15) / 16 * 16;
        return piece;
    }
    Softmax take_softmax(int64_t rows, int padded_dim) { return {take(rows), take(rows), take(rows * padded_dim)}; }
    Partial take_partial(int64_t rows, int padded_dim) {
        float* highest = take(rows);
        float* totals = take(rows * kTotals);
        return {highest, totals, take(rows * padded_dim), 0};
    }
    int64_t taken() const { return taken_; }

   private:
    float* memory_;
    int64_t taken_ = 0;
};

// What a thread works in.
struct Memory {
    float* queries;  // packed
    float* factors;
    int64_t *positions, *firsts, *own_positions;  // of rows
    Partial partial;  // of one split
    Softmax segment;  // of the splits of one segment
    Softmax whole;    // of all of them
    float* rest;

    Memory(Pieces& pieces, const PlanSizes& sizes, const Widths& padded) {
        const int64_t rows = sizes.max_head_rows;
        queries = pieces.take(sizes.max_queries * padded.row);
        factors = pieces.take(rows);
        for (int64_t** of_rows : {&positions, &firsts, &own_positions}) {
            *of_rows = reinterpret_cast<int64_t*>(pieces.take(2 * int64_t{sizes.max_rows}));
        }
        partial = pieces.take_partial(rows, padded.value);
        segment = pieces.take_softmax(rows, padded.value);
        whole = pieces.take_softmax(rows, padded.value);
        rest = pieces.take(attend_scratch(sizes.max_rows, sizes.max_heads, padded.row));
    }
};

// Puts the cells of a row, `step` cells apart.
template <class Cell>
void scatter(const char* row, int64_t cells, char* to, int64_t step) {
    const auto size = static_cast<int64_t>(sizeof(Cell));
    for (int64_t i = 0; i < cells; ++i) {
        std::memcpy(to + i * step * size, row + i * size, sizeof(Cell));
    }
}

void scatter(int64_t cell_size, const char* row, int64_t cells, char* to, int64_t step) {
    switch (cell_size) {
        case 1: return scatter<uint8_t>(row, cells, to, step);
        case 2: return scatter<uint16_t>(row, cells, to, step);
        default: return scatter<uint32_t>(row, cells, to, step);
    }
}

// Writes keys and values of tokens to the blocks of their sequences.
struct CacheWriter {
    const KernelTable& table;
    const AttentionMetadata& metadata;
    const Cache& cache;
    int64_t item = size_of(cache.dtype);

    int64_t row_of(int64_t token, int64_t kv_head) const {
        const int64_t place = metadata.token_rows[static_cast<size_t>(token)], size = metadata.shape.block_size;
        return (place / size * metadata.shape.num_kv_heads + kv_head) * size + place % size;
    }

    void put_key(int64_t token, int64_t kv_head, const float* key) const {
        const int64_t d = metadata.shape.head_dim, size = metadata.shape.block_size;
        const int64_t row = row_of(token, kv_head), offset = row % size, pair = pair_of(cache.math);
        alignas(64) char encoded[kMaxHeadDim * 4];
        float scale = 0;
        table.to_cache(cache.dtype, key, d, encoded, &scale);
        if (cache.key_scales) cache.key_scales[row] = scale;
        scatter(pair * item, encoded, d / pair, at(cache.keys, ((row - offset) * d + offset * pair) * item), size);
    }

    void put_value(int64_t token, int64_t kv_head, const float* value) const {
        const int64_t d = metadata.shape.head_dim, pair = value_pair(cache.math, metadata.shape.block_size);
        const int64_t row = row_of(token, kv_head), offset = row % pair;
        alignas(64) char encoded[kMaxHeadDim * 4];
        float scale = 0;
        table.to_cache(cache.dtype, value, d, encoded, &scale);
        if (cache.value_scales) cache.value_scales[row] = scale;
        char* to = at(cache.values, (row - offset) * d * item);
        scatter(item, encoded, d, to + offset * item, pair);
        if (offset + 1 < pair && !writes_next(token)) {
            // It is multiplied by 0, which has to be 0: no NaN may be left there.
            std::memset(encoded, 0, static_cast<size_t>(d * item));
            scatter(item, encoded, d, to + item, pair);
        }
    }

    // Whether the token is kept on this rank.
    bool holds(int64_t token) const { return metadata.token_rows[static_cast<size_t>(token)] >= 0; }

    // Whether the other half of a token's pair is written in the same step.
    bool writes_next(int64_t token) const {
        const auto i = static_cast<size_t>(token);
        return i + 1 < metadata.token_rows.size() && metadata.token_rows[i + 1] == metadata.token_rows[i] + 1;
    }
};

void clear(Partial partial, int heads, int64_t rows, int padded_dim) {
    for (int head = 0; head < heads; ++head) {
        const Partial of_head = partial.from(head * partial.head_rows, padded_dim);
        std::fill_n(of_head.highest, rows, -INFINITY);
        std::fill_n(of_head.totals, rows * kTotals, 0.0f);
        std::fill_n(of_head.out, rows * padded_dim, 0.0f);
    }
}

void clear(Softmax softmax, int64_t rows, int padded_dim) {
    std::fill_n(softmax.highest, rows, -INFINITY);
    std::fill_n(softmax.total, rows, 0.0f);
    std::fill_n(softmax.out, rows * padded_dim, 0.0f);
}

// The weights of a row, with that of its head's sink. Far above all scores that one is infinite, and the result 0.
float total(const AttentionOptions& options, int64_t head, Softmax row) {
    return options.sinks == nullptr ? *row.total : *row.total + std::exp2(options.sinks[head] * kLog2E - *row.highest);
}

// Memory that all threads of a layer's attention share.
struct SharedMemory {
    Partial splits;
    Softmax carried;  // of rows of sequences with cold segments: over those so far

    SharedMemory(Pieces& pieces, const AttentionMetadata& metadata, const PlanSizes& sizes, const Widths& padded)
        : splits(pieces.take_partial(sizes.num_split_rows, padded.value)),
          carried(pieces.take_softmax(metadata.num_carried * metadata.shape.num_heads, padded.value)) {}
};

// The attention of one layer, as one thread goes through it.
struct Attention {
    const KernelTable& table;
    const AttentionMetadata& metadata;
    const AttentionPlan& plan;
    const Cache& cache;
    const Queries& queries;
    const AttentionOptions& options;
    float* out;
    Memory memory;
    SharedMemory shared;
    const int32_t* cold_blocks = nullptr;  // of the cold segments that this is the attention over; `cache` has them
    const Softmax* found = nullptr;        // of rows by their places, where what is found is not the end of it
    int64_t first_key = 0;                 // position of the first token of the cold segments

    using Item = AttentionPlan::Item;
    const HeadShape& shape = metadata.shape;
    int padded = Widths(cache).value;

    const AttentionPlan::Tile& tile_of(const Item& item, int64_t member = 0) const {
        return plan.tiles[static_cast<size_t>(plan.members[static_cast<size_t>(item.first_member + member)])];
    }

    // Number of a tile's row among those of all tokens and heads.
    int64_t place(const AttentionPlan::Tile& tile, int kv_head, int row) const {
        const int64_t token = tile.first_token + row / plan.group;
        return token * shape.num_heads + kv_head * plan.group + row % plan.group;
    }

    // A query, which is put together in `joined` [head_dim] where it comes in two parts.
    const float* query(int64_t place, float* joined) const {
        const int64_t first = cache.value_dim, rest = cache.head_dim - first;
        if (queries.rest == nullptr) return queries.first + place * first;
        std::copy_n(queries.first + place * first, first, joined);
        std::copy_n(queries.rest + place * rest, rest, joined + first);
        return joined;
    }

    Partial split_at(const Item& item, int64_t split) const {
        const auto& rows = plan.splits[static_cast<size_t>(split)];
        Partial partial = shared.splits.from(rows.row + item.kv_head * rows.head_rows, padded);
        partial.head_rows = rows.head_rows;
        return partial;
    }

    // Packs the queries of an item; returns the rows of a head.
    int pack(const Item& item) const {
        alignas(64) float joined[kMaxHeadDim];
        int rows = 0;
        for (int64_t member = 0; member < item.num_members; ++member) {
            const auto& tile = tile_of(item, member);
            for (int row = 0; row < tile.num_tokens * plan.group; ++row) {
                const int64_t own = tile.first_position + row / plan.group, position = cold_blocks ? tile.end - 1 : own;
                memory.own_positions[rows] = own - first_key;
                memory.firsts[rows] = options.reach.first(position);
                memory.positions[rows++] = options.reach.last(position, tile.end);
            }
        }
        for (int head = 0; head < item.heads; ++head) {
            float* packed = memory.queries + head * packed_queries(rows, shape.head_dim / pair_of(cache.math));
            float* factor = memory.factors + head * rows;
            for (int64_t member = 0, to = 0; member < item.num_members; ++member) {
                const auto& tile = tile_of(item, member);
                for (int row = 0; row < tile.num_tokens * plan.group; ++row, ++to) {
                    const float* own = query(place(tile, item.kv_head + head, row), joined);
                    factor[to] = options.scale * kLog2E * table.pack_query(cache.math, own, shape.head_dim,
                                                                   static_cast<int>(to), rows, packed);
                }
            }
        }
        return rows;
    }

    void run(const Item& item) const {
        const int rows = pack(item);
        const int32_t* blocks = cold_blocks ? cold_blocks : metadata.blocks_of(tile_of(item).sequence);
        const AttendTile attended{
            cache, memory.queries, memory.factors, memory.positions, memory.firsts, rows, item.kv_head, item.heads,
            options.softcap * kLog2E, blocks, item.end, shape.num_kv_heads, shape.block_size, shape.head_dim,
            Widths(cache).row, padded, options.relative, memory.own_positions,
            metadata.sequences[static_cast<size_t>(tile_of(item).sequence)].first_token, plan.group};
        if (item.split >= 0) {
            const Partial split = split_at(item, item.split);
            if (!item.resumes) clear(split, item.heads, rows, padded);
            table.attend(attended, item.begin, item.end, memory.rest, split);
            return;
        }
        Partial partial = memory.partial;
        partial.head_rows = rows;
        merge_all(item, rows, [&](int64_t begin, int64_t end, Softmax into) {
            clear(partial, item.heads, rows, padded);
            table.attend(attended, begin, end, memory.rest, partial);
            table.merge(item.heads * rows, padded, into, partial);
        });
    }

    // Merges the splits of an item, each of which is taken into the softmax of its segment, and the segments.
    template <class TakeSplit>
    void merge_all(const Item& item, int rows, TakeSplit take_split) const {
        const int all = item.heads * rows;
        const int64_t segment = plan.parts.segment, split = plan.parts.split;
        const bool carries = metadata.sequences[static_cast<size_t>(tile_of(item).sequence)].cold_len > 0;
        // What is merged into nothing stays as it is.
        const bool by_segments = carries || (item.end - 1) / segment > item.begin / segment;
        clear(memory.whole, all, padded);
        if (carries) carry(item, rows, [&](Softmax own, Softmax carried) { table.merge_segment(rows, padded, own, carried); });
        for (int64_t begin = item.begin; begin < item.end;) {
            const int64_t end = std::min(begin / split * split + split, item.end);
            if (by_segments && (begin == item.begin || begin % segment == 0)) clear(memory.segment, all, padded);
            take_split(begin, end, by_segments ? memory.segment : memory.whole);
            if (by_segments && (end == item.end || end % segment == 0)) {
                table.merge_segment(all, padded, memory.whole, memory.segment);
            }
            begin = end;
        }
        if (cold_blocks) {
            carry(item, rows, [&](Softmax own, Softmax carried) { copy(own, rows, carried); });
        } else if (found) {
            keep(item, rows);
        } else {
            normalize(item, rows);
        }
    }

    void copy(Softmax from, int64_t rows, Softmax to) const {
        std::copy_n(from.highest, rows, to.highest);
        std::copy_n(from.total, rows, to.total);
        std::copy_n(from.out, rows * padded, to.out);
    }

    void keep(const Item& item, int rows) const {
        for (int head = 0; head < item.heads; ++head) {
            for (int row = 0; row < rows; ++row) {
                copy(memory.whole.from(int64_t{head} * rows + row, padded), 1,
                     found->from(place(tile_of(item), item.kv_head + head, row), padded));
            }
        }
    }

    // Calls f(rows of a head in memory.whole, the same rows among those that are carried on).
    template <class F>
    void carry(const Item& item, int rows, F f) const {
        const auto& tile = tile_of(item);
        const auto& sequence = metadata.sequences[static_cast<size_t>(tile.sequence)];
        const int64_t first = (sequence.first_carried + tile.first_token - sequence.first_token) * shape.num_heads;
        for (int head = 0; head < item.heads; ++head) {
            f(memory.whole.from(int64_t{head} * rows, padded),
              shared.carried.from(first + int64_t{item.kv_head + head} * rows, padded));
        }
    }

    void merge(const Item& item) const {
        const auto& tile = tile_of(item);
        const int rows = static_cast<int>(tile.num_tokens) * plan.group;
        merge_all(item, rows, [&](int64_t begin, int64_t, Softmax into) {
            const Partial partial = split_at(item, tile.first_split + begin / plan.parts.split - tile.begin / plan.parts.split);
            for (int head = 0; head < item.heads; ++head) {
                table.merge(rows, padded, into.from(int64_t{head} * rows, padded), partial.from(head * partial.head_rows, padded));
            }
        });
    }

    // Calls all threads of the team make together.
    void run_all() const {
        const auto num_shared = static_cast<int64_t>(plan.shared.size());
        const auto num_items = static_cast<int64_t>(plan.items.size());
        const auto num_merged = static_cast<int64_t>(plan.merged.size());
        if (num_shared > 0) {
#pragma omp for schedule(dynamic, 1)
            for (int64_t i = 0; i < num_shared; ++i) run(plan.shared[static_cast<size_t>(i)]);
        }
#pragma omp for schedule(dynamic, 1)
        for (int64_t i = 0; i < num_items; ++i) run(plan.items[static_cast<size_t>(i)]);
        if (num_merged > 0) {
#pragma omp for schedule(dynamic, 1)
            for (int64_t i = 0; i < num_merged; ++i) merge(plan.merged[static_cast<size_t>(i)]);
        }
    }

    void normalize(const Item& item, int rows) const {
        for (int head = 0; head < item.heads; ++head) {
            for (int row = 0; row < rows; ++row) {
                const int64_t from = int64_t{head} * rows + row;
                table.normalize(memory.whole.out + from * padded,
                                total(options, (item.kv_head + head) * plan.group + row % plan.group, memory.whole.from(from, padded)),
                                cache.value_dim,
                                out + place(tile_of(item), item.kv_head + head, row) * cache.value_dim);
            }
        }
    }
};

// Memory of attention over contexts that are spread, which all threads share.
struct ContextMemory {
    SharedMemory shared;
    Softmax whole, found;
    int64_t share;  // elements of `found`, which lie together
    float* gathered;

    ContextMemory(Pieces& pieces, const AttentionMetadata& metadata, const PlanSizes& sizes, const Widths& padded, int ranks)
        : shared(pieces, metadata, sizes, padded), whole(take(pieces, metadata, padded)), found(take(pieces, metadata, padded)) {
        Pieces measured(nullptr);
        take(measured, metadata, padded);
        share = measured.taken();
        gathered = pieces.take(share * ranks);
    }

    static Softmax take(Pieces& pieces, const AttentionMetadata& metadata, const Widths& padded) {
        return pieces.take_softmax(metadata.num_tokens * metadata.shape.num_heads, padded.value);
    }
    // What a rank has found.
    Softmax of(int rank) const {
        const int64_t by = gathered - found.highest + rank * share;
        return {found.highest + by, found.total + by, found.out + by};
    }
};

PlanSizes sizes_of(const std::vector<AttentionPlan>& rounds) {
    PlanSizes most;
    for (const AttentionPlan& plan : rounds) most = most.or_more(plan);
    return most;
}

}  // namespace

void rotate_and_cache(const KernelTable& table, const AttentionMetadata& metadata, const Cache& cache,
                      const float* qkv, const HeadNorms& norms, const Rotary& rotary, float* queries) {
    const HeadShape& shape = metadata.shape;
    const CacheWriter writer{table, metadata, cache};
    const int64_t d = shape.head_dim;
    const int64_t heads = shape.num_heads, kv_heads = shape.num_kv_heads;
    const float* q_norm = norms.all_heads ? nullptr : norms.queries;
    const float* k_norm = norms.all_heads ? nullptr : norms.keys;
    std::vector<float> normed(norms.all_heads ? static_cast<size_t>((heads + kv_heads) * d) : 0);
    parallel_for_rows(metadata.num_tokens, [&](int64_t token) {
        const float* q = qkv + token * (heads + 2 * kv_heads) * d;
        const float* k = q + heads * d;
        const float* v = k + kv_heads * d;
        const float* cosine = rotary.cosines + token * (rotary.r / 2);
        const float* sine = rotary.sines + token * (rotary.r / 2);
        if (norms.all_heads) {
            float *q_out = normed.data(), *k_out = q_out + heads * d;
            table.rms_norm(q, nullptr, norms.queries, norms.eps, heads * d, nullptr, q_out);
            table.rms_norm(k, nullptr, norms.keys, norms.eps, kv_heads * d, nullptr, k_out);
            q = q_out, k = k_out;
        }
        for (int64_t h = 0; h < heads; ++h) {
            table.norm_and_rotate(q + h * d, q_norm, norms.eps, cosine, sine, rotary.r, d,
                                  queries + (token * heads + h) * d);
        }
        for (int64_t h = 0; h < kv_heads; ++h) {
            alignas(64) float key[kMaxHeadDim];
            table.norm_and_rotate(k + h * d, k_norm, norms.eps, cosine, sine, rotary.r, d, key);
            if (!writer.holds(token)) break;
            writer.put_key(token, h, key);
            writer.put_value(token, h, v + h * d);
        }
    });
}

void rotate_and_cache_latents(const KernelTable& table, const AttentionMetadata& metadata, const Cache& cache,
                              const float* queries, const float* latents, const float* norm, float eps,
                              const Rotary& rotary, float* out) {
    const CacheWriter writer{table, metadata, cache};
    const int64_t heads = metadata.shape.num_heads, d = cache.head_dim, rank = cache.value_dim, index = cache.index_dim;
    const int64_t rest = d - rank - index;
    parallel_for_rows(metadata.num_tokens, [&](int64_t token) {
        const float* cosine = rotary.cosines + token * (rotary.r / 2);
        const float* sine = rotary.sines + token * (rotary.r / 2);
        for (int64_t row = token * heads; row < (token + 1) * heads; ++row) {
            table.norm_and_rotate(queries + row * rest, nullptr, 0, cosine, sine, rotary.r, rest, out + row * rest);
        }
        if (!writer.holds(token)) return;
        alignas(64) float latent[kMaxHeadDim];
        const float* own = latents + token * d + index;
        table.rms_norm(own, nullptr, norm, eps, rank, nullptr, latent);
        table.norm_and_rotate(own + rank, nullptr, 0, cosine, sine, rotary.r, rest, latent + rank);
        std::copy_n(own - index, index, latent + rank + rest);
        writer.put_value(token, 0, latent);
    });
}

size_t attention_scratch(const AttentionMetadata& metadata, const Cache& cache, const Reach& reach) {
    const PlanSizes sizes = metadata.sizes(reach);
    const Widths padded(cache);
    Pieces own(nullptr), shared(nullptr);
    const Memory memory(own, sizes, padded);
    const SharedMemory of_all(shared, metadata, sizes, padded);
    return sizeof(float) * static_cast<size_t>(omp_get_max_threads() * own.taken() + shared.taken());
}

void attention(const KernelTable& table, const AttentionMetadata& metadata, const Cache& cache, const Queries& queries,
               const AttentionOptions& options, float* out, void* scratch) {
    const PlanSizes sizes = metadata.sizes(options.reach);
    const Widths padded(cache);
    Pieces pieces(static_cast<float*>(scratch));
    const SharedMemory shared(pieces, metadata, sizes, padded);
    Pieces measured(nullptr);
    const Memory size(measured, sizes, padded);
    Pieces own(static_cast<float*>(scratch) + pieces.taken() + omp_get_thread_num() * measured.taken());
    const Memory memory(own, sizes, padded);
    if (!metadata.cold.empty()) {
        const int64_t rows = metadata.num_carried * metadata.shape.num_heads;
#pragma omp for
        for (int64_t row = 0; row < rows; ++row) clear(shared.carried.from(row, padded.value), 1, padded.value);
    }
    int64_t first_key = 0;
    for (size_t i = 0; i < metadata.cold.size(); ++i) {
#pragma omp master
        metadata.staged = metadata.source->take(cache, static_cast<int64_t>(i));
#pragma omp barrier
        const StagedRun staged = metadata.staged;
        const AttentionPlan& plan = metadata.cold_plan(metadata.cold[i]);
        const bool follows = i > 0 && metadata.cold[i].sequence == metadata.cold[i - 1].sequence;
        first_key = follows ? first_key + metadata.cold[i - 1].count * plan.parts.segment : 0;
        const Attention over{table, metadata, plan, *staged.cache, queries, options, out, memory, shared, staged.blocks,
                             nullptr, first_key};
        over.run_all();
    }
    if (!metadata.cold.empty()) {
#pragma omp master
        metadata.source->release(cache);
    }
    const Attention layer{table, metadata, metadata.plan(options.reach), cache, queries, options, out, memory, shared};
    layer.run_all();
}

size_t context_attention_scratch(const AttentionMetadata& metadata, const Cache& cache, const Reach& reach,
                                 const ContextRanks& ranks) {
    const PlanSizes sizes = sizes_of(metadata.rounds(reach, ranks.rank, ranks.size));
    const Widths padded(cache);
    Pieces own(nullptr), shared(nullptr);
    const Memory memory(own, sizes, padded);
    const ContextMemory of_all(shared, metadata, sizes, padded, ranks.size);
    return sizeof(float) * static_cast<size_t>(omp_get_max_threads() * own.taken() + shared.taken());
}

void context_attention(const KernelTable& table, const AttentionMetadata& metadata, const Cache& cache, const Queries& queries,
                       const AttentionOptions& options, const ContextRanks& ranks, float* out, void* scratch) {
    const std::vector<AttentionPlan>& rounds = metadata.rounds(options.reach, ranks.rank, ranks.size);
    const PlanSizes sizes = sizes_of(rounds);
    const Widths padded(cache);
    Pieces pieces(static_cast<float*>(scratch));
    const ContextMemory all(pieces, metadata, sizes, padded, ranks.size);
    Pieces measured(nullptr);
    const Memory size(measured, sizes, padded);
    Pieces own(static_cast<float*>(scratch) + pieces.taken() + omp_get_thread_num() * measured.taken());
    const Memory memory(own, sizes, padded);
    const int64_t heads = metadata.shape.num_heads;
    parallel_for_rows(metadata.num_tokens * heads, [&](int64_t row) { clear(all.whole.from(row, padded.value), 1, padded.value); });
    for (const AttentionPlan& plan : rounds) {
        parallel_for_rows(metadata.num_tokens * heads, [&](int64_t row) { clear(all.found.from(row, padded.value), 1, padded.value); });
        const Attention over{table, metadata, plan, cache, queries, options, out, memory, all.shared, nullptr, &all.found};
        over.run_all();
#pragma omp master
        ranks.all_gather(all.found.highest, all.share * size_of(Dtype::f32), all.gathered);
#pragma omp barrier
        parallel_for_rows(metadata.num_tokens, [&](int64_t token) {
            const int first = metadata.first_rank(metadata.token_sequences[static_cast<size_t>(token)], ranks.rank);
            for (int turn = 0; turn < ranks.size; ++turn) {
                const Softmax share = all.of((first + turn) % ranks.size).from(token * heads, padded.value);
                table.merge_segment(static_cast<int>(heads), padded.value, all.whole.from(token * heads, padded.value), share);
            }
        });
    }
    parallel_for_rows(metadata.num_tokens * heads, [&](int64_t row) {
        const Softmax found = all.whole.from(row, padded.value);
        table.normalize(found.out, total(options, row % heads, found), cache.value_dim, out + row * cache.value_dim);
    });
}

}  // namespace pagoda
