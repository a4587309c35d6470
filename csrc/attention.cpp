#include <omp.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "ops.h"

namespace pagoda {

namespace {

// Query rows that share one gathering of keys and values.
constexpr int kQueryRows = 48;
// A larger part of a thread's work than one in so many is shared out: threads may not all be equally fast.
constexpr int64_t kItemsPerThread = 16;
constexpr float kLog2E = 1.44269504f;

int round_up_to_16(int d) { return (d + 15) / 16 * 16; }

int64_t partial_size(int rows, int padded_dim) { return int64_t{rows} * (padded_dim + 2); }

Partial partial_at(float* memory, int rows, int padded_dim) {
    return {memory + int64_t{rows} * padded_dim, memory + int64_t{rows} * (padded_dim + 1), memory};
}

// What a thread works in, in floats.
struct Memory {
    int padded;       // head_dim rounded up
    int64_t queries;  // packed
    int64_t partial;  // for an unfinished softmax
    int64_t own;      // in all

    explicit Memory(const AttentionMetadata& metadata)
        : padded(round_up_to_16(metadata.shape.head_dim)),
          queries(packed_queries(metadata.max_rows, padded)),
          partial(partial_size(metadata.max_rows, padded)),
          own(queries + metadata.max_rows + attend_scratch(metadata.max_rows, padded) + 2 * partial) {}
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

    // Whether the other half of a token's pair is written in the same step.
    bool writes_next(int64_t token) const {
        const auto i = static_cast<size_t>(token);
        return i + 1 < metadata.token_rows.size() && metadata.token_rows[i + 1] == metadata.token_rows[i] + 1;
    }
};

void clear(Partial partial, int rows, int padded_dim) {
    std::fill_n(partial.highest, rows, -INFINITY);
    std::fill_n(partial.total, rows, 0.0f);
    std::fill_n(partial.out, int64_t{rows} * padded_dim, 0.0f);
}

}  // namespace

AttentionMetadata::AttentionMetadata(const HeadShape& shape_, int64_t n, const int64_t* query_lens,
                             const int64_t* context_lens, const int64_t* block_tables, int64_t width_)
    : shape(shape_), width(width_), blocks(block_tables, block_tables + n * width_) {
    const int group = shape.num_heads / shape.num_kv_heads;
    const int64_t tokens_per_tile = std::max(1, kQueryRows / group);
    for (int64_t i = 0; i < n; ++i) {
        const int64_t start = context_lens[i] - query_lens[i];
        for (int64_t done = 0; done < query_lens[i]; done += tokens_per_tile) {
            const int64_t count = std::min(tokens_per_tile, query_lens[i] - done);
            tiles.push_back({num_tokens + done, count, start + done, i});
            max_rows = std::max(max_rows, static_cast<int>(count) * group);
        }
        for (int64_t position = start; position < context_lens[i]; ++position) {
            const int64_t block = blocks[static_cast<size_t>(i * width + position / shape.block_size)];
            token_rows.push_back(block * shape.block_size + position % shape.block_size);
        }
        num_tokens += query_lens[i];
    }
    const int64_t longest = longest_item();
    for (size_t i = 0; i < tiles.size(); ++i) {
        const auto tile = static_cast<int64_t>(i);
        const int64_t end = tiles[i].first_position + tiles[i].num_tokens;
        for (int head = 0; head < shape.num_kv_heads; ++head) {
            if (end <= longest) {
                items.push_back({tile, head, 0, end, -1});
                continue;
            }
            merged.push_back({tile, head, 0, end, num_slots});
            for (int64_t begin = 0; begin < end; begin += kSplit) {
                items.push_back({tile, head, begin, std::min(begin + kSplit, end), num_slots++});
            }
        }
    }
    // The longest first, so that threads finish together.
    std::stable_sort(items.begin(), items.end(),
                     [](const Item& a, const Item& b) { return a.end - a.begin > b.end - b.begin; });
}

// Cached tokens from which on an item is shared out, lest one thread is at it when all others are done.
int64_t AttentionMetadata::longest_item() const {
    int64_t total = 0;
    for (const auto& tile : tiles) total += (tile.first_position + tile.num_tokens) * shape.num_kv_heads;
    return std::max<int64_t>(kSplit, total / (kItemsPerThread * omp_get_max_threads()));
}

void rotate_and_cache(const KernelTable& table, const AttentionMetadata& metadata, const Cache& cache,
                      const float* qkv, const float* q_norm, const float* k_norm, float eps, const float* cosines,
                      const float* sines, float* queries) {
    const HeadShape& shape = metadata.shape;
    const CacheWriter writer{table, metadata, cache};
    const int64_t d = shape.head_dim;
    const int64_t heads = shape.num_heads, kv_heads = shape.num_kv_heads;
#pragma omp for schedule(static)
    for (int64_t token = 0; token < metadata.num_tokens; ++token) {
        const float* q = qkv + token * (heads + 2 * kv_heads) * d;
        const float* k = q + heads * d;
        const float* v = k + kv_heads * d;
        const float* cosine = cosines + token * (d / 2);
        const float* sine = sines + token * (d / 2);
        for (int64_t h = 0; h < heads; ++h) {
            table.norm_and_rotate(q + h * d, q_norm, eps, cosine, sine, d, queries + (token * heads + h) * d);
        }
        for (int64_t h = 0; h < kv_heads; ++h) {
            alignas(64) float key[kMaxHeadDim];
            table.norm_and_rotate(k + h * d, k_norm, eps, cosine, sine, d, key);
            writer.put_key(token, h, key);
            writer.put_value(token, h, v + h * d);
        }
    }
}

size_t attention_scratch(const AttentionMetadata& metadata) {
    const Memory memory(metadata);
    return sizeof(float) * static_cast<size_t>(omp_get_max_threads() * memory.own +
                                               metadata.num_slots * memory.partial);
}

void attention(const KernelTable& table, const AttentionMetadata& metadata, const Cache& cache, const float* queries,
               float scale, int64_t window, float* out, void* scratch) {
    const HeadShape& shape = metadata.shape;
    const int group = shape.num_heads / shape.num_kv_heads;
    const Memory memory(metadata);
    const int padded = memory.padded;
    const int64_t partial = memory.partial;
    float* own = static_cast<float*>(scratch) + omp_get_thread_num() * memory.own;
    float* slots = static_cast<float*>(scratch) + omp_get_max_threads() * memory.own;
    const Partial whole = partial_at(own, metadata.max_rows, padded);
    const Partial part = partial_at(own + partial, metadata.max_rows, padded);
    float* packed = own + 2 * partial;
    float* factors = packed + memory.queries;
    float* rest = factors + metadata.max_rows;
    const auto rows_of = [&](const AttentionMetadata::Tile& tile) {
        return static_cast<int>(tile.num_tokens) * group;
    };
    // Where a row's query is, and where its result goes.
    const auto place = [&](const AttentionMetadata::Item& item, int row) {
        const int64_t token = metadata.tiles[static_cast<size_t>(item.tile)].first_token + row / group;
        return (token * shape.num_heads + item.kv_head * group + row % group) * shape.head_dim;
    };
    const auto normalize = [&](const AttentionMetadata::Item& item, int rows, Partial result) {
        for (int row = 0; row < rows; ++row) {
            table.normalize(result.out + int64_t{row} * padded, result.total[row], shape.head_dim,
                            out + place(item, row));
        }
    };
    const auto num_items = static_cast<int64_t>(metadata.items.size());
    const auto num_merged = static_cast<int64_t>(metadata.merged.size());
#pragma omp for schedule(dynamic, 1)
    for (int64_t i = 0; i < num_items; ++i) {
        const auto& item = metadata.items[static_cast<size_t>(i)];
        const auto& tile = metadata.tiles[static_cast<size_t>(item.tile)];
        const int rows = rows_of(tile);
        for (int row = 0; row < rows; ++row) {
            factors[row] = scale * kLog2E * table.pack_query(cache.math, queries + place(item, row),
                                                             shape.head_dim, row, rows, packed);
        }
        const AttendTile attended{
            cache, packed, factors, rows, group, tile.first_position, window,
            metadata.blocks.data() + tile.sequence * metadata.width, item.begin, item.end, item.kv_head,
            shape.num_kv_heads, shape.block_size, shape.head_dim, padded};
        if (item.slot >= 0) {
            const Partial slot = partial_at(slots + item.slot * partial, metadata.max_rows, padded);
            table.attend(attended, item.begin, item.end, rest, slot);
            continue;
        }
        clear(whole, rows, padded);
        for (int64_t begin = item.begin; begin < item.end; begin += kSplit) {
            table.attend(attended, begin, std::min(begin + kSplit, item.end), rest, part);
            table.merge(rows, padded, whole, part);
        }
        normalize(item, rows, whole);
    }
#pragma omp for schedule(dynamic, 1)
    for (int64_t i = 0; i < num_merged; ++i) {
        const auto& item = metadata.merged[static_cast<size_t>(i)];
        const int rows = rows_of(metadata.tiles[static_cast<size_t>(item.tile)]);
        clear(whole, rows, padded);
        const int64_t splits = (item.end + kSplit - 1) / kSplit;
        for (int64_t split = 0; split < splits; ++split) {
            table.merge(rows, padded, whole,
                        partial_at(slots + (item.slot + split) * partial, metadata.max_rows, padded));
        }
        normalize(item, rows, whole);
    }
}

}  // namespace pagoda
