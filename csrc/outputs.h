// Where the outputs of a linear map go: to rows in memory, or of each row only the highest is kept.
#pragma once

#include <omp.h>

#include <cmath>

#include "kernels.h"
#include "panels.h"

namespace pagoda {

class Outputs {
   public:
    // Rows `stride` elements apart.
    Outputs(void* rows, int64_t stride) : rows_(rows), stride_(stride) {}

    // What `highest_scratch` says is needed, for n rows.
    static Outputs highest(void* scratch, int64_t n, Dtype dtype) {
        Outputs outputs(nullptr, kPanel);
        outputs.scratch_ = scratch;
        outputs.thread_bytes_ = thread_bytes(n, dtype);
        outputs.seen_bytes_ = seen_bytes(n);
        return outputs;
    }
    static size_t highest_scratch(int64_t n, Dtype dtype) {
        return static_cast<size_t>(omp_get_max_threads() * thread_bytes(n, dtype));
    }

    // All threads, before outputs come. No barrier is needed.
    void begin(int64_t n) const {
        if (scratch_ == nullptr) return;
        for (int64_t row = 0; row < n; ++row) seen(omp_get_thread_num())[row] = {-INFINITY, 1, 0};
    }

    int64_t stride() const { return stride_; }

    // Where this thread writes the outputs of a panel, of the rows from `row` on.
    void* panel(int64_t row, int64_t column, int64_t item) const {
        if (scratch_ == nullptr) return at(rows_, (row * stride_ + column) * item);
        return at(seen(omp_get_thread_num()), seen_bytes_);
    }

    // What `panel` gave has been written.
    void take(const KernelTable& table, Dtype dtype, int64_t row, int64_t rows, int64_t column, int columns) const {
        if (scratch_ == nullptr) return;
        Highest* own = seen(omp_get_thread_num());
        table.highest(dtype, at(own, seen_bytes_), static_cast<int>(rows), columns, column, own + row);
    }

    // After a barrier: the first of the highest outputs of a row, and whether all are finite.
    Highest highest_of(int64_t row) const {
        Highest best = seen(0)[row];
        for (int thread = 1; thread < omp_get_num_threads(); ++thread) {
            const Highest& other = seen(thread)[row];
            const bool finite = best.finite && other.finite;
            const bool first = other.value == best.value && other.column < best.column;
            if (other.value > best.value || first) best = other;
            best.finite = finite;
        }
        return best;
    }

   private:
    static int64_t seen_bytes(int64_t n) { return (n * static_cast<int64_t>(sizeof(Highest)) + 63) / 64 * 64; }
    static int64_t thread_bytes(int64_t n, Dtype dtype) { return seen_bytes(n) + n * kPanel * size_of(dtype); }
    Highest* seen(int thread) const { return static_cast<Highest*>(static_cast<void*>(at(scratch_, thread * thread_bytes_))); }

    void* rows_;
    int64_t stride_;
    void* scratch_ = nullptr;
    int64_t thread_bytes_ = 0, seen_bytes_ = 0;
};

}  // namespace pagoda
