// SPDX-License-Identifier: Apache-2.0
#include "program.h"

#include <omp.h>

#include <algorithm>
#include <chrono>
#include <stdexcept>
#include <string>
#include <utility>

namespace pagoda {

namespace {

// Below this many multiplications, waking another thread takes longer than the work.
constexpr int64_t kWorthThreads = 1 << 17;

int64_t now_ns() {
    const auto now = std::chrono::steady_clock::now().time_since_epoch();
    return std::chrono::duration_cast<std::chrono::nanoseconds>(now).count();
}

}  // namespace

Program::Program(const KernelTable& table, std::vector<ValueShape> values, std::vector<Value> inputs,
                 std::vector<Value> results, Value rows, Value adapters)
    : table_(table),
      values_(std::move(values)),
      inputs_(std::move(inputs)),
      results_(std::move(results)),
      storage_(values_.size()),
      rows_(rows),
      adapters_(adapters),
      addresses_(values_.size()) {
    for (size_t i = 0; i < storage_.size(); ++i) storage_[i] = static_cast<Value>(i);
}

bool Program::is_input(Value value) const {
    return std::find(inputs_.begin(), inputs_.end(), storage_.at(static_cast<size_t>(value))) != inputs_.end();
}

void Program::record(Operation operation) {
    if (operation.node < 0) operation.node = operation.nodes.at(0);
    operations_.push_back(std::move(operation));
}

int Program::schedule(const std::vector<int>& nodes, const std::vector<Value>& external) {
    Schedule schedule;
    std::vector<Place> places;
    const auto known = [&](Value root) {
        if (std::find(inputs_.begin(), inputs_.end(), root) != inputs_.end()) return true;
        return std::any_of(external.begin(), external.end(),
                           [&](Value value) { return storage_.at(static_cast<size_t>(value)) == root; });
    };
    const auto wanted = [&](int node) { return std::find(nodes.begin(), nodes.end(), node) != nodes.end(); };
    for (size_t i = 0; i < operations_.size(); ++i) {
        const Operation& operation = operations_[i];
        if (!std::all_of(operation.nodes.begin(), operation.nodes.end(), wanted) || wanted(operation.other)) continue;
        const size_t order = schedule.operations.size();
        schedule.operations.push_back(i);
        for (const Value used : operation.uses) {
            const Value root = storage_[static_cast<size_t>(used)];
            if (known(root)) continue;
            const auto found = std::find_if(places.begin(), places.end(),
                                            [&](const Place& place) { return place.value == root; });
            if (found == places.end()) {
                places.push_back({root, 0, order, order});
            } else {
                found->last_use = order;
            }
        }
    }
    place(places, values_, schedule);
    schedule.places = std::move(places);
    schedules_.push_back(std::move(schedule));
    return static_cast<int>(schedules_.size() - 1);
}

// Values that are never needed together share memory: each takes the lowest place that is free all its life. Those with
// other rows lie apart.
void Program::place(std::vector<Place>& places, const std::vector<ValueShape>& shapes, Schedule& schedule) {
    const auto shape_of = [&](const Place& place) { return shapes[static_cast<size_t>(place.value)]; };
    const auto row_space = [&](const Place& place) { return (shape_of(place).row_bytes() + 63) / 64 * 64; };
    for (size_t i = 0; i < places.size(); ++i) {
        Place& own = places[i];
        const Rows rows = shape_of(own).rows;
        std::vector<const Place*> neighbours;
        for (size_t j = 0; j < i; ++j) {
            const Place& other = places[j];
            if (shape_of(other).rows == rows && other.last_use >= own.first_use) neighbours.push_back(&other);
        }
        std::sort(neighbours.begin(), neighbours.end(),
                  [](const auto* a, const auto* b) { return a->offset < b->offset; });
        for (const Place* other : neighbours) {
            if (other->offset >= own.offset + row_space(own)) break;
            own.offset = std::max(own.offset, other->offset + row_space(*other));
        }
        int64_t& total = schedule.bytes[rows];
        total = std::max(total, own.offset + row_space(own));
    }
}

std::vector<std::tuple<int, int64_t, int64_t>> Program::operations(int schedule) const {
    std::vector<std::tuple<int, int64_t, int64_t>> found;
    for (const size_t i : schedules_.at(static_cast<size_t>(schedule)).operations) {
        const Operation& operation = operations_[i];
        found.emplace_back(operation.node, operation.weight_bytes, operation.flops);
    }
    return found;
}

void Program::find_values(const Schedule& schedule, const Step& step, const std::vector<uintptr_t>& inputs,
                          const std::vector<uintptr_t>& results) {
    for (size_t rows = 0; rows < kRowKinds; ++rows) {
        arenas_[rows].take(static_cast<size_t>(schedule.bytes[rows] * step.count(Rows(rows))));
    }
    std::fill(addresses_.begin(), addresses_.end(), nullptr);
    for (const Place& place : schedule.places) {
        const Rows rows = shape(place.value).rows;
        addresses_[static_cast<size_t>(place.value)] =
            static_cast<char*>(arenas_[rows].get()) + place.offset * step.count(rows);
    }
    find_inputs(inputs);
    for (size_t i = 0; i < results_.size(); ++i) {
        if (results.at(i) == 0) continue;
        const Value root = storage_[static_cast<size_t>(results_[i])];
        addresses_[static_cast<size_t>(root)] = reinterpret_cast<char*>(results[i]);
    }
    for (size_t i = 0; i < storage_.size(); ++i) addresses_[i] = addresses_[static_cast<size_t>(storage_[i])];
}

void Program::check_rows(const Step& step) const {
    const auto* rows = at<int64_t>(rows_);
    if (step.num_rows > step.num_tokens) throw std::out_of_range("More rows are wanted than there are.");
    for (int64_t i = 0; i < step.num_rows; ++i) {
        if (rows[i] >= 0 && rows[i] < step.num_tokens) continue;
        throw std::out_of_range("A wanted row is not one of the step's " + std::to_string(step.num_tokens) + ".");
    }
}

void Program::find_inputs(const std::vector<uintptr_t>& inputs) {
    for (size_t i = 0; i < inputs_.size(); ++i) {
        addresses_[static_cast<size_t>(inputs_[i])] = reinterpret_cast<char*>(inputs.at(i));
    }
}

void Program::find_adapted(Step& step) {
    const auto* adapters = adapters_ < 0 ? nullptr : at<int64_t>(adapters_);
    step.adapted = adapters != nullptr;
    if (!step.adapted) return;
    adapted_tokens_.assign(adapters, nullptr, step.num_tokens);
    if (rows_ >= 0 && at(rows_) != nullptr) {
        check_rows(step);
        adapted_selected_.assign(adapters, at<int64_t>(rows_), step.num_rows);
    }
}

size_t Program::scratch_bytes(const Schedule& schedule, const Step& step) const {
    size_t most = 0;
    for (const size_t i : schedule.operations) {
        const Operation& operation = operations_[i];
        if (operation.scratch && runs(operation, step)) most = std::max(most, operation.scratch(step));
    }
    return most;
}

size_t Program::step_bytes(int number, Step step, const std::vector<uintptr_t>& inputs) {
    const Schedule& schedule = schedules_.at(static_cast<size_t>(number));
    std::fill(addresses_.begin(), addresses_.end(), nullptr);
    find_own(step);
    find_inputs(inputs);
    find_adapted(step);
    int64_t bytes = 0;
    for (size_t rows = 0; rows < kRowKinds; ++rows) bytes += schedule.bytes[rows] * step.count(Rows(rows));
    return static_cast<size_t>(bytes) + scratch_bytes(schedule, step);
}

void Program::run(int number, Step step, const std::vector<uintptr_t>& inputs, const std::vector<uintptr_t>& results,
                  int64_t* times) {
    const Schedule& schedule = schedules_.at(static_cast<size_t>(number));
    find_own(step);
    find_values(schedule, step, inputs, results);
    step.adapted = adapters_ >= 0 && at<int64_t>(adapters_) != nullptr;
    for (const size_t i : schedule.operations) {
        if (operations_[i].check) operations_[i].check(step);
    }
    find_adapted(step);
    int64_t work = 0;
    for (const size_t i : schedule.operations) {
        const Operation& operation = operations_[i];
        if (runs(operation, step)) work += operation.work * num_met(operation, step);
    }
    void* scratch = scratch_.take(scratch_bytes(schedule, step));
    stopped_at_ = schedule.operations.size();
    in_team(work > kWorthThreads, [&] {
        if (times != nullptr) return run_timed(schedule, step, scratch, times);
        for (size_t place = 0; place < schedule.operations.size() && goes_on(place); ++place) {
            const Operation& operation = operations_[schedule.operations[place]];
            if (runs(operation, step)) operation.run(step, scratch);
        }
    });
}

// Every operation ends with a barrier, so one thread's clock sees when all are done.
void Program::run_timed(const Schedule& schedule, const Step& step, void* scratch, int64_t* times) {
    const bool measures = omp_get_thread_num() == 0;
    int64_t before = measures ? now_ns() : 0;
    for (size_t i = 0; i < schedule.operations.size() && goes_on(i); ++i) {
        const Operation& operation = operations_[schedule.operations[i]];
        if (runs(operation, step)) operation.run(step, scratch);
        if (!measures) continue;
        const int64_t now = now_ns();
        times[i] = now - before;
        before = now;
    }
}

}  // namespace pagoda
