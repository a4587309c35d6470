// SPDX-License-Identifier: Apache-2.0
// Sums, norms, rotation and activation of one row.
#pragma once

#include <algorithm>
#include <cmath>

#include "products.h"

namespace {

// More parts than this are added up in a loop.
constexpr int kUnrolledParts = 4;

void add_up(Dtype dtype, const void* const* parts, int count, int64_t d, void* out_) {
    with_type(dtype, [&](auto* type) {
        using T = Pointee<decltype(type)>;
        T* out = static_cast<T*>(out_);
        const auto part = [&](int i) { return static_cast<const T*>(parts[i]); };
        if (count > kUnrolledParts) {
            for_vectors(d, [&](auto get, auto put) {
                vec total = get(part(0));
                for (int i = 1; i < count; ++i) total = add(total, get(part(i)));
                put(out, total);
            });
            return;
        }
        with_count<kUnrolledParts>(count, [&](auto n) {
            const T* all[n.value];
            for (int i = 0; i < n.value; ++i) all[i] = part(i);
            for_vectors(d, [&](auto get, auto put) {
                vec total = get(all[0]);
                for (int i = 1; i < n.value; ++i) total = add(total, get(all[i]));
                put(out, total);
            });
        });
    });
}

PAGODA_INLINE float inverse_root_mean_square(const float* x, float eps, int64_t d) {
    vec squares = zero();
    for_vectors(d, [&](auto get, auto) {
        const vec v = get(x);
        squares = fma(v, v, squares);
    });
    return 1.0f / __builtin_sqrtf(sum(squares) / static_cast<float>(d) + eps);
}

void rms_norm(const float* x, const float* delta, const float* weight, float eps, int64_t d, float* total,
              float* out) {
    if (delta != nullptr) {
        for_vectors(d, [&](auto get, auto put) { put(total, add(get(x), get(delta))); });
        x = total;
    }
    const vec factor = broadcast(inverse_root_mean_square(x, eps, d));
    for_vectors(d, [&](auto get, auto put) { put(out, mul(mul(get(x), factor), get(weight))); });
}

PAGODA_INLINE vec silu(vec gate) { return div(gate, add(broadcast(1.0f), exp(sub(zero(), gate)))); }

void silu_and_mul(const float* gates, int64_t d, float* out) {
    for_vectors(d, [&](auto get, auto put) { put(out, mul(silu(get(gates)), get(gates + d))); });
}

void norm_and_rotate(const float* x, const float* weight, float eps, const float* cosines, const float* sines,
                     int64_t r, int64_t d, float* out) {
    float normed[pagoda::kMaxHeadDim];
    if (weight != nullptr) {
        rms_norm(x, nullptr, weight, eps, d, nullptr, normed);
        x = normed;
    }
    std::copy(x + r, x + d, out + r);
    const int64_t half = r / 2;
    for_vectors(half, [&](auto get, auto put) {
        const vec left = get(x), right = get(x + half), cosine = get(cosines), sine = get(sines);
        put(out, sub(mul(left, cosine), mul(right, sine)));
        put(out + half, add(mul(right, cosine), mul(left, sine)));
    });
}

// ---- operations of a graph that work on every row by itself, by the names in pagoda/backend/operations.py

// x/2 (1 + tanh(y)) is x / (1 + e^-2y).
PAGODA_INLINE vec gelu_tanh(vec x) {
    const vec cubed = mul(mul(x, x), x);
    const vec doubled = mul(broadcast(1.5957691216f), fma(broadcast(0.044715f), cubed, x));
    return div(x, add(broadcast(1.0f), exp(sub(zero(), doubled))));
}

// x/2 (1 + erf(x / sqrt(2))), by erfc within 1.5e-7 (Abramowitz and Stegun 1964, 7.1.26).
PAGODA_INLINE vec gelu(vec x) {
    const vec one = broadcast(1.0f), y = mul(absolute(x), broadcast(0.70710678119f));
    const vec t = div(one, fma(broadcast(0.3275911f), y, one));
    vec p = broadcast(1.061405429f);
    for (const float next : {-1.453152027f, 1.421413741f, -0.284496736f, 0.254829592f}) p = fma(p, t, broadcast(next));
    const vec tail = mul(mul(p, t), exp(sub(zero(), mul(y, y))));  // erfc(y)
    // Of a number below 0 half of the tail is left, of others all but that.
    const vec half = mul(broadcast(0.5f), tail);
    return mul(x, add(half, unless_below(x, zero(), sub(one, add(half, half)))));
}

void layer_norm(const float* x, const float* weight, const float* bias, float eps, int64_t d, float* out) {
    vec total = zero();
    for_vectors(d, [&](auto get, auto) { total = add(total, get(x)); });
    const vec mean = broadcast(sum(total) / static_cast<float>(d));
    for_vectors(d, [&](auto get, auto put) { put(out, sub(get(x), mean)); });
    const vec factor = broadcast(inverse_root_mean_square(out, eps, d));
    for_vectors(d, [&](auto get, auto put) { put(out, fma(mul(get(out), factor), get(weight), get(bias))); });
}

PAGODA_INLINE vec swiglu_oai(vec gate, vec up, vec alpha, vec limit) {
    const vec one = broadcast(1.0f), capped = min(limit, gate), kept = max(sub(zero(), limit), min(limit, up));
    return mul(div(capped, add(one, exp(mul(sub(zero(), alpha), capped)))), add(kept, one));
}

// Sums of squares of the first elements of a row and of those behind them.
void sum_of_squares(const float* x, int64_t first, int64_t second, float* out) {
    for (const int64_t d : {first, second}) {
        vec squares = zero();
        for_vectors(d, [&](auto get, auto) {
            const vec v = get(x);
            squares = fma(v, v, squares);
        });
        *out++ = sum(squares);
        x += d;
    }
}

// Pairs (gate, up) side by side.
void swiglu_oai(const float* pairs, float alpha, float limit, int64_t d, float* out) {
    constexpr int64_t kAtOnce = 64;
    float gates[kAtOnce], ups[kAtOnce];
    for (int64_t first = 0; first < d; first += kAtOnce) {
        const int64_t n = d - first < kAtOnce ? d - first : kAtOnce;
        for (int64_t i = 0; i < n; ++i) {
            gates[i] = pairs[2 * (first + i)];
            ups[i] = pairs[2 * (first + i) + 1];
        }
        for_vectors(n, [&](auto get, auto put) {
            put(out + first, swiglu_oai(get(gates), get(ups), broadcast(alpha), broadcast(limit)));
        });
    }
}

// Layer norms of the heads of d elements in the first elements of a row; the others stay as they are.
void layer_norm_heads(const pagoda::RowOperands& row) {
    const auto elements = static_cast<int64_t>(row.numbers[0]), d = static_cast<int64_t>(row.numbers[1]);
    const auto eps = static_cast<float>(row.numbers[2]);
    for (int64_t i = 0; i < elements; i += d) {
        layer_norm(row.inputs[0] + i, row.weights[0] + i, row.weights[1] + i, eps, d, row.outputs[0] + i);
    }
    std::copy(row.inputs[0] + elements, row.inputs[0] + row.width, row.outputs[0] + elements);
}

// Rotates the heads of d elements in the first elements of a row by r/2 cosines and sines; the others stay as they are.
void rotate_heads(const pagoda::RowOperands& row) {
    const auto elements = static_cast<int64_t>(row.numbers[0]), d = static_cast<int64_t>(row.numbers[1]);
    const auto r = static_cast<int64_t>(row.numbers[2]);
    for (int64_t i = 0; i < elements; i += d) {
        norm_and_rotate(row.inputs[0] + i, nullptr, 0, row.inputs[1], row.inputs[2], r, d, row.outputs[0] + i);
    }
    std::copy(row.inputs[0] + elements, row.inputs[0] + row.width, row.outputs[0] + elements);
}

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

// RMS norms of the heads of d elements in a part of a row; the others stay as they are.
void rms_norm_heads(const pagoda::RowOperands& row) {
    const auto first = static_cast<int64_t>(row.numbers[0]), elements = static_cast<int64_t>(row.numbers[1]);
    const auto d = static_cast<int64_t>(row.numbers[2]);
    const auto eps = static_cast<float>(row.numbers[3]);
    const float* x = row.inputs[0];
    float* out = row.outputs[0];
    std::copy(x, x + first, out);
    for (int64_t i = 0; i < elements; i += d) {
        rms_norm(x + first + i, nullptr, row.weights[0] + i, eps, d, nullptr, out + first + i);
    }
    std::copy(x + first + elements, x + row.width, out + first + elements);
}

// Weights of two experts, each among those whose logits are not far below its own; 0 of others (Liu et al. 2024).
void sparse_mixing(const pagoda::RowOperands& row) {
    const auto farthest = 2.0f * static_cast<float>(row.numbers[0]);
    const float* logits = row.inputs[0];
    const auto n = static_cast<int>(row.width);
    std::fill_n(row.outputs[0], n, 0.0f);
    int first = -1;
    for (int round = 0; round < 2; ++round) {
        int best = first == 0 ? 1 : 0;
        for (int i = best + 1; i < n; ++i) {
            if (i != first && logits[i] > logits[best]) best = i;
        }
        const float top = logits[best];
        float total = 0.0f;
        for (int i = 0; i < n; ++i) {
            const float size = std::max(std::fabs(logits[i]), top);
            if (i != first && !((top - logits[i]) / size > farthest)) total += std::exp(logits[i] - top);
        }
        row.outputs[0][best] = 1.0f / total;
        first = best;
    }
}

// Weights of a row's experts, 0 of others, each times its factor; those behind the kept ones are added up.
void expert_weights(const pagoda::RowOperands& row) {
    float scores[pagoda::kMaxExperts], choice[pagoda::kMaxExperts];
    bool marked[pagoda::kMaxExperts];
    const auto chosen = static_cast<int>(row.numbers[0]), n = static_cast<int>(row.inputs_width);
    const bool renormalize = row.numbers[1] != 0, corrected = row.numbers[2] != 0;
    const auto kept = std::min<int64_t>(n, row.width);
    std::copy_n(row.inputs[0], n, scores);
    const float total = exponentials(scores, n);
    for (int i = 0; i < n; ++i) choice[i] = corrected ? scores[i] / total + row.weights[1][i] : row.inputs[0][i];
    mark_highest(choice, n, chosen, marked);
    float of_chosen = 0.0f;
    for (int i = 0; i < n; ++i) of_chosen += marked[i] ? scores[i] / total : 0.0f;
    const float divisor = renormalize ? of_chosen : 1.0f;
    std::fill_n(row.outputs[0], row.width, 0.0f);
    for (int i = 0; i < n; ++i) {
        const int64_t place = kept < n ? std::min<int64_t>(i, kept - 1) : i;
        if (marked[i]) row.outputs[0][place] += scores[i] / total / divisor * row.weights[0][i];
    }
}

// By how much numbers are more than so many standard deviations above the mean of their row; 0 where they are not.
void above_deviations(const pagoda::RowOperands& row) {
    vec total = zero();
    for_vectors(row.width, [&](auto get, auto) { total = add(total, get(row.inputs[0])); });
    const vec mean = broadcast(sum(total) / static_cast<float>(row.width));
    vec squares = zero();
    for_vectors(row.width, [&](auto get, auto put) { put(row.outputs[0], sub(get(row.inputs[0]), mean)); });
    for_vectors(row.width, [&](auto get, auto) {
        const vec v = get(row.outputs[0]);
        squares = fma(v, v, squares);
    });
    const float deviation = __builtin_sqrtf(sum(squares) / static_cast<float>(row.width));
    const vec least = broadcast(deviation * static_cast<float>(row.numbers[0]));
    for_vectors(row.width, [&](auto get, auto put) { put(row.outputs[0], max(zero(), sub(get(row.outputs[0]), least))); });
}

// A row brought to the root mean square of another one.
void match_magnitude(const pagoda::RowOperands& row) {
    const auto mean_square = [&](const float* x) {
        vec squares = zero();
        for_vectors(row.width, [&](auto get, auto) {
            const vec v = get(x);
            squares = fma(v, v, squares);
        });
        return sum(squares) / static_cast<float>(row.width);
    };
    const float wanted = __builtin_sqrtf(mean_square(row.inputs[1]));
    const float own = __builtin_sqrtf(std::max(mean_square(row.inputs[0]), static_cast<float>(row.numbers[0])));
    const vec factor = broadcast(wanted / own);
    for_vectors(row.width, [&](auto get, auto put) { put(row.outputs[0], mul(get(row.inputs[0]), factor)); });
}

// Each of several streams plus all of them times its own numbers (AltUp's prediction).
void mix_streams(const pagoda::RowOperands& row) {
    const auto count = static_cast<int64_t>(row.numbers[0]), d = row.width / count;
    for (int64_t to = 0; to < count; ++to) {
        for_vectors(d, [&](auto get, auto put) {
            vec total = get(row.inputs[0] + to * d);
            for (int64_t from = 0; from < count; ++from) {
                total = fma(get(row.inputs[0] + from * d), broadcast(row.inputs[1][to * count + from]), total);
            }
            put(row.outputs[0] + to * d, total);
        });
    }
}

// Each of several streams plus a number of its own, and one, times what the first one lacks of x (AltUp's correction).
void correct_streams(const pagoda::RowOperands& row) {
    const auto count = static_cast<int64_t>(row.numbers[0]), d = row.width / count;
    for (int64_t to = 0; to < count; ++to) {
        const vec factor = broadcast(row.inputs[2][to] + 1.0f);
        for_vectors(d, [&](auto get, auto put) {
            put(row.outputs[0] + to * d,
                fma(sub(get(row.inputs[1]), get(row.inputs[0])), factor, get(row.inputs[0] + to * d)));
        });
    }
}

// Of numbers above 0 positive x^2 + beta x, of others negative (e^min(x, eps) - 1 - x) + beta x.
PAGODA_INLINE vec xielu(vec x, vec positive, vec negative, vec beta, vec eps) {
    const vec power = sub(exp(min(x, eps)), broadcast(1.0f)), above = max(x, zero());
    const vec below = unless_below(zero(), x, mul(negative, sub(power, x)));
    return fma(beta, x, add(mul(positive, mul(above, above)), below));
}

constexpr pagoda::RowKernel kRowKernels[] = {
    {"add",
     [](const pagoda::RowOperands& row) {
         for_vectors(row.width, [&](auto get, auto put) {
             put(row.outputs[0], add(get(row.inputs[0]), get(row.inputs[1])));
         });
     }},
    {"rms_norm",
     [](const pagoda::RowOperands& row) {
         const auto eps = static_cast<float>(row.numbers[0]);
         rms_norm(row.inputs[0], nullptr, row.weights[0], eps, row.width, nullptr, row.outputs[0]);
     }},
    {"silu_and_mul",
     [](const pagoda::RowOperands& row) { silu_and_mul(row.inputs[0], row.width, row.outputs[0]); }},
    {"gelu_and_mul",
     [](const pagoda::RowOperands& row) {
         for_vectors(row.width, [&](auto get, auto put) {
             put(row.outputs[0], mul(gelu_tanh(get(row.inputs[0])), get(row.inputs[0] + row.width)));
         });
     }},
    {"gelu_erf_and_mul",
     [](const pagoda::RowOperands& row) {
         for_vectors(row.width, [&](auto get, auto put) {
             put(row.outputs[0], mul(gelu(get(row.inputs[0])), get(row.inputs[0] + row.width)));
         });
     }},
    {"swiglu_oai",
     [](const pagoda::RowOperands& row) {
         const auto alpha = static_cast<float>(row.numbers[0]), limit = static_cast<float>(row.numbers[1]);
         swiglu_oai(row.inputs[0], alpha, limit, row.width, row.outputs[0]);
     }},
    {"gelu",
     [](const pagoda::RowOperands& row) {
         for_vectors(row.width, [&](auto get, auto put) { put(row.outputs[0], gelu(get(row.inputs[0]))); });
     }},
    {"gelu_tanh",
     [](const pagoda::RowOperands& row) {
         for_vectors(row.width, [&](auto get, auto put) { put(row.outputs[0], gelu_tanh(get(row.inputs[0]))); });
     }},
    {"silu",
     [](const pagoda::RowOperands& row) {
         for_vectors(row.width, [&](auto get, auto put) { put(row.outputs[0], silu(get(row.inputs[0]))); });
     }},
    {"relu",
     [](const pagoda::RowOperands& row) {
         for_vectors(row.width, [&](auto get, auto put) { put(row.outputs[0], max(zero(), get(row.inputs[0]))); });
     }},
    {"xielu",
     [](const pagoda::RowOperands& row) {
         vec n[4];
         for (int i = 0; i < 4; ++i) n[i] = broadcast(static_cast<float>(row.numbers[i]));
         for_vectors(row.width, [&](auto get, auto put) {
             put(row.outputs[0], xielu(get(row.inputs[0]), n[0], n[1], n[2], n[3]));
         });
     }},
    {"clip",
     [](const pagoda::RowOperands& row) {
         const vec most = broadcast(static_cast<float>(row.numbers[0])), least = sub(zero(), most);
         for_vectors(row.width, [&](auto get, auto put) {
             put(row.outputs[0], max(least, min(most, get(row.inputs[0]))));
         });
     }},
    {"layer_norm_heads", layer_norm_heads},
    {"rotate_heads", rotate_heads},
    {"rms_norm_heads", rms_norm_heads},
    {"sparse_mixing", sparse_mixing},
    {"expert_weights", expert_weights},
    {"above_deviations", above_deviations},
    {"match_magnitude", match_magnitude},
    {"mix_streams", mix_streams},
    {"correct_streams", correct_streams},
    {"join_columns",
     [](const pagoda::RowOperands& row) {
         const int64_t first = row.inputs_width;
         std::copy_n(row.inputs[0], first, row.outputs[0]);
         std::copy_n(row.inputs[1], row.width - first, row.outputs[0] + first);
     }},
    {"columns",
     [](const pagoda::RowOperands& row) {
         std::copy_n(row.inputs[0] + static_cast<int64_t>(row.numbers[0]), row.width, row.outputs[0]);
     }},
    {"scale",
     [](const pagoda::RowOperands& row) {
         const vec factor = broadcast(static_cast<float>(row.numbers[0]));
         for_vectors(row.width, [&](auto get, auto put) { put(row.outputs[0], mul(get(row.inputs[0]), factor)); });
     }},
    {"sigmoid",
     [](const pagoda::RowOperands& row) {
         const vec one = broadcast(1.0f);
         for_vectors(row.width, [&](auto get, auto put) {
             put(row.outputs[0], div(one, add(one, exp(sub(zero(), get(row.inputs[0]))))));
         });
     }},
    {"mul",
     [](const pagoda::RowOperands& row) {
         for_vectors(row.width, [&](auto get, auto put) {
             put(row.outputs[0], mul(get(row.inputs[0]), get(row.inputs[1])));
         });
     }},
    {"scale_rows",
     [](const pagoda::RowOperands& row) {
         const vec factor = broadcast(row.inputs[1][0]);
         for_vectors(row.width, [&](auto get, auto put) { put(row.outputs[0], mul(get(row.inputs[0]), factor)); });
     }},
    {"scale_heads",
     [](const pagoda::RowOperands& row) {
         const auto d = static_cast<int64_t>(row.numbers[0]);
         for (int64_t first = 0; first < row.width; first += d) {
             const vec factor = broadcast(row.inputs[1][first / d]);
             for_vectors(d, [&](auto get, auto put) {
                 put(row.outputs[0] + first, mul(get(row.inputs[0] + first), factor));
             });
         }
     }},
    {"sum_of_squares",
     [](const pagoda::RowOperands& row) {
         const auto queries = static_cast<int64_t>(row.numbers[0]), keys = static_cast<int64_t>(row.numbers[1]);
         sum_of_squares(row.inputs[0], queries, keys, row.outputs[0]);
     }},
    {"norm_by_squares",
     [](const pagoda::RowOperands& row) {
         const float *x = row.inputs[0], *end = x + row.width;
         float* out = row.outputs[0];
         for (int part = 0; part < 2; ++part) {
             const auto d = static_cast<int64_t>(row.numbers[part]);
             const float mean = row.inputs[1][part] / static_cast<float>(row.numbers[2 + part]);
             const vec factor = broadcast(1.0f / __builtin_sqrtf(mean + static_cast<float>(row.numbers[4])));
             const float* weight = row.weights[part];
             for_vectors(d, [&](auto get, auto put) { put(out, mul(mul(get(x), factor), get(weight))); });
             x += d, out += d;
         }
         std::copy(x, end, out);
     }},
    {"softcap",
     [](const pagoda::RowOperands& row) {
         // tanh(y) is 1 - 2 / (1 + e^2y).
         const auto number = static_cast<float>(row.numbers[0]);
         const vec cap = broadcast(number), slope = broadcast(2.0f / number), one = broadcast(1.0f);
         for_vectors(row.width, [&](auto get, auto put) {
             const vec rest = div(add(cap, cap), add(exp(mul(get(row.inputs[0]), slope)), one));
             put(row.outputs[0], sub(cap, rest));
         });
     }},
    {"layer_norm",
     [](const pagoda::RowOperands& row) {
         const auto eps = static_cast<float>(row.numbers[0]);
         layer_norm(row.inputs[0], row.weights[0], row.weights[1], eps, row.width, row.outputs[0]);
     }},
    {"rms_norm_groups",
     [](const pagoda::RowOperands& row) {
         const auto d = static_cast<int64_t>(row.numbers[0]);
         const auto eps = static_cast<float>(row.numbers[1]);
         for (int64_t i = 0; i < row.width; i += d) {
             rms_norm(row.inputs[0] + i, nullptr, row.weights[0] + i, eps, d, nullptr, row.outputs[0] + i);
         }
     }},
    {"gated_head_norm",
     [](const pagoda::RowOperands& row) {
         const auto d = static_cast<int64_t>(row.numbers[0]);
         const auto eps = static_cast<float>(row.numbers[1]);
         for (int64_t first = 0; first < row.width; first += d) {
             const float *x = row.inputs[0] + first, *gate = row.inputs[1] + first;
             float* out = row.outputs[0] + first;
             rms_norm(x, nullptr, row.weights[0], eps, d, nullptr, out);
             for_vectors(d, [&](auto get, auto put) { put(out, mul(get(out), silu(get(gate)))); });
         }
     }},
    {nullptr, nullptr},
};

}  // namespace
