// SPDX-License-Identifier: Apache-2.0
#include "indexed_attention.h"

#include <omp.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>

namespace pagoda {

namespace {

// Tokens whose rows are copied at once.
constexpr int64_t kTokens = 16;
// Tokens of a block of copies, and of a piece of work.
constexpr int64_t kCopyBlock = kKeyTile;

int64_t round_up(int64_t x, int64_t step) { return (x + step - 1) / step * step; }

template <class Cell>
void copy_row(const char* from, int64_t step, int64_t cells, char* to, int64_t to_step) {
    const auto size = static_cast<int64_t>(sizeof(Cell));
    for (int64_t i = 0; i < cells; ++i) std::memcpy(to + i * to_step * size, from + i * step * size, sizeof(Cell));
}

}  // namespace

// Some tokens of a step, the cached tokens that each sees, and the tokens that are chosen of these.
struct IndexedAttention::Part {
    int64_t first = 0, count = 0;
    int64_t lens[kTokens], chosen[kTokens], sequences[kTokens];
    int64_t longest = 0, most_chosen = 0;

    int64_t blocks() const { return round_up(most_chosen, kCopyBlock) / kCopyBlock; }
};

struct IndexedAttention::Memory {
    float* scores = nullptr;     // [kTokens, stride]
    int32_t* order = nullptr;    // [kTokens, stride]
    float* keys = nullptr;       // [threads, index_dim, kKeyTile]
    Cache copies{};
    void* attention = nullptr;
    int64_t stride = 0;
    size_t bytes = 0;

    Memory(const Cache& cache, int64_t longest, int64_t blocks, void* scratch) : stride(round_up(longest, kKeyTile)) {
        const auto take = [&](int64_t size) {
            char* piece = scratch == nullptr ? nullptr : static_cast<char*>(scratch) + bytes;
            bytes += static_cast<size_t>(round_up(size, 64));
            return static_cast<void*>(piece);
        };
        scores = static_cast<float*>(take(kTokens * stride * 4));
        order = static_cast<int32_t*>(take(kTokens * stride * 4));
        keys = static_cast<float*>(take(omp_get_max_threads() * cache.index_dim * kKeyTile * 4));
        const int64_t width = cache.head_dim - cache.index_dim, row_bytes = width * size_of(cache.dtype);
        copies = cache;
        copies.num_blocks = kTokens * blocks, copies.block_size = kCopyBlock, copies.head_dim = width, copies.index_dim = 0;
        copies.key_stride = copies.value_stride = kCopyBlock * row_bytes;
        copies.scale_stride = kCopyBlock * size_of(Dtype::f32);
        copies.values = take(copies.num_blocks * copies.value_stride);
        if (cache.value_scales != nullptr) {
            copies.key_scales = copies.value_scales = static_cast<float*>(take(copies.num_blocks * copies.scale_stride));
        }
        attention = take(0);
    }
};

IndexedAttention::IndexedAttention(const Cache& cache, int64_t num_heads, int64_t index_heads, int64_t most, float scale)
    : cache_(cache), num_heads_(num_heads), index_heads_(index_heads), most_(most), scale_(scale) {}

IndexedAttention::Part IndexedAttention::part(const AttentionMetadata& metadata, int64_t first) const {
    Part part;
    part.first = first;
    for (; part.count < kTokens && first + part.count < metadata.num_tokens; ++part.count) {
        const int64_t token = first + part.count, sequence = metadata.token_sequences[static_cast<size_t>(token)];
        const auto& own = metadata.sequences[static_cast<size_t>(sequence)];
        const int64_t length = own.context_len - own.query_len + token - own.first_token + 1;
        part.sequences[part.count] = sequence, part.lens[part.count] = length;
        part.chosen[part.count] = std::min(length, most_);
        part.longest = std::max(part.longest, length);
        part.most_chosen = std::max(part.most_chosen, part.chosen[part.count]);
    }
    return part;
}

// A step over copies, in which each token is one of a sequence of its own.
AttentionMetadata IndexedAttention::of_chosen(const Part& part) const {
    const int64_t blocks = part.blocks();
    std::vector<int64_t> ones(static_cast<size_t>(part.count), 1), tables(static_cast<size_t>(part.count * blocks));
    std::iota(tables.begin(), tables.end(), 0);
    const HeadShape shape{static_cast<int>(num_heads_), 1, static_cast<int>(cache_.head_dim - cache_.index_dim),
                          static_cast<int>(kCopyBlock)};
    return {shape, part.count * blocks, part.count, ones.data(), part.chosen, nullptr, tables.data(), blocks,
            ContextParts(std::max(most_, int64_t{kSplit}))};
}

size_t IndexedAttention::scratch(const AttentionMetadata& metadata) const {
    threads_ = omp_get_max_threads();
    size_t most = 0;
    for (int64_t first = 0; first < metadata.num_tokens; first += kTokens) {
        const Part own = part(metadata, first);
        const Memory memory(cache_, own.longest, own.blocks(), nullptr);
        most = std::max(most, memory.bytes + attention_scratch(of_chosen(own), memory.copies, {}));
    }
    return most;
}

// Scores of the tokens that do not attend to all they see. Tokens of one sequence share the keys of a tile.
void IndexedAttention::score(const KernelTable& table, const AttentionMetadata& metadata, const Part& part,
                             const IndexedQueries& queries, const Memory& memory) const {
    const int64_t size = cache_.block_size, d = cache_.index_dim, item = size_of(cache_.dtype);
    const int64_t pair = value_pair(cache_.math, static_cast<int>(size)), begin = cache_.head_dim - d;
    float* keys = memory.keys + omp_get_thread_num() * d * kKeyTile;
    for (int64_t token = 0, next; token < part.count; token = next) {
        next = token + 1;
        while (next < part.count && part.sequences[next] == part.sequences[token]) ++next;
        if (part.lens[next - 1] <= most_) continue;
        const int32_t* blocks = metadata.blocks_of(part.sequences[token]);
        const int64_t tiles = (part.lens[next - 1] + kKeyTile - 1) / kKeyTile;
#pragma omp for schedule(dynamic) nowait
        for (int64_t tile = 0; tile < tiles; ++tile) {
            const int64_t first = tile * kKeyTile, end = std::min(part.lens[next - 1], first + kKeyTile);
            std::memset(keys, 0, static_cast<size_t>(d * kKeyTile) * sizeof(float));
            for (int64_t position = first; position < end; ++position) {
                const int64_t block = blocks[position / size], offset = position % size;
                const auto* values = static_cast<const char*>(cache_.values) + block * cache_.value_stride;
                const float scale = cache_.value_scales == nullptr ? 1 : cache_.value_scales[block * size + offset];
                const char* key = values + ((offset / pair * cache_.head_dim + begin) * pair + offset % pair) * item;
                table.index_key(cache_.dtype, key, d, pair, scale, keys + position - first);
            }
            for (int64_t own = token; own < next; ++own) {
                if (part.lens[own] <= most_ || part.lens[own] <= first) continue;
                const int64_t row = part.first + own;
                table.index_scores(keys, d, queries.index + row * index_heads_ * d, queries.weights + row * index_heads_,
                                   index_heads_, memory.scores + own * memory.stride + first);
            }
        }
    }
#pragma omp barrier
}

// The positions of the highest scores, of equal ones the first, in order.
void IndexedAttention::choose(const Part& part, const Memory& memory) const {
#pragma omp for schedule(dynamic)
    for (int64_t token = 0; token < part.count; ++token) {
        int32_t* order = memory.order + token * memory.stride;
        float* scores = memory.scores + token * memory.stride;
        const int64_t length = part.lens[token];
        std::iota(order, order + length, 0);
        if (length <= most_) continue;
        for (int64_t i = 0; i < length; ++i) {
            if (!(scores[i] > -std::numeric_limits<float>::infinity())) scores[i] = -std::numeric_limits<float>::infinity();
        }
        const auto better = [scores](int32_t a, int32_t b) { return scores[a] != scores[b] ? scores[a] > scores[b] : a < b; };
        std::nth_element(order, order + most_, order + length, better);
        std::sort(order, order + most_);
    }
}

void IndexedAttention::copy(const AttentionMetadata& metadata, const Part& part, const Memory& memory) const {
    const Cache& to = memory.copies;
    const int64_t size = cache_.block_size, item = size_of(cache_.dtype), width = to.head_dim, blocks = part.blocks();
    const int64_t pair = value_pair(cache_.math, static_cast<int>(size)), to_pair = value_pair(cache_.math, kCopyBlock);
#pragma omp for schedule(dynamic)
    for (int64_t task = 0; task < part.count * blocks; ++task) {
        const int64_t token = task / blocks, first = task % blocks * kCopyBlock;
        const int64_t end = std::min(part.chosen[token], first + kCopyBlock);
        const int32_t* table = metadata.blocks_of(part.sequences[token]);
        const int32_t* order = memory.order + token * memory.stride;
        char* values = static_cast<char*>(to.values) + task * to.value_stride;
        for (int64_t i = first; i < end; ++i) {
            const int64_t block = table[order[i] / size], offset = order[i] % size, at = i - first;
            const char* from = static_cast<const char*>(cache_.values) + block * cache_.value_stride +
                               (offset / pair * cache_.head_dim * pair + offset % pair) * item;
            char* row = values + (at / to_pair * width * to_pair + at % to_pair) * item;
            switch (item) {
                case 1: copy_row<uint8_t>(from, pair, width, row, to_pair); break;
                case 2: copy_row<uint16_t>(from, pair, width, row, to_pair); break;
                default: copy_row<uint32_t>(from, pair, width, row, to_pair);
            }
            if (to.value_scales != nullptr) {
                to.value_scales[task * kCopyBlock + at] = cache_.value_scales[block * size + offset];
            }
        }
        if (end > first && (end - first) % to_pair != 0) {
            // The other half of the last pair is multiplied by 0, and must not be NaN.
            char* pairs = values + (end - first) / to_pair * width * to_pair * item;
            for (int64_t i = 0; i < width; ++i) std::memset(pairs + (i * to_pair + 1) * item, 0, static_cast<size_t>(item));
        }
    }
}

void IndexedAttention::run(const KernelTable& table, const AttentionMetadata& metadata, const IndexedQueries& queries,
                           float* out, void* scratch) {
    // What a nested level would have does not count (OMP_NUM_THREADS may say another number for it).
    omp_set_num_threads(threads_);
    const int64_t d = cache_.head_dim - cache_.index_dim, dim = cache_.value_dim;
    for (int64_t first = 0; first < metadata.num_tokens; first += kTokens) {
        const Part own = part(metadata, first);
        const Memory memory(cache_, own.longest, own.blocks(), scratch);
        score(table, metadata, own, queries, memory);
        choose(own, memory);
        copy(metadata, own, memory);
#pragma omp single
        {
            chosen_.emplace(of_chosen(own));
            attention_scratch(*chosen_, memory.copies, {});  // plans
        }
        const Queries part_queries{queries.attention.first + first * num_heads_ * dim,
                                   queries.attention.rest + first * num_heads_ * (d - dim)};
        attention(table, *chosen_, memory.copies, part_queries, {scale_, {}}, out + first * num_heads_ * dim, memory.attention);
#pragma omp barrier
    }
}

}  // namespace pagoda
