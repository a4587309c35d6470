// SPDX-License-Identifier: Apache-2.0
#include "heads.h"

#include <algorithm>

#include "panels.h"

namespace pagoda {

size_t head_linear_scratch(const KernelTable& table, const LinearLayer& heads, int64_t n) {
    const auto rows = n * static_cast<int64_t>(heads.parts.size());
    return sizeof(WorkQueue) + static_cast<size_t>(rows * heads.parts[0].weight.packed_row(table));
}

void head_linear(const KernelTable& table, const LinearLayer& heads, const float* x, int64_t n, float* out, void* scratch) {
    const PackedLinear& one = heads.parts[0].weight;
    const auto num_heads = static_cast<int64_t>(heads.parts.size());
    const int64_t inputs = one.inputs(), outputs = one.outputs(), panels = one.num_panels();
    const int64_t row_bytes = one.packed_row(table);
    WorkQueue& queue = WorkQueue::reset(scratch);
    char* packed = at(scratch, sizeof(WorkQueue));  // [heads, n]
    parallel_for_rows(num_heads * n, [&](int64_t row) {
        const float* from = x + (row % n * num_heads + row / n) * inputs;
        one.pack(table, [&](int) { return from; }, 1, packed + row * row_bytes, nullptr);
    });
    const int64_t rows_at_once = one.rows_at_once(table);
    parallel_for_panels(queue, num_heads * panels, n, row_bytes, rows_at_once, [&](int64_t item, int64_t next, int64_t begin, int64_t end) {
        const int64_t head = item / panels, column = item % panels * kPanel;
        const PackedLinear& own = heads.parts[static_cast<size_t>(head)].weight;
        const void* fetched = next < 0 ? nullptr : heads.parts[static_cast<size_t>(next / panels)].weight.panel(next % panels);
        const int cols = static_cast<int>(std::min<int64_t>(kPanel, outputs - column));
        for_tiles(begin, end, rows_at_once, [&](int64_t first, int rows) {
            own.multiply(table, item % panels, packed + (head * n + first) * row_bytes, rows, nullptr,
                         out + (first * num_heads + head) * outputs + column, num_heads * outputs, cols, fetched);
            fetched = nullptr;
        });
    });
}

}  // namespace pagoda
