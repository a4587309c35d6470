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

template <class T>
PAGODA_INLINE float inverse_root_mean_square(const T* x, float eps, int64_t d) {
    vec squares = zero();
    for_vectors(d, [&](auto get, auto) {
        const vec v = get(x);
        squares = fma(v, v, squares);
    });
    return 1.0f / __builtin_sqrtf(sum(squares) / static_cast<float>(d) + eps);
}

void rms_norm(Dtype dtype, const void* x_, const void* delta_, const void* weight_, float eps, int64_t d,
              void* sum_, void* out_) {
    with_type(dtype, [&](auto* type) {
        using T = Pointee<decltype(type)>;
        const T* x = static_cast<const T*>(x_);
        if (delta_ != nullptr) {
            const T* delta = static_cast<const T*>(delta_);
            T* total = static_cast<T*>(sum_);
            for_vectors(d, [&](auto get, auto put) { put(total, add(get(x), get(delta))); });
            x = total;
        }
        const T* weight = static_cast<const T*>(weight_);
        T* out = static_cast<T*>(out_);
        const vec factor = broadcast(inverse_root_mean_square(x, eps, d));
        for_vectors(d, [&](auto get, auto put) {
            put(out, mul(rounded(mul(get(x), factor), type), get(weight)));
        });
    });
}

void silu_and_mul(Dtype dtype, const void* gate_up, int64_t d, void* out_) {
    with_type(dtype, [&](auto* type) {
        using T = Pointee<decltype(type)>;
        const T* gates = static_cast<const T*>(gate_up);
        T* out = static_cast<T*>(out_);
        for_vectors(d, [&](auto get, auto put) {
            const vec gate = get(gates);
            const vec silu = div(gate, add(broadcast(1.0f), exp(sub(zero(), gate))));
            put(out, mul(rounded(silu, type), get(gates + d)));
        });
    });
}

void norm_and_rotate(Dtype dtype, const void* x_, const void* weight_, float eps, const float* cosines,
                     const float* sines, int64_t d, void* out_) {
    with_type(dtype, [&](auto* type) {
        using T = Pointee<decltype(type)>;
        const T* x = static_cast<const T*>(x_);
        const T* weight = static_cast<const T*>(weight_);
        T* out = static_cast<T*>(out_);
        T normed[pagoda::kMaxHeadDim];
        if (weight != nullptr) {
            const vec factor = broadcast(inverse_root_mean_square(x, eps, d));
            for_vectors(d, [&](auto get, auto put) {
                put(normed, mul(rounded(mul(get(x), factor), type), get(weight)));
            });
            x = normed;
        }
        const int64_t half = d / 2;
        for_vectors(half, [&](auto get, auto put) {
            const vec left = get(x), right = get(x + half), cosine = get(cosines), sine = get(sines);
            put(out, sub(mul(left, cosine), mul(right, sine)));
            put(out + half, add(mul(right, cosine), mul(left, sine)));
        });
    });
}

void to_float(Dtype dtype, const void* x, float scale, int64_t d, float* out) {
    with_type(dtype, [&](auto* type) {
        const auto* typed = static_cast<decltype(type)>(const_cast<void*>(x));
        for_vectors(d, [&](auto get, auto put) { put(out, mul(get(typed), broadcast(scale))); });
    });
}

}  // namespace
