// SPDX-License-Identifier: Apache-2.0
#include "dispatch.h"

#include <algorithm>
#include <utility>

#include "panels.h"

namespace pagoda {

struct Dispatch::Memory {
    int32_t* chosen;   // [n, per_token]
    float* weights;    // [n, per_token]
    int64_t* places;   // [n, ranks] of the rows that are sent, -1 where none is
    float* sent;       // [pairs, hidden + num_experts], of tokens and ranks that they go to
    float* received;   // [all, hidden + num_experts]
    float* logits;     // [all, num_experts]
    float* given;      // [all, hidden], by the experts here
    float* back;       // [pairs, hidden], by those of all ranks
    void* experts;
    size_t bytes = 0;

    Memory(const Dispatch& owner, int64_t n, int64_t all, void* scratch) {
        const ExpertRouting& routing = owner.experts_.routing;
        const int64_t hidden = owner.experts_.hidden, pairs = n * owner.most_ranks();
        const auto take = [&](auto*& where, int64_t count) {
            where = reinterpret_cast<std::remove_reference_t<decltype(where)>>(static_cast<char*>(scratch) + bytes);
            bytes += (static_cast<size_t>(count) * sizeof(*where) + 63) / 64 * 64;
        };
        take(chosen, n * routing.per_token);
        take(weights, n * routing.per_token);
        take(places, n * owner.group_.size);
        take(sent, pairs * owner.row());
        take(received, all * owner.row());
        take(logits, all * routing.num_experts);
        take(given, all * hidden);
        take(back, pairs * hidden);
        experts = static_cast<char*>(scratch) + bytes;
        bytes += experts_scratch(owner.held_, all);
    }
};

Dispatch::Dispatch(const Experts& experts, Group& group, std::vector<int64_t> first_experts)
    : experts_(experts), held_(experts), uncounted_(static_cast<size_t>(experts.routing.num_experts)), group_(group),
      first_experts_(std::move(first_experts)), sent_(static_cast<size_t>(group.size * group.size)) {
    held_.counts = uncounted_.data();
}

int64_t Dispatch::most_ranks() const { return std::min<int64_t>(group_.size, experts_.routing.per_token); }

size_t Dispatch::scratch(int64_t n, int64_t all) const { return Memory(*this, n, all, nullptr).bytes; }

void Dispatch::send(const float* x, const float* logits, int64_t n, const Memory& m) {
    const ExpertRouting& routing = experts_.routing;
    const int64_t hidden = experts_.hidden, ranks = group_.size;
    std::fill_n(m.places, n * ranks, -1);
    for (int64_t pair = 0; pair < n * routing.per_token; ++pair) {
        const int64_t expert = m.chosen[pair];
        ++experts_.counts[expert];
        const auto behind = std::upper_bound(first_experts_.begin(), first_experts_.end(), expert);
        m.places[pair / routing.per_token * ranks + (behind - first_experts_.begin() - 1)] = 0;
    }
    std::vector<int64_t> own(static_cast<size_t>(ranks));
    int64_t next = 0;
    for (int64_t rank = 0; rank < ranks; ++rank) {
        for (int64_t i = 0; i < n; ++i) {
            int64_t& place = m.places[i * ranks + rank];
            if (place < 0) continue;
            place = next++;
            float* to = std::copy_n(x + i * hidden, hidden, m.sent + place * row());
            std::copy_n(logits + i * routing.num_experts, routing.num_experts, to);
            ++own[static_cast<size_t>(rank)];
        }
    }
    // Of an exchange that fails nothing is left: as if nobody had sent anything.
    std::fill(sent_.begin(), sent_.end(), 0);
    group_.all_gather(own.data(), ranks * static_cast<int64_t>(sizeof(int64_t)), sent_.data());
    received_ = 0;
    std::vector<int64_t> bytes;
    for (size_t i = 0; i < sent_.size(); ++i) {
        bytes.push_back(sent_[i] * row() * static_cast<int64_t>(sizeof(float)));
        if (static_cast<int>(i) % group_.size == group_.rank) received_ += sent_[i];
    }
    group_.all_to_all(m.sent, bytes, m.received);
}

void Dispatch::compute(const float* x, const float* logits, int64_t n, int64_t all, float* out, void* scratch) {
    const ExpertRouting& routing = experts_.routing;
    const int64_t hidden = experts_.hidden, ranks = group_.size;
    const Memory m(*this, n, all, scratch);
    parallel_for_rows(n, [&](int64_t i) {
        experts_.table.route(logits + i * routing.num_experts, routing, experts_.correction,
                             m.chosen + i * routing.per_token, m.weights + i * routing.per_token);
    });
#pragma omp master
    send(x, logits, n, m);
#pragma omp barrier
    parallel_for_rows(received_, [&](int64_t i) {
        std::copy_n(m.received + i * row() + hidden, routing.num_experts, m.logits + i * routing.num_experts);
    });
    if (received_ > 0) compute_experts(held_, m.received, row(), m.logits, received_, m.given, m.experts);
#pragma omp master
    {
        std::vector<int64_t> bytes;
        for (int64_t i = 0; i < ranks * ranks; ++i) {  // what came goes back
            bytes.push_back(sent_[static_cast<size_t>(i % ranks * ranks + i / ranks)] * hidden *
                            static_cast<int64_t>(sizeof(float)));
        }
        group_.all_to_all(m.given, bytes, m.back);
    }
#pragma omp barrier
    parallel_for_rows(n, [&](int64_t i) {
        float* to = out + i * hidden;
        std::fill_n(to, hidden, 0.0f);
        for (int64_t rank = 0; rank < ranks; ++rank) {
            const int64_t place = m.places[i * ranks + rank];
            if (place < 0) continue;
            const float* part = m.back + place * hidden;
            for (int64_t j = 0; j < hidden; ++j) to[j] += part[j];
        }
    });
}

}  // namespace pagoda
