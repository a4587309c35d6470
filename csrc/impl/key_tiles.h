// SPDX-License-Identifier: Apache-2.0
// Where keys and values of a tile of cached tokens lie, and how they become lanes that are multiplied.
//
// They are read where they lie in the cache, in groups of 16 tokens. Blocks of fewer tokens, and values of heads that do
// not fill vectors, are gathered first. Latents lie as values do, and their keys are transposed once for all heads.
#pragma once

#include <cstring>
#include <initializer_list>

#include "lanes.h"

namespace {

using pagoda::AttendTile;

constexpr int kGroup = 16;
constexpr int kGroups = kKeyTile / kGroup;

// Of a token of the tile's sequence for one of the tile's heads.
struct Place {
    int64_t block, head;
    int64_t offset;

    // Counted in [kv_heads, block_size].
    PAGODA_INLINE int64_t row(const AttendTile& tile) const { return head * tile.block_size + offset; }
};
PAGODA_INLINE Place place_of(const AttendTile& tile, int head, int64_t position) {
    // Division of 32 bits is much the quicker.
    const auto p = static_cast<uint32_t>(position), size = static_cast<uint32_t>(tile.block_size);
    return {tile.blocks[p / size], tile.kv_head + head, p % size};
}

template <class Cell>
PAGODA_INLINE const Cell* block_at(const void* blocks, int64_t block, int64_t stride) {
    return reinterpret_cast<const Cell*>(static_cast<const char*>(blocks) + block * stride);
}

// Where the lanes of a key begin, which are block_size apart.
template <class M, class Cell>
PAGODA_INLINE const Cell* key_at(const AttendTile& tile, Place place) {
    return block_at<Cell>(tile.cache.keys, place.block, tile.cache.key_stride) +
           place.head * tile.block_size * (tile.head_dim / M::pair) + place.offset;
}
// The lanes of a value, of which those of the next token or pair follow.
template <class M, class Cell>
PAGODA_INLINE const Cell* value_at(const AttendTile& tile, Place place) {
    return block_at<Cell>(tile.cache.values, place.block, tile.cache.value_stride) +
           place.row(tile) / M::pair * tile.head_dim;
}

// Where the groups of a tile are, for its first head. Blocks lie anywhere, so the processor cannot guess which memory comes next:
// `soon` says where those of the next tile are.
struct Places {
    Place now[kGroups], soon[kGroups];

    // Beyond the last of the tokens stands any group.
    Places(const AttendTile& tile, int64_t first, int64_t end) {
        for (int g = 0; g < kGroups; ++g) {
            const int64_t position = first + g * kGroup, later = position + kKeyTile;
            now[g] = place_of(tile, 0, position < end ? position : first);
            soon[g] = later < tile.end ? place_of(tile, 0, later) : now[g];
        }
    }
};

// Where the groups of a tile of keys or values of one head begin.
template <class Cell>
struct Groups {
    const Cell* now[kGroups];
    const Cell* soon[kGroups];  // what is read after it: of the next head, or of the next tile's first
    int64_t stride;             // from lane to lane of a key, from value to value

    // `head_cells` are those of a head in a block.
    template <class At>
    Groups(const Places& places, int64_t stride_, int head, int heads, int64_t head_cells, At at) : stride(stride_) {
        for (int g = 0; g < kGroups; ++g) {
            now[g] = at(places.now[g]) + head * head_cells;
            soon[g] = head + 1 < heads ? now[g] + head_cells : at(places.soon[g]);
        }
    }
    // Of a tile that was gathered.
    Groups(const Cell* lanes, int64_t group, int64_t stride_) : stride(stride_) {
        for (int g = 0; g < kGroups; ++g) soon[g] = now[g] = lanes + g * group;
    }
};

template <class M, class Cell>
Groups<Cell> key_groups(const AttendTile& tile, const Places& places, int head) {
    return {places, tile.block_size, head, tile.heads, int64_t{tile.block_size} * (tile.head_dim / M::pair),
            [&](Place place) { return key_at<M, Cell>(tile, place); }};
}
template <class M, class Cell>
Groups<Cell> value_groups(const AttendTile& tile, const Places& places, int head) {
    return {places, tile.head_dim, head, tile.heads, int64_t{tile.block_size / M::pair} * tile.head_dim,
            [&](Place place) { return value_at<M, Cell>(tile, place); }};
}

bool reads_keys(const AttendTile& tile) { return tile.block_size % kGroup == 0 && !tile.cache.holds_latents(); }
bool reads_values(const AttendTile& tile) {
    return tile.block_size % kGroup == 0 && tile.cache.value_dim % kGroup == 0;
}

// Keys from `first` on as [groups, lanes, kGroup]; what is behind the last of `count` is of no account.
template <class M, class Cell>
void gather_keys(const AttendTile& tile, int head, int64_t first, int count, typename M::Lane* out) {
    const int64_t size = tile.block_size, lanes = tile.head_dim / M::pair;
    for (int j = 0; j < count; ++j) {
        const Cell* key = key_at<M, Cell>(tile, place_of(tile, head, first + j));
        typename M::Lane* to = out + j / kGroup * lanes * kGroup + j % kGroup;
        for (int64_t i = 0; i < lanes; ++i) to[i * kGroup] = M::lane(key[i * size]);
    }
}

// Rows of values from `first` on as [tokens or pairs, padded_row].
template <class M, class Cell>
void gather_values(const AttendTile& tile, int head, int64_t first, int count, typename M::Lane* out) {
    const int64_t d = tile.head_dim;
    for (int j = 0; j < count; j += M::pair, out += tile.padded_row) {
        std::memset(out + d, 0, sizeof(*out) * static_cast<size_t>(tile.padded_row - d));
        if constexpr (M::pair == 2) {
            if (tile.block_size == 1) {
                using Element = decltype(Cell::first);
                const auto value = [&](int64_t position) {
                    const Place place = place_of(tile, head, position);
                    return block_at<Element>(tile.cache.values, place.block, tile.cache.value_stride) + place.head * d;
                };
                const Element* one = value(first + j);
                const Element* other = j + 1 < count ? value(first + j + 1) : nullptr;
                for (int64_t i = 0; i < d; ++i) out[i] = M::lane(one[i], other ? other[i] : Element{});
                continue;
            }
        }
        const Cell* value = value_at<M, Cell>(tile, place_of(tile, head, first + j));
        for (int64_t i = 0; i < d; ++i) out[i] = M::lane(value[i]);
    }
}

#ifndef __aarch64__
// Four lanes of a row.
PAGODA_INLINE __m128i four_lanes(const float* p) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p)); }
PAGODA_INLINE __m128i four_lanes(const bf16_pair* p) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p)); }
PAGODA_INLINE __m128i four_lanes(const i16_pair* p) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p)); }
PAGODA_INLINE __m128i four_lanes(const i8_pair* p) {
    return _mm_cvtepi8_epi16(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
}
PAGODA_INLINE __m128i four_lanes(const bf16* p) {
    return _mm_slli_epi32(_mm_cvtepu16_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))), 16);
}
PAGODA_INLINE __m128i four_lanes(const f16* p) {
    return _mm_castps_si128(_mm_cvtph_ps(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
}
PAGODA_INLINE __m128i four_lanes(const e4m3* p) {
    return _mm_castps_si128(_mm_setr_ps(as_float(p[0]), as_float(p[1]), as_float(p[2]), as_float(p[3])));
}

// Four lanes each of rows `step` apart, side by side, and what moves them about within such fours.
#ifdef __AVX512F__
template <class Cell>
PAGODA_INLINE ivec four_lanes_of_rows(const Cell* p, int64_t step) {
    ivec x = _mm512_castsi128_si512(four_lanes(p));
    x = _mm512_inserti32x4(x, four_lanes(p + step), 1);
    x = _mm512_inserti32x4(x, four_lanes(p + 2 * step), 2);
    return _mm512_inserti32x4(x, four_lanes(p + 3 * step), 3);
}
PAGODA_INLINE ivec zip_low_lanes(ivec a, ivec b) { return _mm512_unpacklo_epi32(a, b); }
PAGODA_INLINE ivec zip_high_lanes(ivec a, ivec b) { return _mm512_unpackhi_epi32(a, b); }
PAGODA_INLINE ivec low_lanes(ivec a, ivec b) { return _mm512_unpacklo_epi64(a, b); }
PAGODA_INLINE ivec high_lanes(ivec a, ivec b) { return _mm512_unpackhi_epi64(a, b); }
PAGODA_INLINE ivec shuffle_bytes(ivec x, const uint8_t (&order)[16]) {
    return _mm512_shuffle_epi8(x, _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(order))));
}
PAGODA_INLINE void store_lanes(void* p, ivec x) { _mm512_storeu_si512(p, x); }
#else
template <class Cell>
PAGODA_INLINE ivec four_lanes_of_rows(const Cell* p, int64_t step) {
    return _mm256_inserti128_si256(_mm256_castsi128_si256(four_lanes(p)), four_lanes(p + step), 1);
}
PAGODA_INLINE ivec zip_low_lanes(ivec a, ivec b) { return _mm256_unpacklo_epi32(a, b); }
PAGODA_INLINE ivec zip_high_lanes(ivec a, ivec b) { return _mm256_unpackhi_epi32(a, b); }
PAGODA_INLINE ivec low_lanes(ivec a, ivec b) { return _mm256_unpacklo_epi64(a, b); }
PAGODA_INLINE ivec high_lanes(ivec a, ivec b) { return _mm256_unpackhi_epi64(a, b); }
PAGODA_INLINE ivec shuffle_bytes(ivec x, const uint8_t (&order)[16]) {
    return _mm256_shuffle_epi8(x, _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(order))));
}
PAGODA_INLINE void store_lanes(void* p, ivec x) { _mm256_storeu_si256(static_cast<__m256i*>(p), x); }
#endif
#endif

// Four elements of the rows of kWidth tokens as the lanes of keys, which are kGroup apart.
template <class M, class Cell>
PAGODA_INLINE void transpose_four(const Cell* rows, int64_t stride, typename M::Lane* out) {
    if constexpr (M::pair == 1) {
        ivec x[4];
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) x[i] = four_lanes_of_rows(rows + i * stride, 4 * stride);
        const ivec first = zip_low_lanes(x[0], x[1]), second = zip_low_lanes(x[2], x[3]);
        const ivec third = zip_high_lanes(x[0], x[1]), fourth = zip_high_lanes(x[2], x[3]);
        store_lanes(out, low_lanes(first, second));
        store_lanes(out + kGroup, high_lanes(first, second));
        store_lanes(out + 2 * kGroup, low_lanes(third, fourth));
        store_lanes(out + 3 * kGroup, high_lanes(third, fourth));
    } else {
        // Of pairs of two tokens in two pairs of elements.
        constexpr uint8_t order[] = {0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15};
        const ivec even = shuffle_bytes(four_lanes_of_rows(rows, 2 * stride), order);
        const ivec odd = shuffle_bytes(four_lanes_of_rows(rows + stride, 2 * stride), order);
        store_lanes(out, low_lanes(even, odd));
        store_lanes(out + kGroup, high_lanes(even, odd));
    }
}

// Rows of `count` values, which are keys as well, as [groups, lanes, kGroup].
template <class M, class Cell>
void transpose_rows(const Groups<Cell>& rows, int count, int64_t d, typename M::Lane* out) {
    for (int token = 0; token < count; token += kWidth) {
        const Cell* from = rows.now[token / kGroup] + token % kGroup / M::pair * rows.stride;
        typename M::Lane* to = out + token / kGroup * (d / M::pair) * kGroup + token % kGroup;
        for (int64_t i = 0; i < d; i += 4) {
            const int64_t element = i + 4 <= d ? i : d - 4;
            transpose_four<M>(from + element, rows.stride, to + element / M::pair * kGroup);
        }
    }
}

// Scales of tokens from `first` on, and `beyond` behind the last of `count`.
void gather_scales(const AttendTile& tile, int head, const float* scales, int64_t first, int count, float beyond,
                   float* out) {
    const int run = tile.block_size < kKeyTile ? tile.block_size : kKeyTile;
    for (int j = 0; j < count; j += run) {
        const Place place = place_of(tile, head, first + j);
        const int here = count - j < run ? count - j : run;
        const float* of_block = block_at<float>(scales, place.block, tile.cache.scale_stride);
        std::memcpy(out + j, of_block + place.row(tile), sizeof(float) * here);
    }
    for (int j = count; j < kKeyTile; ++j) out[j] = beyond;
}

// Brings the scales closer that are read next: of the next head, or of the next tile's first.
PAGODA_INLINE void prefetch_scales(const AttendTile& tile, int head, const Places& places, const float* scales) {
    const int next = head + 1 < tile.heads ? head + 1 : 0;
    for (const Place& place : next > 0 ? places.now : places.soon) {
        const float* of_block = block_at<float>(scales, place.block, tile.cache.scale_stride);
        prefetch_l2(of_block + place.row(tile) + next * tile.block_size);
    }
}

}  // namespace
