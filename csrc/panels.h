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

// Calls work(panel, next, first tile, last tile) for all tiles of rows and all panels; `next` is a panel, or -1.
template <class Work>
void parallel_for_panels(WorkQueue& queue, int64_t panels, int64_t tiles, Work work) {
    const int64_t threads = omp_get_num_threads();
    // A panel stays in the cache while all rows go by; only when there are few panels are the rows shared out.
    const int64_t parts = panels >= 4 * threads ? 1 : std::min(tiles, 4 * threads);
    parallel_for_dynamic(queue, panels * parts, [&](int64_t task, int64_t next_task) {
        const int64_t panel = task / parts, part = task % parts;
        const int64_t next = next_task >= 0 && next_task / parts != panel ? next_task / parts : -1;
        work(panel, next, tiles * part / parts, tiles * (part + 1) / parts);
    });
}

}  // namespace pagoda
