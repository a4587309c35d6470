// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "ops.h"

namespace pagoda {

void copy_rows(const float* x, int64_t d, const int64_t* rows, int64_t n, float* out) {
    parallel_for_rows(n, [&](int64_t i) { std::copy_n(x + rows[i] * d, d, out + i * d); });
}

void add_rms_norm(const KernelTable& table, const float* x, const float* delta, const float* weight, float eps,
                  int64_t n, int64_t d, float* sum, float* out) {
    parallel_for_rows(n, [&](int64_t i) {
        const int64_t row = i * d;
        table.rms_norm(x + row, delta + row, weight, eps, d, sum + row, out + row);
    });
}

}  // namespace pagoda
