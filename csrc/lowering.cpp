// SPDX-License-Identifier: Apache-2.0
#include "lowering.h"

#include <omp.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <memory>
#include <stdexcept>
#include <utility>

#include "collectives.h"
#include "dispatch.h"
#include "layer_lowering.h"
#include "outputs.h"
#include "panels.h"

namespace pagoda {

namespace {

using Value = Program::Value;
using When = Program::When;

// Translates one node after the other; some are taken together with those that follow.
class Lowering {
   public:
    Lowering(Program& program, const Graph& graph)
        : program_(program), graph_(graph), readers_(graph.values.size()), done_(graph.nodes.size()) {
        for (const Node& node : graph.nodes) {
            for (const int value : node.inputs) ++readers_[static_cast<size_t>(value)];
        }
        for (const int value : graph.results) ++readers_[static_cast<size_t>(value)];
    }

    void run();

    void embedding(int index);
    void linear(int index);
    void linear_argmax(int index);
    void add_low_rank(int index);
    void experts(int index);
    void dispatched_experts(int index);
    void all_reduce(int index);
    void all_gather(int index);
    void gather_rows(int index);
    void scatter_rows(int index);
    void all_gather_argmax(int index);
    void select_rows(int index);
    void own_rows(int index);
    void share_rows(int index);
    void add(int index);

   private:
    const Node& node(int index) const { return graph_.node(index); }
    // The weight of a node that takes no weights of several formats.
    const LinearLayer::Part& only_part(const Node& node) const {
        const auto& parts = graph_.weight<const LinearLayer*>(node, 0)->parts;
        if (parts.size() != 1) throw std::invalid_argument(node.op + " takes a weight of one format");
        return parts[0];
    }
    int64_t width(Value value) const { return graph_.width(value); }
    // The next node if it is this operation on a value that nothing else reads, else -1.
    int follower(int index, const char* op, Value value) const;
    // The next node if it is this operation on the value, else -1.
    int next(int index, const char* op, Value value) const;

    bool row_kernel(int index);
    void multiply(int index, const LinearLayer& layer, Value x, Value out, When when, bool counts);
    void gated(int index, int activation, const LinearLayer& layer, When when);
    void low_rank(int index, Value out);
    void row_kernel(int index, const RowKernel& kernel, Value in, Value out, When when);
    // Lets an output have the memory of an input, of which there is a copy if it is the caller's.
    void take_over(int index, Value in, Value out);

    Program& program_;
    const Graph& graph_;
    std::vector<int> readers_;  // of each value
    std::vector<bool> done_;    // nodes
};

const std::map<std::string, void (Lowering::*)(int)> kLowerings = {
    {"embedding", &Lowering::embedding},
    {"linear", &Lowering::linear},
    {"linear_argmax", &Lowering::linear_argmax},
    {"add_low_rank", &Lowering::add_low_rank},
    {"experts", &Lowering::experts},
    {"dispatched_experts", &Lowering::dispatched_experts},
    {"all_reduce", &Lowering::all_reduce},
    {"all_gather", &Lowering::all_gather},
    {"gather_rows", &Lowering::gather_rows},
    {"scatter_rows", &Lowering::scatter_rows},
    {"all_gather_argmax", &Lowering::all_gather_argmax},
    {"select_rows", &Lowering::select_rows},
    {"own_rows", &Lowering::own_rows},
    {"share_rows", &Lowering::share_rows},
    {"add", &Lowering::add},
};

void Lowering::run() {
    for (int index = 0; index < static_cast<int>(graph_.nodes.size()); ++index) {
        if (done_[static_cast<size_t>(index)]) continue;
        const auto known = kLowerings.find(node(index).op);
        if (known != kLowerings.end()) {
            (this->*known->second)(index);
        } else if (!row_kernel(index) && !lower_layer(program_, graph_, index)) {
            throw std::invalid_argument("there is no kernel for " + node(index).op);
        }
    }
}

int Lowering::next(int index, const char* op, Value value) const {
    if (index < 0 || static_cast<size_t>(index) + 1 >= graph_.nodes.size()) return -1;
    const Node& next = node(index + 1);
    return next.op == op && next.inputs[0] == value ? index + 1 : -1;
}

int Lowering::follower(int index, const char* op, Value value) const {
    return readers_[static_cast<size_t>(value)] == 1 ? next(index, op, value) : -1;
}

void Lowering::take_over(int index, Value in, Value out) {
    if (!program_.is_input(in)) return program_.share(out, in);
    program_.record({.nodes = {index}, .uses = {in, out}, .work = width(in), .run = [=, &p = program_](const Step& step, void*) {
        const int64_t rows = p.num_rows(in, step), d = p.shape(in).width;
        parallel_for_rows(rows, [&](int64_t i) { std::copy_n(p.at(in) + i * d, d, p.at(out) + i * d); });
    }});
}

// ---- rows by themselves

namespace {

// Numbers in the i-th weight of an operation on rows of some width: as many, or those of a head, of queries or of keys.
int64_t row_weights(const Node& own, size_t i, int64_t width) {
    if (own.op == "gated_head_norm" || own.op == "layer_norm_heads") return static_cast<int64_t>(own.numbers.at(0));
    if (own.op == "rms_norm_heads") return static_cast<int64_t>(own.numbers.at(1));
    if (own.op == "norm_by_squares") return static_cast<int64_t>(own.numbers.at(i));
    return width;
}

}  // namespace

bool Lowering::row_kernel(int index) {
    const Node& own = node(index);
    for (const RowKernel* kernel = program_.table().row_kernels; kernel->name != nullptr; ++kernel) {
        if (own.op != kernel->name) continue;
        row_kernel(index, *kernel, own.inputs.at(0), own.outputs.at(0), When::always);
        return true;
    }
    return false;
}

void Lowering::row_kernel(int index, const RowKernel& kernel, Value in, Value out, When when) {
    constexpr size_t kMost = 4;
    const Node& own = node(index);
    std::vector<Value> inputs = own.inputs, outputs = own.outputs, uses;
    inputs.at(0) = in;
    outputs.at(0) = out;
    if (std::max(inputs.size(), outputs.size()) > kMost) throw std::invalid_argument("too many values of " + own.op);
    uses = inputs;
    uses.insert(uses.end(), outputs.begin(), outputs.end());
    std::vector<const float*> weights;
    int64_t weight_bytes = 0;
    for (size_t i = 0; i < own.weights.size(); ++i) {
        weights.push_back(graph_.vector(own, i));
        weight_bytes += row_weights(own, i, width(in)) * size_of(Dtype::f32);
    }
    const auto run = kernel.run;
    program_.record({.nodes = {index}, .uses = std::move(uses), .work = std::max(width(in), width(out)),
                     .run = [inputs, outputs, weights, numbers = own.numbers, run, &p = program_](const Step& step, void*) {
                         const int64_t rows = p.num_rows(inputs[0], step);
                         const float* from[kMost];
                         float* to[kMost];
                         parallel_for_rows(rows, [&](int64_t row) {
                             for (size_t i = 0; i < inputs.size(); ++i) from[i] = p.at(inputs[i]) + row * p.shape(inputs[i]).width;
                             for (size_t i = 0; i < outputs.size(); ++i) to[i] = p.at(outputs[i]) + row * p.shape(outputs[i]).width;
                             run({from, weights.data(), to, numbers.data(), p.shape(inputs[0]).width, p.shape(outputs[0]).width});
                         });
                     },
                     .when = when, .weight_bytes = weight_bytes});
}

// A sum and the norm of it, which follows, go over the rows once in steps that compute both.
void Lowering::add(int index) {
    const Node& own = node(index);
    const Value x = own.inputs[0], delta = own.inputs[1], sum = own.outputs[0];
    const int norm = next(index, "rms_norm", sum);
    row_kernel(index);
    if (norm < 0) return;
    program_.replace_last(norm);
    row_kernel(norm);
    program_.replace_last(index);
    done_[static_cast<size_t>(norm)] = true;
    const Value out = node(norm).outputs[0];
    const float* weight = graph_.vector(node(norm), 0);
    const auto eps = static_cast<float>(node(norm).numbers.at(0));
    program_.record({.nodes = {index, norm}, .uses = {x, delta, sum, out}, .work = width(x),
                     .run = [=, &p = program_](const Step& step, void*) {
                         add_rms_norm(p.table(), p.at(x), p.at(delta), weight, eps, p.num_rows(x, step),
                                      p.shape(x).width, p.at(sum), p.at(out));
                     },
                     .node = norm, .weight_bytes = width(x) * size_of(Dtype::f32)});
}

void Lowering::select_rows(int index) {
    const Node& own = node(index);
    const Value x = own.inputs[0], rows = own.inputs[1], out = own.outputs[0];
    const bool is_result = std::find(graph_.results.begin(), graph_.results.end(), out) != graph_.results.end();
    if (x == graph_.adapters && !is_result) return program_.share(out, x);  // the program knows which rows are selected
    program_.record({.nodes = {index}, .uses = {x, out}, .work = width(x),
                     .run = [=, &p = program_](const Step& step, void*) {
                         const int64_t floats = p.shape(x).row_bytes() / size_of(Dtype::f32);
                         copy_rows(p.at(x), floats, p.at<int64_t>(rows), step.num_rows, p.at(out));
                     },
                     .check = [=, &p = program_](const Step& step) {
                         if (p.at(x) == nullptr && step.num_rows > 0) throw std::invalid_argument("A step of this graph needs what rows are selected of.");
                         p.check_rows(step);
                     }});
}

// ---- linear layers

void Lowering::embedding(int index) {
    const Node& own = node(index);
    const Value ids = own.inputs[0], out = own.outputs[0];
    const PackedLinear table = only_part(own).weight;
    const auto first_id = static_cast<int64_t>(own.numbers.at(0)), num_ids = static_cast<int64_t>(own.numbers.at(1));
    program_.record({.nodes = {index}, .uses = {ids, out}, .work = width(out),
                     .run = [=, &p = program_](const Step& step, void*) {
                         table.embedding(p.table(), first_id, p.at<int64_t>(ids), p.num_rows(ids, step), p.at(out));
                     },
                     .check = [=, &p = program_](const Step& step) {
                         for (int64_t i = 0; i < p.num_rows(ids, step); ++i) {
                             const int64_t id = p.at<int64_t>(ids)[i];
                             if (id >= 0 && id < num_ids) continue;
                             throw std::out_of_range("A token id is not from 0 to " + std::to_string(num_ids - 1) + ".");
                         }
                     }});
}

// One operation for each part. One in place of another, in other steps, `counts` no weights again.
void Lowering::multiply(int index, const LinearLayer& layer, Value x, Value out, When when, bool counts) {
    int64_t column = 0;
    for (const LinearLayer::Part& part : layer.parts) {
        const int64_t work = part.weight.inputs() * part.weight.outputs();
        program_.record({.nodes = {index}, .uses = {x, out}, .work = when == When::adapted ? 0 : work,
                         .run = [=, &p = program_](const Step& step, void* scratch) {
                             const Outputs outputs(p.at(out) + column, p.shape(out).width);
                             part.weight.linear(p.table(), part.bias, p.at(x), p.num_rows(x, step), outputs, scratch);
                         },
                         .scratch = [=, &p = program_](const Step& step) {
                             return part.weight.scratch_bytes(p.table(), p.num_rows(x, step));
                         },
                         .when = when, .weight_bytes = counts ? part.weight.bytes() + part.bias_bytes : 0,
                         .flops = counts ? 2 * work : 0});
        column += part.weight.outputs();
    }
}

void Lowering::gated(int index, int activation, const LinearLayer& layer, When when) {
    const Value x = node(index).inputs[0], out = node(activation).outputs[0];
    const LinearLayer::Part part = layer.parts.at(0);
    const int64_t work = part.weight.inputs() * part.weight.outputs();
    program_.record({.nodes = {activation}, .uses = {x, out}, .work = work,
                     .run = [=, &p = program_](const Step& step, void* scratch) {
                         part.weight.linear(p.table(), part.bias, p.at(x), p.num_rows(x, step),
                                            Outputs::gated(p.at(out), p.shape(out).width), scratch);
                     },
                     .scratch = [=, &p = program_](const Step& step) {
                         return part.weight.scratch_bytes(p.table(), p.num_rows(x, step));
                     },
                     .when = when, .node = index, .weight_bytes = part.weight.bytes() + part.bias_bytes,
                     .flops = 2 * work});
}

// SiLU gates that follow are applied to panels of outputs as they are computed; in steps with adapters afterwards.
void Lowering::linear(int index) {
    const Node& own = node(index);
    const auto& layer = *graph_.weight<const LinearLayer*>(own, 0);
    const Value x = own.inputs[0], both = own.outputs[0];
    const bool whole_panels = layer.parts.size() == 1 && layer.outputs() % (2 * kPanel) == 0;
    const int adapted = whole_panels ? follower(index, "add_low_rank", both) : -1;
    const Value gates = adapted < 0 ? both : node(adapted).outputs[0];
    const int silu = whole_panels ? follower(adapted < 0 ? index : adapted, "silu_and_mul", gates) : -1;
    if (silu < 0) return multiply(index, layer, x, both, When::always, true);
    done_[static_cast<size_t>(silu)] = true;
    if (adapted < 0) return gated(index, silu, layer, When::always);
    done_[static_cast<size_t>(adapted)] = true;
    gated(index, silu, layer, When::plain);
    multiply(index, layer, x, both, When::adapted, false);
    low_rank(adapted, both);
    for (const RowKernel* kernel = program_.table().row_kernels; kernel->name != nullptr; ++kernel) {
        if (node(silu).op == kernel->name) row_kernel(silu, *kernel, both, node(silu).outputs[0], When::adapted);
    }
}

void Lowering::add_low_rank(int index) {
    const Node& own = node(index);
    take_over(index, own.inputs[0], own.outputs[0]);
    low_rank(index, own.outputs[0]);
}

void Lowering::low_rank(int index, Value out) {
    const Node& own = node(index);
    const Value x = own.inputs[1];
    const auto* maps = graph_.weight<const LowRankMaps*>(own, 0);
    program_.record({.nodes = {index}, .uses = {x, out}, .work = 0,
                     .run = [=, &p = program_](const Step&, void* scratch) {
                         pagoda::add_low_rank(p.table(), *maps, p.adapted_rows(x), p.at(x), p.shape(x).width, p.at(out),
                                              p.shape(out).width, scratch);
                     },
                     .scratch = [=, &p = program_](const Step&) {
                         return low_rank_scratch(p.table(), *maps, p.adapted_rows(x).size());
                     },
                     .when = When::adapted});
}

// For each row the index of its highest output, the bits of its value, and whether all are finite.
void Lowering::linear_argmax(int index) {
    const Node& own = node(index);
    const Value x = own.inputs[0], out = own.outputs[0];
    const LinearLayer::Part part = only_part(own);
    const auto first_id = static_cast<int64_t>(own.numbers.at(0));
    const auto rounded = [](size_t bytes) { return static_cast<int64_t>((bytes + 63) / 64 * 64); };
    const int64_t work = part.weight.inputs() * part.weight.outputs();
    program_.record({.nodes = {index}, .uses = {x, out}, .work = work,
                     .run = [=, &p = program_](const Step& step, void* scratch) {
                         const int64_t rows = p.num_rows(x, step);
                         const int64_t own_bytes = rounded(part.weight.scratch_bytes(p.table(), rows));
                         const Outputs seen = Outputs::argmax(at(scratch, own_bytes), rows);
                         part.weight.linear(p.table(), part.bias, p.at(x), rows, seen, scratch);
                         auto* to = p.at<int64_t>(out);
                         parallel_for_rows(rows, [&](int64_t row) {
                             const Argmax best = seen.argmax_of(row);
                             int32_t bits;
                             std::memcpy(&bits, &best.value, sizeof bits);
                             to[3 * row] = first_id + best.column;
                             to[3 * row + 1] = bits;
                             to[3 * row + 2] = best.finite != 0;
                         });
                     },
                     .scratch = [=, &p = program_](const Step& step) {
                         const int64_t rows = p.num_rows(x, step);
                         return static_cast<size_t>(rounded(part.weight.scratch_bytes(p.table(), rows))) +
                                Outputs::argmax_scratch(rows);
                     },
                     .weight_bytes = part.weight.bytes() + part.bias_bytes, .flops = 2 * work});
}

void Lowering::experts(int index) {
    const Node& own = node(index);
    const Value x = own.inputs[0], logits = own.inputs[1], out = own.outputs[0];
    const auto* experts = graph_.weight<const Experts*>(own, 0);
    int64_t bytes = 0, weights = 0;
    for (const Expert& expert : experts->held) {
        for (const ExpertMap* map : {&expert.gate, &expert.up, &expert.down}) {
            if (expert.one_map && map == &expert.up) continue;
            bytes += map->weight.bytes() + (map->bias == nullptr ? 0 : map->weight.outputs() * size_of(Dtype::f32));
            weights += map->weight.inputs() * map->weight.outputs();
        }
    }
    program_.record({.nodes = {index}, .uses = {x, logits, out}, .work = experts->work(),
                     .run = [=, &p = program_](const Step& step, void* scratch) {
                         compute_experts(*experts, p.at(x), p.shape(x).width, p.at(logits), p.num_rows(x, step),
                                         p.at(out), scratch);
                     },
                     .scratch = [=, &p = program_](const Step& step) {
                         return experts_scratch(*experts, p.num_rows(x, step));
                     },
                     .weight_bytes = bytes,
                     .flops = 2 * weights * experts->routing.per_token / experts->routing.num_experts});
}

void Lowering::dispatched_experts(int index) {
    const Node& own = node(index);
    const Value x = own.inputs[0], logits = own.inputs[1], out = own.outputs[0];
    const auto* experts = graph_.weight<const Experts*>(own, 0);
    const std::vector<int64_t> first_experts(own.numbers.begin(), own.numbers.end());
    const auto dispatch = std::make_shared<Dispatch>(*experts, *graph_.weight<Group*>(own, 1), first_experts);
    const auto all = [=, &p = program_](const Step& step) { return step.count(of_all_ranks(p.shape(x).rows)); };
    program_.record({.nodes = {index}, .uses = {x, logits, out}, .work = experts->work(),
                     .run = [=, &p = program_](const Step& step, void* scratch) {
                         dispatch->compute(p.at(x), p.at(logits), p.num_rows(x, step), all(step), p.at(out), scratch);
                     },
                     .scratch = [=, &p = program_](const Step& step) {
                         return dispatch->scratch(p.num_rows(x, step), all(step));
                     },
                     .meets = true});
}

// ---- several ranks

void Lowering::all_reduce(int index) {
    const Node& own = node(index);
    const Value x = own.outputs[0];
    Group* group = graph_.weight<Group*>(own, 0);
    take_over(index, own.inputs[0], x);
    program_.record({.nodes = {index}, .uses = {x}, .work = width(x), .run = [=, &p = program_](const Step& step, void*) {
        group->all_reduce(p.table(), p.at(x), p.num_rows(x, step), p.shape(x).width);
    }});
}

// Rows of one length are gathered, as all ranks have some more or less.
void Lowering::all_gather(int index) {
    const Node& own = node(index);
    const Value x = own.inputs[0], out = own.outputs[0];
    Group* group = graph_.weight<Group*>(own, 0);
    std::vector<int64_t> sizes(own.numbers.begin(), own.numbers.end());
    const int64_t most = *std::max_element(sizes.begin(), sizes.end());
    program_.record({.nodes = {index}, .uses = {x, out}, .work = width(out),
                     .run = [=, &p = program_](const Step& step, void* scratch) {
                         const int64_t rows = p.num_rows(x, step), d = p.shape(x).width, all = p.shape(out).width;
                         auto* padded = static_cast<float*>(scratch);
                         float* gathered = padded + rows * most;
                         parallel_for_rows(rows, [&](int64_t row) {
                             float* to = padded + row * most;
                             std::fill(std::copy_n(p.at(x) + row * d, d, to), to + most, 0.0f);
                         });
#pragma omp master
                         group->all_gather(padded, rows * most * size_of(Dtype::f32), gathered);
#pragma omp barrier
                         parallel_for_rows(rows, [&](int64_t row) {
                             float* to = p.at(out) + row * all;
                             for (size_t rank = 0; rank < sizes.size(); ++rank) {
                                 const float* share = gathered + (static_cast<int64_t>(rank) * rows + row) * most;
                                 to = std::copy_n(share, sizes[rank], to);
                             }
                         });
                     },
                     .scratch = [=, &p = program_](const Step& step) {
                         const auto ranks = static_cast<int64_t>(sizes.size());
                         return static_cast<size_t>(p.num_rows(x, step) * most * (1 + ranks) * size_of(Dtype::f32));
                     }});
}

void Lowering::own_rows(int index) {
    const Node& own = node(index);
    const Value x = own.inputs[0], out = own.outputs[0];
    const Group* ranks = graph_.weight<Group*>(own, 0);
    program_.share_out(ranks->rank, ranks->size);
    program_.record({.nodes = {index}, .uses = {out, x}, .work = width(x), .run = [=, &p = program_](const Step& step, void*) {
        const int64_t d = p.shape(x).width;
        parallel_for_rows(step.num_own, [&](int64_t row) {
            std::copy_n(p.at(x) + (step.first_own + row) * d, d, p.at(out) + row * d);
        });
    }});
}

void Lowering::share_rows(int index) {
    const Node& own = node(index);
    const Value x = own.inputs[0], out = own.outputs[0];
    Group* ranks = graph_.weight<Group*>(own, 0);
    program_.record({.nodes = {index}, .uses = {x, out}, .work = width(x),
                     .run = [=, &p = program_](const Step& step, void* scratch) {
                         const int64_t d = p.shape(x).width, most = p.most_own(step.num_tokens);
                         auto* padded = static_cast<float*>(scratch);
                         const float* gathered = p.at(x);
                         if (most < step.num_tokens) {
                             parallel_for_rows(step.num_own, [&](int64_t row) {
                                 std::copy_n(p.at(x) + row * d, d, padded + row * d);
                             });
#pragma omp master
                             ranks->all_gather(padded, most * d * size_of(Dtype::f32), padded + most * d);
#pragma omp barrier
                             gathered = padded + most * d;
                         }
                         parallel_for_rows(step.num_tokens, [&](int64_t row) {
                             std::copy_n(gathered + row * d, d, p.at(out) + row * d);
                         });
                     },
                     .scratch = [=, &p = program_](const Step& step) {
                         return static_cast<size_t>(p.most_own(step.num_tokens) * (1 + ranks->size) * p.shape(x).width) *
                                size_of(Dtype::f32);
                     }});
}

// Equally many rows of each rank are gathered, and those that it has of them kept.
void Lowering::gather_rows(int index) {
    const Node& own = node(index);
    const Value x = own.inputs[0], counts = own.inputs[1], out = own.outputs[0];
    Group* group = graph_.weight<Group*>(own, 0);
    const auto most = [=, &p = program_] {
        const auto* of_ranks = p.at<int64_t>(counts);
        return *std::max_element(of_ranks, of_ranks + group->size);
    };
    program_.record({.nodes = {index}, .uses = {out, x}, .work = width(x),
                     .run = [=, &p = program_](const Step&, void* scratch) {
                         const int64_t rows = most(), bytes = rows * p.shape(x).row_bytes();
                         const auto* of_ranks = p.at<int64_t>(counts);
#pragma omp master
                         {
                             // Rows behind this rank's own are whatever lies there.
                             auto* padded = static_cast<char*>(scratch);
                             const int64_t held = of_ranks[group->rank] * p.shape(x).row_bytes();
                             std::copy_n(reinterpret_cast<const char*>(p.at(x)), held, padded);
                             std::fill(padded + held, padded + bytes, 0);
                             group->all_gather(padded, bytes, padded + bytes);
                         }
#pragma omp barrier
                         int64_t first = 0;
                         for (int rank = 0; rank < group->size; first += of_ranks[rank++]) {
                             const auto* from = reinterpret_cast<const float*>(static_cast<char*>(scratch) + (1 + rank) * bytes);
                             const int64_t d = p.shape(x).width;
                             parallel_for_rows(of_ranks[rank], [&](int64_t row) {
                                 std::copy_n(from + row * d, d, p.at(out) + (first + row) * d);
                             });
                         }
                     },
                     .scratch = [=, &p = program_](const Step&) {
                         return static_cast<size_t>((1 + group->size) * most() * p.shape(x).row_bytes());
                     }});
}

// Each rank is sent its rows by all, and adds them up in order of rank.
void Lowering::scatter_rows(int index) {
    const Node& own = node(index);
    const Value x = own.inputs[0], counts = own.inputs[1], out = own.outputs[0];
    Group* group = graph_.weight<Group*>(own, 0);
    program_.record({.nodes = {index}, .uses = {x, out}, .work = width(x),
                     .run = [=, &p = program_](const Step& step, void* scratch) {
                         auto* parts = static_cast<float*>(scratch);
                         const int64_t count = p.num_rows(out, step) * p.shape(out).width;
#pragma omp master
                         {
                             const auto* of_ranks = p.at<int64_t>(counts);
                             std::vector<int64_t> bytes;
                             for (int i = 0; i < group->size * group->size; ++i) {
                                 bytes.push_back(of_ranks[i % group->size] * p.shape(x).row_bytes());
                             }
                             group->all_to_all(p.at(x), bytes, parts);
                         }
#pragma omp barrier
                         const int64_t d = p.shape(out).width;
                         parallel_for_rows(p.num_rows(out, step), [&](int64_t row) {
                             float* to = p.at(out) + row * d;
                             std::copy_n(parts + row * d, d, to);
                             for (int rank = 1; rank < group->size; ++rank) {
                                 const float* part = parts + rank * count + row * d;
                                 for (int64_t i = 0; i < d; ++i) to[i] += part[i];
                             }
                         });
                     },
                     .scratch = [=, &p = program_](const Step& step) {
                         return static_cast<size_t>(group->size * p.num_rows(out, step) * p.shape(out).row_bytes());
                     }});
}

void Lowering::all_gather_argmax(int index) {
    const Node& own = node(index);
    const Value x = own.inputs[0], out = own.outputs[0];
    Group* group = graph_.weight<Group*>(own, 0);
    const auto item = static_cast<int64_t>(sizeof(int64_t));
    program_.record({.nodes = {index}, .uses = {x, out}, .work = width(out),
                     .run = [=, &p = program_](const Step& step, void* scratch) {
                         const int64_t rows = p.num_rows(x, step);
                         const auto value_of = [](const int64_t* found) {
                             const auto bits = static_cast<int32_t>(found[1]);
                             float value;
                             std::memcpy(&value, &bits, sizeof value);
                             return value;
                         };
#pragma omp master
                         group->all_gather(p.at<int64_t>(x), rows * 3 * item, scratch);
#pragma omp barrier
                         const auto* shares = static_cast<const int64_t*>(scratch);
                         parallel_for_rows(rows, [&](int64_t row) {
                             const int64_t* best = shares + 3 * row;
                             int64_t finite = best[2];
                             for (int rank = 1; rank < group->size; ++rank) {
                                 const int64_t* other = shares + 3 * (rank * rows + row);
                                 finite &= other[2];
                                 if (value_of(other) > value_of(best)) best = other;
                             }
                             int64_t* to = p.at<int64_t>(out) + 3 * row;
                             to[0] = best[0], to[1] = best[1], to[2] = finite;
                         });
                     },
                     .scratch = [=, &p = program_](const Step& step) {
                         return static_cast<size_t>(p.num_rows(x, step) * 3 * item * group->size);
                     }});
}

}  // namespace

int64_t LinearLayer::outputs() const {
    int64_t total = 0;
    for (const Part& part : parts) total += part.weight.outputs();
    return total;
}

std::unique_ptr<Program> lower(const KernelTable& table, const Graph& graph) {
    auto program =
        std::make_unique<Program>(table, graph.values, graph.inputs, graph.results, graph.rows, graph.adapters);
    Lowering(*program, graph).run();
    return program;
}

}  // namespace pagoda
