// SPDX-License-Identifier: Apache-2.0
// Whether this process may use AMX: see "Using XSTATE features in user space applications" in the kernel's documentation.
#ifdef __x86_64__
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include <cerrno>
#include <cstdint>
#include <cstring>

#include "tile_kernels.h"

namespace pagoda {

#ifdef __x86_64__

bool has_amx() {
    constexpr uint32_t kBf16 = 1u << 22, kTile = 1u << 24, kInt8 = 1u << 25, kAll = kBf16 | kTile | kInt8;
    uint32_t a = 0, b = 0, c = 0, d = 0;
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) != 0 && (d & kAll) == kAll;
}

std::string amx_obstacle() {
    if (!has_amx()) return "this processor has no AMX with bf16 and int8";
#ifdef PAGODA_AMX
    constexpr int kRequestPermission = 0x1023;  // ARCH_REQ_XCOMP_PERM
    constexpr int kTileData = 18;               // XFEATURE_XTILEDATA
    if (syscall(SYS_arch_prctl, kRequestPermission, kTileData) != 0) {
        return std::string("the kernel refuses AMX's tiles (arch_prctl: ") + std::strerror(errno) + ")";
    }
    return "";
#else
    return "Pagoda was built without AMX, which its C++ compiler did not know";
#endif
}

#else

bool has_amx() { return false; }

std::string amx_obstacle() { return "this processor has no AMX"; }

#endif

}  // namespace pagoda
