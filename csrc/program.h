// A forward pass that is recorded once and then run for any number of tokens: one call, one parallel region, and
// no memory taken once it has seen its largest step. (What CUDA calls a graph.)
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "buffer.h"
#include "collectives.h"
#include "experts.h"
#include "low_rank.h"
#include "ops.h"

namespace pagoda {

// What changes from step to step.
struct Step {
    int64_t num_tokens;
    const AttentionMetadata* metadata;
    const int64_t* token_ids;  // [num_tokens]
    const float* hidden;       // rows of the program's input, if it has one
    const float* cosines;      // [num_tokens, head_dim / 2]
    const float* sines;
    const int64_t* rows = nullptr;  // [num_rows], tokens whose results are wanted
    int64_t num_rows = 0;
    const int64_t* adapters = nullptr;  // [num_tokens], below 0 for none; null if no token has an adapter
};

class Program {
   public:
    // A value has a row of floats for each token, or behind `select_rows` for each wanted one; it is known by the number
    // that operations return and take.
    using Value = int;

    explicit Program(const KernelTable& table) : table_(table) {}

    // Steps in which an operation is computed: all, or those in which no token, or some token, has an adapter.
    enum class When { always, plain, adapted };
    // Of operations that are recorded from now on.
    void record_when(When when) { when_ = when; }

    Value value(int64_t width);

    // What every step brings along instead of computing it.
    Value input(int64_t width);

    // Rows of a weight for the step's tokens, of which there are `num_ids`; the weight has those from `first_id` on.
    void embedding(Value out, const PanelShape& shape, const void* packed, int64_t first_id, int64_t num_ids);
    void quantized_embedding(Value out, const QuantizedShape& shape, const void* packed, const int64_t* order,
                             int64_t first_id, int64_t num_ids);

    // To the columns of `out` from `column` on.
    void linear(Value x, Value out, int64_t column, const PanelShape& shape, const void* packed,
                const float* bias);
    void quantized_linear(Value x, Value out, int64_t column, const QuantizedShape& shape, const void* packed,
                          const int64_t* order, const float* bias);

    // To all of `out`: silu of the first half of the outputs times the second half, each of whole panels.
    void gated_linear(Value x, Value out, const PanelShape& shape, const void* packed, const float* bias);
    void quantized_gated_linear(Value x, Value out, const QuantizedShape& shape, const void* packed,
                                const int64_t* order, const float* bias);

    // Makes x the sum of the x of all ranks.
    void all_reduce(Value x, Collectives& group);
    Value add(Value x, Value delta);
    // The rows of x that are wanted; what is computed of them has as many.
    Value select_rows(Value x);
    Value rms_norm(Value x, const float* weight, float eps);
    // x + delta, and its norm.
    std::pair<Value, Value> add_rms_norm(Value x, Value delta, const float* weight, float eps);
    Value silu_and_mul(Value gate_up);
    void silu_and_mul_to(Value gate_up, Value out);
    // Adds to the rows of `out` what adapters make of x.
    void add_low_rank(Value x, Value out, const LowRankMaps& maps);
    Value experts(Value x, Value logits, const Experts& experts);
    Value rotate_and_cache(Value qkv, const Cache& cache, int64_t queries_width, const float* q_norm,
                           const float* k_norm, float eps);
    Value attention(Value queries, const Cache& cache, float scale, int64_t window);

    // What `run` gives; nothing can be recorded after it.
    void finish(Value result);

    // How many operations have been recorded.
    int64_t size() const { return static_cast<int64_t>(operations_.size()); }

    // Writes the result's rows to `out`; and, unless `times` [size] is null, the nanoseconds of each operation, from the
    // end of the one before it until all threads are done.
    void run(const Step& step, float* out, int64_t* times = nullptr);

   private:
    struct ValueInfo {
        int64_t width;
        bool selected = false;
        size_t first_use = SIZE_MAX, last_use = 0;  // operations
        int64_t offset = 0;          // in the arena, in bytes for each token of the step
        int64_t row_bytes() const { return width * size_of(Dtype::f32); }
        int64_t row_space() const { return (row_bytes() + 63) / 64 * 64; }
    };
    struct Operation {
        Value first;  // which it has to compute rows of
        std::function<void(const Step&, void* scratch)> run;
        std::function<size_t(const Step&)> scratch;  // bytes; may be empty
        int64_t work;                                // multiplications for each token
        When when = When::always;
    };

    void run_timed(const Step& step, void* scratch, int64_t* times) const;
    void run(const Operation& operation, const Step& step, void* scratch) const {
        if (operation.when != When::always && (operation.when == When::adapted) != (step.adapters != nullptr)) return;
        if (num_rows(operation.first, step) > 0) operation.run(step, scratch);
    }
    int64_t num_rows(Value value, const Step& step) const {
        return info(value).selected ? step.num_rows : step.num_tokens;
    }
    // An operation on these values, which all have the rows of the first one.
    void record(const std::vector<Value>& uses, int64_t work, std::function<void(const Step&, void*)> run,
                std::function<size_t(const Step&)> scratch = {});
    void place_values();
    bool lies_in_arena(Value value) const { return value != input_ && value != result_; }
    // Where a value's rows are.
    const float* address(Value value, const Step& step);
    // Where they are computed, from the column on.
    float* written(Value value, const Step& step, int64_t column = 0);
    const AdaptedRows& adapted_rows(Value value) const { return info(value).selected ? adapted_selected_ : adapted_tokens_; }
    const ValueInfo& info(Value value) const { return values_.at(static_cast<size_t>(value)); }

    const KernelTable& table_;
    std::vector<ValueInfo> values_;
    std::vector<Operation> operations_;
    Value input_ = -1, result_ = -1;
    float* out_ = nullptr;
    int64_t num_ids_ = INT64_MAX;  // token ids are below it, where they are looked at
    int64_t token_bytes_ = 0, token_work_ = 0;
    When when_ = When::always;
    AdaptedRows adapted_tokens_, adapted_selected_;  // of the step
    Buffer arena_, scratch_;
};

}  // namespace pagoda
