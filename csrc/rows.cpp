#include "ops.h"

namespace pagoda {

void add(const KernelTable& table, Dtype dtype, const void* x, const void* delta, int64_t n, int64_t d, void* out) {
    const int64_t stride = d * size_of(dtype);
#pragma omp for schedule(static)
    for (int64_t i = 0; i < n; ++i) {
        const void* parts[] = {at(x, i * stride), at(delta, i * stride)};
        table.add_up(dtype, parts, 2, d, at(out, i * stride));
    }
}

void add_rms_norm(const KernelTable& table, Dtype dtype, const void* x, const void* delta,
                  const void* weight, float eps, int64_t n, int64_t d, void* sum, void* out) {
    const int64_t stride = d * size_of(dtype);
#pragma omp for schedule(static)
    for (int64_t i = 0; i < n; ++i) {
        const int64_t row = i * stride;
        table.rms_norm(dtype, at(x, row), delta ? at(delta, row) : nullptr, weight, eps, d,
                       delta ? at(sum, row) : nullptr, at(out, row));
    }
}

void silu_and_mul(const KernelTable& table, Dtype dtype, const void* gate_up, int64_t n, int64_t d,
                  void* out) {
    const int64_t stride = d * size_of(dtype);
#pragma omp for schedule(static)
    for (int64_t i = 0; i < n; ++i) {
        table.silu_and_mul(dtype, at(gate_up, 2 * i * stride), d, at(out, i * stride));
    }
}

}  // namespace pagoda
