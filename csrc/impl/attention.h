// SPDX-License-Identifier: Apache-2.0
// Attention of the queries of some tokens over the cached tokens of one split.
//
// Keys and values are read where they lie in the cache, in groups of 16 tokens, and become lanes of registers.
// Blocks of fewer tokens, and values of heads that do not fill vectors, are gathered first. What is summed up, and
// in which order, is the same however many rows are computed together.
#pragma once

#include <cmath>
#include <cstring>

#include "key_tiles.h"
#include "rows.h"

namespace {

using pagoda::Math;
using pagoda::Partial;
using pagoda::Softmax;

// Calls f(way, null pointer to its cells) for the tile.
template <class F>
PAGODA_INLINE void with_cells(const AttendTile& tile, F f) {
    switch (tile.cache.math) {
        case Math::f32:
            if (tile.cache.dtype == Dtype::e4m3) return f(F32Math{}, static_cast<e4m3*>(nullptr));
            return with_type(tile.cache.dtype, [&](auto* cell) { f(F32Math{}, cell); });
        case Math::i16: return f(I16Math{}, static_cast<i8_pair*>(nullptr));
        case Math::bf16:
#ifdef PAGODA_BF16_PAIRS
            return f(Bf16Math{}, static_cast<bf16_pair*>(nullptr));
#else
            return;
#endif
    }
}

Math math_of([[maybe_unused]] Dtype activations, Dtype cache) {
    if (cache == Dtype::i8) return Math::i16;
#ifdef PAGODA_BF16_PAIRS
    if (activations == Dtype::bf16 && cache == Dtype::bf16) return Math::bf16;
#endif
    return Math::f32;
}

// Numbers of d elements as whole multiples of the result, at most `largest` of them; NaN if one of them is.
float quantize_symmetric(float* x, float largest, int64_t d) {
    vec top = zero();
    for_vectors(d, [&](auto get, auto) { top = max_bits(top, absolute(get(x))); });
    const float scale = highest_bits(top) / largest;
    const bool finite = scale < INFINITY;
    const vec divisor = broadcast(finite && scale > 0.0f ? scale : 1.0f);
    for_vectors(d, [&](auto get, auto put) {
        put(x, finite ? round_to_int(div(get(x), divisor)) : zero());
    });
    return finite ? scale : NAN;
}

void to_cache(Dtype cache, const float* x, int64_t d, void* out, float* scale) {
    if (cache == Dtype::i8) {
        alignas(64) float row[pagoda::kMaxHeadDim];
        std::memcpy(row, x, static_cast<size_t>(d) * sizeof(float));
        *scale = quantize_symmetric(row, 127, d);
        for (int64_t i = 0; i < d; ++i) static_cast<int8_t*>(out)[i] = static_cast<int8_t>(row[i]);
        return;
    }
    if (cache == Dtype::e4m3) {
        for (int64_t i = 0; i < d; ++i) static_cast<e4m3*>(out)[i] = to_e4m3(x[i]);
        return;
    }
    with_type(cache, [&](auto* type) {
        auto* typed = static_cast<decltype(type)>(out);
        for_vectors(d, [&](auto get, auto put) { put(typed, get(x)); });
    });
}

// Rows are multiplied some at a time, panels of about as many each.
PAGODA_INLINE int panel_rows(int rows) {
    const int panels = (rows + kRegisterRows - 1) / kRegisterRows;
    return (rows + panels - 1) / panels;
}

// Queries are [panels, lanes of a head, rows of a panel].
float pack_query(Math math, const float* x, int64_t d, int row, int rows, void* packed) {
    const int in_panel = panel_rows(rows);
    const int64_t lanes = d / pagoda::pair_of(math);
    auto* to = static_cast<char*>(packed) + (row / in_panel * lanes * in_panel + row % in_panel) * 4;
    const auto put = [&](int64_t i, const auto& lane) {
        static_assert(sizeof(lane) == 4);
        std::memcpy(to + i * in_panel * 4, &lane, 4);
    };
    if (math == Math::bf16) {
        alignas(64) bf16_pair pairs[pagoda::kMaxHeadDim / 2];
        for_vectors(d, [&](auto get, auto put_vector) { put_vector(&pairs[0].first, get(x)); });
        for (int64_t i = 0; i < lanes; ++i) put(i, pairs[i]);
        return 1.0f;
    }
    if (math == Math::f32) {
        for (int64_t i = 0; i < lanes; ++i) put(i, x[i]);
        return 1.0f;
    }
    alignas(64) float values[pagoda::kMaxHeadDim];
    std::memcpy(values, x, static_cast<size_t>(d) * sizeof(float));
    const float scale = quantize_symmetric(values, kLargestQuery, d);
    for (int64_t i = 0; i < lanes; ++i) {
        put(i, i16_pair{static_cast<int16_t>(values[2 * i]), static_cast<int16_t>(values[2 * i + 1])});
    }
    return scale;
}

// Vectors of columns that fit the registers beside so many rows.
constexpr int columns_beside(int rows) {
    const int sums = kRegisterRows * kRegisterCols;
    return rows * 8 <= sums ? 8 : rows * 4 <= sums ? 4 : 2;
}

template <class M, int Rows, int Cols, class Cell>
PAGODA_INLINE void score_columns(const typename M::Lane* queries, int query_stride, int64_t lanes,
                                 const Groups<Cell>& keys, int column, float* scores) {
    typename M::Sum sums[Rows][Cols];
    const Cell* now[Cols];
    const Cell* soon[Cols];
#pragma GCC unroll 8
    for (int j = 0; j < Cols; ++j) {
        const int token = column + j * kWidth;
        now[j] = keys.now[token / kGroup] + token % kGroup;
        soon[j] = keys.soon[token / kGroup] + token % kGroup;
#pragma GCC unroll 12
        for (int r = 0; r < Rows; ++r) sums[r][j] = M::nothing();
    }
    for (int64_t i = 0; i < lanes; ++i) {
        decltype(M::columns(now[0])) columns[Cols];
#pragma GCC unroll 8
        for (int j = 0; j < Cols; ++j) {
            // Of two groups or two lanes in one cache line, one sees to it.
            if (j * kWidth % kGroup == 0 && (sizeof(Cell) == 4 || (i + j * kWidth / kGroup) % 2 == 0)) {
                prefetch_l2(soon[j] + i * keys.stride);
            }
            columns[j] = M::columns(now[j] + i * keys.stride);
        }
#pragma GCC unroll 12
        for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 8
            for (int j = 0; j < Cols; ++j) {
                sums[r][j] = M::add_product(sums[r][j], columns[j], queries + i * query_stride + r);
            }
        }
    }
#pragma GCC unroll 12
    for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 8
        for (int j = 0; j < Cols; ++j) {
            store(scores + r * kKeyTile + column + j * kWidth, M::to_float(sums[r][j]));
        }
    }
}

// out = decay * out + the values of `count` tokens times their weights [Rows, kKeyTile].
template <class M, int Rows, int Cols, class Cell>
PAGODA_INLINE void add_columns(const float* weights, const Groups<Cell>& values, int count, const float* decay,
                               const float* scale, int column, float* out, int64_t out_stride) {
    typename M::Sum sums[Rows][Cols];
#pragma GCC unroll 12
    for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 8
        for (int j = 0; j < Cols; ++j) sums[r][j] = M::nothing();
    }
    constexpr int in_group = kGroup / M::pair;
    const int lanes = (count + M::pair - 1) / M::pair;
    for (int g = 0; g * in_group < lanes; ++g) {
        const Cell* now = values.now[g] + column;
        const Cell* soon = values.soon[g] + column;
        const auto* x = reinterpret_cast<const typename M::Lane*>(weights) + g * in_group;
        const int here = lanes - g * in_group < in_group ? lanes - g * in_group : in_group;
        for (int i = 0; i < here; ++i) {
            decltype(M::columns(now)) columns[Cols];
#pragma GCC unroll 8
            for (int j = 0; j < Cols; ++j) {
                if (j * kWidth * sizeof(Cell) % 64 == 0) {
                    prefetch_l2(soon + i * values.stride + j * kWidth);
                }
                columns[j] = M::columns(now + i * values.stride + j * kWidth);
            }
#pragma GCC unroll 12
            for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 8
                for (int j = 0; j < Cols; ++j) {
                    sums[r][j] = M::add_product(sums[r][j], columns[j], x + r * kKeyTile + i);
                }
            }
        }
    }
#pragma GCC unroll 12
    for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 8
        for (int j = 0; j < Cols; ++j) {
            float* to = out + r * out_stride + column + j * kWidth;
            store(to, fma(load(to), broadcast(decay[r]), M::weighted(sums[r][j], scale[r])));
        }
    }
}

// All columns of the outputs from `column` on, as many at a time as may be.
template <class M, int Rows, int Cols, class Cell>
PAGODA_INLINE void add_all_columns(const float* weights, const Groups<Cell>& values, int count,
                                   const float* decay, const float* scale, int column, float* out, int64_t d) {
    for (; column + Cols * kWidth <= d; column += Cols * kWidth) {
        add_columns<M, Rows, Cols>(weights, values, count, decay, scale, column, out, d);
    }
    if constexpr (Cols > 1) {
        add_all_columns<M, Rows, Cols / 2>(weights, values, count, decay, scale, column, out, d);
    }
}

PAGODA_INLINE int clamp_to_tile(int64_t x) {
    return x < 0 ? 0 : x > kKeyTile ? kKeyTile : static_cast<int>(x);
}

// What `attend` works in.
struct AttendMemory {
    float* keys;
    float* values;
    float* key_scales;
    float* value_scales;
    float* scores;  // [rows, kKeyTile], later the weights as lanes
    float* peaks;   // [rows rounded up to vectors] from here on
    float* decay;   // what earlier sums are worth now
    float* base;    // the score that has the weight 1
    float* scale;   // of the weights
    float* added;   // [kKeyTile], to the scores of a row
    float* highest;  // [heads, rows rounded up]
    int padded_rows;

    AttendMemory(float* p, const AttendTile& tile) : padded_rows((tile.rows + kWidth - 1) / kWidth * kWidth) {
        const auto take = [&p](int64_t n) {
            p += n;
            return p - n;
        };
        keys = take(int64_t{kKeyTile} * tile.padded_row);
        values = take(int64_t{kKeyTile} * tile.padded_row);
        key_scales = take(kKeyTile);
        value_scales = take(kKeyTile);
        added = take(kKeyTile);
        scores = take(int64_t{tile.rows} * kKeyTile);
        for (float** of_rows : {&peaks, &decay, &base, &scale}) *of_rows = take(padded_rows);
        highest = take(int64_t{tile.heads} * padded_rows);
    }
};

// What is added to the scores of a row with the keys from `first` on, as far as it sees them; null for nothing.
const float* relative_scores(const AttendTile& tile, int head, int row, int64_t first, float* memory) {
    const auto& relative = tile.relative;
    if (relative.reach < 0 && relative.slopes == nullptr) return nullptr;
    const int64_t own = tile.own_positions[row], nearest = first - own + relative.reach;
    const int64_t of_head = int64_t{tile.kv_head + head} * tile.group + row % tile.group;
    if (relative.slopes != nullptr) {
        for (int j = 0; j < kKeyTile; ++j) memory[j] = relative.slopes[of_head] * static_cast<float>(first + j - own);
        return memory;
    }
    if (relative.of_distances != nullptr) return relative.of_distances + of_head * relative.head_stride + nearest;
    const int64_t stride = relative.num_heads * relative.num_buckets, place = of_head * relative.num_buckets;
    const float* of_query = relative.of_queries + (tile.first_token + own) * stride + place;
    const float* of_keys = relative.of_keys + (tile.first_token + first) * stride + place;
    const int visible = clamp_to_tile(tile.positions[row] + 1 - first);
    for (int j = 0; j < visible; ++j, of_keys += stride) {
        const int32_t bucket = relative.buckets[nearest + j];
        memory[j] = relative.scale * (of_query[bucket] + of_keys[bucket]);
    }
    for (int j = visible; j < kKeyTile; ++j) memory[j] = 0.0f;
    return memory;
}

// Brings scores to powers of two, those of the keys from `first` to before `last`; others count nothing.
// Returns the highest.
PAGODA_INLINE float scale_scores(float* scores, int first, int last, float factor, const float* key_scales,
                                 const float* added, float softcap) {
    for (int j = 0; j < kKeyTile; j += kWidth) {
        const vec scaled = mul(load(scores + j), broadcast(factor));
        store(scores + j, key_scales ? mul(scaled, load(key_scales + j)) : scaled);
        if (added) store(scores + j, add(load(scores + j), load(added + j)));
    }
    if (softcap != 0) {
        // tanh(y) is 1 - 2 / (1 + e^2y).
        const vec cap = broadcast(softcap), slope = broadcast(2 * 1.44269504f / softcap);
        for (int j = 0; j < kKeyTile; j += kWidth) {
            const vec power = exp2(min(broadcast(126.0f), mul(load(scores + j), slope)));
            const vec rest = div(add(cap, cap), add(power, broadcast(1.0f)));
            store(scores + j, sub(cap, rest));
        }
    }
    for (int j = 0; j < first; ++j) scores[j] = -INFINITY;
    for (int j = last; j < kKeyTile; ++j) scores[j] = -INFINITY;
    vec top = broadcast(-INFINITY);
    for (int j = 0; j < kKeyTile; j += kWidth) top = max(top, load(scores + j));
    return reduce_max(top);
}

// What the peaks of the tile make of the highest scores: `base` and `decay`.
PAGODA_INLINE void raise_highest(const AttendMemory& memory, float* highest, int rows) {
    for (int row = 0; row < rows; row += kWidth) {
        const vec before = load(highest + row);
        const vec now = max(before, load(memory.peaks + row));
        const vec base = max(now, broadcast(-3e38f));
        store(highest + row, now);
        store(memory.base + row, base);
        store(memory.decay + row, exp2(sub(before, base)));
    }
}

// Reads the first tile of a split ahead of its use, all of it at once.
template <class Cell>
void prefetch(const Groups<Cell>& groups, int64_t rows, int64_t row_cells) {
    for (const Cell* group : groups.now) {
        for (int64_t row = 0; row < rows; ++row) {
            const char* p = reinterpret_cast<const char*>(group + row * groups.stride);
            for (int64_t byte = 0; byte < row_cells * static_cast<int64_t>(sizeof(Cell)); byte += 64) {
                prefetch_l2(p + byte);
            }
        }
    }
}

// Rows of one panel: their place among the head's, and the keys from `first` on that one of them sees.
struct Panel {
    int row, rows, visible;

    Panel(const AttendTile& tile, int row_, int64_t first) : row(row_) {
        const int most = panel_rows(tile.rows);
        rows = tile.rows - row < most ? tile.rows - row : most;
        int64_t last = 0;
        for (int i = row; i < row + rows; ++i) last = tile.positions[i] > last ? tile.positions[i] : last;
        visible = clamp_to_tile(last + 1 - first);
    }
};

// Of one head's queries.
template <class M, class Cell>
void score(const AttendTile& tile, const typename M::Lane* queries, const Panel& panel, const Groups<Cell>& keys,
           float* scores) {
    const int64_t lanes = tile.head_dim / M::pair;
    const int stride = panel_rows(tile.rows);
    queries += panel.row * lanes;
    with_count<kRegisterRows>(panel.rows, [&](auto count) {
        constexpr int rows = decltype(count)::value;
        constexpr int beside = columns_beside(rows), all = kKeyTile / kWidth;
        constexpr int cols = beside < all ? beside : all;
        for (int column = 0; column < panel.visible; column += cols * kWidth) {
            score_columns<M, rows, cols>(queries, stride, lanes, keys, column, scores + panel.row * kKeyTile);
        }
    });
}

// Makes weights of one head's scores.
template <class M>
void softmax_tile(const AttendTile& tile, int head, int64_t first, const AttendMemory& memory, float* totals) {
    const float* key_scales = std::is_same_v<M, I16Math> ? memory.key_scales : nullptr;
    const float* factors = tile.factors + int64_t{head} * tile.rows;
    for (int row = 0; row < tile.rows; ++row) {
        const float* added = relative_scores(tile, head, row, first, memory.added);
        memory.peaks[row] = scale_scores(memory.scores + row * kKeyTile, clamp_to_tile(tile.firsts[row] - first),
                                         clamp_to_tile(tile.positions[row] + 1 - first), factors[row], key_scales,
                                         added, tile.softcap);
    }
    raise_highest(memory, memory.highest + int64_t{head} * memory.padded_rows, tile.rows);
    for (int row = 0; row < tile.rows; ++row, totals += pagoda::kTotals) {
        const vec sums = M::softmax_tile(memory.scores + row * kKeyTile, broadcast(memory.base[row]),
                                         memory.value_scales, memory.scale + row);
        store(totals, fma(load(totals), broadcast(memory.decay[row]), sums));
    }
}

template <class M, class Cell>
void add_values(const AttendTile& tile, const Panel& panel, const Groups<Cell>& values,
                const AttendMemory& memory, float* out) {
    with_count<kRegisterRows>(panel.rows, [&](auto count) {
        constexpr int rows = decltype(count)::value;
        add_all_columns<M, rows, columns_beside(rows)>(
            memory.scores + panel.row * kKeyTile, values, panel.visible, memory.decay + panel.row,
            memory.scale + panel.row, 0, out + int64_t{panel.row} * tile.padded_dim, tile.padded_dim);
    });
}

// The keys of one head from `first` on, with groups of keys and of values in the cache or in memory.
template <class M, class KeyCell, class ValueCell>
void attend_tile(const AttendTile& tile, int head, int64_t first, const Groups<KeyCell>& keys,
                 const Groups<ValueCell>& values, const AttendMemory& memory, Partial part) {
    const int step = panel_rows(tile.rows);
    const auto* queries = static_cast<const typename M::Lane*>(tile.queries) +
                          head * pagoda::packed_queries(tile.rows, tile.head_dim / M::pair);
    for (int row = 0; row < tile.rows; row += step) {
        score<M>(tile, queries, Panel(tile, row, first), keys, memory.scores);
    }
    softmax_tile<M>(tile, head, first, memory, part.totals);
    for (int row = 0; row < tile.rows; row += step) {
        add_values<M>(tile, Panel(tile, row, first), values, memory, part.out);
    }
}

// `head` at the keys from `first` to before `end`.
template <class M, class Cell>
void attend_head(const AttendTile& tile, int head, int64_t first, int64_t end, const Places& places,
                 const AttendMemory& memory, Partial part) {
    using Lane = typename M::Lane;
    const int count = clamp_to_tile(end - first);
    auto* gathered_keys = reinterpret_cast<Lane*>(memory.keys);
    auto* gathered_values = reinterpret_cast<Lane*>(memory.values);
    const Groups<Lane> key_lanes(gathered_keys, int64_t{tile.head_dim} / M::pair * kGroup, kGroup);
    if constexpr (std::is_same_v<M, I16Math>) {
        gather_scales(tile, head, tile.cache.key_scales, first, count, 1.0f, memory.key_scales);
        gather_scales(tile, head, tile.cache.value_scales, first, count, 0.0f, memory.value_scales);
        prefetch_scales(tile, head, places, tile.cache.key_scales);
        prefetch_scales(tile, head, places, tile.cache.value_scales);
    }
    const auto with_values = [&](const auto& values) {
        if (reads_keys(tile)) {
            return attend_tile<M>(tile, head, first, key_groups<M, Cell>(tile, places, head), values, memory, part);
        }
        if (tile.cache.holds_latents()) {
            transpose_rows<M>(values, count, tile.head_dim, gathered_keys);
        } else {
            gather_keys<M, Cell>(tile, head, first, count, gathered_keys);
        }
        attend_tile<M>(tile, head, first, key_lanes, values, memory, part);
    };
    if (reads_values(tile)) return with_values(value_groups<M, Cell>(tile, places, head));
    gather_values<M, Cell>(tile, head, first, count, gathered_values);
    with_values(Groups<Lane>(gathered_values, int64_t{tile.padded_row} * kGroup / M::pair, tile.padded_row));
}

// Online softmax (FlashAttention, Dao et al. 2022) over key tiles at fixed positions, in the way M with such cells.
template <class M, class Cell>
void attend_cells(const AttendTile& tile, int64_t begin, int64_t end, float* scratch, Partial part) {
    const AttendMemory memory(scratch, tile);
    const auto of_rows = sizeof(float) * static_cast<size_t>(tile.rows);
    for (int row = 0; row < memory.padded_rows; ++row) memory.peaks[row] = -INFINITY;
    for (int head = 0; head < tile.heads; ++head) {
        float* highest = memory.highest + head * memory.padded_rows;
        for (int row = tile.rows; row < memory.padded_rows; ++row) highest[row] = -INFINITY;
        std::memcpy(highest, part.highest + head * part.head_rows, of_rows);
    }
    for (int64_t first = begin; first < end; first += kKeyTile) {
        const Places places(tile, first, end);
        if (first == begin && reads_values(tile)) {
            if (reads_keys(tile)) prefetch(key_groups<M, Cell>(tile, places, 0), tile.head_dim / M::pair, kGroup);
            prefetch(value_groups<M, Cell>(tile, places, 0), kGroup / M::pair, tile.head_dim);
        }
        for (int head = 0; head < tile.heads; ++head) {
            attend_head<M, Cell>(tile, head, first, end, places, memory,
                                 part.from(head * part.head_rows, tile.padded_dim));
        }
    }
    for (int head = 0; head < tile.heads; ++head) {
        std::memcpy(part.highest + head * part.head_rows, memory.highest + head * memory.padded_rows, of_rows);
    }
}

void attend(const AttendTile& tile, int64_t begin, int64_t end, float* scratch, Partial part) {
    with_cells(tile, [&](auto way, auto* cell) {
        attend_cells<decltype(way), Pointee<decltype(cell)>>(tile, begin, end, scratch, part);
    });
}

// Takes a row of a softmax into the same row of another.
PAGODA_INLINE void merge_row(int64_t row, int padded_dim, Softmax whole, float here, float total, const float* from) {
    const float before = whole.highest[row];
    const float now = here > before ? here : before;
    const float old_share = before == -INFINITY ? 0.0f : exp2(before - now);
    const float new_share = here == -INFINITY ? 0.0f : exp2(here - now);
    whole.highest[row] = now;
    whole.total[row] = whole.total[row] * old_share + total * new_share;
    float* to = whole.out + row * padded_dim;
    for (int j = 0; j < padded_dim; j += kWidth) {
        const vec old = mul(load(to + j), broadcast(old_share));
        store(to + j, fma(load(from + j), broadcast(new_share), old));
    }
}

void merge(int rows, int padded_dim, Softmax whole, Partial split) {
    for (int64_t row = 0; row < rows; ++row) {
        const float total = sum(load(split.totals + row * pagoda::kTotals));
        merge_row(row, padded_dim, whole, split.highest[row], total, split.out + row * padded_dim);
    }
}

void merge_segment(int rows, int padded_dim, Softmax whole, Softmax segment) {
    for (int64_t row = 0; row < rows; ++row) {
        merge_row(row, padded_dim, whole, segment.highest[row], segment.total[row], segment.out + row * padded_dim);
    }
}

void normalize(const float* out, float total, int64_t d, float* result) {
    for_vectors(d, [&](auto get, auto put) { put(result, div(get(out), broadcast(total))); });
}

}  // namespace
