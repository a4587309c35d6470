// SPDX-License-Identifier: Apache-2.0
// How the threads of a team share out rows, and panels of a weight, for all formats of weights.
#pragma once

#include <omp.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <new>

namespace pagoda {

inline const char* at(const void* p, int64_t bytes) { return static_cast<const char*>(p) + bytes; }
inline char* at(void* p, int64_t bytes) { return static_cast<char*>(p) + bytes; }

// The first task that no thread has claimed yet. It lies in front of an operation's scratch memory.
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

// How one of so many threads claims tasks. It queues a task while it works on another, so as to know which is next to come
// from memory; not the last ones, which are for whoever is free: one core may be half as fast as the others.
class Claims {
   public:
    Claims(WorkQueue& queue, int64_t tasks, int64_t threads)
        : queue_(&queue), tasks_(tasks), threads_(threads), task_(queue.next.fetch_add(1)) {}

    bool has_task() const { return task_ < tasks_; }
    int64_t task() const { return task_; }

    // The task that comes behind this one, or is likely to; -1 if none. Once for each task.
    int64_t look_ahead() {
        int64_t next = queue_->next.load(std::memory_order_relaxed);
        queues_ = next < tasks_ - 2 * threads_;
        // In the meantime all others claim one.
        next = queues_ ? queue_->next.fetch_add(1) : next + threads_ - 1;
        queued_ = next;
        return next < tasks_ ? next : -1;
    }
    void advance() { task_ = queues_ ? queued_ : queue_->next.fetch_add(1); }

   private:
    WorkQueue* queue_;
    int64_t tasks_, threads_, task_, queued_ = 0;
    bool queues_ = false;
};

// Calls work(task, next) for all tasks; see Claims::look_ahead.
template <class Work>
void parallel_for_dynamic(WorkQueue& queue, int64_t tasks, Work work) {
    for (Claims claims(queue, tasks, omp_get_num_threads()); claims.has_task(); claims.advance()) {
        const int64_t next = claims.look_ahead();
        work(claims.task(), next);
    }
#pragma omp barrier
}

// Calls work(row) for n rows that take equally long. Threads claim many rows in runs, so that a slow core does fewer.
template <class Work>
void parallel_for_rows(int64_t n, Work work) {
    constexpr int64_t kRunsPerThread = 8;
    const int64_t run = n / (kRunsPerThread * omp_get_num_threads());
    if (run == 0) {
#pragma omp for schedule(static)
        for (int64_t row = 0; row < n; ++row) work(row);
    } else {
#pragma omp for schedule(dynamic, run)
        for (int64_t row = 0; row < n; ++row) work(row);
    }
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

// Rows in whose time a panel can be read: fewer are cut only where threads would have none.
constexpr int64_t kCutRows = 24;

// How panels of a weight times n rows of activations, which take row_bytes each, are cut into tasks that threads claim
// one after the other. Rows are cut at multiples of tile_rows: into parts that stay in the cache while all panels go by,
// and those again where there are few panels, until no task is more than one in kLeastTasks of a thread's share, lest
// others wait for its end.
class PanelSplit {
   public:
    static constexpr int64_t kLeastTasks = 10;

    struct Task {
        int64_t panel, first_row, end_row;
    };

    PanelSplit(int64_t panels, int64_t n, int64_t row_bytes, int64_t tile_rows, int64_t threads)
        : panels_(panels), n_(n), tile_rows_(tile_rows), tiles_((n + tile_rows - 1) / tile_rows) {
        parts_ = std::min(tiles_, (n * row_bytes + kPartBytes - 1) / kPartBytes);
        if (parts_ == 0) return;
        const int64_t least_tiles = panels < threads ? 1 : (kCutRows + tile_rows - 1) / tile_rows;
        const int64_t most_tiles = std::max(least_tiles, panels * tiles_ / (kLeastTasks * threads));
        cuts_ = std::clamp<int64_t>((tiles_ + most_tiles * parts_ - 1) / (most_tiles * parts_), 1, tiles_ / parts_);
    }

    int64_t num_tasks() const { return panels_ * parts_ * cuts_; }
    // The cuts of a part follow one another: a panel comes from memory once for all of them.
    Task task(int64_t number) const {
        const int64_t piece = number / (panels_ * cuts_) * cuts_ + number % cuts_;
        return {number / cuts_ % panels_, begin(piece), std::min(n_, begin(piece + 1))};
    }

   private:
    int64_t begin(int64_t piece) const { return tiles_ * piece / (parts_ * cuts_) * tile_rows_; }

    int64_t panels_, n_, tile_rows_, tiles_, parts_, cuts_ = 1;
};

// Calls work(panel, next, first row, last row) for all tasks of a split; `next` is another panel, or -1.
template <class Work>
void parallel_for_panels(WorkQueue& queue, int64_t panels, int64_t n, int64_t row_bytes, int64_t tile_rows, Work work) {
    const PanelSplit split(panels, n, row_bytes, tile_rows, omp_get_num_threads());
    parallel_for_dynamic(queue, split.num_tasks(), [&](int64_t number, int64_t next_number) {
        const PanelSplit::Task task = split.task(number);
        const int64_t next = next_number >= 0 ? split.task(next_number).panel : -1;
        work(task.panel, next != task.panel ? next : -1, task.first_row, task.end_row);
    });
}

}  // namespace pagoda
