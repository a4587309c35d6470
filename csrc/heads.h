// SPDX-License-Identifier: Apache-2.0
// A linear map of each head, of its own inputs.
#pragma once

#include "lowering.h"

namespace pagoda {

size_t head_linear_scratch(const KernelTable& table, const LinearLayer& heads, int64_t n);
// Rows of x [n, heads * inputs] to out [n, heads * outputs]; the parts of `heads` are alike. Called by all threads of a
// team.
void head_linear(const KernelTable& table, const LinearLayer& heads, const float* x, int64_t n, float* out, void* scratch);

}  // namespace pagoda
