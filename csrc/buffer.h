// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdlib>
#include <memory>
#include <new>

#include "pages.h"

namespace pagoda {

// Memory that is kept from call to call and grows when more is needed.
class Buffer {
   public:
    // Bytes at a multiple of a page, large where there are many, with arbitrary contents.
    void* take(size_t bytes) {
        if (bytes > size_) {
            const size_t page = bytes < kLargePage ? 4096 : kLargePage;
            const size_t rounded = (bytes + page - 1) / page * page;
            memory_.reset(std::aligned_alloc(page, rounded));
            if (memory_) advise_large_pages(memory_.get(), static_cast<int64_t>(rounded));
            size_ = memory_ ? rounded : 0;
            if (!memory_) throw std::bad_alloc();
        }
        return memory_.get();
    }

    void* get() const { return memory_.get(); }

   private:
    struct Free {
        void operator()(void* p) const { std::free(p); }
    };
    std::unique_ptr<void, Free> memory_;
    size_t size_ = 0;
};

}  // namespace pagoda
