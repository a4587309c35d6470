// SPDX-License-Identifier: Apache-2.0
// A forward pass that is recorded once and then run for any number of tokens: one call, one parallel region, and
// no memory taken once it has seen its largest step. (What CUDA calls a graph.)
#pragma once

#include <omp.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <functional>
#include <tuple>
#include <vector>

#include "buffer.h"
#include "low_rank.h"
#include "ops.h"

namespace pagoda {

// Which rows a value has: those of all tokens or of selected ones, those that a context-parallel rank computes, or those of all
// ranks where each has tokens of its own.
// `Value.row_kind` in Python.
enum Rows { kOfTokens, kSelected, kOwn, kOfAllTokens, kAllSelected };
constexpr size_t kRowKinds = 5;

inline Rows of_all_ranks(Rows rows) {
    return rows == kOfTokens ? kOfAllTokens : rows == kSelected ? kAllSelected : rows;
}

// What changes from step to step.
struct Step {
    int64_t num_tokens = 0;
    int64_t num_rows = 0;  // that are selected
    int64_t all_tokens = 0, all_rows = 0;  // of all ranks, where each has tokens of its own
    bool adapted = false;  // some token has an adapter
    int64_t first_own = 0, num_own = 0;  // rows that a context-parallel rank computes

    int64_t count(Rows rows) const {
        const int64_t counts[kRowKinds] = {num_tokens, num_rows, num_own, all_tokens, all_rows};
        return counts[rows];
    }
};

class Program {
   public:
    // Known by its index.
    using Value = int;
    struct ValueShape {
        int64_t width, item_bytes;
        Rows rows;

        int64_t row_bytes() const { return width * item_bytes; }
    };

    // Steps in which an operation is computed: all, or those in which no token, or some token, has an adapter.
    enum class When { always, plain, adapted };

    struct Operation {
        std::vector<int> nodes;   // of the graph: needed if all of them are
        std::vector<Value> uses;  // that it reads and writes; the first says of how many rows it is
        int64_t work;             // multiplications for each row
        std::function<void(const Step&, void* scratch)> run;
        std::function<size_t(const Step&)> scratch = {};     // bytes
        std::function<void(const Step&)> check = {};         // throws if the step does not fit
        When when = When::always;
        int node = -1;  // that names it, by default the first
        int64_t weight_bytes = 0, flops = 0;
        int other = -1;  // node with which another operation computes these, where it is needed too
        bool meets = false;  // other ranks' rows are a reason to compute it too
    };

    // `inputs` and `results` are in the order in which `run` is given them; `rows` and `adapters` are inputs, or -1.
    Program(const KernelTable& table, std::vector<ValueShape> values, std::vector<Value> inputs,
            std::vector<Value> results, Value rows, Value adapters);

    // ---- while operations are recorded

    void record(Operation operation);
    // The last operation is not needed in steps that need this node too, which another one computes with its own.
    void replace_last(int node) { operations_.back().other = node; }
    // Lets a value that is not computed yet have the memory of another one.
    void share(Value value, Value memory_of) { storage_.at(size_t(value)) = storage_.at(size_t(memory_of)); }
    bool is_input(Value value) const;

    // ---- while they run

    const KernelTable& table() const { return table_; }
    const ValueShape& shape(Value value) const { return values_.at(static_cast<size_t>(value)); }
    int64_t num_rows(Value value, const Step& step) const {
        return step.count(shape(value).rows);
    }
    // Rows are shared out among context-parallel ranks; as host.own_rows in Python.
    void share_out(int rank, int size) { rank_ = rank, num_ranks_ = size; }
    int64_t most_own(int64_t num_tokens) const {
        const int64_t size = num_ranks_;
        return num_tokens < size * std::max<int64_t>(size, 16) ? num_tokens : (num_tokens + size - 1) / size;
    }
    // Where a value's rows are.
    template <class T = float>
    T* at(Value value) const {
        return reinterpret_cast<T*>(addresses_[static_cast<size_t>(value)]);
    }
    // Throws std::out_of_range if selected rows are none of the step's.
    void check_rows(const Step& step) const;
    const AdaptedRows& adapted_rows(Value value) const {
        return shape(value).rows == kSelected ? adapted_selected_ : adapted_tokens_;
    }

    // ---- once they are recorded

    // Number of the schedule that computes the operations of these nodes, with some results in memory of the caller.
    int schedule(const std::vector<int>& nodes, const std::vector<Value>& external);
    // Node, bytes of weights and floating-point operations for each token of a schedule's operations.
    std::vector<std::tuple<int, int64_t, int64_t>> operations(int schedule) const;

    // Bytes that a step takes of this program's own memory; takes none and computes nothing. Of the inputs only metadata and
    // numbers of adapters are read.
    size_t step_bytes(int schedule, Step step, const std::vector<uintptr_t>& inputs);

    // Ends the step that runs behind the operation that calls this from its team's first thread.
    void stop() { stopped_at_ = current_; }

    // Computes a schedule. `inputs` and `results` are addresses, 0 where there is none. Writes to `times`, unless it is
    // null, the nanoseconds of each operation, from the end of the one before it until all threads are done.
    void run(int schedule, Step step, const std::vector<uintptr_t>& inputs, const std::vector<uintptr_t>& results,
             int64_t* times = nullptr);

   private:
    struct Place {
        Value value;
        int64_t offset;  // bytes for each row
        size_t first_use, last_use;
    };
    struct Schedule {
        std::vector<size_t> operations;
        std::vector<Place> places;
        int64_t bytes[kRowKinds] = {};  // of all values with such rows
    };

    void find_own(Step& step) const {
        const int64_t most = most_own(step.num_tokens);
        step.first_own = most == step.num_tokens ? 0 : std::min(step.num_tokens, rank_ * most);
        step.num_own = std::min(most, step.num_tokens - step.first_own);
    }
    static void place(std::vector<Place>& places, const std::vector<ValueShape>& shapes, Schedule& schedule);
    void find_values(const Schedule& schedule, const Step& step, const std::vector<uintptr_t>& inputs,
                     const std::vector<uintptr_t>& results);
    void find_inputs(const std::vector<uintptr_t>& inputs);
    // Finds the step's rows that have adapters, once its inputs are known.
    void find_adapted(Step& step);
    size_t scratch_bytes(const Schedule& schedule, const Step& step) const;
    void run_timed(const Schedule& schedule, const Step& step, void* scratch, int64_t* times);
    // Whether a thread goes on to the operation at this place of a schedule. Another thread may be in that one already, and
    // stop there, where this one has to follow.
    bool goes_on(size_t place) {
        if (omp_get_thread_num() == 0) current_ = place;
        return place <= stopped_at_;
    }
    bool runs(const Operation& operation, const Step& step) const {
        if (operation.when != When::always && (operation.when == When::adapted) != step.adapted) return false;
        return num_met(operation, step) > 0;
    }
    // Rows that are a reason to compute an operation.
    int64_t num_met(const Operation& operation, const Step& step) const {
        const Rows rows = shape(operation.uses[0]).rows;
        return step.count(operation.meets ? of_all_ranks(rows) : rows);
    }

    const KernelTable& table_;
    std::vector<ValueShape> values_;
    std::vector<Value> inputs_, results_, storage_;
    Value rows_, adapters_;
    std::vector<Operation> operations_;
    std::vector<Schedule> schedules_;
    std::vector<char*> addresses_;                   // of values, in this step
    AdaptedRows adapted_tokens_, adapted_selected_;  // of the step
    size_t current_ = 0;              // operation of the first thread
    std::atomic<size_t> stopped_at_;  // the last operation of the step
    Buffer arenas_[kRowKinds], scratch_;
    int rank_ = 0, num_ranks_ = 1;
};

}  // namespace pagoda
