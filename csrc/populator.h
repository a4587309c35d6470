// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

namespace pagoda {

// Takes the pages of blocks from the system before anyone writes to them. Its thread runs only where a core has nothing
// else to do, and leaves the content of pages as it is, also where others write to them meanwhile. Nobody ever waits
// for a lock that it holds: it may not run for long.
class Populator {
   public:
    // Memory of one tensor; its blocks follow one another.
    struct Region {
        uintptr_t address;
        int64_t block_bytes;
    };

    Populator(std::vector<Region> regions, int64_t num_blocks);
    // Waits for the page that the thread is at.
    ~Populator();
    Populator(const Populator&) = delete;
    Populator& operator=(const Populator&) = delete;

    // Populates the blocks before this one, in their order, in all regions alike. For one caller at a time.
    void advance(int64_t end);
    // Waits until that is done.
    void wait() const;

   private:
    void run();
    bool touch(const Region& region, int64_t first, int64_t end) const;

    std::vector<Region> regions_;
    int64_t num_blocks_, stretch_ = 1;
    std::atomic<int64_t> wanted_ = 0, done_ = 0;
    std::atomic<bool> stop_ = false;
    std::atomic<int> changes_ = 0;
    std::thread thread_;
};

}  // namespace pagoda
