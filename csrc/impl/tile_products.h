// SPDX-License-Identifier: Apache-2.0
// Products of rows with panels by tiles, and with the matrices of adapters.
//
// Panels are read as they lie: of every 4 bytes of a row (two inputs of bf16, or four codes) a panel has 128 bytes for its
// 32 outputs, half of them of one tile. All sums over inputs are from the first to the last in tiles of one depth, whatever
// the number of rows; a sum that is put down and taken up again stays what it is.
#pragma once

#include "../tile_ops.h"
#include "linear.h"
#include "low_rank.h"

namespace {

using pagoda::kAvx512Bf16;
using pagoda::kMostPanelRows;

struct Bf16Product {
    template <int Sum, int A, int B>
    PAGODA_INLINE static void add(Tiles& tiles) {
        tiles.add_bf16<Sum, A, B>();
    }
};
struct ByteProduct {
    template <int Sum, int A, int B>
    PAGODA_INLINE static void add(Tiles& tiles) {
        tiles.add_bytes<Sum, A, B>();
    }
};

// Where words of rows and of columns are: those of a row follow one another, those of a column lie apart.
struct Factors {
    const char* rows;
    int64_t row_stride;  // bytes
    const char* columns;
    int64_t column_stride;

    Factors from(int64_t word) const { return {rows + 4 * word, row_stride, columns + word * column_stride, column_stride}; }
};

// sums [Rows, Cols tiles] += one tile of words.
template <class Product, int Rows, int Cols>
PAGODA_INLINE void add_tile(Tiles& tiles, const Factors& factors) {
    tiles.load<kColumnTile>(factors.columns, factors.column_stride);
    tiles.load<kRowTile>(factors.rows, factors.row_stride);
    Product::template add<0, kRowTile, kColumnTile>(tiles);
    if constexpr (Cols == 2) {
        tiles.load<kColumnTile + 1>(factors.columns + 4 * kTileSide, factors.column_stride);
        Product::template add<1, kRowTile, kColumnTile + 1>(tiles);
    }
    if constexpr (Rows == 2) {
        tiles.load<kRowTile + 1>(factors.rows + kTileSide * factors.row_stride, factors.row_stride);
        Product::template add<2, kRowTile + 1, kColumnTile>(tiles);
        if constexpr (Cols == 2) Product::template add<3, kRowTile + 1, kColumnTile + 1>(tiles);
    }
}

// The last words, where they do not fill a tile, with zeros behind them.
struct LastWords {
    alignas(64) char rows[kBlockRows * 4 * kTileSide] = {};
    alignas(64) char columns[kTileSide * 8 * kTileSide] = {};

    LastWords(const Factors& factors, int num_rows, int words, int column_bytes) {
        for (int r = 0; r < num_rows; ++r) std::memcpy(rows + r * 64, factors.rows + r * factors.row_stride, 4 * words);
        for (int i = 0; i < words; ++i) std::memcpy(columns + i * 128, factors.columns + i * factors.column_stride, column_bytes);
    }
    Factors factors() const { return {rows, 64, columns, 128}; }
};

// sums [block.rows, Cols * 16], `stride` bytes apart, = or, with `more`, += the products of so many words. Calls
// ahead(word) at each tile of them.
template <class Product, int Rows, int Cols, class Ahead>
PAGODA_INLINE void sum_tiles(Tiles& tiles, const TileBlock& block, const Factors& factors, int64_t words, char* sums,
                             int64_t stride, bool more, Ahead ahead) {
    char *right = sums + 4 * kTileSide, *below = sums + kTileSide * stride, *corner = below + 4 * kTileSide;
    if (more) {
        tiles.load<0>(sums, stride);
        if constexpr (Cols == 2) tiles.load<1>(right, stride);
        if constexpr (Rows == 2) tiles.load<2>(below, stride);
        if constexpr (Rows == 2 && Cols == 2) tiles.load<3>(corner, stride);
    } else {
        tiles.zero<0>();
        if constexpr (Cols == 2) tiles.zero<1>();
        if constexpr (Rows == 2) tiles.zero<2>();
        if constexpr (Rows == 2 && Cols == 2) tiles.zero<3>();
    }
    const int rest = static_cast<int>(words % block.words);
    for (int64_t word = 0; word < words - rest; word += block.words) {
        ahead(word);
        add_tile<Product, Rows, Cols>(tiles, factors.from(word));
    }
    if (rest != 0) {
        const LastWords last(factors.from(words - rest), block.rows, rest, 4 * kTileSide * Cols);
        add_tile<Product, Rows, Cols>(tiles, last.factors());
    }
    tiles.store<0>(sums, stride);
    if constexpr (Cols == 2) tiles.store<1>(right, stride);
    if constexpr (Rows == 2) tiles.store<2>(below, stride);
    if constexpr (Rows == 2 && Cols == 2) tiles.store<3>(corner, stride);
}

PAGODA_INLINE void nothing_ahead(int64_t) {}

template <class Product, int Cols, class Ahead>
void sum_block(Tiles& tiles, const TileBlock& block, const Factors& factors, int64_t words, void* sums, int64_t stride,
               bool more, Ahead ahead) {
    tiles.shape(block);
    auto* to = static_cast<char*>(sums);
    if (block.rows > kTileSide) {
        sum_tiles<Product, 2, Cols>(tiles, block, factors, words, to, stride, more, ahead);
    } else {
        sum_tiles<Product, 1, Cols>(tiles, block, factors, words, to, stride, more, ahead);
    }
}

constexpr int kPanelRow = 4 * kPanel;  // bytes: a word of each output

// Words of a panel that go by all rows before those behind them: 32 KiB, which stay in the first cache.
constexpr int64_t kChunkWords = 256;
// Bytes ahead of which a panel that is read for the first time is asked for, where nobody asked before.
constexpr int64_t kStreamAhead = 4096;

// Asks for what is read next while the words of a panel go by.
PAGODA_INLINE void fetch_tile(const Prefetch& ahead, const char* panel, int64_t word, int words) {
    for (int i = 0; i < words; ++i) {
        if (ahead.from != nullptr) {
            fetch_ahead(ahead, word + i);
        } else {
            _mm_prefetch(panel + (word + i) * kPanelRow + kStreamAhead, _MM_HINT_T0);
            _mm_prefetch(panel + (word + i) * kPanelRow + kStreamAhead + 64, _MM_HINT_T0);
        }
    }
}

// sums [rows, kPanel] of a panel.
template <class Product>
void sum_panel(const char* packed, int64_t row_bytes, int rows, const char* panel, int64_t words, const Prefetch& ahead,
               void* sums) {
    Tiles tiles;
    const int depth = words < kTileSide ? static_cast<int>(words) : kTileSide, whole = rows / kBlockRows * kBlockRows;
    const Factors factors{packed, row_bytes, panel, kPanelRow};
    const auto multiply = [&](int row, int count, int64_t first, int64_t end) {
        const TileBlock block{count, depth};
        const Factors own{factors.rows + row * row_bytes + 4 * first, row_bytes, panel + first * kPanelRow, kPanelRow};
        char* to = static_cast<char*>(sums) + row * kPanelRow;
        if (row == 0) {
            sum_block<Product, 2>(tiles, block, own, end - first, to, kPanelRow, first > 0,
                                  [&](int64_t word) { fetch_tile(ahead, panel, first + word, depth); });
        } else {
            sum_block<Product, 2>(tiles, block, own, end - first, to, kPanelRow, first > 0, nothing_ahead);
        }
    };
    const int64_t chunk = whole > kBlockRows ? kChunkWords : words;
    for (int64_t first = 0; first < words; first += chunk) {
        const int64_t end = words - first < chunk ? words : first + chunk;
        for (int row = 0; row < whole; row += kBlockRows) multiply(row, kBlockRows, first, end);
    }
    // Shaping tiles takes time: rows that do not fill a block come last, all inputs at once.
    if (rows > whole) multiply(whole, rows - whole, 0, words);
}

void tile_linear_panel(Dtype dtype, const void* panel, const void* packed, int64_t row_bytes, int rows, int64_t k,
                       const float* bias, float* out, int64_t out_stride, int cols, Prefetch ahead) {
    const auto* from = static_cast<const char*>(packed);
    if (dtype != Dtype::bf16) {
        for (int row = 0; row < rows; row += kTileRows) {
            const int count = rows - row < kTileRows ? rows - row : kTileRows;
            kAvx512Bf16.linear_panel(dtype, panel, from + row * row_bytes, row_bytes, count, k, bias, out + row * out_stride,
                                     out_stride, cols, row == 0 ? ahead : Prefetch{});
        }
        return;
    }
    alignas(64) float c[kMostPanelRows * kPanel];
    sum_panel<Bf16Product>(from, row_bytes, rows, static_cast<const char*>(panel), (k + 1) / 2, ahead, c);
    store_outputs(c, rows, bias, out, out_stride, cols);
}

// ---- adapters

// sums [rows, kLowRankBlock] of a block.
PAGODA_INLINE void sum_low_rank(Tiles& tiles, const char* block, const void* packed, int64_t row_bytes, int rows,
                                int64_t words, float* sums) {
    constexpr int64_t bytes = 4 * kLowRankBlock;
    static_assert(kLowRankBlock == kTileSide);
    const Factors factors{static_cast<const char*>(packed), row_bytes, block, bytes};
    sum_block<Bf16Product, 1>(tiles, {rows, words < kTileSide ? static_cast<int>(words) : kTileSide}, factors, words, sums,
                              bytes, false, [&](int64_t word) {
                                  for (int i = 0; i < kTileSide; ++i) fetch_weights(block + (word + i) * bytes);
                              });
}

void tile_low_rank_down(Dtype dtype, const void* block, const void* packed, int64_t row_bytes, int rows, int64_t k,
                        float scale, float* out) {
    if (dtype != Dtype::bf16) return kAvx512Bf16.low_rank_down(dtype, block, packed, row_bytes, rows, k, scale, out);
    Tiles tiles;
    sum_low_rank(tiles, static_cast<const char*>(block), packed, row_bytes, rows, (k + 1) / 2, out);
    for (int r = 0; r < rows; ++r) {
        float* row = out + r * kLowRankBlock;
        store(row, mul(load(row), broadcast(scale)));
    }
}

void tile_low_rank_up(Dtype dtype, const void* blocks, const void* packed, int64_t row_bytes, int rows, int64_t k,
                      float* const* out, int64_t outputs) {
    if (dtype != Dtype::bf16) return kAvx512Bf16.low_rank_up(dtype, blocks, packed, row_bytes, rows, k, out, outputs);
    Tiles tiles;
    const int64_t words = (k + 1) / 2;
    const auto* block = static_cast<const char*>(blocks);
    for (int64_t first = 0; first < outputs; first += kLowRankBlock, block += words * 4 * kLowRankBlock) {
        alignas(64) float sums[kTileRows * kLowRankBlock];
        sum_low_rank(tiles, block, packed, row_bytes, rows, words, sums);
        for (int r = 0; r < rows; ++r) {
            const int64_t left = outputs - first;
            for_vectors(left < kLowRankBlock ? left : kLowRankBlock, [&](auto get, auto put) {
                put(out[r] + first, add(get(out[r] + first), get(sums + r * kLowRankBlock)));
            });
        }
    }
}

}  // namespace
