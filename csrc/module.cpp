// The Python module. Tensors come as addresses: what lies there is checked by pagoda/backend/cpu/backend.py.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>
#include <string>

#include "buffer.h"
#include "collectives.h"
#include "experts.h"
#include "low_rank.h"
#include "ops.h"
#include "pages.h"
#include "populator.h"
#include "program.h"
#include "sampler.h"

namespace nb = nanobind;

namespace pagoda {

namespace {

using Address = uintptr_t;

template <class T = void>
T* to(Address address) {
    return reinterpret_cast<T*>(address);
}

// Below this many operations on elements, waking another thread takes longer than the work.
constexpr int64_t kWorthThreads = 1 << 15;

struct InstructionSet {
    const char* name;
    const KernelTable* table;
    bool present;
};

// From the lowest to the highest; each has all that those before it have.
std::vector<InstructionSet> instruction_sets() {
    __builtin_cpu_init();
    const bool avx2 =
        __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    const bool avx512_vnni = avx512 && __builtin_cpu_supports("avx512vnni");
    const bool avx512_bf16 = avx512_vnni && __builtin_cpu_supports("avx512bf16");
    return {{"avx2", &kAvx2, avx2},
            {"avx512", &kAvx512, avx512},
            {"avx512_vnni", &kAvx512Vnni, avx512_vnni},
            {"avx512_bf16", &kAvx512Bf16, avx512_bf16}};
}

std::vector<std::string> available_instruction_sets() {
    std::vector<std::string> names;
    for (const auto& set : instruction_sets()) {
        if (set.present) names.emplace_back(set.name);
    }
    return names;
}

// The rows of a step that are sampled, in order.
struct SamplingBatch {
    std::vector<SamplingRow> rows;

    void add(bool greedy, float scale, float lowest_power, int64_t top_k, uint64_t top_p, uint64_t typical_p,
             uint64_t seed, uint64_t position, int64_t logprobs, Address allowed, Address stops, int64_t num_stops,
             Address bias_ids, Address biases, int64_t num_biases, Address seen, Address counts, int64_t num_seen,
             float repetition, float frequency, float presence) {
        rows.push_back({nullptr, greedy, scale, lowest_power, top_k, top_p, typical_p, seed, position, logprobs,
                        to<uint32_t>(allowed), to<int64_t>(stops), num_stops, to<int64_t>(bias_ids),
                        to<float>(biases), num_biases, to<int64_t>(seen), to<float>(counts), num_seen, repetition,
                        frequency, presence});
    }
};

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

    void embedding(int dtype, int64_t outputs, int64_t inputs, Address packed, int64_t first_id, Address ids, int64_t n,
                   Address out) const {
        in_team(n * inputs > kWorthThreads, [&] {
            pagoda::embedding(*table_, {Dtype(dtype), inputs, outputs}, to(packed), first_id, to<int64_t>(ids), n,
                              to<float>(out));
        });
    }

    void linear(int dtype, int64_t outputs, int64_t inputs, Address packed, Address bias, Address x,
                int64_t row_stride, int64_t n, Address out, int64_t out_stride) {
        const PanelShape shape{Dtype(dtype), inputs, outputs};
        void* scratch = buffer_.take(linear_scratch(*table_, shape, n));
        in_team(n * inputs * outputs > 4 * kWorthThreads, [&] {
            pagoda::linear(*table_, shape, to(packed), to<float>(bias), to<float>(x), row_stride, n,
                           Outputs(to<float>(out), out_stride), scratch);
        });
    }

    void add_low_rank(const LowRankMaps& maps, Address adapters, Address x, int64_t row_stride, int64_t n, Address out,
                      int64_t out_stride) {
        AdaptedRows adapted;
        adapted.assign(to<int64_t>(adapters), nullptr, n);
        void* scratch = buffer_.take(low_rank_scratch(*table_, maps, adapted.size()));
        in_team(adapted.size() * maps.inputs > kWorthThreads / 16, [&] {
            pagoda::add_low_rank(*table_, maps, adapted, to<float>(x), row_stride, to<float>(out), out_stride, scratch);
        });
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

    void quantized_embedding(const QuantizedShape& shape, Address packed, Address order, int64_t first_id, Address ids,
                             int64_t n, Address out) const {
        in_team(n * shape.inputs > kWorthThreads, [&] {
            pagoda::quantized_embedding(*table_, shape, to(packed), to<int64_t>(order), first_id, to<int64_t>(ids), n,
                                        to<float>(out));
        });
    }

    void quantized_linear(const QuantizedShape& shape, Address packed, Address order, Address bias, Address x,
                          int64_t row_stride, int64_t n, Address out, int64_t out_stride) {
        void* scratch = buffer_.take(quantized_scratch(*table_, shape, to<int64_t>(order), n));
        in_team(n * shape.inputs * shape.outputs > 4 * kWorthThreads, [&] {
            pagoda::quantized_linear(*table_, shape, to(packed), to<int64_t>(order), to<float>(bias), to<float>(x),
                                     row_stride, n, Outputs(to<float>(out), out_stride), scratch);
        });
    }

    void linear_argmax(int dtype, int64_t outputs, int64_t inputs, Address packed, Address bias, Address x,
                       int64_t row_stride, int64_t n, Address columns, Address values, Address finite) {
        const PanelShape shape{Dtype(dtype), inputs, outputs};
        argmax(n, inputs * outputs, linear_scratch(*table_, shape, n), columns, values, finite,
               [&](const Outputs& seen, void* scratch) {
                   pagoda::linear(*table_, shape, to(packed), to<float>(bias), to<float>(x), row_stride, n, seen,
                                  scratch);
               });
    }

    void quantized_argmax(const QuantizedShape& shape, Address packed, Address order, Address bias, Address x,
                          int64_t row_stride, int64_t n, Address columns, Address values, Address finite) {
        argmax(n, shape.inputs * shape.outputs, quantized_scratch(*table_, shape, to<int64_t>(order), n), columns,
               values, finite, [&](const Outputs& seen, void* scratch) {
                   pagoda::quantized_linear(*table_, shape, to(packed), to<int64_t>(order), to<float>(bias),
                                            to<float>(x), row_stride, n, seen, scratch);
               });
    }

    void add(Address x, Address delta, int64_t n, int64_t d, Address out) const {
        in_team(n * d > kWorthThreads,
                [&] { pagoda::add(*table_, to<float>(x), to<float>(delta), n, d, to<float>(out)); });
    }

    void add_rms_norm(Address x, Address delta, Address weight, float eps, int64_t n, int64_t d, Address sum,
                      Address out) const {
        in_team(n * d > kWorthThreads, [&] {
            pagoda::add_rms_norm(*table_, to<float>(x), to<float>(delta), to<float>(weight), eps, n, d,
                                 to<float>(sum), to<float>(out));
        });
    }

    void silu_and_mul(Address gate_up, int64_t n, int64_t d, Address out) const {
        in_team(n * d > kWorthThreads,
                [&] { pagoda::silu_and_mul(*table_, to<float>(gate_up), n, d, to<float>(out)); });
    }

    void experts(const Experts& experts, Address x, int64_t row_stride, Address logits, int64_t n, Address out) {
        void* scratch = buffer_.take(experts_scratch(experts, n));
        in_team(n * experts.work() > 4 * kWorthThreads,
                [&] { compute_experts(experts, to<float>(x), row_stride, to<float>(logits), n, to<float>(out), scratch); });
    }

    int key_pair(int dtype, int cache_dtype) const {
        return pair_of(table_->math(Dtype(dtype), Dtype(cache_dtype)));
    }

    int value_pair(int dtype, int cache_dtype, int block_size) const {
        return pagoda::value_pair(table_->math(Dtype(dtype), Dtype(cache_dtype)), block_size);
    }

    void rotate_and_cache(const AttentionMetadata& metadata, const Cache& cache, Address qkv, Address q_norm,
                          Address k_norm, float eps, Address cosines, Address sines, Address queries) const {
        in_team(metadata.num_tokens * metadata.shape.num_heads * metadata.shape.head_dim > kWorthThreads, [&] {
            pagoda::rotate_and_cache(*table_, metadata, cache, to<float>(qkv), to<float>(q_norm), to<float>(k_norm),
                                     eps, to<float>(cosines), to<float>(sines), to<float>(queries));
        });
    }

    void attention(const AttentionMetadata& metadata, const Cache& cache, Address queries, float scale, int64_t window,
                   Address out) {
        void* scratch = buffer_.take(attention_scratch(metadata, window));
        in_team(metadata.work(window) > 8 * kWorthThreads, [&] {
            pagoda::attention(*table_, metadata, cache, to<float>(queries), scale, window, to<float>(out), scratch);
        });
    }

    void sample(SamplingBatch& batch, Address logits, int64_t row_stride, int64_t vocab, int64_t most, Address numbers,
                Address logprobs) {
        const nb::gil_scoped_release released;
        const auto n = static_cast<int64_t>(batch.rows.size());
        for (int64_t i = 0; i < n; ++i) batch.rows[static_cast<size_t>(i)].logits = to<float>(logits) + i * row_stride;
        pagoda::sample(*table_, batch.rows.data(), n, vocab, {to<int64_t>(numbers), to<float>(logprobs), most}, buffer_);
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
    // Of a linear layer of n rows; `multiply` computes it.
    template <class Multiply>
    void argmax(int64_t n, int64_t weights, size_t scratch_bytes, Address columns, Address values, Address finite,
                Multiply multiply) {
        scratch_bytes = (scratch_bytes + 63) / 64 * 64;
        auto* scratch = static_cast<char*>(buffer_.take(scratch_bytes + Outputs::argmax_scratch(n)));
        const Outputs seen = Outputs::argmax(scratch + scratch_bytes, n);
        in_team(n * weights > 4 * kWorthThreads, [&] {
            multiply(seen, scratch);
#pragma omp for schedule(static)
            for (int64_t row = 0; row < n; ++row) {
                const Argmax best = seen.argmax_of(row);
                to<int64_t>(columns)[row] = best.column;
                to<float>(values)[row] = best.value;
                to<bool>(finite)[row] = best.finite != 0;
            }
        });
    }

    const KernelTable* table_ = nullptr;
    Buffer buffer_;
};

void all_reduce(Collectives& group, const Kernels& kernels, int dtype, Address x, int64_t count) {
    nb::gil_scoped_release released;
    in_team(count > 4 * kWorthThreads,
            [&] { group.all_reduce(kernels.table(), Dtype(dtype), to(x), count); });
}

void run(Program& program, int64_t num_tokens, const AttentionMetadata& metadata, Address token_ids, Address hidden,
         Address cosines, Address sines, Address rows, int64_t num_rows, Address adapters, Address out, Address times) {
    nb::gil_scoped_release released;
    program.run({num_tokens, &metadata, to<int64_t>(token_ids), to<float>(hidden), to<float>(cosines), to<float>(sines),
                 to<int64_t>(rows), num_rows, to<int64_t>(adapters)},
                to<float>(out), to<int64_t>(times));
}

}  // namespace

NB_MODULE(_native, m) {
    m.attr("PANEL_OUTPUTS") = kPanel;
    m.attr("LOW_RANK_BLOCK") = kLowRankBlock;
    m.attr("MAX_HEAD_DIM") = kMaxHeadDim;
    m.attr("MAX_EXPERTS") = kMaxExperts;
    m.def("instruction_sets", &available_instruction_sets);
    m.def("packed_bytes", [](int dtype, int64_t outputs, int64_t inputs) {
        return PanelShape{Dtype(dtype), inputs, outputs}.bytes();
    });
    m.def("pack_quantized", [](const QuantizedShape& shape, Address codes, Address scales, Address offsets,
                               Address packed) {
        pack_quantized(shape, to(codes), to(scales), to(offsets), to(packed));
    });
    nb::class_<QuantizedShape>(m, "QuantizedShape")
        .def_static("int8", &QuantizedShape::int8)
        .def_static("grouped", &QuantizedShape::grouped)
        .def_static("in_blocks", &QuantizedShape::in_blocks)
        .def_prop_ro("bytes", &QuantizedShape::bytes);
    m.def("pack_blocks", [](const QuantizedShape& shape, Address codes, Address scales, Address minima,
                            Address block_scales, Address block_minima, Address packed) {
        pack_blocks(shape, {to<uint8_t>(codes), to(scales), to(minima), to(block_scales), to(block_minima)},
                    to(packed));
    });
    m.def("advise_large_pages", [](Address memory, int64_t bytes) { advise_large_pages(to(memory), bytes); });
    nb::class_<Cache>(m, "Cache")
        .def("__init__", [](Cache* self, int dtype, int key_pair, Address keys, Address values, Address key_scales,
                            Address value_scales) {
            const Math math = Dtype(dtype) == Dtype::i8 ? Math::i16 : key_pair == 2 ? Math::bf16 : Math::f32;
            new (self) Cache{Dtype(dtype), math, to(keys), to(values), to<float>(key_scales), to<float>(value_scales)};
        });
    nb::class_<AttentionMetadata>(m, "AttentionMetadata")
        .def(
            "__init__",
            [](AttentionMetadata* self, int num_heads, int num_kv_heads, int head_dim, int block_size, int64_t n,
               Address query_lens, Address context_lens, Address block_tables, int64_t width) {
                new (self) AttentionMetadata({num_heads, num_kv_heads, head_dim, block_size}, n,
                                             to<int64_t>(query_lens), to<int64_t>(context_lens),
                                             to<int64_t>(block_tables), width);
            })
        .def_ro("num_tokens", &AttentionMetadata::num_tokens)
        .def("num_tokens_read", &AttentionMetadata::num_tokens_read);
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
        .def("add_low_rank", &Kernels::add_low_rank)
        .def("pack_weight", &Kernels::pack_weight)
        .def("embedding", &Kernels::embedding)
        .def("linear", &Kernels::linear)
        .def("linear_argmax", &Kernels::linear_argmax)
        .def("quantized_argmax", &Kernels::quantized_argmax)
        .def("quantize_int8", &Kernels::quantize_int8)
        .def("quantize_int4", &Kernels::quantize_int4)
        .def("quantized_embedding", &Kernels::quantized_embedding)
        .def("quantized_linear", &Kernels::quantized_linear)
        .def("add", &Kernels::add)
        .def("add_rms_norm", &Kernels::add_rms_norm)
        .def("silu_and_mul", &Kernels::silu_and_mul)
        .def("experts", &Kernels::experts)
        .def("key_pair", &Kernels::key_pair)
        .def("value_pair", &Kernels::value_pair)
        .def("rotate_and_cache", &Kernels::rotate_and_cache)
        .def("attention", &Kernels::attention)
        .def("sample", &Kernels::sample)
        .def("score", &Kernels::score);
    nb::class_<SamplingBatch>(m, "SamplingBatch").def(nb::init<>()).def("add", &SamplingBatch::add);
    nb::class_<PackedLinear>(m, "PackedLinear")
        .def_static("dense",
                    [](int dtype, int64_t outputs, int64_t inputs, Address panels) {
                        return PackedLinear(PanelShape{Dtype(dtype), inputs, outputs}, to(panels));
                    })
        .def_static("quantized", [](const QuantizedShape& shape, Address panels, Address order) {
            return PackedLinear(shape, to(panels), to<int64_t>(order));
        });
    nb::class_<Experts>(m, "Experts")
        .def("__init__",
             [](Experts* self, const Kernels& kernels, int64_t hidden, int num_experts, int per_token,
                bool renormalize, int first, Address counts) {
                 if (num_experts > kMaxExperts) throw std::invalid_argument("too many experts");
                 new (self) Experts(kernels.table(), hidden, {num_experts, per_token, renormalize}, first,
                                    to<int64_t>(counts));
             })
        .def("add", &Experts::add);
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
        .def("broadcast", [](Collectives& self, Address x, int64_t bytes) {
            nb::gil_scoped_release released;
            self.broadcast(to(x), bytes);
        });
    nb::class_<Program>(m, "Program")
        .def(
            "__init__",
            [](Program* self, const Kernels& kernels) { new (self) Program(kernels.table()); })
        .def("value", &Program::value)
        .def("input", &Program::input)
        .def("embedding",
             [](Program& self, int out, int dtype, int64_t outputs, int64_t inputs, Address packed,
                int64_t first_id, int64_t num_ids) {
                 self.embedding(out, {Dtype(dtype), inputs, outputs}, to(packed), first_id, num_ids);
             })
        .def("quantized_embedding",
             [](Program& self, int out, const QuantizedShape& shape, Address packed, Address order,
                int64_t first_id, int64_t num_ids) {
                 self.quantized_embedding(out, shape, to(packed), to<int64_t>(order), first_id, num_ids);
             })
        .def("all_reduce", &Program::all_reduce)
        .def("add", &Program::add)
        .def("select_rows", &Program::select_rows)
        .def("linear",
             [](Program& self, int x, int out, int64_t column, int dtype, int64_t outputs, int64_t inputs,
                Address packed, Address bias) {
                 self.linear(x, out, column, {Dtype(dtype), inputs, outputs}, to(packed), to<float>(bias));
             })
        .def("quantized_linear",
             [](Program& self, int x, int out, int64_t column, const QuantizedShape& shape, Address packed,
                Address order, Address bias) {
                 self.quantized_linear(x, out, column, shape, to(packed), to<int64_t>(order),
                                       to<float>(bias));
             })
        .def("gated_linear",
             [](Program& self, int x, int out, int dtype, int64_t outputs, int64_t inputs, Address packed,
                Address bias) {
                 self.gated_linear(x, out, {Dtype(dtype), inputs, outputs}, to(packed), to<float>(bias));
             })
        .def("quantized_gated_linear",
             [](Program& self, int x, int out, const QuantizedShape& shape, Address packed, Address order,
                Address bias) {
                 self.quantized_gated_linear(x, out, shape, to(packed), to<int64_t>(order), to<float>(bias));
             })
        .def("rms_norm", [](Program& self, int x, Address weight,
                            float eps) { return self.rms_norm(x, to<float>(weight), eps); })
        .def("add_rms_norm", [](Program& self, int x, int delta, Address weight,
                                float eps) { return self.add_rms_norm(x, delta, to<float>(weight), eps); })
        .def("silu_and_mul", &Program::silu_and_mul)
        .def("silu_and_mul_to", &Program::silu_and_mul_to)
        .def("add_low_rank", &Program::add_low_rank)
        .def("record_when", [](Program& self, int when) { self.record_when(Program::When(when)); })
        .def("experts", &Program::experts)
        .def("rotate_and_cache",
             [](Program& self, int qkv, const Cache& cache, int64_t queries_width, Address q_norm,
                Address k_norm, float eps) {
                 return self.rotate_and_cache(qkv, cache, queries_width, to<float>(q_norm), to<float>(k_norm), eps);
             })
        .def("attention", &Program::attention)
        .def("finish", &Program::finish)
        .def_prop_ro("size", &Program::size)
        .def("run", &run);
}

}  // namespace pagoda
