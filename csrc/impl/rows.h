// Sums, norms, rotation and activation of one row.
#pragma once

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

void silu_and_mul(const float* gates, int64_t d, float* out) {
    for_vectors(d, [&](auto get, auto put) {
        const vec gate = get(gates);
        const vec silu = div(gate, add(broadcast(1.0f), exp(sub(zero(), gate))));
        put(out, mul(silu, get(gates + d)));
    });
}

void norm_and_rotate(const float* x, const float* weight, float eps, const float* cosines, const float* sines,
                     int64_t d, float* out) {
    float normed[pagoda::kMaxHeadDim];
    if (weight != nullptr) {
        rms_norm(x, nullptr, weight, eps, d, nullptr, normed);
        x = normed;
    }
    const int64_t half = d / 2;
    for_vectors(half, [&](auto get, auto put) {
        const vec left = get(x), right = get(x + half), cosine = get(cosines), sine = get(sines);
        put(out, sub(mul(left, cosine), mul(right, sine)));
        put(out + half, add(mul(right, cosine), mul(left, sine)));
    });
}

}  // namespace
