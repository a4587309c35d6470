// SPDX-License-Identifier: Apache-2.0
#include "populator.h"

#ifdef __linux__
#include <pthread.h>
#include <sched.h>
#endif

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <utility>

#include "pages.h"

namespace pagoda {

namespace {

constexpr uintptr_t kPage = 4096;

// An idle thread gives way to any other at once. Returns false where the system has no such threads.
bool become_idle() {
#ifdef __linux__
    pthread_setname_np(pthread_self(), "kv-populator");
    const sched_param none{};
    return pthread_setschedparam(pthread_self(), SCHED_IDLE, &none) == 0;
#else
    return false;
#endif
}

}  // namespace

Populator::Populator(std::vector<Region> regions, int64_t num_blocks)
    : regions_(std::move(regions)), num_blocks_(num_blocks) {
    for (const Region& region : regions_) {
        if (region.block_bytes < 1) throw std::invalid_argument("a block has no bytes");
        stretch_ = std::max(stretch_, static_cast<int64_t>(kLargePage) / region.block_bytes);
    }
    thread_ = std::thread(&Populator::run, this);
}

Populator::~Populator() {
    stop_ = true;
    ++changes_;
    changes_.notify_one();
    thread_.join();
}

void Populator::advance(int64_t end) {
    wanted_ = std::max(wanted_.load(), std::min(end, num_blocks_));
    ++changes_;
    changes_.notify_one();
}

void Populator::wait() const {
    for (int64_t done = done_; done < wanted_; done = done_) done_.wait(done);
}

void Populator::run() {
    const bool idle = become_idle();
    while (idle && !stop_) {
        const int changes = changes_;
        const int64_t first = done_, end = std::min(wanted_.load(), first + stretch_);
        if (first == end) {
            changes_.wait(changes);
            continue;
        }
        for (const Region& region : regions_) {
            if (!touch(region, first, end)) return;
        }
        done_ = end;
        done_.notify_all();
    }
    done_ = std::numeric_limits<int64_t>::max();
    done_.notify_all();
}

// A page is taken by a write. Adding nothing is one that keeps whatever is written there at the same time.
bool Populator::touch(const Region& region, int64_t first, int64_t end) const {
    const auto at = [&](int64_t block) { return region.address + static_cast<uintptr_t>(block * region.block_bytes); };
    // The page that begins before later blocks has been touched with the ones before.
    uintptr_t page = first == 0 ? at(first) : (at(first) + kPage - 1) / kPage * kPage;
    for (; page < at(end); page = (page / kPage + 1) * kPage) {
        if (stop_) return false;
        std::atomic_ref<uint8_t>(*reinterpret_cast<uint8_t*>(page)).fetch_add(0, std::memory_order_relaxed);
    }
    return true;
}

}  // namespace pagoda
