// SPDX-License-Identifier: Apache-2.0
// How the threads of a team share out panels of a weight, for all formats of weights.
#pragma once

#include <omp.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <new>

namespace pagoda {

inline const char* at(const void* p, int64_t bytes) { return static_cast<const char*>(p) + bytes; }
inline char* at(void* p, int64_t bytes) { return static_cast<char*>(p) + bytes; }

// The first panel that no thread has claimed yet. It lies in front of an operation's scratch memory.
struct alignas(64) WorkQueue {
    std::atomic<int64_t> next;

    // A barrier has to follow.
    static WorkQueue& reset(void* scratch) {
        auto* queue = static_cast<WorkQueue*>(scratch);
#pragma omp single nowait
        new (queue) WorkQueue{0};
        return *queue;
    }
};

// Calls work(item, next) for all items. A thread queue an item while it works on another, so as to know which is
// `next` to come from memory; -1 if none.
template <class Work>
void parallel_for_dynamic(WorkQueue& queue, int64_t items, Work work) {
    for (int64_t item = queue.next.fetch_add(1), claimed; item < items; item = claimed) {
        claimed = queue.next.fetch_add(1);
        work(item, claimed < items ? claimed : -1);
    }
#pragma omp barrier
}

// Calls work(first, n) for the rows from `begin` to `end`, in tiles of nearly one size.
template <class Work>
void for_tiles(int64_t begin, int64_t end, int64_t rows_at_once, Work work) {
    const int64_t rows = end - begin, tiles = (rows + rows_at_once - 1) / rows_at_once;
    for (int64_t tile = 0; tile < tiles; ++tile) {
        const int64_t first = rows * tile / tiles;
        work(begin + first, static_cast<int>(rows * (tile + 1) / tiles - first));
    }
}

// Packed rows that stay in a core's second cache beside two panels, while all panels go by.
constexpr int64_t kPartBytes = 512 * 1024;

// Calls work(panel, next, first row, last row) for all n rows, which take row_bytes each, and all panels; `next` is a
// panel, or -1. Rows are cut at multiples of tile_rows.
template <class Work>
void parallel_for_panels(WorkQueue& queue, int64_t panels, int64_t n, int64_t row_bytes, int64_t tile_rows, Work work) {
    const int64_t threads = omp_get_num_threads(), tiles = (n + tile_rows - 1) / tile_rows;
    // A panel is read for each part of the rows: they are shared out among threads only where there are few panels.
    const int64_t least = panels >= 4 * threads ? 1 : 4 * threads;
    const int64_t parts = std::min(tiles, std::max(least, (n * row_bytes + kPartBytes - 1) / kPartBytes));
    parallel_for_dynamic(queue, panels * parts, [&](int64_t task, int64_t next_task) {
        const int64_t panel = task % panels, part = task / panels;
        const int64_t next = next_task >= 0 && next_task % panels != panel ? next_task % panels : -1;
        work(panel, next, tiles * part / parts * tile_rows, std::min(n, tiles * (part + 1) / parts * tile_rows));
    });
}

}  // namespace pagoda
