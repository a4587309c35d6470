// SPDX-License-Identifier: Apache-2.0
// What is known of a row of logits while it is sampled, and the order of its tokens.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#include "kernels.h"
#include "sampler.h"

namespace pagoda {

// Sums of the tokens of a bucket.
struct Bucket {
    int64_t weight, count;
};

constexpr int64_t kBucketsBytes = kSampleBuckets * static_cast<int64_t>(sizeof(Bucket));

// A token of the bucket where a sum is reached.
struct Candidate {
    uint32_t key;  // of two, the token with the higher one comes first
    uint32_t token;
    int64_t weight;
};

// Order of floats, none NaN, as that of whole numbers.
inline uint32_t key_of(float x) {
    x += 0.0f;  // one key for both zeros
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    return bits & 0x80000000 ? ~bits : bits | 0x80000000;
}
inline float value_of(uint32_t key) {
    const uint32_t bits = key & 0x80000000 ? key & 0x7fffffff : ~key;
    float x;
    std::memcpy(&x, &bits, 4);
    return x;
}

// The tokens on one side of a value, and of those that equal it the ones below `equal_end`.
struct Cut {
    float value;
    int64_t equal_end = std::numeric_limits<int64_t>::max();
    int64_t weight = 0;  // of all tokens that are left
};

// The least whole number that is no less than share / 2^53 of the total, and at least 1.
inline int64_t share_of(int64_t total, uint64_t share) {
    const auto product = static_cast<unsigned __int128>(total) * share;
    return std::max<int64_t>(1, static_cast<int64_t>((product + kCertain - 1) >> 53));
}

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// What is known of a row while it is sampled.
struct Row {
    const SamplingRow* rules;
    const float* raw;  // the model's logits
    float* logits;     // as the rules leave them; maybe in the same place
    float* raw_maxima;
    float* maxima;  // of blocks of `logits`; maybe in the same place
    int64_t* raw_weights;  // of chunks
    int64_t* weights;
    int64_t* products;  // of weights and powers
    int64_t* finite;    // of chunks
    Bucket* buckets;  // null unless tokens are cut
    Outcome outcome;
    int64_t token;
    float raw_highest;
    int64_t total;  // of weights, for top-p or typical-p
    Weighing how;
    int64_t equal_end, distant_end;  // from these tokens on, logits and distances that equal the limits do not count

    bool draws() const { return outcome == Outcome::drawn && !rules->greedy; }
    bool reports() const { return outcome == Outcome::drawn && rules->logprobs >= 0; }

    // How tokens from `begin` on are weighed, up to `end`, which is moved to where that changes.
    Weighing weighing(int64_t begin, int64_t& end) const {
        Weighing now = how;
        if (begin < equal_end) {
            end = std::min(end, equal_end);
        } else {
            now.lowest = std::nextafterf(how.lowest, INFINITY);
        }
        if (begin < distant_end) {
            end = std::min(end, distant_end);
        } else {
            now.farthest = std::nextafterf(how.farthest, -INFINITY);
        }
        return now;
    }

    // False if no token of the block counts.
    bool reached(int64_t block) const {
        const float highest = maxima[block];
        return highest >= how.lowest && (highest - how.highest) * how.scale >= how.lowest_power;
    }
};

}  // namespace pagoda
