// SPDX-License-Identifier: Apache-2.0
#pragma once

#ifdef __linux__
#include <sys/mman.h>
#endif

#include <cstddef>
#include <cstdint>

namespace pagoda {

constexpr size_t kLargePage = 1 << 21;

// Large pages where the system gives them: blocks of a cache lie anywhere, and to look up a small page for each
// takes as long as to read it.
inline void advise_large_pages([[maybe_unused]] void* p, [[maybe_unused]] int64_t bytes) {
#ifdef MADV_HUGEPAGE
    constexpr uintptr_t page = kLargePage;
    const uintptr_t begin = (reinterpret_cast<uintptr_t>(p) + page - 1) / page * page;
    const uintptr_t end = (reinterpret_cast<uintptr_t>(p) + static_cast<uintptr_t>(bytes)) / page * page;
    if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#endif
}

}  // namespace pagoda
