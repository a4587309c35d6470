// SPDX-License-Identifier: Apache-2.0
// What the processes of one host do together, through memory that all of them have mapped.
//
// Every rank writes what it has to a slot of its own, all meet, and every rank reads the slots of all. There are two
// slots for each rank, taken in turn: who has met the others after writing to one knows that they have finished with
// the other. So a message that fits a slot takes one meeting; a large sum of more than two ranks takes two, as each
// rank adds up a part of it for the others.
#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

#include "kernels.h"

namespace pagoda {

class Collectives {
   public:
    static constexpr int kMaxRanks = 64;

    // Of the memory that `size` ranks share; it has to be zero at first.
    static int64_t bytes(int size);

    // Maps the memory behind a file descriptor, which may be closed then.
    Collectives(int descriptor, int rank, int size);
    ~Collectives();
    Collectives(const Collectives&) = delete;
    Collectives& operator=(const Collectives&) = delete;

    int rank() const { return rank_; }
    int size() const { return size_; }

    // Makes x the sum of the x of all ranks, added up as floats in order of rank. Called by all threads of a team.
    void all_reduce(const KernelTable& table, Dtype dtype, void* x, int64_t count);

    // The x of every rank, one behind the other. Called by one thread, as are the others below.
    void all_gather(const void* x, int64_t bytes, void* out);

    // What every rank has for this one, in order. Of each rank's x, `bytes` [size, size] are for each rank, in order.
    void all_to_all(const void* x, const std::vector<int64_t>& bytes, void* out);

    // Makes x what rank 0 has there.
    void broadcast(void* x, int64_t bytes);

   private:
    struct Shared;
    struct Part;

    // Returns when all ranks have come here as often. What they wrote before can be read then.
    void meet();
    void wait_for(uint32_t arrivals);
    void meet_as_team();
    char* slot(int rank, uint64_t message) const;
    static void copy(void* to, const void* from, const Part& part, int64_t item);
    void publish(const void* x, const Part& part, int64_t item, uint64_t message) const;
    void sum_all(const KernelTable& table, Dtype dtype, void* x, const Part& part, uint64_t message) const;
    void reduce_at_once(const KernelTable& table, Dtype dtype, void* x, int64_t count, uint64_t message);
    void reduce_by_parts(const KernelTable& table, Dtype dtype, void* x, int64_t count, uint64_t message);

    const int rank_, size_;
    Shared* shared_;
    uint64_t messages_ = 0;
    uint32_t arrivals_ = 0;  // of all ranks, at the meetings so far
    int spins_;
};

}  // namespace pagoda
