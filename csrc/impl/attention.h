// Attention of the queries of some tokens over the cached tokens of one split.
#pragma once

#include <cmath>
#include <cstring>

#include "products.h"

namespace {

using pagoda::AttendTile;
using pagoda::kKeyTile;
using pagoda::Partial;

// Where the cache keeps a token of the tile's sequence for the tile's head, counted in [blocks, kv_heads].
PAGODA_INLINE int64_t block_of(const AttendTile& tile, int64_t position) {
    return int64_t{tile.blocks[position / tile.block_size]} * tile.num_kv_heads + tile.kv_head;
}

// Where the blocks keep the key and the value of a token. A key's elements are block_size apart.
template <class T>
PAGODA_INLINE const T* key_at(const AttendTile& tile, int64_t position) {
    return static_cast<const T*>(tile.keys) +
           block_of(tile, position) * tile.block_size * tile.head_dim + position % tile.block_size;
}
template <class T>
PAGODA_INLINE const T* value_at(const AttendTile& tile, int64_t position) {
    const int64_t row = block_of(tile, position) * tile.block_size + position % tile.block_size;
    return static_cast<const T*>(tile.values) + row * tile.head_dim;
}

// Keys from `begin` on as [head_dim, kKeyTile]; what is behind the last of `count` is of no account.
template <class T>
void gather_keys(const AttendTile& tile, int64_t begin, int count, float* out) {
    const int64_t size = tile.block_size, d = tile.head_dim;
    if (size % 16 == 0) {
        for (int j = 0; j < count; j += 16) {
            const T* first = key_at<T>(tile, begin + j);
            for (int64_t i = 0; i < d; ++i) {
#pragma GCC unroll 2
                for (int lane = 0; lane < 16; lane += kWidth) {
                    store(out + i * kKeyTile + j + lane, load(first + i * size + lane));
                }
            }
        }
        return;
    }
    for (int j = 0; j < count; ++j) {
        const T* first = key_at<T>(tile, begin + j);
        for (int64_t i = 0; i < d; ++i) out[i * kKeyTile + j] = as_float(first[i * size]);
    }
}

// Values from `begin` on as [count, padded_dim].
template <class T>
void gather_values(const AttendTile& tile, int64_t begin, int count, float* out) {
    const int64_t d = tile.head_dim;
    for (int j = 0; j < count; ++j) {
        const T* row = value_at<T>(tile, begin + j);
        float* to = out + int64_t{j} * tile.padded_dim;
        int64_t i = 0;
        for (; i + kWidth <= d; i += kWidth) store(to + i, load(row + i));
        for (; i < tile.padded_dim; i += kWidth) store(to + i, i < d ? load_first(row + i, d - i) : zero());
    }
}

// With few rows it is quicker to convert keys and values on the way than to gather them first. The sums are the
// same: over the same elements, in the same order.
constexpr int kFewRows = 6;

bool reads_blocks(const AttendTile& tile) {
    return tile.rows <= kFewRows && tile.block_size % 16 == 0 && tile.head_dim % 16 == 0;
}

// Blocks lie anywhere, so the processor cannot guess which memory comes next: `soon` says where the keys and values
// of later groups of 16 are.
template <int Rows, int Groups, class T>
PAGODA_INLINE void score_groups(const AttendTile& tile, const T* const (&keys)[Groups],
                                const T* const (&soon)[2][Groups], float* scores) {
    constexpr int vectors = 16 / kWidth;
    vec sums[Rows][Groups][vectors];
#pragma GCC unroll 6
    for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 4
        for (int g = 0; g < Groups; ++g) {
#pragma GCC unroll 2
            for (int v = 0; v < vectors; ++v) sums[r][g][v] = zero();
        }
    }
    const int64_t d = tile.head_dim, size = tile.block_size;
    for (int64_t i = 0; i < d; ++i) {
        vec columns[Groups][vectors];
#pragma GCC unroll 4
        for (int g = 0; g < Groups; ++g) {
            _mm_prefetch(soon[0][g] + i * size, _MM_HINT_T1);
            _mm_prefetch(soon[1][g] + i * 16, _MM_HINT_T1);
#pragma GCC unroll 2
            for (int v = 0; v < vectors; ++v) columns[g][v] = load(keys[g] + i * size + v * kWidth);
        }
#pragma GCC unroll 6
        for (int r = 0; r < Rows; ++r) {
            const vec query = broadcast(tile.queries[r * d + i]);
#pragma GCC unroll 4
            for (int g = 0; g < Groups; ++g) {
#pragma GCC unroll 2
                for (int v = 0; v < vectors; ++v) {
                    sums[r][g][v] = fma(query, columns[g][v], sums[r][g][v]);
                }
            }
        }
    }
#pragma GCC unroll 6
    for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 4
        for (int g = 0; g < Groups; ++g) {
#pragma GCC unroll 2
            for (int v = 0; v < vectors; ++v) {
                store(scores + r * kKeyTile + g * 16 + v * kWidth, sums[r][g][v]);
            }
        }
    }
}

// Scores of the keys from `begin` on; those behind the last of `count` are of no account.
template <class T>
void score_blocks(const AttendTile& tile, int64_t begin, int count, int64_t end, float* scores) {
    constexpr int groups = kWidth == 16 ? 4 : 1;
    with_count<kFewRows>(tile.rows, [&](auto rows) {
        for (int j = 0; j < count; j += 16 * groups) {
            const T* keys[groups];
            const T* soon[2][groups];
            for (int g = 0; g < groups; ++g) {
                const int64_t position = begin + j + 16 * g, later = position + kKeyTile;
                keys[g] = key_at<T>(tile, position < begin + count ? position : begin);
                soon[0][g] = key_at<T>(tile, later < end ? later : begin);
                soon[1][g] = value_at<T>(tile, later < end ? later : begin);
            }
            score_groups<decltype(rows)::value, groups>(tile, keys, soon, scores + j);
        }
    });
}

template <class T>
void add_block_values(const AttendTile& tile, const float* weights, int64_t begin, int count,
                      const float* decay, float* out) {
    const int64_t d = tile.head_dim;
    constexpr float kept[kFewRows] = {1, 1, 1, 1, 1, 1};
    with_count<kFewRows>(tile.rows, [&](auto rows) {
        for (int j = 0; j < count; j += 16) {
            const T* values = value_at<T>(tile, begin + j);
            const int64_t keys = count - j < 16 ? count - j : 16;
            const auto weight = [=](int r, int64_t i) { return weights[r * kKeyTile + j + i]; };
            const float* factor = j == 0 ? decay : kept;
            constexpr int rows_now = decltype(rows)::value;
            constexpr int cols = kWidth == 16 && rows_now <= 3 ? 2 * kWideCols : kWideCols;
            int64_t column = 0;
            for (; column + cols * kWidth <= d; column += cols * kWidth) {
                multiply<rows_now, cols>(weight, values + column, d, keys, factor, out + column, d);
            }
            for (; column < d; column += kWidth) {
                multiply<rows_now, 1>(weight, values + column, d, keys, factor, out + column, d);
            }
        }
    });
}

void score(const AttendTile& tile, const float* keys, float* scores) {
    for (int row = 0; row < tile.rows; row += kWideRows) {
        const int left = tile.rows - row < kWideRows ? tile.rows - row : kWideRows;
        const float* queries = tile.queries + int64_t{row} * tile.head_dim;
        const int64_t d = tile.head_dim;
        with_count<kWideRows>(left, [&](auto count) {
            for (int j = 0; j < kKeyTile; j += kWideCols * kWidth) {
                multiply<decltype(count)::value, kWideCols>(
                    [=](int r, int64_t i) { return queries[r * d + i]; }, keys + j, kKeyTile, d, nullptr,
                    scores + row * kKeyTile + j, kKeyTile);
            }
        });
    }
}

void add_values(const AttendTile& tile, const float* weights, const float* values, int num_keys,
                const float* decay, float* out) {
    const int64_t d = tile.padded_dim;
    for (int row = 0; row < tile.rows; row += kWideRows) {
        const int left = tile.rows - row < kWideRows ? tile.rows - row : kWideRows;
        const float* w = weights + row * kKeyTile;
        const auto weight = [=](int r, int64_t i) { return w[r * kKeyTile + i]; };
        float* to = out + row * d;
        with_count<kWideRows>(left, [&](auto count) {
            constexpr int rows = decltype(count)::value;
            int64_t j = 0;
            for (; j + kWideCols * kWidth <= d; j += kWideCols * kWidth) {
                multiply<rows, kWideCols>(weight, values + j, d, num_keys, decay + row, to + j, d);
            }
            for (; j < d; j += kWidth) {
                multiply<rows, 1>(weight, values + j, d, num_keys, decay + row, to + j, d);
            }
        });
    }
}

// Turns the scores of the keys from `begin` on into weights, of the keys from `first` to before `last` only.
// Returns what earlier sums are worth now.
PAGODA_INLINE float soften(float* scores, int first, int last, float& highest_score, float& total) {
    for (int j = 0; j < first; ++j) scores[j] = -INFINITY;
    for (int j = last; j < kKeyTile; ++j) scores[j] = -INFINITY;
    vec top = broadcast(-INFINITY);
    for (int j = 0; j < kKeyTile; j += kWidth) top = max(top, load(scores + j));
    const float before = highest_score, here = highest(top);
    const float now = here > before ? here : before;
    const vec base = broadcast(now == -INFINITY ? 0.0f : now);
    vec sums = zero();
    for (int j = 0; j < kKeyTile; j += kWidth) {
        const vec weights = exp(sub(load(scores + j), base));
        store(scores + j, weights);
        sums = add(sums, weights);
    }
    const float decay = before == -INFINITY ? 0.0f : exp(before - now);
    highest_score = now;
    total = total * decay + sum(sums);
    return decay;
}

PAGODA_INLINE int clamp_to_tile(int64_t x) {
    return x < 0 ? 0 : x > kKeyTile ? kKeyTile : static_cast<int>(x);
}

// Online softmax (FlashAttention, Dao et al. 2022) over key tiles at fixed positions.
void attend(const AttendTile& tile, int64_t begin, int64_t end, float* scratch, Partial part) {
    float* keys = scratch;
    float* values = keys + int64_t{kKeyTile} * tile.padded_dim;
    float* scores = values + int64_t{kKeyTile} * tile.padded_dim;
    float* decay = scores + int64_t{tile.rows} * kKeyTile;
    for (int row = 0; row < tile.rows; ++row) {
        part.highest[row] = -INFINITY;
        part.total[row] = 0.0f;
    }
    std::memset(part.out, 0, sizeof(float) * static_cast<size_t>(tile.rows) * tile.padded_dim);
    const bool direct = reads_blocks(tile);
    const int64_t oldest = tile.first_position - tile.window + 1;
    if (oldest > begin) begin = oldest / kKeyTile * kKeyTile;
    for (int64_t first = begin; first < end; first += kKeyTile) {
        const int count = clamp_to_tile(end - first);
        with_type(tile.dtype, [&](auto* type) {
            using T = Pointee<decltype(type)>;
            if (direct) {
                score_blocks<T>(tile, first, count, end, scores);
            } else {
                gather_keys<T>(tile, first, count, keys);
                gather_values<T>(tile, first, count, values);
            }
        });
        if (!direct) score(tile, keys, scores);
        for (int row = 0; row < tile.rows; ++row) {
            const int64_t position = tile.first_position + row / tile.group;
            decay[row] = soften(scores + row * kKeyTile, clamp_to_tile(position - tile.window + 1 - first),
                                clamp_to_tile(position + 1 - first), part.highest[row], part.total[row]);
        }
        if (!direct) {
            add_values(tile, scores, values, count, decay, part.out);
            continue;
        }
        with_type(tile.dtype, [&](auto* type) {
            using T = Pointee<decltype(type)>;
            add_block_values<T>(tile, scores, first, count, decay, part.out);
        });
    }
}

void merge(int rows, int padded_dim, Partial whole, Partial part) {
    for (int row = 0; row < rows; ++row) {
        const float before = whole.highest[row], here = part.highest[row];
        const float now = here > before ? here : before;
        const float old_share = before == -INFINITY ? 0.0f : exp(before - now);
        const float new_share = here == -INFINITY ? 0.0f : exp(here - now);
        whole.highest[row] = now;
        whole.total[row] = whole.total[row] * old_share + part.total[row] * new_share;
        float* to = whole.out + int64_t{row} * padded_dim;
        const float* from = part.out + int64_t{row} * padded_dim;
        for (int j = 0; j < padded_dim; j += kWidth) {
            const vec old = mul(load(to + j), broadcast(old_share));
            store(to + j, fma(load(from + j), broadcast(new_share), old));
        }
    }
}

void finish(Dtype dtype, const float* out, float total, int64_t d, void* result) {
    with_type(dtype, [&](auto* type) {
        auto* typed = static_cast<decltype(type)>(result);
        for_vectors(d, [&](auto get, auto put) { put(typed, div(get(out), broadcast(total))); });
    });
}

}  // namespace
