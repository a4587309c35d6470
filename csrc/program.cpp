#include "program.h"

#include <omp.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>

#include "panels.h"

namespace pagoda {

namespace {

// Below this many multiplications, waking another thread takes longer than the work.
constexpr int64_t kWorthThreads = 1 << 17;

int64_t now_ns() {
    const auto now = std::chrono::steady_clock::now().time_since_epoch();
    return std::chrono::duration_cast<std::chrono::nanoseconds>(now).count();
}

}  // namespace

Program::Value Program::value(int64_t width) {
    values_.push_back({width});
    return static_cast<Value>(values_.size() - 1);
}

void Program::record(const std::vector<Value>& uses, int64_t work,
                     std::function<void(const Step&, void*)> run, std::function<size_t(const Step&)> scratch) {
    if (result_ >= 0) throw std::logic_error("the program is finished");
    const bool selected = info(uses.at(0)).selected;
    for (const Value used : uses) {
        ValueInfo& value = values_.at(static_cast<size_t>(used));
        if (value.first_use == SIZE_MAX && used != input_) value.selected = selected;
        if (value.selected != selected) throw std::logic_error("values of an operation have the same rows");
        value.first_use = std::min(value.first_use, operations_.size());
        value.last_use = operations_.size();
    }
    operations_.push_back({uses[0], std::move(run), std::move(scratch), work, when_});
    if (when_ != When::adapted) token_work_ += work;
}

Program::Value Program::input(int64_t width) {
    if (input_ >= 0) throw std::logic_error("a program has one input");
    input_ = value(width);
    return input_;
}

void Program::embedding(Value out, const PanelShape& shape, const void* packed, int64_t first_id,
                          int64_t num_ids) {
    num_ids_ = std::min(num_ids_, num_ids);
    record({out}, shape.inputs, [=, this](const Step& step, void*) {
        pagoda::embedding(table_, shape, packed, first_id, step.token_ids, step.num_tokens, written(out, step));
    });
}

void Program::quantized_embedding(Value out, const QuantizedShape& shape, const void* packed,
                             const int64_t* order, int64_t first_id, int64_t num_ids) {
    num_ids_ = std::min(num_ids_, num_ids);
    record({out}, shape.inputs, [=, this](const Step& step, void*) {
        pagoda::quantized_embedding(table_, shape, packed, order, first_id, step.token_ids, step.num_tokens,
                               written(out, step));
    });
}

void Program::linear(Value x, Value out, int64_t column, const PanelShape& shape, const void* packed,
                     const float* bias) {
    record(
        {x, out}, shape.inputs * shape.outputs,
        [=, this](const Step& step, void* scratch) {
            pagoda::linear(table_, shape, packed, bias, address(x, step), info(x).width, num_rows(x, step),
                           Outputs(written(out, step, column), info(out).width), scratch);
        },
        [=, this](const Step& step) { return linear_scratch(table_, shape, num_rows(x, step)); });
}

void Program::quantized_linear(Value x, Value out, int64_t column, const QuantizedShape& shape,
                               const void* packed, const int64_t* order, const float* bias) {
    record(
        {x, out}, shape.inputs * shape.outputs,
        [=, this](const Step& step, void* scratch) {
            pagoda::quantized_linear(table_, shape, packed, order, bias, address(x, step), info(x).width,
                                     num_rows(x, step), Outputs(written(out, step, column), info(out).width), scratch);
        },
        [=, this](const Step& step) { return quantized_scratch(table_, shape, order, num_rows(x, step)); });
}

void Program::gated_linear(Value x, Value out, const PanelShape& shape, const void* packed, const float* bias) {
    record(
        {x, out}, shape.inputs * shape.outputs,
        [=, this](const Step& step, void* scratch) {
            pagoda::linear(table_, shape, packed, bias, address(x, step), info(x).width, num_rows(x, step),
                           Outputs::gated(written(out, step), info(out).width), scratch);
        },
        [=, this](const Step& step) { return linear_scratch(table_, shape, num_rows(x, step)); });
}

void Program::quantized_gated_linear(Value x, Value out, const QuantizedShape& shape, const void* packed,
                                     const int64_t* order, const float* bias) {
    record(
        {x, out}, shape.inputs * shape.outputs,
        [=, this](const Step& step, void* scratch) {
            pagoda::quantized_linear(table_, shape, packed, order, bias, address(x, step), info(x).width,
                                     num_rows(x, step), Outputs::gated(written(out, step), info(out).width), scratch);
        },
        [=, this](const Step& step) { return quantized_scratch(table_, shape, order, num_rows(x, step)); });
}

void Program::all_reduce(Value x, Collectives& group) {
    if (x == input_) throw std::logic_error("the input stays as it is");
    record({x}, info(x).width, [=, this, &group](const Step& step, void*) {
        group.all_reduce(table_, Dtype::f32, written(x, step), num_rows(x, step) * info(x).width);
    });
}

Program::Value Program::add(Value x, Value delta) {
    const int64_t width = info(x).width;
    const Value out = value(width);
    record({x, delta, out}, width, [=, this](const Step& step, void*) {
        pagoda::add(table_, address(x, step), address(delta, step), num_rows(x, step), width,
                    written(out, step));
    });
    return out;
}

Program::Value Program::select_rows(Value x) {
    const int64_t width = info(x).width;
    if (info(x).selected) throw std::logic_error("rows are selected once");
    const Value out = value(width);
    record({x}, width, [=, this](const Step& step, void*) {
        pagoda::copy_rows(address(x, step), width, step.rows, step.num_rows, written(out, step));
    });
    ValueInfo& selected = values_[static_cast<size_t>(out)];
    selected.selected = true;
    selected.first_use = selected.last_use = operations_.size() - 1;
    return out;
}

Program::Value Program::rms_norm(Value x, const float* weight, float eps) {
    const int64_t width = info(x).width;
    const Value out = value(width);
    record({x, out}, width, [=, this](const Step& step, void*) {
        pagoda::add_rms_norm(table_, address(x, step), nullptr, weight, eps, num_rows(x, step), width,
                             nullptr, written(out, step));
    });
    return out;
}

std::pair<Program::Value, Program::Value> Program::add_rms_norm(Value x, Value delta, const float* weight,
                                                                float eps) {
    const int64_t width = info(x).width;
    const Value sum = value(width), out = value(width);
    record({x, delta, sum, out}, width, [=, this](const Step& step, void*) {
        pagoda::add_rms_norm(table_, address(x, step), address(delta, step), weight, eps,
                             num_rows(x, step), width, written(sum, step), written(out, step));
    });
    return {sum, out};
}

Program::Value Program::silu_and_mul(Value gate_up) {
    const Value out = value(info(gate_up).width / 2);
    silu_and_mul_to(gate_up, out);
    return out;
}

void Program::silu_and_mul_to(Value gate_up, Value out) {
    const int64_t width = info(gate_up).width / 2;
    record({gate_up, out}, width, [=, this](const Step& step, void*) {
        pagoda::silu_and_mul(table_, address(gate_up, step), num_rows(gate_up, step), width,
                             written(out, step));
    });
}

void Program::add_low_rank(Value x, Value out, const LowRankMaps& maps) {
    const LowRankMaps* kept = &maps;
    record(
        {x, out}, maps.inputs,
        [=, this](const Step& step, void* scratch) {
            pagoda::add_low_rank(table_, *kept, adapted_rows(x), address(x, step), info(x).width, written(out, step),
                                 info(out).width, scratch);
        },
        [=, this](const Step& step) {
            return step.adapters == nullptr ? 0 : low_rank_scratch(table_, *kept, adapted_rows(x).size());
        });
}

Program::Value Program::experts(Value x, Value logits, const Experts& experts) {
    const Value out = value(experts.hidden);
    const auto kept = std::make_shared<const Experts>(experts);
    record(
        {x, logits, out}, experts.work(),
        [=, this](const Step& step, void* scratch) {
            compute_experts(*kept, address(x, step), info(x).width, address(logits, step), num_rows(x, step),
                            written(out, step), scratch);
        },
        [=, this](const Step& step) { return experts_scratch(*kept, num_rows(x, step)); });
    return out;
}

Program::Value Program::rotate_and_cache(Value qkv, const Cache& cache, int64_t queries_width,
                                         const float* q_norm, const float* k_norm, float eps) {
    const Value out = value(queries_width);
    record({qkv, out}, info(qkv).width, [=, this](const Step& step, void*) {
        pagoda::rotate_and_cache(table_, *step.metadata, cache, address(qkv, step), q_norm, k_norm, eps,
                                 step.cosines, step.sines, written(out, step));
    });
    return out;
}

Program::Value Program::attention(Value queries, const Cache& cache, float scale, int64_t window) {
    const Value out = value(info(queries).width);
    record(
        {queries, out}, info(queries).width * kKeyTile,
        [=, this](const Step& step, void* scratch) {
            pagoda::attention(table_, *step.metadata, cache, address(queries, step), scale, window,
                              written(out, step), scratch);
        },
        [=](const Step& step) { return attention_scratch(*step.metadata, window); });
    return out;
}

void Program::finish(Value result) {
    if (result_ >= 0) throw std::logic_error("the program is finished");
    if (result == input_) throw std::logic_error("the result is not computed");
    result_ = result;
    place_values();
}

// Values that are never needed together share memory: each takes the lowest place that is free all its life.
void Program::place_values() {
    for (size_t i = 0; i < values_.size(); ++i) {
        ValueInfo& value = values_[i];
        if (!lies_in_arena(static_cast<Value>(i))) continue;
        std::vector<const ValueInfo*> neighbours;
        for (size_t j = 0; j < i; ++j) {
            const ValueInfo& other = values_[j];
            if (lies_in_arena(static_cast<Value>(j)) && other.last_use >= value.first_use) {
                neighbours.push_back(&other);
            }
        }
        std::sort(neighbours.begin(), neighbours.end(),
                  [](const auto* a, const auto* b) { return a->offset < b->offset; });
        for (const ValueInfo* other : neighbours) {
            if (other->offset >= value.offset + value.row_space()) break;
            value.offset = std::max(value.offset, other->offset + other->row_space());
        }
        token_bytes_ = std::max(token_bytes_, value.offset + value.row_space());
    }
}

const float* Program::address(Value value, const Step& step) {
    return value == input_ ? step.hidden : written(value, step);
}

float* Program::written(Value value, const Step& step, int64_t column) {
    if (value == result_) return out_ + column;
    return reinterpret_cast<float*>(at(arena_.get(), info(value).offset * step.num_tokens)) + column;
}

void Program::run(const Step& step, float* out, int64_t* times) {
    if (result_ < 0) throw std::logic_error("the program is not finished");
    for (int64_t i = 0; num_ids_ != INT64_MAX && i < step.num_tokens; ++i) {
        if (step.token_ids[i] < 0 || step.token_ids[i] >= num_ids_) {
            throw std::out_of_range("A token id is not from 0 to " + std::to_string(num_ids_ - 1) + ".");
        }
    }
    for (int64_t i = 0; i < step.num_rows; ++i) {
        if (step.rows[i] < 0 || step.rows[i] >= step.num_tokens) {
            throw std::out_of_range("A wanted row is not one of the step's " + std::to_string(step.num_tokens) + ".");
        }
    }
    if (step.num_rows > step.num_tokens) throw std::out_of_range("More rows are wanted than there are.");
    if (step.adapters != nullptr) {
        adapted_tokens_.assign(step.adapters, nullptr, step.num_tokens);
        adapted_selected_.assign(step.adapters, step.rows, step.num_rows);
    }
    out_ = out;
    size_t scratch_bytes = 0;
    for (const Operation& operation : operations_) {
        if (operation.scratch) scratch_bytes = std::max(scratch_bytes, operation.scratch(step));
    }
    arena_.take(static_cast<size_t>(token_bytes_ * step.num_tokens));
    void* scratch = scratch_.take(scratch_bytes);
    in_team(token_work_ * step.num_tokens > kWorthThreads, [&] {
        if (times != nullptr) return run_timed(step, scratch, times);
        for (const Operation& operation : operations_) this->run(operation, step, scratch);
    });
}

// Every operation ends with a barrier, so one thread's clock sees when all are done.
void Program::run_timed(const Step& step, void* scratch, int64_t* times) const {
    const bool measures = omp_get_thread_num() == 0;
    int64_t before = measures ? now_ns() : 0;
    for (size_t i = 0; i < operations_.size(); ++i) {
        run(operations_[i], step, scratch);
        if (!measures) continue;
        const int64_t now = now_ns();
        times[i] = now - before;
        before = now;
    }
}

}  // namespace pagoda
