#include "experts.h"

#include <algorithm>
#include <cstring>

#include "panels.h"

namespace pagoda {

// ---- one linear map

namespace {

// Rows that quantized kernels are given at once: a multiple of all their register tiles.
constexpr int64_t kQuantizedRows = 24;

bool same_rows(const PanelShape& a, const PanelShape& b) { return a.dtype == b.dtype && a.inputs == b.inputs; }
bool same_rows(const QuantizedShape& a, const QuantizedShape& b) {
    return a.inputs == b.inputs && a.format.grouped == b.format.grouped && a.format.groups == b.format.groups &&
           a.format.group_inputs == b.format.group_inputs && a.format.bits == b.format.bits &&
           a.format.offsets == b.format.offsets;
}
template <class A, class B>
bool same_rows(const A&, const B&) {
    return false;
}

int64_t panel_bytes(const PanelShape& shape) { return shape.panel_bytes(); }
int64_t panel_bytes(const QuantizedShape& shape) { return shape.format.panel_bytes(); }

}  // namespace

int64_t LinearMap::inputs() const {
    return std::visit([](const auto& shape) { return shape.inputs; }, shape_);
}

int64_t LinearMap::outputs() const {
    return std::visit([](const auto& shape) { return shape.outputs; }, shape_);
}

const void* LinearMap::panel(int64_t index) const {
    return at(panels_, index * std::visit([](const auto& shape) { return panel_bytes(shape); }, shape_));
}

bool LinearMap::packs_like(const LinearMap& other) const {
    const bool same = std::visit([](const auto& a, const auto& b) { return same_rows(a, b); }, shape_, other.shape_);
    if (!same || order_ == other.order_) return same;
    return order_ && other.order_ && std::equal(order_, order_ + inputs(), other.order_);
}

int64_t LinearMap::rows_at_once() const {
    return std::holds_alternative<PanelShape>(shape_) ? kTileRows : kQuantizedRows;
}

int64_t LinearMap::packed_row(const KernelTable& table) const {
    if (const auto* quantized = std::get_if<QuantizedShape>(&shape_)) {
        return QuantizedRow::bytes(quantized->format, table.code_size);
    }
    const auto& dense = std::get<PanelShape>(shape_);
    return dense.padded_inputs() * table.packed_size(dense.dtype);
}

int64_t LinearMap::room() const {
    const Dtype dtype = std::visit([](const auto& shape) { return shape.dtype; }, shape_);
    const int64_t rows = std::holds_alternative<PanelShape>(shape_) ? kTileRows : order_ ? 1 : 0;
    return rows * inputs() * size_of(dtype);
}

void LinearMap::pack(const KernelTable& table, const void* const* rows, int n, void* packed, void* room) const {
    if (const auto* dense = std::get_if<PanelShape>(&shape_)) {
        const int64_t row_bytes = dense->inputs * size_of(dense->dtype);
        for (int i = 0; i < n; ++i) std::memcpy(at(room, i * row_bytes), rows[i], static_cast<size_t>(row_bytes));
        table.pack_rows(dense->dtype, room, dense->inputs, n, dense->inputs, packed);
        return;
    }
    const auto& shape = std::get<QuantizedShape>(shape_);
    const int64_t item = size_of(shape.dtype);
    for (int i = 0; i < n; ++i) {
        const void* row = rows[i];
        if (order_) {
            for (int64_t j = 0; j < shape.inputs; ++j) {
                std::memcpy(at(room, j * item), at(row, order_[j] * item), static_cast<size_t>(item));
            }
            row = room;
        }
        table.quantize_row(shape.dtype, shape.format, row, shape.inputs, at(packed, i * packed_row(table)));
    }
}

void LinearMap::multiply(const KernelTable& table, int64_t panel_index, void* packed, int n, void* out,
                         int64_t out_stride, int cols, const void* next) const {
    const void* weights = panel(panel_index);
    if (const auto* dense = std::get_if<PanelShape>(&shape_)) {
        // A single row takes no time in which memory would idle: there the processor reads ahead best by itself.
        const auto ahead = Prefetch::share(n > 1 ? next : nullptr, dense->panel_bytes(), 0, 1);
        table.linear_panel(dense->dtype, weights, packed, n, dense->inputs, nullptr, out, out_stride, cols, ahead);
        return;
    }
    const auto& shape = std::get<QuantizedShape>(shape_);
    table.quantized_panel(shape.dtype, shape.format, weights, packed, packed_row(table), n, nullptr, out,
                          out_stride, cols, next);
}

// ---- all experts

void Experts::add(const LinearMap& gate, const LinearMap& up, const LinearMap& down) {
    inner = gate.outputs();
    held.push_back({gate, up, down, up.packs_like(gate)});
    gate_row = std::max(gate_row, gate.packed_row(table));
    if (!held.back().alike) up_row = std::max(up_row, up.packed_row(table));
    down_row = std::max(down_row, down.packed_row(table));
    room = (std::max({room, gate.room(), up.room(), down.room()}) + 63) / 64 * 64;
}

namespace {

// Takes pieces of the scratch memory, each at a cache line; from null on, it only counts.
class Pieces {
   public:
    explicit Pieces(void* memory) : begin_(reinterpret_cast<uintptr_t>(memory)), end_(begin_) {}

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
    Claims *gate_up_claims, *down_claims;
    int32_t* chosen;   // [n, per_token], numbers of experts
    float* weights;    // [n, per_token]
    int64_t* rows;     // [n, per_token], -1 where the expert is elsewhere
    int64_t* tokens;   // of each row
    int64_t* starts;   // [held + 1], the first row of each expert
    int64_t* active;   // experts that have rows
    int64_t* num_active;
    char* packed;      // for gates, and then for `down`
    char* up_packed;   // where that is not alike
    char *inner, *outputs, *room;
    size_t bytes;

    Scratch(const Experts& experts, int64_t n, void* memory) {
        Pieces pieces(memory);
        const int64_t chosen_pairs = n * experts.routing.per_token;
        const int64_t pairs = n * std::min<int64_t>(experts.routing.per_token, experts.size());
        const int64_t item = size_of(experts.dtype);
        gate_up_claims = pieces.take<Claims>(1);
        down_claims = pieces.take<Claims>(1);
        chosen = pieces.take<int32_t>(chosen_pairs);
        weights = pieces.take<float>(chosen_pairs);
        rows = pieces.take<int64_t>(chosen_pairs);
        tokens = pieces.take<int64_t>(pairs);
        starts = pieces.take<int64_t>(experts.size() + 1);
        active = pieces.take<int64_t>(experts.size());
        num_active = pieces.take<int64_t>(1);
        packed = pieces.take(pairs * std::max(experts.gate_row, experts.down_row));
        up_packed = pieces.take(pairs * experts.up_row);
        inner = pieces.take(pairs * experts.inner * item);
        outputs = pieces.take(pairs * experts.hidden * item);
        room = pieces.take(omp_get_max_threads() * experts.room);
        bytes = pieces.bytes();
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
    *s.num_active = 0;
    for (int64_t e = 0; e < held; ++e) {
        if (s.starts[e + 1] > 0) s.active[(*s.num_active)++] = e;
        s.starts[e + 1] += s.starts[e];
    }
    for (int64_t i = 0; i < pairs; ++i) {
        const int64_t own = s.chosen[i] - experts.first;
        s.rows[i] = own >= 0 && own < held ? s.starts[own]++ : -1;
        if (s.rows[i] >= 0) s.tokens[s.rows[i]] = i / experts.routing.per_token;
    }
    for (int64_t e = held; e > 0; --e) s.starts[e] = s.starts[e - 1];
    s.starts[0] = 0;
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

int64_t gate_up_rows(const Expert& expert) { return std::min(expert.gate.rows_at_once(), expert.up.rows_at_once()); }
int64_t down_rows(const Expert& expert) { return expert.down.rows_at_once(); }

// Calls work(expert, first, n) for all tiles of rows, each in one thread.
template <class RowsAtOnce, class Work>
void share_tiles(const Experts& experts, const Scratch& s, RowsAtOnce rows_at_once, Work work) {
    const int threads = omp_get_num_threads(), own = omp_get_thread_num();
    int next = 0;
    for (int64_t i = 0; i < *s.num_active; ++i) {
        const int64_t e = s.active[i];
        const Expert& expert = experts.held[static_cast<size_t>(e)];
        for_tiles(s.starts[e], s.starts[e + 1], rows_at_once(expert), [&](int64_t first, int n) {
            if (next == own) work(expert, first, n);
            next = next + 1 == threads ? 0 : next + 1;
        });
    }
#pragma omp barrier
}

// Silu of the gate times up, for the rows of one expert and the 32 channels of one panel.
void compute_inner(const Experts& experts, const Scratch& s, int64_t e, int64_t panel, const void* next) {
    alignas(64) float gate_up[kQuantizedRows * 2 * kPanel];
    const KernelTable& table = experts.table;
    const Expert& expert = experts.held[static_cast<size_t>(e)];
    const int64_t item = size_of(experts.dtype), width = experts.inner, column = panel * kPanel;
    const int cols = static_cast<int>(std::min<int64_t>(kPanel, width - column));
    const void* up_panel = expert.up.panel(panel);
    for_tiles(s.starts[e], s.starts[e + 1], gate_up_rows(expert), [&](int64_t first, int n) {
        char* for_gate = s.packed + first * experts.gate_row;
        char* for_up = expert.alike ? for_gate : s.up_packed + first * experts.up_row;
        expert.gate.multiply(table, panel, for_gate, n, gate_up, 2 * kPanel, cols, up_panel);
        expert.up.multiply(table, panel, for_up, n, at(gate_up, cols * item), 2 * kPanel, cols, next);
        for (int row = 0; row < n; ++row) {
            table.silu_and_mul(experts.dtype, at(gate_up, row * 2 * kPanel * item), cols,
                               s.inner + ((first + row) * width + column) * item);
        }
        up_panel = next = nullptr;
    });
}

void compute_outputs(const Experts& experts, const Scratch& s, int64_t e, int64_t panel, const void* next) {
    const Expert& expert = experts.held[static_cast<size_t>(e)];
    const int64_t item = size_of(experts.dtype), width = experts.hidden, column = panel * kPanel;
    const int cols = static_cast<int>(std::min<int64_t>(kPanel, width - column));
    for_tiles(s.starts[e], s.starts[e + 1], down_rows(expert), [&](int64_t first, int n) {
        expert.down.multiply(experts.table, panel, s.packed + first * experts.down_row, n,
                             s.outputs + (first * width + column) * item, width, cols, next);
        next = nullptr;
    });
}

// Calls work(expert, panel, next panel's address or null) for all panels of the experts that have rows; `map` is
// the member of Expert whose panels come first.
template <class Work>
void share_expert_panels(Claims& claims, const Experts& experts, const Scratch& s, LinearMap Expert::* map,
                         Work work) {
    const int64_t panels = (experts.held.front().*map).num_panels();
    share_items(claims, *s.num_active * panels, [&](int64_t item, int64_t next) {
        const void* next_panel = nullptr;
        if (next >= 0) {
            const Expert& expert = experts.held[static_cast<size_t>(s.active[next / panels])];
            next_panel = (expert.*map).panel(next % panels);
        }
        work(s.active[item / panels], item % panels, next_panel);
    });
}

}  // namespace

size_t experts_scratch(const Experts& experts, int64_t n) { return Scratch(experts, n, nullptr).bytes; }

void compute_experts(const Experts& experts, const void* x, int64_t row_stride, const void* logits, int64_t n,
                     void* out, void* scratch) {
    const KernelTable& table = experts.table;
    const ExpertRouting& routing = experts.routing;
    const Scratch s(experts, n, scratch);
    const int64_t item = size_of(experts.dtype);
    char* room = s.room + omp_get_thread_num() * experts.room;
    Claims::reset(s.gate_up_claims);
    Claims::reset(s.down_claims);
#pragma omp for schedule(static)
    for (int64_t i = 0; i < n; ++i) {
        table.route(experts.dtype, at(logits, i * routing.num_experts * item), routing.num_experts,
                    routing.per_token, routing.renormalize, s.chosen + i * routing.per_token,
                    s.weights + i * routing.per_token);
    }
#pragma omp single
    group_rows(experts, n, s);
    const void* from[kQuantizedRows];
    share_tiles(experts, s, gate_up_rows, [&](const Expert& expert, int64_t first, int rows) {
        for (int i = 0; i < rows; ++i) from[i] = at(x, s.tokens[first + i] * row_stride * item);
        expert.gate.pack(table, from, rows, s.packed + first * experts.gate_row, room);
        if (!expert.alike) expert.up.pack(table, from, rows, s.up_packed + first * experts.up_row, room);
    });
    share_expert_panels(*s.gate_up_claims, experts, s, &Expert::gate,
                        [&](int64_t e, int64_t panel, const void* next) { compute_inner(experts, s, e, panel, next); });
    share_tiles(experts, s, down_rows, [&](const Expert& expert, int64_t first, int rows) {
        for (int i = 0; i < rows; ++i) from[i] = s.inner + (first + i) * experts.inner * item;
        expert.down.pack(table, from, rows, s.packed + first * experts.down_row, room);
    });
    share_expert_panels(
        *s.down_claims, experts, s, &Expert::down,
        [&](int64_t e, int64_t panel, const void* next) { compute_outputs(experts, s, e, panel, next); });
#pragma omp for schedule(static)
    for (int64_t i = 0; i < n; ++i) {
        const int64_t pair = i * routing.per_token;
        table.weighted_sum(experts.dtype, s.outputs, s.rows + pair, s.weights + pair, routing.per_token,
                           experts.hidden, at(out, i * experts.hidden * item));
    }
}

}  // namespace pagoda
