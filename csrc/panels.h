// How the threads of a team share out panels of a weight, for all formats of weights.
#pragma once

#include <omp.h>

#ifdef __linux__
#include <sys/mman.h>
#endif

#include <algorithm>
#include <cstdint>

namespace pagoda {

inline const char* at(const void* p, int64_t bytes) { return static_cast<const char*>(p) + bytes; }
inline char* at(void* p, int64_t bytes) { return static_cast<char*>(p) + bytes; }

// Large pages where the system gives them: a panel is read from one end to the other.
inline void advise_large_pages([[maybe_unused]] void* p, [[maybe_unused]] int64_t bytes) {
#ifdef MADV_HUGEPAGE
    constexpr uintptr_t page = 1 << 21;
    const uintptr_t begin = (reinterpret_cast<uintptr_t>(p) + page - 1) / page * page;
    const uintptr_t end = (reinterpret_cast<uintptr_t>(p) + static_cast<uintptr_t>(bytes)) / page * page;
    if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#endif
}

// Calls work(panel, first tile, last tile) for all tiles of rows and all panels.
template <class Work>
void share_panels(int64_t panels, int64_t tiles, Work work) {
    const int64_t threads = omp_get_num_threads();
    // A panel stays in the cache while all rows go by; only when there are few panels are the rows shared out.
    const int64_t parts = panels >= 4 * threads ? 1 : std::min(tiles, 4 * threads);
    const int64_t tasks = panels * parts;
    const int64_t chunk = std::max<int64_t>(1, tasks / (8 * threads));
#pragma omp for schedule(dynamic, chunk)
    for (int64_t task = 0; task < tasks; ++task) {
        const int64_t panel = task / parts, part = task % parts;
        work(panel, tiles * part / parts, tiles * (part + 1) / parts);
    }
}

}  // namespace pagoda
