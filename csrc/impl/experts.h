// SPDX-License-Identifier: Apache-2.0
// Which experts a token goes through, and the sum of what they give.
#pragma once

#include <cmath>

#include "rows.h"

namespace {

// The highest, or the sum of the two highest, of n values.
PAGODA_INLINE float best_of(const float* values, int n, bool two) {
    float best = -INFINITY, second = -INFINITY;
    for (int i = 0; i < n; ++i) {
        second = values[i] > best ? best : values[i] > second ? values[i] : second;
        best = values[i] > best ? values[i] : best;
    }
    return two ? best + second : best;
}

// The chosen experts by `values`, which are changed: of the best groups, if there are several.
PAGODA_INLINE void mark_chosen(float* values, const pagoda::ExpertRouting& routing, bool* marked) {
    if (routing.groups > 1) {
        float best[pagoda::kMaxExperts];
        bool open[pagoda::kMaxExperts];
        const int size = routing.num_experts / routing.groups;
        for (int g = 0; g < routing.groups; ++g) best[g] = best_of(values + g * size, size, routing.best_two);
        mark_highest(best, routing.groups, routing.groups_per_token, open);
        for (int i = 0; i < routing.num_experts; ++i) values[i] = open[i / size] ? values[i] : -INFINITY;
    }
    mark_highest(values, routing.num_experts, routing.per_token, marked);
}

void route(const float* logits, const pagoda::ExpertRouting& routing, const float* correction, int32_t* numbers,
           float* weights) {
    float values[pagoda::kMaxExperts], choice[pagoda::kMaxExperts];
    bool marked[pagoda::kMaxExperts];
    const int experts = routing.num_experts;
    std::memcpy(values, logits, static_cast<size_t>(experts) * sizeof(float));
    std::memcpy(choice, values, static_cast<size_t>(experts) * sizeof(float));
    float total = 1.0f;
    if (routing.scores == pagoda::Scores::sigmoid) {
        const vec one = broadcast(1.0f);
        for_vectors(experts, [&](auto get, auto put) { put(values, div(one, add(one, exp(sub(zero(), get(values)))))); });
    } else if (routing.scores == pagoda::Scores::softmax) {
        total = exponentials(values, experts);
    }
    // By logits where they decide: two that differ may have the same score, and another one in another instruction set.
    if (routing.by_scores(correction)) {
        for (int i = 0; i < experts; ++i) choice[i] = values[i] / total + (correction != nullptr ? correction[i] : 0.0f);
    }
    mark_chosen(choice, routing, marked);
    float of_chosen = 0.0f;
    int count = 0;
    for (int i = 0; i < experts; ++i) {
        if (!marked[i]) continue;
        numbers[count] = i;
        weights[count] = values[i] / total;
        of_chosen += weights[count++];
    }
    // Sigmoids may all be 0.
    const float divisor = routing.renormalize ? of_chosen + 1e-20f : 1.0f;
    for (int c = 0; c < routing.per_token; ++c) weights[c] = weights[c] / divisor * routing.factor;
}

void gate_and_mul(const pagoda::Gate& gate, const float* gates, const float* ups, int64_t d, float* out) {
    switch (gate.kind) {
        case pagoda::GateKind::silu:
            for_vectors(d, [&](auto get, auto put) { put(out, mul(silu(get(gates)), get(ups))); });
            return;
        case pagoda::GateKind::gelu_tanh:
            for_vectors(d, [&](auto get, auto put) { put(out, mul(gelu_tanh(get(gates)), get(ups))); });
            return;
        case pagoda::GateKind::swiglu_oai:
            for_vectors(d, [&](auto get, auto put) {
                put(out, swiglu_oai(get(gates), get(ups), broadcast(gate.alpha), broadcast(gate.limit)));
            });
            return;
        case pagoda::GateKind::relu:
            for_vectors(d, [&](auto get, auto put) { put(out, mul(max(zero(), get(gates)), get(ups))); });
            return;
        case pagoda::GateKind::clamped_silu: {
            const vec most = broadcast(gate.limit), least = broadcast(-gate.limit);
            for_vectors(d, [&](auto get, auto put) {
                put(out, mul(min(most, silu(get(gates))), max(least, min(most, get(ups)))));
            });
            return;
        }
    }
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
