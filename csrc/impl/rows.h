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
