// SPDX-License-Identifier: Apache-2.0
#include "collectives.h"

#include <omp.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/stat.h>
#ifdef __linux__
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstring>
#include <numeric>
#include <stdexcept>
#include <system_error>

#include "pages.h"
#include "panels.h"

namespace pagoda {

namespace {

// Of one rank; larger messages go slot by slot. All ranks' slots stay in the last cache.
constexpr int64_t kSlotBytes = 1 << 20;
// Up to this size one thread does all the work: meeting its own team would take longer.
constexpr int64_t kOneThreadBytes = 1 << 14;
// From this size on, and with more than two ranks, each rank sums a part and reads the rest from others.
constexpr int64_t kByPartsBytes = 1 << 16;

// How often a rank looks before it gives way to others, at most and at least, and before it sleeps. As long as
// ranks have cores of their own, the others come while it looks.
constexpr int kMostSpins = 2048, kLeastSpins = 16, kYields = 16;
// At every so many meetings a rank looks as often as it may: after a pause, that is how it finds out that the others
// come while it looks again, though a little later than the least would tell.
constexpr uint32_t kMeetingsBetweenTries = 64;

// Lets the core's other thread, or its clock, have this moment.
void pause_briefly() {
#ifdef __aarch64__
    asm volatile("isb" ::: "memory");
#else
    __builtin_ia32_pause();
#endif
}

void sleep_unless_changed(std::atomic<uint32_t>& word, uint32_t seen) {
#ifdef __linux__
    syscall(SYS_futex, &word, FUTEX_WAIT, seen, nullptr, nullptr, 0);
#else
    sched_yield();
#endif
}

void wake_all(std::atomic<uint32_t>& word) {
#ifdef __linux__
    syscall(SYS_futex, &word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
#endif
}

}  // namespace

struct Collectives::Shared {
    alignas(64) std::atomic<uint32_t> arrivals;
    std::atomic<uint32_t> sleepers;
    alignas(4096) char slots[];
};
static_assert(std::atomic<uint32_t>::is_always_lock_free);

// A part of a row of elements, between cache lines.
struct Collectives::Part {
    int64_t begin, end;

    // The index-th of so many parts of `count` elements.
    Part(int64_t count, int64_t index, int64_t parts) {
        constexpr int64_t line = 32;
        const int64_t lines = (count + line - 1) / line;
        begin = std::min(lines * index / parts * line, count);
        end = std::min(lines * (index + 1) / parts * line, count);
    }
    // The same of a part.
    Part(const Part& whole, int64_t index, int64_t parts) : Part(whole.end - whole.begin, index, parts) {
        begin += whole.begin;
        end += whole.begin;
    }
};

void Collectives::copy(void* to, const void* from, const Part& part, int64_t item) {
    std::memcpy(at(to, part.begin * item), at(from, part.begin * item),
                static_cast<size_t>((part.end - part.begin) * item));
}

int64_t Collectives::bytes(int size) { return static_cast<int64_t>(sizeof(Shared)) + 2 * size * kSlotBytes; }

Collectives::Collectives(int descriptor, int rank, int size) : rank_(rank), size_(size), spins_(kMostSpins) {
    if (size > kMaxRanks) throw std::invalid_argument("a group has at most 64 ranks on one host");
    if (rank < 0 || rank >= size) throw std::invalid_argument("there is no such rank");
    struct stat facts;
    if (fstat(descriptor, &facts) != 0) throw std::system_error(errno, std::generic_category());
    if (facts.st_size != bytes(size)) throw std::invalid_argument("the memory is not that of a group of this size");
    void* memory = mmap(nullptr, static_cast<size_t>(bytes(size)), PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
    if (memory == MAP_FAILED) throw std::system_error(errno, std::generic_category());
    shared_ = static_cast<Shared*>(memory);
    advise_large_pages(shared_, bytes(size));
}

Collectives::~Collectives() { munmap(shared_, static_cast<size_t>(bytes(size_))); }

char* Collectives::slot(int rank, uint64_t message) const {
    return shared_->slots + ((message & 1) * static_cast<uint64_t>(size_) + static_cast<uint64_t>(rank)) * kSlotBytes;
}

void Collectives::meet() {
    arrivals_ += static_cast<uint32_t>(size_);
    if (shared_->arrivals.fetch_add(1) + 1 != arrivals_) return wait_for(arrivals_);
    if (shared_->sleepers.load() > 0) wake_all(shared_->arrivals);
}

// Nobody is more than one meeting ahead, so that many arrivals can only be of all ranks.
void Collectives::wait_for(uint32_t arrivals) {
    const auto reached = [&](uint32_t seen) { return static_cast<int32_t>(seen - arrivals) >= 0; };
    const bool tries = arrivals / static_cast<uint32_t>(size_) % kMeetingsBetweenTries == 0;
    const int spins = tries ? kMostSpins : spins_;
    for (int i = 0; i < spins; ++i) {
        if (reached(shared_->arrivals.load(std::memory_order_acquire))) {
            spins_ = std::min(kMostSpins, 2 * spins);
            return;
        }
        pause_briefly();
    }
    spins_ = std::max(kLeastSpins, spins_ / 2);
    for (int i = 0; i < kYields; ++i) {
        sched_yield();
        if (reached(shared_->arrivals.load(std::memory_order_acquire))) return;
    }
    // Whoever arrives last reads this after it has arrived; so it wakes this rank, or this rank sees its arrival.
    shared_->sleepers.fetch_add(1);
    for (uint32_t seen; !reached(seen = shared_->arrivals.load());) sleep_unless_changed(shared_->arrivals, seen);
    shared_->sleepers.fetch_sub(1);
}

void Collectives::all_reduce(const KernelTable& table, Dtype dtype, void* x, int64_t count) {
    if (size_ == 1 || count == 0) return;
    const int64_t item = size_of(dtype), slot_count = kSlotBytes / item;
    if (count * item <= kOneThreadBytes) {
#pragma omp single
        {
            publish(x, {count, 0, 1}, item, messages_);
            meet();
            sum_all(table, dtype, x, {count, 0, 1}, messages_++);
        }
        return;
    }
    const bool by_parts = size_ > 2 && count * item >= kByPartsBytes;
    uint64_t message = messages_;
    for (int64_t first = 0; first < count; first += slot_count, ++message) {
        void* chunk = at(x, first * item);
        const int64_t n = std::min(slot_count, count - first);
        if (by_parts) {
            reduce_by_parts(table, dtype, chunk, n, message);
        } else {
            reduce_at_once(table, dtype, chunk, n, message);
        }
    }
#pragma omp barrier
#pragma omp single
    messages_ = message;
}

void Collectives::reduce_at_once(const KernelTable& table, Dtype dtype, void* x, int64_t count, uint64_t message) {
    const Part own(count, omp_get_thread_num(), omp_get_num_threads());
    publish(x, own, size_of(dtype), message);
    meet_as_team();
    sum_all(table, dtype, x, own, message);
}

// A rank sums its part, which the others then have from it. It is told of that part only.
void Collectives::reduce_by_parts(const KernelTable& table, Dtype dtype, void* x, int64_t count, uint64_t message) {
    const int64_t item = size_of(dtype);
    const auto share = [&](int rank) {
        return Part({count, rank, size_}, omp_get_thread_num(), omp_get_num_threads());
    };
    for (int rank = 0; rank < size_; ++rank) {
        if (rank != rank_) publish(x, share(rank), item, message);
    }
    meet_as_team();
    sum_all(table, dtype, x, share(rank_), message);
    publish(x, share(rank_), item, message);
    meet_as_team();
    for (int rank = 0; rank < size_; ++rank) {
        if (rank != rank_) copy(x, slot(rank, message), share(rank), item);
    }
}

void Collectives::publish(const void* x, const Part& part, int64_t item, uint64_t message) const {
    copy(slot(rank_, message), x, part, item);
}

// To x, from what the other ranks have published and x itself.
void Collectives::sum_all(const KernelTable& table, Dtype dtype, void* x, const Part& part, uint64_t message) const {
    const int64_t offset = part.begin * size_of(dtype);
    const void* parts[kMaxRanks];
    for (int rank = 0; rank < size_; ++rank) {
        parts[rank] = at(rank == rank_ ? x : slot(rank, message), offset);
    }
    table.add_up(dtype, parts, size_, part.end - part.begin, at(x, offset));
}

void Collectives::meet_as_team() {
#pragma omp barrier
#pragma omp single
    meet();
}

void Collectives::all_gather(const void* x, int64_t bytes, void* out) {
    for (int64_t first = 0; first < bytes; first += kSlotBytes, ++messages_) {
        const Part chunk(std::min(kSlotBytes, bytes - first), 0, 1);
        publish(at(x, first), chunk, 1, messages_);
        meet();
        for (int rank = 0; rank < size_; ++rank) {
            copy(at(out, rank * bytes + first), slot(rank, messages_), chunk, 1);
        }
    }
}

void Collectives::all_to_all(const void* x, const std::vector<int64_t>& bytes, void* out) {
    if (static_cast<int>(bytes.size()) != size_ * size_) throw std::invalid_argument("each rank has bytes for each");
    // Of the x of a rank, what is for the ranks before another one, or for all.
    const auto before = [&](int rank, int other) {
        const auto row = bytes.begin() + rank * size_;
        return std::accumulate(row, row + other, int64_t{0});
    };
    int64_t most = 0;
    for (int rank = 0; rank < size_; ++rank) most = std::max(most, before(rank, size_));
    const int64_t own = before(rank_, size_);
    for (int64_t first = 0; first < most; first += kSlotBytes, ++messages_) {
        const Part chunk(std::clamp<int64_t>(own - first, 0, kSlotBytes), 0, 1);
        publish(at(x, first), chunk, 1, messages_);
        meet();
        int64_t place = 0;
        for (int rank = 0; rank < size_; ++rank) {
            const int64_t begin = before(rank, rank_), end = before(rank, rank_ + 1);
            const int64_t from = std::max(begin, first), to = std::min(end, first + kSlotBytes);
            if (from < to) {
                std::memcpy(at(out, place + from - begin), at(slot(rank, messages_), from - first),
                            static_cast<size_t>(to - from));
            }
            place += end - begin;
        }
    }
}

void Collectives::broadcast(void* x, int64_t bytes) {
    for (int64_t first = 0; first < bytes; first += kSlotBytes, ++messages_) {
        const Part chunk(std::min(kSlotBytes, bytes - first), 0, 1);
        if (rank_ == 0) publish(at(x, first), chunk, 1, messages_);
        meet();
        if (rank_ != 0) copy(at(x, first), slot(0, messages_), chunk, 1);
    }
}

}  // namespace pagoda
