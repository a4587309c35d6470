#include <algorithm>

#include "ops.h"

namespace pagoda {

void copy_rows(const float* x, int64_t d, const int64_t* rows, int64_t n, float* out) {
#pragma omp for schedule(static)
    for (int64_t i = 0; i < n; ++i) std::copy_n(x + rows[i] * d, d, out + i * d);
}

void add(const KernelTable& table, const float* x, const float* delta, int64_t n, int64_t d, float* out) {
#pragma omp for schedule(static)
    for (int64_t i = 0; i < n; ++i) {
        const void* parts[] = {x + i * d, delta + i * d};
        table.add_up(Dtype::f32, parts, 2, d, out + i * d);
    }
}

void add_rms_norm(const KernelTable& table, const float* x, const float* delta, const float* weight, float eps,
                  int64_t n, int64_t d, float* sum, float* out) {
#pragma omp for schedule(static)
    for (int64_t i = 0; i < n; ++i) {
        const int64_t row = i * d;
        table.rms_norm(x + row, delta ? delta + row : nullptr, weight, eps, d, delta ? sum + row : nullptr, out + row);
    }
}

void silu_and_mul(const KernelTable& table, const float* gate_up, int64_t n, int64_t d, float* out) {
#pragma omp for schedule(static)
    for (int64_t i = 0; i < n; ++i) table.silu_and_mul(gate_up + 2 * i * d, d, out + i * d);
}

}  // namespace pagoda
