// SPDX-License-Identifier: Apache-2.0
// Sampling: tokens from rows of logits, all rows of a step together, each by its own rules.
//
// A token's weight is a whole number, 2 to the power of its scaled logit's distance from the highest, in units of
// 2^-kWeightBits. Sums of weights are exact, so neither the order of summation nor the number of threads can
// change a result. pagoda/backend/reference/sampling.py says the same in a few lines of PyTorch.
#pragma once

#include <cstdint>

#include "buffer.h"
#include "kernels.h"

namespace pagoda {

// What has become of a row; the numbers are those of `Outcome` in pagoda/backend/sampling.py.
enum class Outcome : int64_t { drawn = 0, not_finite = 1, overflown = 2, nothing_allowed = 3 };

// A probability in units of 2^-53.
constexpr uint64_t kCertain = uint64_t{1} << 53;

// The columns of pagoda/backend/sampling_table.py, which says what they mean: NUMBER(type, name) of each that holds
// a number, LIST(type, name) of each that holds the address of a list, whose length is in another column.
#define PAGODA_SAMPLING_COLUMNS(NUMBER, LIST) \
    NUMBER(int8_t, greedy)                    \
    NUMBER(float, scale)                      \
    NUMBER(float, lowest_power)               \
    NUMBER(int64_t, top_k)                    \
    NUMBER(uint64_t, top_p)                   \
    NUMBER(uint64_t, typical_p)               \
    NUMBER(uint64_t, seed)                    \
    NUMBER(uint64_t, position)                \
    NUMBER(int64_t, logprobs)                 \
    NUMBER(int8_t, masked)                    \
    LIST(int64_t, stops)                      \
    NUMBER(int64_t, num_stops)                \
    LIST(int64_t, bias_ids)                   \
    LIST(float, biases)                       \
    NUMBER(int64_t, num_biases)               \
    LIST(int64_t, seen)                       \
    LIST(float, counts)                       \
    NUMBER(int64_t, num_seen)                 \
    NUMBER(float, repetition)                 \
    NUMBER(float, frequency)                  \
    NUMBER(float, presence)

// How the token of a row is chosen, and its logits [vocab], which may be overwritten.
struct SamplingRow {
    float* logits;
    const uint32_t* allowed;  // a bit for each token, or null
    int64_t given = -1;       // the token, if it is not to be chosen but only reported
#define PAGODA_NUMBER(type, name) type name;
#define PAGODA_LIST(type, name) const type* name;
    PAGODA_SAMPLING_COLUMNS(PAGODA_NUMBER, PAGODA_LIST)
#undef PAGODA_NUMBER
#undef PAGODA_LIST

    bool changes_logits() const {
        return allowed != nullptr || num_stops > 0 || num_biases > 0 || num_seen > 0;
    }
    bool forbids_tokens() const { return allowed != nullptr || num_stops > 0; }
    // Keeps a prefix of the tokens in the order of their logits.
    bool cuts(int64_t vocab) const { return (top_k > 0 && top_k < vocab) || top_p < kCertain; }
    bool typical() const { return typical_p < kCertain; }
};

// What is reported of each row.
struct SamplingReport {
    int64_t* numbers;      // [rows, 3 + most]: outcome, token, its rank, the ids of the likeliest tokens
    float* logprobs;       // [rows, 1 + most]: of the token, of the likeliest ones
    int64_t most;          // likeliest tokens of any row
};

// Works in memory of the buffer, on all threads.
void sample(const KernelTable& table, const SamplingRow* rows, int64_t n, int64_t vocab,
            const SamplingReport& report, Buffer& buffer);

}  // namespace pagoda
