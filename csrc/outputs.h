// Where the outputs of a linear layer go: to rows in memory, or only the argmax of each row is kept.
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
    void* scratch_ = nullptr;
    int64_t thread_bytes_ = 0, seen_bytes_ = 0;
};

}  // namespace pagoda
