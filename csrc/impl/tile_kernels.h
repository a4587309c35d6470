// SPDX-License-Identifier: Apache-2.0
// The kernels on tiles. A file that includes this is compiled for AMX or its emulation and fills one TileKernels.
#pragma once

#include "../tile_kernels.h"
#include "tile_attention.h"
#include "tile_products.h"
#include "tile_quantized.h"

namespace {

void multiply_tile(bool pairs, int rows, int words, const void* a, const void* b, void* sums) {
    Tiles tiles;
    const Factors factors{static_cast<const char*>(a), 4 * words, static_cast<const char*>(b), kPanelRow};
    if (pairs) return sum_block<Bf16Product, 2>(tiles, {rows, words}, factors, words, sums, kPanelRow, true, nothing_ahead);
    sum_block<ByteProduct, 2>(tiles, {rows, words}, factors, words, sums, kPanelRow, true, nothing_ahead);
}

constexpr pagoda::TileKernels kTileKernels = {
    tile_linear_panel, tile_low_rank_down, tile_low_rank_up, tile_quantized_panel,
    tile_pack_query, tile_attend, multiply_tile,
};

}  // namespace
