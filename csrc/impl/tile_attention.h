// SPDX-License-Identifier: Apache-2.0
// Attention in bf16 by tiles: scores of up to 32 rows for two groups of 16 tokens at once, and their weights times two
// vectors of values. Keys and values are read where they lie in the cache; see key_tiles.h.
//
// Values of 32 tokens are summed up together, in order, whatever blocks they lie in. What tokens beyond the last that rows
// see left in the cache is not multiplied: zeros are.
#pragma once

#include "attention.h"
#include "tile_products.h"
#include "tile_quantized.h"

namespace {

struct TileMath {
    using Lane = bf16_pair;
    static constexpr int pair = 2;

    static Lane lane(bf16_pair x) { return x; }
    static Lane lane(bf16 first, bf16 second) { return {first, second}; }
    PAGODA_INLINE static vec softmax_tile(float* scores, vec base, const float* value_scales, float* scale) {
        return Bf16Math::softmax_tile(scores, base, value_scales, scale);
    }
};

// Tokens whose values are multiplied together: two groups, in each kGroup / 2 rows of pairs.
constexpr int kTogether = 2 * kGroup, kGroupPairs = kGroup / 2;

// Queries are rows of bf16, one behind the other.
float tile_pack_query(Math math, const float* x, int64_t d, int row, int rows, void* packed) {
    if (math != Math::bf16) return kAvx512Bf16.pack_query(math, x, d, row, rows, packed);
    bf16* to = static_cast<bf16*>(packed) + row * d;
    for_vectors(d, [&](auto get, auto put) { put(to, get(x)); });
    return 1.0f;
}

// Asks for rows of the next tile.
void fetch_groups(const Groups<bf16_pair>& groups, int64_t rows, int64_t row_cells) {
    for (const bf16_pair* group : groups.soon) {
        for (int64_t row = 0; row < rows; ++row) {
            for (int64_t cell = 0; cell < row_cells; cell += 16) {
                _mm_prefetch(reinterpret_cast<const char*>(group + row * groups.stride + cell), _MM_HINT_T1);
            }
        }
    }
}

// The keys from `first` on that one of some rows sees.
int visible_keys(const AttendTile& tile, int64_t row, int rows, int64_t first) {
    int64_t last = 0;
    for (int64_t i = row; i < row + rows; ++i) last = tile.positions[i] > last ? tile.positions[i] : last;
    return clamp_to_tile(last + 1 - first);
}

// scores [rows, kKeyTile] of rows of queries with the groups that they see.
void score_block(Tiles& tiles, const bf16_pair* queries, int rows, int64_t lanes, const Groups<bf16_pair>& keys, int visible,
                 float* scores) {
    constexpr int64_t stride = kKeyTile * sizeof(float);
    const TileBlock block{rows, even_depth(lanes)};
    for (int token = 0; token < visible; token += kGroup) {
        const Factors factors{reinterpret_cast<const char*>(queries), lanes * 4,
                              reinterpret_cast<const char*>(keys.now[token / kGroup]), keys.stride * 4};
        sum_block<Bf16Product, 1>(tiles, block, factors, lanes, scores + token, stride, false, nothing_ahead);
    }
}

// Rows of pairs of the values of kTogether tokens from `token` of a tile on.
struct ValueRows {
    const bf16_pair* first;
    int64_t stride;

    // As they lie if they do so together and `visible` has them all; else in memory of 16 rows of `width`.
    ValueRows(const Groups<bf16_pair>& values, int token, int visible, int64_t width, bf16_pair* memory)
        : first(values.now[token / kGroup]), stride(values.stride) {
        if (visible - token >= kTogether && values.now[token / kGroup + 1] == first + kGroupPairs * stride) return;
        first = memory, stride = width;
        for (int i = 0; i < kTogether / 2; ++i, memory += width) {
            const auto bytes = static_cast<size_t>(width) * sizeof(*memory);
            if (token + 2 * i >= visible) {
                std::memset(memory, 0, bytes);
                continue;
            }
            const bf16_pair* group = values.now[token / kGroup + i / kGroupPairs];
            std::memcpy(memory, group + i % kGroupPairs * values.stride, bytes);
        }
    }
};

// out [rows, padded_dim] = decay * out + weights [rows, kKeyTile] times the values of `visible` tokens.
void add_value_block(Tiles& tiles, const float* weights, int rows, const Groups<bf16_pair>& values, int visible,
                     const float* decay, int64_t width, bf16_pair* memory, float* out) {
    constexpr int64_t kWeightStride = kKeyTile * sizeof(float);
    constexpr int halves = kKeyTile / kTogether;
    const TileBlock block{rows, kTileSide};
    const ValueRows parts[halves] = {{values, 0, visible, width, memory},
                                     {values, kTogether, visible, width, memory + kTogether / 2 * width}};
    static_assert(halves == 2);
    for (int64_t column = 0; column < width; column += kPanel) {
        BlockSums sums;
        const bool both = width - column >= kPanel;
        for (int half = 0; half < halves && half * kTogether < visible; ++half) {
            const Factors factors{reinterpret_cast<const char*>(weights) + half * kTogether * 2, kWeightStride,
                                  reinterpret_cast<const char*>(parts[half].first + column), parts[half].stride * 4};
            if (both) {
                sum_block<Bf16Product, 2>(tiles, block, factors, kTileSide, sums.sums, kPanelRow, half > 0, nothing_ahead);
            } else {
                sum_block<Bf16Product, 1>(tiles, block, factors, kTileSide, sums.sums, kPanelRow, half > 0, nothing_ahead);
            }
        }
        for (int r = 0; r < rows; ++r) {
            for (int j = 0; j < (both ? kPanel : kTileSide); j += kWidth) {
                float* to = out + r * width + column + j;
                const float* own = reinterpret_cast<const float*>(sums.sums) + r * kPanel + j;
                store(to, fma(load(to), broadcast(decay[r]), load(own)));
            }
        }
    }
}

// What attend_head calls for tiles, instead of attention.h's.
template <class M, class KeyCell, class ValueCell>
    requires std::is_same_v<M, TileMath>
void attend_tile(const AttendTile& tile, int head, int64_t first, const Groups<KeyCell>& keys,
                 const Groups<ValueCell>& values, const AttendMemory& memory, Partial part) {
    Tiles tiles;
    const int64_t lanes = tile.head_dim / M::pair, width = tile.padded_dim;
    const auto* queries = static_cast<const bf16_pair*>(tile.queries) + head * pagoda::packed_queries(tile.rows, lanes);
    // Values that were gathered fill half of their memory.
    auto* copied = reinterpret_cast<bf16_pair*>(memory.values) + kKeyTile / 2 * int64_t{tile.padded_row};
    fetch_groups(keys, lanes, kGroup);
    fetch_groups(values, kGroupPairs, tile.head_dim);
    for_blocks(tile.rows, [&](int64_t row, int rows) {
        score_block(tiles, queries + row * lanes, rows, lanes, keys, visible_keys(tile, row, rows, first),
                    memory.scores + row * kKeyTile);
    });
    softmax_tile<M>(tile, head, first, memory, part.totals);
    for_blocks(tile.rows, [&](int64_t row, int rows) {
        const int visible = visible_keys(tile, row, rows, first);
        if (visible == 0) return;
        add_value_block(tiles, memory.scores + row * kKeyTile, rows, values, visible, memory.decay + row, width, copied,
                        part.out + row * width);
    });
}

void tile_attend(const AttendTile& tile, int64_t begin, int64_t end, float* scratch, Partial part) {
    if (tile.cache.math != Math::bf16) return kAvx512Bf16.attend(tile, begin, end, scratch, part);
    attend_cells<TileMath, bf16_pair>(tile, begin, end, scratch, part);
}

}  // namespace
