// SPDX-License-Identifier: Apache-2.0
#include "low_rank.h"

#include <algorithm>
#include <numeric>
#include <stdexcept>
#include <utility>

#include "panels.h"

namespace pagoda {

namespace {

// Of one chunk; a multiple of kLowRankBlock.
constexpr int64_t kChunkOutputs = 512;

// Bytes from one packed row to the next: an odd number of cache lines, so that rows do not displace each other.
int64_t row_bytes(const KernelTable& table, const LowRankMaps& maps, int64_t inputs) {
    return (((inputs + 1) / 2 * 2 * table.packed_size(maps.dtype) + 63) / 64 | 1) * 64;
}

}  // namespace

LowRankMaps::LowRankMaps(int number, int64_t num_inputs, std::vector<int64_t> outputs)
    : dtype(Dtype(number)), inputs(num_inputs), num_parts_(outputs.size()) {
    int64_t column = 0;
    for (size_t part = 0; part < outputs.size(); ++part) {
        for (int64_t first = 0; first < outputs[part]; first += kChunkOutputs) {
            chunks.push_back({part, first, std::min(kChunkOutputs, outputs[part] - first), column + first});
        }
        column += outputs[part];
    }
}

void LowRankMaps::set(int64_t adapter, std::vector<LowRankPart> parts) {
    if (parts.size() != num_parts_) throw std::invalid_argument("an adapter has as many parts as the layer");
    int64_t blocks = 0;
    for (const LowRankPart& part : parts) blocks += part.blocks();
    most_blocks = std::max(most_blocks, blocks);
    adapters_[adapter] = std::move(parts);
}

void AdaptedRows::assign(const int64_t* adapters, const int64_t* selected, int64_t n) {
    rows.clear();
    tiles.clear();
    const auto adapter_of = [=](int64_t row) { return adapters[selected ? selected[row] : row]; };
    for (int64_t row = 0; row < n; ++row) {
        if (adapter_of(row) >= 0) rows.push_back(row);
    }
    std::stable_sort(rows.begin(), rows.end(), [&](int64_t a, int64_t b) { return adapter_of(a) < adapter_of(b); });
    for (int64_t i = 0; i < size(); ++i) {
        const int64_t adapter = adapter_of(rows[static_cast<size_t>(i)]);
        if (tiles.empty() || tiles.back().adapter != adapter || tiles.back().rows == kTileRows) {
            tiles.push_back({adapter, i, 0});
        }
        ++tiles.back().rows;
    }
}

size_t low_rank_scratch(const KernelTable& table, const LowRankMaps& maps, int64_t rows) {
    const int64_t ranks = maps.most_blocks * kLowRankBlock;
    return static_cast<size_t>(rows * (row_bytes(table, maps, maps.inputs) + row_bytes(table, maps, ranks)));
}

void add_low_rank(const KernelTable& table, const LowRankMaps& maps, const AdaptedRows& adapted, const float* x,
                  int64_t row_stride, float* out, int64_t out_stride, void* scratch) {
    const int64_t n = adapted.size(), num_tiles = static_cast<int64_t>(adapted.tiles.size());
    const int64_t x_bytes = row_bytes(table, maps, maps.inputs);
    const int64_t ranks_bytes = row_bytes(table, maps, maps.most_blocks * kLowRankBlock);
    const int64_t block_bytes = kLowRankBlock * table.packed_size(maps.dtype);
    char *inputs = at(scratch, 0), *ranks = at(scratch, n * x_bytes);
    parallel_for_rows(n, [&](int64_t i) {
        const float* row = x + adapted.rows[static_cast<size_t>(i)] * row_stride;
        table.pack_row(maps.dtype, row, maps.inputs, inputs + i * x_bytes);
    });
    // Down, by blocks of the ranks of all parts, one behind the other.
#pragma omp for schedule(dynamic)
    for (int64_t task = 0; task < num_tiles * maps.most_blocks; ++task) {
        const AdaptedRows::Tile& tile = adapted.tiles[static_cast<size_t>(task / maps.most_blocks)];
        const auto* parts = maps.find(tile.adapter);
        if (parts == nullptr) continue;
        const int64_t place = task % maps.most_blocks;
        int64_t block = place;
        auto part = parts->begin();
        for (; part != parts->end() && block >= part->blocks(); ++part) block -= part->blocks();
        if (part == parts->end()) continue;
        alignas(64) float sums[kTileRows * kLowRankBlock];
        table.low_rank_down(maps.dtype, at(part->down, block * maps.block_bytes(maps.inputs)),
                            inputs + tile.first * x_bytes, x_bytes, static_cast<int>(tile.rows), maps.inputs,
                            part->scale, sums);
        for (int64_t row = 0; row < tile.rows; ++row) {
            table.pack_row(maps.dtype, sums + row * kLowRankBlock, kLowRankBlock,
                           ranks + (tile.first + row) * ranks_bytes + place * block_bytes);
        }
    }
    const auto num_chunks = static_cast<int64_t>(maps.chunks.size());
#pragma omp for schedule(dynamic)
    for (int64_t task = 0; task < num_tiles * num_chunks; ++task) {
        const AdaptedRows::Tile& tile = adapted.tiles[static_cast<size_t>(task / num_chunks)];
        const LowRankMaps::Chunk& chunk = maps.chunks[static_cast<size_t>(task % num_chunks)];
        const auto* parts = maps.find(tile.adapter);
        if (parts == nullptr) continue;
        const LowRankPart& part = (*parts)[chunk.part];
        if (part.rank == 0) continue;
        const int64_t before = std::accumulate(parts->begin(), parts->begin() + static_cast<int64_t>(chunk.part),
                                               int64_t{0}, [](int64_t sum, const auto& p) { return sum + p.blocks(); });
        float* to[kTileRows];
        for (int64_t row = 0; row < tile.rows; ++row) {
            to[row] = out + adapted.rows[static_cast<size_t>(tile.first + row)] * out_stride + chunk.column;
        }
        table.low_rank_up(maps.dtype, at(part.up, chunk.first / kLowRankBlock * maps.block_bytes(part.rank)),
                          ranks + tile.first * ranks_bytes + before * block_bytes, ranks_bytes,
                          static_cast<int>(tile.rows), part.rank, to, chunk.outputs);
    }
}

}  // namespace pagoda
