// SPDX-License-Identifier: Apache-2.0
// Where the outputs of a linear layer go: to rows in memory, as they are or as silu(left half) times right half; or only
// the argmax of each row is kept.
#pragma once

#include <omp.h>

#include <cmath>

#include "kernels.h"
#include "panels.h"

namespace pagoda {

class Outputs {
   public:
    // Rows that lie `stride` elements apart.
    Outputs(float* rows, int64_t stride) : rows_(rows), stride_(stride) {}

    // Silu of the first half of the outputs times the second half, each of whole panels.
    static Outputs gated(float* rows, int64_t stride) {
        Outputs outputs(rows, stride);
        outputs.gated_ = true;
        return outputs;
    }

    // The argmax of n rows; `scratch` has argmax_scratch(n) bytes.
    static Outputs argmax(void* scratch, int64_t n) {
        Outputs outputs(nullptr, kPanel);
        outputs.scratch_ = scratch;
        outputs.thread_bytes_ = thread_bytes(n);
        outputs.seen_bytes_ = seen_bytes(n);
        return outputs;
    }
    static size_t argmax_scratch(int64_t n) { return static_cast<size_t>(omp_get_max_threads() * thread_bytes(n)); }

    // All threads, before outputs come. No barrier is needed.
    void begin(int64_t n) const {
        if (scratch_ == nullptr) return;
        for (int64_t row = 0; row < n; ++row) seen(omp_get_thread_num())[row] = {-INFINITY, 1, 0};
    }

    int64_t stride() const { return stride_; }
    bool gated() const { return gated_; }

    // Where this thread writes the outputs of a panel, of the rows from `row` on.
    float* panel(int64_t row, int64_t column) const {
        if (scratch_ == nullptr) return rows_ + row * stride_ + column;
        return reinterpret_cast<float*>(at(seen(omp_get_thread_num()), seen_bytes_));
    }

    // What `panel` gave has been written.
    void take(const KernelTable& table, int64_t row, int64_t rows, int64_t column, int columns) const {
        if (scratch_ == nullptr) return;
        Argmax* own = seen(omp_get_thread_num());
        const auto* outputs = reinterpret_cast<const float*>(at(own, seen_bytes_));
        table.argmax(outputs, static_cast<int>(rows), columns, column, own + row);
    }

    // The argmax of a row over all threads; after a barrier.
    Argmax argmax_of(int64_t row) const {
        Argmax best = seen(0)[row];
        for (int thread = 1; thread < omp_get_num_threads(); ++thread) {
            const Argmax& other = seen(thread)[row];
            const bool finite = best.finite && other.finite;
            const bool first = other.value == best.value && other.column < best.column;
            if (other.value > best.value || first) best = other;
            best.finite = finite;
        }
        return best;
    }

   private:
    static int64_t seen_bytes(int64_t n) { return (n * static_cast<int64_t>(sizeof(Argmax)) + 63) / 64 * 64; }
    static int64_t thread_bytes(int64_t n) { return seen_bytes(n) + n * kPanel * size_of(Dtype::f32); }
    Argmax* seen(int thread) const { return static_cast<Argmax*>(static_cast<void*>(at(scratch_, thread * thread_bytes_))); }

    float* rows_;
    int64_t stride_;
    bool gated_ = false;
    void* scratch_ = nullptr;
    int64_t thread_bytes_ = 0, seen_bytes_ = 0;
};

// Calls multiply(panel, first row, rows, to, stride, next panel or -1) for all panels of a linear layer and all n packed
// rows, and brings what it leaves at `to` to where outputs go. There is a next panel only if it is to be fetched.
template <class Multiply>
void for_output_panels(const KernelTable& table, WorkQueue& queue, int64_t outputs, int64_t n, int64_t row_bytes,
                       int64_t tile_rows, bool fetch, const Outputs& out, Multiply multiply) {
    constexpr int64_t kGatedRows = 96;
    const int64_t panels = (outputs + kPanel - 1) / kPanel, half = panels / 2;
    if (!out.gated()) {
        parallel_for_panels(queue, panels, n, row_bytes, tile_rows, [&](int64_t panel, int64_t next, int64_t begin, int64_t end) {
            const int64_t column = panel * kPanel;
            multiply(panel, begin, end - begin, out.panel(begin, column), out.stride(), fetch ? next : -1);
            out.take(table, begin, end - begin, column, static_cast<int>(std::min<int64_t>(kPanel, outputs - column)));
        });
        return;
    }
    parallel_for_panels(queue, half, n, row_bytes, tile_rows, [&](int64_t panel, int64_t next, int64_t begin, int64_t end) {
        alignas(64) float both[kGatedRows * 2 * kPanel];
        for (int64_t first = begin; first < end; first += kGatedRows) {
            const int64_t rows = std::min(kGatedRows, end - first);
            const bool fetches = fetch && first == begin;
            multiply(panel, first, rows, both, 2 * kPanel, fetches ? half + panel : -1);
            multiply(half + panel, first, rows, both + kPanel, 2 * kPanel, fetches ? next : -1);
            for (int64_t row = 0; row < rows; ++row) {
                table.silu_and_mul(both + row * 2 * kPanel, kPanel, out.panel(first + row, panel * kPanel));
            }
        }
    });
}

}  // namespace pagoda
