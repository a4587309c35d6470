// Which experts a token goes through, and the sum of what they give.
#pragma once

#include <cmath>

#include "rows.h"

namespace {

// The highest `chosen` of n values, the first of equal ones; always as many, also of values that are not numbers.
PAGODA_INLINE void mark_highest(const float* values, int n, int chosen, bool* marked) {
    for (int i = 0; i < n; ++i) marked[i] = false;
    for (int c = 0; c < chosen; ++c) {
        int best = 0;
        while (marked[best]) ++best;
        for (int i = best + 1; i < n; ++i) {
            if (!marked[i] && values[i] > values[best]) best = i;
        }
        marked[best] = true;
    }
}

// e^(x - the highest) for all n values, and their sum.
PAGODA_INLINE float exponentials(float* values, int n) {
    float top = -INFINITY;
    for (int i = 0; i < n; ++i) top = values[i] > top ? values[i] : top;
    for_vectors(n, [&](auto get, auto put) { put(values, exp(sub(get(values), broadcast(top)))); });
    float total = 0.0f;
    for (int i = 0; i < n; ++i) total += values[i];
    return total;
}

void route(const float* logits, int experts, int chosen, bool renormalize, int32_t* numbers,
           float* probabilities) {
    float values[pagoda::kMaxExperts];
    bool marked[pagoda::kMaxExperts];
    std::memcpy(values, logits, static_cast<size_t>(experts) * sizeof(float));
    // By logits: two that differ may have the same probability, and another one in another instruction set.
    mark_highest(values, experts, chosen, marked);
    const float total = exponentials(values, experts);
    float of_chosen = 0.0f;
    int count = 0;
    for (int i = 0; i < experts; ++i) {
        if (!marked[i]) continue;
        numbers[count] = i;
        probabilities[count] = values[i] / total;
        of_chosen += probabilities[count++];
    }
    if (!renormalize) return;
    for (int c = 0; c < chosen; ++c) probabilities[c] /= of_chosen;
}

void weighted_sum(const float* rows, const int64_t* places, const float* weights, int n, int64_t d, float* out) {
    for_vectors(d, [&](auto get, auto put) {
        vec total = zero();
        for (int i = 0; i < n; ++i) {
            if (places[i] >= 0) total = fma(broadcast(weights[i]), get(rows + places[i] * d), total);
        }
        put(out, total);
    });
}

}  // namespace
