// SPDX-License-Identifier: Apache-2.0
// The Python module. Tensors come as addresses: what lies there is checked by pagoda/backend/cpu/backend.py.
#include <nanobind/nanobind.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <array>
#include <exception>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>

#include "buffer.h"
#include "collectives.h"
#include "experts.h"
#include "instruction_sets.h"
#include "low_rank.h"
#include "lowering.h"
#include "ops.h"
#include "pages.h"
#include "panels.h"
#include "populator.h"
#include "sampler.h"
#include "sampling_table.h"
#include "tile_kernels.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace pagoda {

namespace {

using Address = uintptr_t;

template <class T = void>
T* to(Address address) {
    return reinterpret_cast<T*>(address);
}

// Below this many operations on elements, waking another thread takes longer than the work.
constexpr int64_t kWorthThreads = 1 << 15;

std::vector<std::string> available_instruction_sets() {
    std::vector<std::string> names;
    for (const auto& set : instruction_sets()) {
        if (set.present && std::string(set.name) != kEmulatedAmx) names.emplace_back(set.name);
    }
    return names;
}

void multiply_tiles(const std::string& name, bool bf16, int rows, int words, Address a, Address b, Address sums) {
    const TileKernels* tiles = nullptr;
#ifdef __x86_64__
    if (name == kEmulatedAmx) tiles = &kAmxEmulated;
#endif
#ifdef PAGODA_AMX
    if (name == "amx" && amx_obstacle().empty()) tiles = &kAmx;
#endif
    if (tiles == nullptr) throw std::invalid_argument("there are no tiles of " + name);
    tiles->multiply(bf16, rows, words, to(a), to(b), to(sums));
}

// The kernels of one instruction set, and memory that they use from call to call: for one caller at a time.
class Kernels {
   public:
    explicit Kernels(const std::string& name) {
        for (const auto& set : instruction_sets()) {
            if (set.present && set.name == name) table_ = set.table;
        }
        if (table_ == nullptr) throw std::invalid_argument("this CPU has no " + name);
    }

    void pack_weight(int dtype, int64_t outputs, int64_t inputs, Address weight, Address packed) const {
        pagoda::pack_weight({Dtype(dtype), inputs, outputs}, to(weight), to(packed));
    }

    void quantize_int8(int dtype, int64_t outputs, int64_t inputs, Address weight, Address codes, Address scales,
                       Address zero_points) const {
        pagoda::quantize_int8(*table_, {Dtype(dtype), inputs, outputs}, to(weight), to(codes),
                              to<float>(scales), to<int32_t>(zero_points));
    }

    void quantize_int4(int dtype, int64_t outputs, int64_t inputs, int64_t group_size, Address weight,
                       Address codes, Address scales) const {
        pagoda::quantize_int4(*table_, {Dtype(dtype), inputs, outputs}, group_size, to(weight),
                              to<uint8_t>(codes), to(scales));
    }

    void quantize_blocks(int dtype, int64_t outputs, int64_t inputs, int bits, int64_t group_size, Address weight,
                         Address codes, Address scales, Address minima, Address row_scales, Address row_minima) const {
        pagoda::quantize_blocks(*table_, {Dtype(dtype), inputs, outputs}, bits, group_size, to(weight),
                                {to<uint8_t>(codes), to<int8_t>(scales), to<int8_t>(minima), to(row_scales), to(row_minima)});
    }

    int key_pair(int dtype, int cache_dtype) const {
        return pair_of(table_->math(Dtype(dtype), Dtype(cache_dtype)));
    }

    int value_pair(int dtype, int cache_dtype, int block_size) const {
        return pagoda::value_pair(table_->math(Dtype(dtype), Dtype(cache_dtype)), block_size);
    }

    // The next token of each of some slots, from a row of logits for each.
    void sample(const SamplingTable& params, const std::vector<int64_t>& slots, Address logits, int64_t row_stride,
                int64_t most, Address numbers, Address logprobs) {
        const nb::gil_scoped_release released;
        rows_.clear();
        for (const int64_t slot : slots) {
            rows_.push_back(params.row(slot, to<float>(logits) + static_cast<int64_t>(rows_.size()) * row_stride));
        }
        pagoda::sample(*table_, rows_.data(), static_cast<int64_t>(rows_.size()), params.vocab(),
                       {to<int64_t>(numbers), to<float>(logprobs), most}, buffer_);
    }

    // Reports, as `sample` does, on one given token of each row.
    void score(Address token_ids, Address logits, int64_t rows, int64_t row_stride, int64_t vocab, int64_t most,
               Address numbers, Address logprobs) {
        const nb::gil_scoped_release released;
        std::vector<SamplingRow> batch(static_cast<size_t>(rows));
        for (int64_t i = 0; i < rows; ++i) {
            SamplingRow& row = batch[static_cast<size_t>(i)];
            row.logits = to<float>(logits) + i * row_stride;
            row.greedy = true;
            row.logprobs = most;
            row.given = to<int64_t>(token_ids)[i];
        }
        pagoda::sample(*table_, batch.data(), rows, vocab, {to<int64_t>(numbers), to<float>(logprobs), most}, buffer_);
    }

    const KernelTable& table() const { return *table_; }

   private:
    const KernelTable* table_ = nullptr;
    Buffer buffer_;
    std::vector<SamplingRow> rows_;
};

void all_reduce(Collectives& group, const Kernels& kernels, int dtype, Address x, int64_t count) {
    nb::gil_scoped_release released;
    in_team(count > 4 * kWorthThreads,
            [&] { group.all_reduce(kernels.table(), Dtype(dtype), to(x), count); });
}

// Ranks that share memory.
class SharedGroup final : public Group {
   public:
    explicit SharedGroup(Collectives& ranks) : ranks_(ranks) { size = ranks.size(), rank = ranks.rank(); }

    void all_reduce(const KernelTable& table, float* rows, int64_t n, int64_t d) override {
        ranks_.all_reduce(table, Dtype::f32, rows, n * d);
    }
    void all_gather(const void* x, int64_t bytes, void* out) override { ranks_.all_gather(x, bytes, out); }
    void all_to_all(const void* x, const std::vector<int64_t>& bytes, void* out) override {
        ranks_.all_to_all(x, bytes, out);
    }

   private:
    Collectives& ranks_;
};

// Ranks that Python reaches. The thread that runs the program calls back; what is raised there ends the step.
class PythonGroup final : public Group {
   public:
    // Exchanges that fail call `stop`.
    PythonGroup(nb::object ranks, std::function<void()> stop) : ranks_(std::move(ranks)), stop_(std::move(stop)) {
        rank = nb::cast<int>(ranks_.attr("rank"));
        size = nb::cast<int>(ranks_.attr("size"));
    }

    void all_reduce(const KernelTable&, float* rows, int64_t n, int64_t d) override {
#pragma omp master
        call([&] { ranks_.attr("all_reduce")(reinterpret_cast<Address>(rows), n, d); });
#pragma omp barrier
    }
    void all_gather(const void* x, int64_t bytes, void* out) override {
        call([&] { ranks_.attr("all_gather")(reinterpret_cast<Address>(x), bytes, reinterpret_cast<Address>(out)); });
    }
    void all_to_all(const void* x, const std::vector<int64_t>& bytes, void* out) override {
        call([&] { ranks_.attr("all_to_all")(reinterpret_cast<Address>(x), bytes, reinterpret_cast<Address>(out)); });
    }
    void rethrow() {
        if (error_) std::rethrow_exception(std::exchange(error_, nullptr));
    }

   private:
    template <class Exchange>
    void call(Exchange exchange) {
        if (error_) return;  // what comes behind an exchange that failed is never read
        const nb::gil_scoped_acquire acquired;
        try {
            exchange();
        } catch (...) {
            error_ = std::current_exception();
            stop_();
        }
    }

    nb::object ranks_;
    std::function<void()> stop_;
    std::exception_ptr error_;
};

// Cold segments that Python brings. The thread that runs the program calls back; what is raised there ends the step once
// all is computed, with what lies in the cache in place of the segments.
class PythonSegments final : public SegmentSource {
   public:
    // `num_blocks` are those of each run.
    PythonSegments(nb::object segments, std::vector<size_t> num_blocks)
        : segments_(std::move(segments)), num_blocks_(std::move(num_blocks)) {
        for (const size_t count : num_blocks_) none_.resize(std::max(none_.size(), count));
    }
    PythonSegments(const PythonSegments&) = delete;

    StagedRun take(const Cache& cache, int64_t index) override {
        StagedRun staged{&cache, none_.data()};
        call([&] {
            const nb::tuple found = nb::borrow<nb::tuple>(segments_.attr("take")(values_of(cache), index));
            const auto* blocks = to<int32_t>(nb::cast<Address>(found[1]));
            blocks_.assign(blocks, blocks + nb::cast<size_t>(found[2]));
            if (blocks_.size() != num_blocks_.at(static_cast<size_t>(index))) {
                throw std::invalid_argument("a segment has another number of blocks");
            }
            const auto* own = nb::cast<const Cache*>(found[0]);
            for (const int32_t block : blocks_) {
                if (block < 0 || block >= own->num_blocks) throw std::out_of_range("a segment has blocks that are not there");
            }
            staged = {own, blocks_.data()};
        });
        return staged;
    }
    void release(const Cache& cache) override {
        call([&] { segments_.attr("release")(values_of(cache)); });
    }
    void rethrow() override {
        if (error_) std::rethrow_exception(std::exchange(error_, nullptr));
    }

   private:
    static Address values_of(const Cache& cache) { return reinterpret_cast<Address>(cache.values); }

    template <class Call>
    void call(Call call) {
        if (error_) return;
        const nb::gil_scoped_acquire acquired;
        try {
            call();
        } catch (...) {
            error_ = std::current_exception();
        }
    }

    nb::object segments_;
    std::vector<int32_t> blocks_;
    const std::vector<size_t> num_blocks_;
    std::vector<int32_t> none_;
    std::exception_ptr error_;
};

// The threads of a team as they claim tasks; see Claims.
class TeamClaims {
   public:
    TeamClaims(int64_t tasks, int64_t threads) {
        for (int64_t thread = 0; thread < threads; ++thread) claims_.emplace_back(queue_, tasks, threads);
    }
    TeamClaims(const TeamClaims&) = delete;

    // The task of a thread, which it begins, or -1.
    int64_t begin(size_t thread) {
        Claims& own = claims_.at(thread);
        if (!own.has_task()) return -1;
        own.look_ahead();
        return own.task();
    }
    void end(size_t thread) { claims_.at(thread).advance(); }

   private:
    WorkQueue queue_{0};
    std::vector<Claims> claims_;
};

using NodeTuple = std::tuple<std::string, std::vector<int>, std::vector<int>, std::vector<int>, std::vector<double>>;

// A graph as a program, with the groups that its nodes meet in.
class LoweredProgram {
   public:
    LoweredProgram(const Kernels& kernels, const std::vector<std::tuple<int64_t, int64_t, int>>& values,
                   std::vector<int> inputs, std::vector<int> results, int rows, int adapters,
                   const std::vector<NodeTuple>& nodes, const nb::list& weights) {
        Graph graph{{}, std::move(inputs), std::move(results), rows, adapters, {}, {}};
        for (const auto& [width, item_bytes, rows] : values) graph.values.push_back({width, item_bytes, Rows(rows)});
        for (const auto& [op, in, out, used, numbers] : nodes) graph.nodes.push_back({op, in, out, used, numbers});
        for (const nb::handle weight : weights) graph.weights.push_back(to_weight(weight));
        program_ = lower(kernels.table(), graph);
    }

    int schedule(const std::vector<int>& nodes, const std::vector<int>& external) {
        return program_->schedule(nodes, external);
    }
    auto operations(int schedule) const { return program_->operations(schedule); }

    // `rows` are the numbers of rows of a step: its tokens, those selected, and both of all ranks.
    size_t step_bytes(int schedule, const std::array<int64_t, 4>& rows, std::vector<Address> inputs,
                      const std::vector<const AttentionMetadata*>& metadata) {
        for (const auto* each : metadata) inputs.push_back(reinterpret_cast<Address>(each));
        return program_->step_bytes(schedule, {rows[0], rows[1], rows[2], rows[3]}, inputs);
    }

    // Inputs are those that are tensors, and then the metadata of each group.
    void run(int schedule, const std::array<int64_t, 4>& rows, std::vector<Address> inputs,
             const std::vector<const AttentionMetadata*>& metadata, const std::vector<Address>& results,
             Address times) {
        for (const auto* each : metadata) inputs.push_back(reinterpret_cast<Address>(each));
        {
            const nb::gil_scoped_release released;
            program_->run(schedule, {rows[0], rows[1], rows[2], rows[3]}, inputs, results, to<int64_t>(times));
        }
        for (const auto& group : python_groups_) group->rethrow();
        for (const auto* each : metadata) {
            if (each != nullptr && each->source != nullptr) each->source->rethrow();
        }
    }

   private:
    Weight to_weight(nb::handle weight) {
        if (nb::isinstance<LinearLayer>(weight)) return nb::cast<const LinearLayer*>(weight);
        if (nb::isinstance<Experts>(weight)) return nb::cast<const Experts*>(weight);
        if (nb::isinstance<LowRankMaps>(weight)) return nb::cast<const LowRankMaps*>(weight);
        if (nb::isinstance<Cache>(weight)) return nb::cast<const Cache*>(weight);
        if (nb::isinstance<StateCache>(weight)) return nb::cast<const StateCache*>(weight);
        if (nb::isinstance<nb::int_>(weight)) return static_cast<const float*>(to<float>(nb::cast<Address>(weight)));
        if (nb::isinstance<Collectives>(weight)) {
            shared_groups_.push_back(std::make_unique<SharedGroup>(nb::cast<Collectives&>(weight)));
            return static_cast<Group*>(shared_groups_.back().get());
        }
        python_groups_.push_back(std::make_unique<PythonGroup>(nb::borrow(weight), [this] { program_->stop(); }));
        return static_cast<Group*>(python_groups_.back().get());
    }

    std::vector<std::unique_ptr<SharedGroup>> shared_groups_;
    std::vector<std::unique_ptr<PythonGroup>> python_groups_;
    std::unique_ptr<Program> program_;
};

}  // namespace

NB_MODULE(_native, m) {
    nb::dict columns;
    for (const auto& [name, typecode] : SamplingTable::typecodes()) columns[name] = std::string(1, typecode);
    m.attr("SAMPLING_COLUMNS") = columns;
    m.attr("PANEL_OUTPUTS") = kPanel;
    m.attr("LOW_RANK_BLOCK") = kLowRankBlock;
    m.attr("MAX_HEAD_DIM") = kMaxHeadDim;
    m.attr("MAX_EXPERTS") = kMaxExperts;
    m.attr("MAX_CONV_WIDTH") = kMaxConvWidth;
    m.attr("MAX_DELTA_KEY") = kMaxDeltaKey;
    m.attr("MAX_SCAN_STATE") = kMaxScanState;
    m.attr("DELTA_KEY_MULTIPLE") = kDeltaKeyMultiple;
    m.attr("EMULATED_AMX") = kEmulatedAmx;
    m.def("instruction_sets", &available_instruction_sets);
    m.def("has_amx", &has_amx);
    m.def("amx_obstacle", &amx_obstacle);
    m.def("multiply_tiles", &multiply_tiles);
    m.def("packed_bytes", [](int dtype, int64_t outputs, int64_t inputs, int64_t group) {
        return PanelShape{Dtype(dtype), inputs, outputs, group}.bytes();
    });
    m.def("pack_small", [](int dtype, int64_t outputs, int64_t inputs, int64_t group, Address values, Address scales,
                           Address packed) {
        pack_small({Dtype(dtype), inputs, outputs, group}, to<uint8_t>(values), to<float>(scales), to(packed));
    });
    m.def("pack_quantized", [](const QuantizedShape& shape, Address codes, Address scales, Address offsets,
                               Address packed) {
        pack_quantized(shape, to(codes), to(scales), to(offsets), to(packed));
    });
    nb::class_<QuantizedShape>(m, "QuantizedShape")
        .def_static("int8", &QuantizedShape::int8)
        .def_static("grouped", &QuantizedShape::grouped)
        .def_static("in_blocks",
                    [](int64_t outputs, int64_t inputs, int bits, int64_t group_size, int64_t block_size,
                       bool integer_scales, bool minima, int codebook, bool whole_rows, int point_inputs, int high_bits,
                       int sign_inputs, Address table) {
                        return QuantizedShape::in_blocks(outputs, inputs, bits, group_size, block_size, integer_scales,
                                                         minima, Codebook(codebook), whole_rows,
                                                         {point_inputs, high_bits, sign_inputs, to<uint8_t>(table)});
                    })
        .def_prop_ro("bytes", &QuantizedShape::bytes);
    m.def("pack_blocks", [](const QuantizedShape& shape, Address codes, Address scales, Address minima,
                            Address block_scales, Address block_minima, Address packed) {
        pack_blocks(shape, {to<uint8_t>(codes), to(scales), to(minima), to(block_scales), to(block_minima)},
                    to(packed));
    });
    m.def("advise_large_pages", [](Address memory, int64_t bytes) { advise_large_pages(to(memory), bytes); });
    m.def("panel_tasks", [](int64_t panels, int64_t n, int64_t row_bytes, int64_t tile_rows, int64_t threads) {
        const PanelSplit split(panels, n, row_bytes, tile_rows, threads);
        std::vector<std::tuple<int64_t, int64_t, int64_t>> tasks;
        for (int64_t i = 0; i < split.num_tasks(); ++i) {
            const PanelSplit::Task task = split.task(i);
            tasks.emplace_back(task.panel, task.first_row, task.end_row);
        }
        return tasks;
    });
    nb::class_<TeamClaims>(m, "TeamClaims")
        .def(nb::init<int64_t, int64_t>())
        .def("begin", &TeamClaims::begin)
        .def("end", &TeamClaims::end);
    m.def("expert_order", [](const std::vector<int64_t>& rows) {
        std::vector<int64_t> starts{0}, active(rows.size());
        for (const int64_t n : rows) starts.push_back(starts.back() + n);
        active.resize(static_cast<size_t>(order_experts(starts.data(), static_cast<int64_t>(rows.size()), active.data())));
        return active;
    });
    nb::class_<Cache>(m, "Cache")
        .def("__init__", [](Cache* self, int dtype, int key_pair, Address keys, Address values, Address key_scales,
                            Address value_scales, int64_t num_blocks, int64_t num_kv_heads, int64_t block_size,
                            int64_t head_dim, int64_t value_dim, int64_t index_dim) {
            const Math math = Dtype(dtype) == Dtype::i8 ? Math::i16 : key_pair == 2 ? Math::bf16 : Math::f32;
            const int64_t rows = num_kv_heads * block_size, bytes = rows * head_dim * size_of(Dtype(dtype));
            new (self) Cache{Dtype(dtype), math, to(keys), to(values), to<float>(key_scales), to<float>(value_scales),
                             num_blocks, num_kv_heads, block_size, head_dim, value_dim,
                             bytes, bytes, rows * size_of(Dtype::f32), index_dim};
        })
        // Blocks of the same layer in other memory, so many bytes apart.
        .def("elsewhere", [](const Cache& self, Address keys, Address values, Address key_scales, Address value_scales,
                             int64_t num_blocks, int64_t stride) {
            Cache cache = self;
            cache.keys = to(keys), cache.values = to(values);
            cache.key_scales = to<float>(key_scales), cache.value_scales = to<float>(value_scales);
            cache.num_blocks = num_blocks;
            cache.key_stride = cache.value_stride = cache.scale_stride = stride;
            return cache;
        });
    nb::class_<StateCache>(m, "StateCache")
        .def("__init__", [](StateCache* self, Address first, int64_t first_stride, Address second, int64_t second_stride,
                            int64_t units, int64_t floats, int64_t num_blocks, int64_t block_size) {
            new (self) StateCache{{to<float>(first), to<float>(second)}, {first_stride, second_stride}, units, floats,
                                  num_blocks, block_size};
        });
    nb::class_<AttentionMetadata>(m, "AttentionMetadata")
        .def(
            "__init__",
            [](AttentionMetadata* self, int num_heads, int num_kv_heads, int head_dim, int block_size,
               int64_t num_blocks, int64_t n, Address query_lens, Address context_lens, Address draft_lens,
               Address block_tables, int64_t width, int64_t segment) {
                new (self) AttentionMetadata({num_heads, num_kv_heads, head_dim, block_size}, num_blocks, n,
                                             to<int64_t>(query_lens), to<int64_t>(context_lens),
                                             to<int64_t>(draft_lens), to<int64_t>(block_tables), width, ContextParts(segment));
            })
        .def("set_cold", [](AttentionMetadata& self, const std::vector<std::pair<int64_t, int64_t>>& runs, nb::object segments) {
            std::vector<ColdRun> cold;
            std::vector<size_t> num_blocks;
            for (const auto& [sequence, count] : runs) {
                cold.push_back({sequence, count});
                num_blocks.push_back(static_cast<size_t>(count * self.parts.segment / self.shape.block_size));
            }
            self.set_cold(std::move(cold), std::make_unique<PythonSegments>(std::move(segments), std::move(num_blocks)));
        })
        .def_ro("num_tokens", &AttentionMetadata::num_tokens)
        .def("num_tokens_read", [](const AttentionMetadata& self, int64_t window) { return self.num_tokens_read({.window = window}); })
        .def("tasks", [](const AttentionMetadata& self, int64_t window) {
            const AttentionPlan& plan = self.plan({.window = window});
            std::vector<std::vector<int64_t>> phases;
            for (const auto* of_phase : {&plan.shared, &plan.items, &plan.merged}) {
                auto& works = phases.emplace_back();
                for (const auto& item : *of_phase) works.push_back(item.work());
            }
            return phases;
        });
    nb::class_<LowRankMaps>(m, "LowRankMaps")
        .def(nb::init<int, int64_t, std::vector<int64_t>>())
        .def("set",
             [](LowRankMaps& self, int64_t adapter,
                const std::vector<std::tuple<int64_t, float, Address, Address>>& parts) {
                 std::vector<LowRankPart> known;
                 for (const auto& [rank, scale, down, up] : parts) known.push_back({rank, scale, to(down), to(up)});
                 self.set(adapter, std::move(known));
             })
        .def("remove", &LowRankMaps::remove);
    nb::class_<Kernels>(m, "Kernels")
        .def(nb::init<const std::string&>())
        .def("pack_weight", &Kernels::pack_weight)
        .def("quantize_int8", &Kernels::quantize_int8)
        .def("quantize_int4", &Kernels::quantize_int4)
        .def("quantize_blocks", &Kernels::quantize_blocks)
        .def("key_pair", &Kernels::key_pair)
        .def("value_pair", &Kernels::value_pair)
        .def("sample", &Kernels::sample)
        .def("score", &Kernels::score);
    nb::class_<SamplingTable>(m, "SamplingTable")
        .def("__init__", [](SamplingTable* self, int64_t num_slots, int64_t vocab, const nb::dict& columns) {
            new (self) SamplingTable(num_slots, vocab, [&](const char* name) {
                return to(nb::cast<Address>(columns[name]));
            });
        });
    nb::class_<PackedLinear>(m, "PackedLinear")
        .def_static("dense",
                    [](int dtype, int64_t outputs, int64_t inputs, int64_t group, Address panels) {
                        return PackedLinear(PanelShape{Dtype(dtype), inputs, outputs, group}, to(panels));
                    })
        .def_static("quantized", [](const QuantizedShape& shape, Address panels, Address order) {
            return PackedLinear(shape, to(panels), to<int64_t>(order));
        });
    nb::class_<ExpertRouting>(m, "ExpertRouting")
        .def("__init__", [](ExpertRouting* self, int num_experts, int per_token, bool renormalize, int scores, int groups,
                            int groups_per_token, bool best_two, float factor, bool weighs_inputs) {
            if (num_experts > kMaxExperts) throw std::invalid_argument("too many experts");
            new (self) ExpertRouting{num_experts, per_token, renormalize, Scores(scores), groups,
                                     groups_per_token, best_two, factor, weighs_inputs};
        });
    nb::class_<Experts>(m, "Experts")
        .def("__init__",
             [](Experts* self, const Kernels& kernels, int64_t hidden, const ExpertRouting& routing, Address correction,
                int gate, float alpha, float limit, int first, Address counts) {
                 new (self) Experts(kernels.table(), hidden, routing, to<float>(correction), {GateKind(gate), alpha, limit},
                                    first, to<int64_t>(counts));
             })
        // Weight and bias of each map.
        .def("add", [](Experts& self, const PackedLinear& gate, Address gate_bias, const PackedLinear& up, Address up_bias,
                       const PackedLinear& down, Address down_bias) {
            self.add({gate, to<float>(gate_bias)}, {up, to<float>(up_bias)}, {down, to<float>(down_bias)});
        });
    nb::class_<Populator>(m, "Populator")
        .def("__init__",
             [](Populator* self, const std::vector<std::pair<Address, int64_t>>& regions, int64_t num_blocks) {
                 std::vector<Populator::Region> known;
                 for (const auto& [address, block_bytes] : regions) known.push_back({address, block_bytes});
                 new (self) Populator(std::move(known), num_blocks);
             })
        .def("advance", &Populator::advance)
        .def("wait", &Populator::wait, nb::call_guard<nb::gil_scoped_release>());
    nb::class_<Collectives>(m, "Collectives")
        .def(nb::init<int, int, int>())
        .def_ro_static("max_ranks", &Collectives::kMaxRanks)
        .def_static("bytes", &Collectives::bytes)
        .def("all_reduce", &all_reduce)
        .def("all_gather",
             [](Collectives& self, Address x, int64_t bytes, Address out) {
                 nb::gil_scoped_release released;
                 self.all_gather(to(x), bytes, to(out));
             })
        .def("all_to_all",
             [](Collectives& self, Address x, const std::vector<int64_t>& bytes, Address out) {
                 nb::gil_scoped_release released;
                 self.all_to_all(to(x), bytes, to(out));
             })
        .def("broadcast", [](Collectives& self, Address x, int64_t bytes) {
            nb::gil_scoped_release released;
            self.broadcast(to(x), bytes);
        });
    nb::class_<LinearLayer>(m, "LinearLayer")
        .def(nb::init<>())
        .def("add", [](LinearLayer& self, const PackedLinear& weight, Address bias, int64_t bias_bytes) {
            self.parts.push_back({weight, to<float>(bias), bias_bytes});
        });
    nb::class_<LoweredProgram>(m, "Program")
        .def(nb::init<const Kernels&, const std::vector<std::tuple<int64_t, int64_t, int>>&, std::vector<int>,
                      std::vector<int>, int, int, const std::vector<NodeTuple>&, const nb::list&>())
        .def("schedule", &LoweredProgram::schedule)
        .def("operations", &LoweredProgram::operations)
        .def("step_bytes", &LoweredProgram::step_bytes, "schedule"_a, "rows"_a, "inputs"_a, "metadata"_a)
        .def("run", &LoweredProgram::run, "schedule"_a, "rows"_a, "inputs"_a, "metadata"_a, "results"_a,
             "times"_a);
}

}  // namespace pagoda
