// SPDX-License-Identifier: Apache-2.0
// Intel's AMX: eight tiles of up to 16 rows of 64 bytes, and products of them, as instructions of the processor or, for
// machines without them and for tests, in C++. Definitions are those of the Intel 64 and IA-32 Architectures Software
// Developer's Manual, volume 2 (LDTILECFG, TILELOADD, TILESTORED, TDPBF16PS, TDPBSUD).
//
// Kernels work on blocks of sums of two by two tiles: 0 and 1 for the first 16 rows, 2 and 3 for the rows behind them.
// Tiles 4 and 5 are for these rows' factors, 6 and 7 for those of 16 columns each.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <cstring>

#include "vec.h"

namespace {

constexpr int kTileSide = 16;  // rows of a tile, and its words of 4 bytes in a row
constexpr int kBlockRows = 2 * kTileSide;
constexpr int kRowTile = 4, kColumnTile = 6;

struct TileBlock {
    int rows = 0;   // of sums, 1 to 32
    int words = 0;  // of 4 bytes in a row of factors, 1 to 16

    bool operator==(const TileBlock&) const = default;
    int rows_of(int tile) const {
        if (tile >= kColumnTile) return words;
        const int first = tile == 2 || tile == 3 || tile == 5 ? kTileSide : 0, rest = rows - first;
        return rest < 0 ? 0 : rest > kTileSide ? kTileSide : rest;
    }
    int row_bytes_of(int tile) const {
        if (rows_of(tile) == 0) return 0;
        return 4 * (tile == kRowTile || tile == kRowTile + 1 ? words : kTileSide);
    }
};

#ifndef PAGODA_EMULATED_TILES

// The instructions themselves: compilers' own functions say nothing of the memory that they read.
class Tiles {
 public:
    Tiles() = default;
    Tiles(const Tiles&) = delete;
    Tiles& operator=(const Tiles&) = delete;
    ~Tiles() {
        if (block_.rows != 0) asm volatile("tilerelease");
    }

    // What tiles hold is lost if the shape is another one.
    void shape(const TileBlock& block) {
        if (block == block_) return;
        block_ = block;
        struct alignas(64) {
            uint8_t palette = 1, start_row = 0, reserved[14] = {};
            uint16_t row_bytes[16] = {};
            uint8_t rows[16] = {};
        } config;
        for (int tile = 0; tile < 8; ++tile) {
            config.rows[tile] = static_cast<uint8_t>(block.rows_of(tile));
            config.row_bytes[tile] = static_cast<uint16_t>(block.row_bytes_of(tile));
        }
        asm volatile("ldtilecfg %0" ::"m"(config));
    }
    template <int T>
    void zero() {
        asm volatile("tilezero %%tmm%c0" ::"i"(T));
    }
    template <int T>
    void load(const void* rows, int64_t stride) {
        asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(rows), "r"(stride), "i"(T) : "memory");
    }
    template <int T>
    void store(void* rows, int64_t stride) {
        asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(rows), "r"(stride), "i"(T) : "memory");
    }
    // Sum += A B, of pairs of bf16.
    template <int Sum, int A, int B>
    void add_bf16() {
        asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(Sum), "i"(A), "i"(B));
    }
    // Sum += A B, of four signed bytes and four unsigned ones.
    template <int Sum, int A, int B>
    void add_bytes() {
        asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(Sum), "i"(A), "i"(B));
    }

 private:
    TileBlock block_;
};

#else

using Tile = uint8_t[kTileSide][4 * kTileSide];

// Rounds to nearest, takes denormals for zeros and makes zeros of them, as TDPBF16PS does whatever MXCSR says.
class FlushedDenormals {
 public:
    FlushedDenormals() : before_(_mm_getcsr()) { _mm_setcsr(0x9fc0); }
    ~FlushedDenormals() { _mm_setcsr(before_); }

 private:
    unsigned before_;
};

// Of each row and column the products of all first elements of pairs are added up one after the other, those of the
// second elements likewise, then both, then the sum before. Not in line, so that what is computed stays between the
// settings of MXCSR.
__attribute__((noinline)) void add_bf16_tile(Tile& sum, const Tile& a, const Tile& b, int rows, int words) {
    const FlushedDenormals flushed;
    asm volatile("" ::: "memory");
    for (int r = 0; r < rows; ++r) {
        vec even = zero(), odd = zero();
        for (int i = 0; i < words; ++i) {
            bf16 pair[2];
            std::memcpy(pair, a[r] + 4 * i, 4);
            const auto* columns = reinterpret_cast<const bf16*>(b[i]);
            even = fma(broadcast(as_float(pair[0])), load_even(columns), even);
            odd = fma(broadcast(as_float(pair[1])), load_odd(columns), odd);
        }
        auto* to = reinterpret_cast<float*>(sum[r]);
        store(to, add(load(to), add(even, odd)));
    }
    asm volatile("" ::: "memory");
}

// Sums wrap around.
void add_bytes_tile(Tile& sum, const Tile& a, const Tile& b, int rows, int words) {
    for (int r = 0; r < rows; ++r) {
        uint32_t sums[kTileSide];
        std::memcpy(sums, sum[r], sizeof(sums));
        for (int i = 0; i < words; ++i) {
            for (int j = 0; j < kTileSide; ++j) {
                for (int k = 0; k < 4; ++k) {
                    sums[j] += static_cast<uint32_t>(static_cast<int8_t>(a[r][4 * i + k]) * b[i][4 * j + k]);
                }
            }
        }
        std::memcpy(sum[r], sums, sizeof(sums));
    }
}

// Ends the process where the processor would.
class Tiles {
 public:
    void shape(const TileBlock& block) {
        if (block == block_) return;
        if (block.rows < 1 || block.rows > kBlockRows || block.words < 1 || block.words > kTileSide) std::abort();
        block_ = block;
        std::memset(tiles_, 0, sizeof(tiles_));
    }
    template <int T>
    void zero() {
        std::memset(tiles_[T], 0, sizeof(Tile));
    }
    template <int T>
    void load(const void* rows, int64_t stride) {
        zero<T>();
        for (int r = 0; r < used_rows(T); ++r) std::memcpy(tiles_[T][r], at(rows, r * stride), bytes(T));
    }
    template <int T>
    void store(void* rows, int64_t stride) {
        for (int r = 0; r < used_rows(T); ++r) std::memcpy(const_cast<char*>(at(rows, r * stride)), tiles_[T][r], bytes(T));
    }
    template <int Sum, int A, int B>
    void add_bf16() {
        add_bf16_tile(tiles_[Sum], tiles_[A], tiles_[B], used_rows(A), used_rows(B));
    }
    template <int Sum, int A, int B>
    void add_bytes() {
        add_bytes_tile(tiles_[Sum], tiles_[A], tiles_[B], used_rows(A), used_rows(B));
    }

 private:
    static const char* at(const void* p, int64_t offset) { return static_cast<const char*>(p) + offset; }
    size_t bytes(int tile) const { return static_cast<size_t>(block_.row_bytes_of(tile)); }
    int used_rows(int tile) const {
        const int rows = block_.rows_of(tile);
        if (rows == 0) std::abort();
        return rows;
    }

    TileBlock block_;
    alignas(64) Tile tiles_[8] = {};
};

#endif

}  // namespace
