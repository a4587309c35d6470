// SPDX-License-Identifier: Apache-2.0
#include "experts.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "panels.h"

namespace pagoda {

void Experts::add(const ExpertMap& gate, const ExpertMap& up, const ExpertMap& down) {
    inner = gate.weight.outputs();
    held.push_back({gate, up, down, up.weight.packs_like(gate.weight), up.weight.panel(0) == gate.weight.panel(0)});
    gate_row = std::max(gate_row, gate.weight.packed_row(table));
    if (!held.back().shares_packing) up_row = std::max(up_row, up.weight.packed_row(table));
    down_row = std::max(down_row, down.weight.packed_row(table));
    for (const ExpertMap* map : {&gate, &up, &down}) pack_scratch = std::max(pack_scratch, map->weight.pack_scratch_bytes());
    pack_scratch = (pack_scratch + 63) / 64 * 64;
}

namespace {

// Takes allocator of the scratch memory, each at a cache line; from null on, it only counts.
class ScratchAllocator {
   public:
    explicit ScratchAllocator(void* memory) : begin_(reinterpret_cast<uintptr_t>(memory)), end_(begin_) {}

    template <class T = char>
    T* take(int64_t count) {
        const uintptr_t piece = end_;
        end_ += (static_cast<uintptr_t>(count) * sizeof(T) + 63) / 64 * 64;
        return reinterpret_cast<T*>(piece);
    }
    size_t bytes() const { return end_ - begin_; }

   private:
    uintptr_t begin_, end_;
};

// A row is a pair of a token and one of its experts that is here; those of one expert follow one another.
struct Scratch {
    WorkQueue *gate_up_queue, *down_queue;
    int32_t* chosen;   // [n, per_token], numbers of experts
    float* weights;    // [n, per_token]
    int64_t* rows;     // [n, per_token], -1 where the expert is elsewhere
    int64_t* tokens;   // of each row
    int64_t* starts;   // [held + 1], the first row of each expert
    int64_t* active;   // experts that have rows, see order_experts
    int64_t* num_active;
    char* packed;      // for gates, and then for `down`
    char* up_packed;   // where the gate's packing does not serve `up`
    float* inputs;     // of each row, if weights are for inputs
    float *inner, *outputs;
    char* pack_scratch;
    size_t bytes;

    Scratch(const Experts& experts, int64_t n, void* memory) {
        ScratchAllocator allocator(memory);
        const int64_t chosen_pairs = n * experts.routing.per_token;
        const int64_t pairs = n * std::min<int64_t>(experts.routing.per_token, experts.size());
        gate_up_queue = allocator.take<WorkQueue>(1);
        down_queue = allocator.take<WorkQueue>(1);
        chosen = allocator.take<int32_t>(chosen_pairs);
        weights = allocator.take<float>(chosen_pairs);
        rows = allocator.take<int64_t>(chosen_pairs);
        tokens = allocator.take<int64_t>(pairs);
        starts = allocator.take<int64_t>(experts.size() + 1);
        active = allocator.take<int64_t>(experts.size());
        num_active = allocator.take<int64_t>(1);
        packed = allocator.take(pairs * std::max(experts.gate_row, experts.down_row));
        up_packed = allocator.take(pairs * experts.up_row);
        inputs = allocator.take<float>(experts.routing.weighs_inputs ? pairs * experts.hidden : 0);
        inner = allocator.take<float>(pairs * experts.inner);
        outputs = allocator.take<float>(pairs * experts.hidden);
        pack_scratch = allocator.take(omp_get_max_threads() * experts.pack_scratch);
        bytes = allocator.bytes();
    }
};

// Sorts pairs by expert, keeping the order of tokens.
void group_rows(const Experts& experts, int64_t n, const Scratch& s) {
    const int64_t held = experts.size(), pairs = n * experts.routing.per_token;
    std::fill_n(s.starts, held + 1, 0);
    for (int64_t i = 0; i < pairs; ++i) {
        ++experts.counts[s.chosen[i]];
        const int64_t own = s.chosen[i] - experts.first;
        if (own >= 0 && own < held) ++s.starts[own + 1];
    }
    for (int64_t e = 0; e < held; ++e) s.starts[e + 1] += s.starts[e];
    *s.num_active = order_experts(s.starts, held, s.active);
    for (int64_t i = 0; i < pairs; ++i) {
        const int64_t own = s.chosen[i] - experts.first;
        s.rows[i] = own >= 0 && own < held ? s.starts[own]++ : -1;
        if (s.rows[i] >= 0) s.tokens[s.rows[i]] = i / experts.routing.per_token;
    }
    for (int64_t e = held; e > 0; --e) s.starts[e] = s.starts[e - 1];
    s.starts[0] = 0;
}

// Weighs what each row is given instead of what it gives.
void weigh_inputs(const Experts& experts, const float* x, int64_t row_stride, int64_t n, const Scratch& s) {
    parallel_for_rows(n * experts.routing.per_token, [&](int64_t i) {
        const float weight = std::exchange(s.weights[i], 1.0f);
        if (s.rows[i] < 0) return;
        const float* from = x + i / experts.routing.per_token * row_stride;
        float* to = s.inputs + s.rows[i] * experts.hidden;
        for (int64_t j = 0; j < experts.hidden; ++j) to[j] = from[j] * weight;
    });
}

int64_t gate_up_rows(const Experts& experts, const Expert& expert) {
    return std::min(expert.gate.weight.rows_at_once(experts.table), expert.up.weight.rows_at_once(experts.table));
}
int64_t down_rows(const Experts& experts, const Expert& expert) { return expert.down.weight.rows_at_once(experts.table); }

// Calls work(expert, first, n) for all tiles of rows, each in one thread.
template <class RowsAtOnce, class Work>
void parallel_for_tiles(const Experts& experts, const Scratch& s, RowsAtOnce rows_at_once, Work work) {
    const int threads = omp_get_num_threads(), own = omp_get_thread_num();
    int next = 0;
    for (int64_t i = 0; i < *s.num_active; ++i) {
        const int64_t e = s.active[i];
        const Expert& expert = experts.held[static_cast<size_t>(e)];
        for_tiles(s.starts[e], s.starts[e + 1], rows_at_once(experts, expert), [&](int64_t first, int n) {
            if (next == own) work(expert, first, n);
            next = next + 1 == threads ? 0 : next + 1;
        });
    }
#pragma omp barrier
}

// The gate's activation times up, for the rows of one expert and the 32 channels of one panel.
void compute_inner(const Experts& experts, const Scratch& s, int64_t e, int64_t panel, const void* next) {
    alignas(64) float gate_up[kMostPanelRows * 2 * kPanel];
    const KernelTable& table = experts.table;
    const Expert& expert = experts.held[static_cast<size_t>(e)];
    const int64_t width = experts.inner, column = panel * kPanel;
    const int cols = static_cast<int>(std::min<int64_t>(kPanel, width - column));
    const void* up_panel = expert.one_map ? next : expert.up.weight.panel(panel);
    for_tiles(s.starts[e], s.starts[e + 1], gate_up_rows(experts, expert), [&](int64_t first, int n) {
        char* for_gate = s.packed + first * experts.gate_row;
        char* for_up = expert.shares_packing ? for_gate : s.up_packed + first * experts.up_row;
        expert.gate.weight.multiply(table, panel, for_gate, n, expert.gate.bias_of(panel), gate_up, 2 * kPanel, cols, up_panel);
        if (!expert.one_map) {
            expert.up.weight.multiply(table, panel, for_up, n, expert.up.bias_of(panel), gate_up + cols, 2 * kPanel, cols, next);
        }
        for (int row = 0; row < n; ++row) {
            const float *gates = gate_up + row * 2 * kPanel, *ups = expert.one_map ? gates : gates + cols;
            table.gate(experts.activation, gates, ups, cols, s.inner + (first + row) * width + column);
        }
        up_panel = next = nullptr;
    });
}

void compute_outputs(const Experts& experts, const Scratch& s, int64_t e, int64_t panel, const void* next) {
    const Expert& expert = experts.held[static_cast<size_t>(e)];
    const int64_t width = experts.hidden, column = panel * kPanel;
    const int cols = static_cast<int>(std::min<int64_t>(kPanel, width - column));
    for_tiles(s.starts[e], s.starts[e + 1], down_rows(experts, expert), [&](int64_t first, int n) {
        expert.down.weight.multiply(experts.table, panel, s.packed + first * experts.down_row, n,
                                    expert.down.bias_of(panel), s.outputs + first * width + column, width, cols, next);
        next = nullptr;
    });
}

// Calls work(expert, panel, next panel's address or null) for all panels of the experts that have rows; `map` is
// the member of Expert whose panels come first.
template <class Work>
void parallel_for_expert_panels(WorkQueue& queue, const Experts& experts, const Scratch& s, ExpertMap Expert::* map,
                         Work work) {
    const int64_t panels = (experts.held.front().*map).weight.num_panels();
    parallel_for_dynamic(queue, *s.num_active * panels, [&](int64_t item, int64_t next) {
        const void* next_panel = nullptr;
        if (next >= 0) {
            const Expert& expert = experts.held[static_cast<size_t>(s.active[next / panels])];
            next_panel = (expert.*map).weight.panel(next % panels);
        }
        work(s.active[item / panels], item % panels, next_panel);
    });
}

}  // namespace

int64_t order_experts(const int64_t* starts, int64_t held, int64_t* order) {
    const auto rows = [&](int64_t e) { return starts[e + 1] - starts[e]; };
    int64_t num_active = 0;
    for (int64_t e = 0; e < held; ++e) {
        if (rows(e) > 0) order[num_active++] = e;
    }
    std::stable_sort(order, order + num_active, [&](int64_t a, int64_t b) { return rows(a) > rows(b); });
    return num_active;
}

size_t experts_scratch(const Experts& experts, int64_t n) { return Scratch(experts, n, nullptr).bytes; }

void compute_experts(const Experts& experts, const float* x, int64_t row_stride, const float* logits, int64_t n,
                     float* out, void* scratch) {
    const KernelTable& table = experts.table;
    const ExpertRouting& routing = experts.routing;
    const Scratch s(experts, n, scratch);
    auto* pack_scratch = reinterpret_cast<float*>(s.pack_scratch + omp_get_thread_num() * experts.pack_scratch);
    WorkQueue::reset(s.gate_up_queue);
    WorkQueue::reset(s.down_queue);
    parallel_for_rows(n, [&](int64_t i) {
        table.route(logits + i * routing.num_experts, routing, experts.correction, s.chosen + i * routing.per_token,
                    s.weights + i * routing.per_token);
    });
#pragma omp single
    group_rows(experts, n, s);
    if (routing.weighs_inputs) weigh_inputs(experts, x, row_stride, n, s);
    parallel_for_tiles(experts, s, gate_up_rows, [&](const Expert& expert, int64_t first, int rows) {
        const auto from = [&](int i) {
            if (routing.weighs_inputs) return static_cast<const float*>(s.inputs) + (first + i) * experts.hidden;
            return x + s.tokens[first + i] * row_stride;
        };
        expert.gate.weight.pack(table, from, rows, s.packed + first * experts.gate_row, pack_scratch);
        if (!expert.shares_packing) expert.up.weight.pack(table, from, rows, s.up_packed + first * experts.up_row, pack_scratch);
    });
    parallel_for_expert_panels(*s.gate_up_queue, experts, s, &Expert::gate,
                        [&](int64_t e, int64_t panel, const void* next) { compute_inner(experts, s, e, panel, next); });
    parallel_for_tiles(experts, s, down_rows, [&](const Expert& expert, int64_t first, int rows) {
        const auto from = [&](int i) { return s.inner + (first + i) * experts.inner; };
        expert.down.weight.pack(table, from, rows, s.packed + first * experts.down_row, pack_scratch);
    });
    parallel_for_expert_panels(
        *s.down_queue, experts, s, &Expert::down,
        [&](int64_t e, int64_t panel, const void* next) { compute_outputs(experts, s, e, panel, next); });
    parallel_for_rows(n, [&](int64_t i) {
        const int64_t pair = i * routing.per_token;
        table.weighted_sum(s.outputs, s.rows + pair, s.weights + pair, routing.per_token, experts.hidden,
                           out + i * experts.hidden);
    });
}

}  // namespace pagoda
