// SPDX-License-Identifier: Apache-2.0
#include "instruction_sets.h"

#include "tile_kernels.h"

#if defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#endif

namespace pagoda {

#ifdef __aarch64__

namespace {

// Bits of Linux (Documentation/arch/arm64/elf_hwcaps.rst), which older headers lack.
constexpr unsigned long kDotprod = 1ul << 20, kI8mm = 1ul << 13, kBf16 = 1ul << 14;

bool has([[maybe_unused]] unsigned long first, [[maybe_unused]] unsigned long second) {
#ifdef __linux__
    return (getauxval(AT_HWCAP) & first) == first && (getauxval(AT_HWCAP2) & second) == second;
#else
    return false;
#endif
}

}  // namespace

std::vector<InstructionSet> instruction_sets() {
    return {
        {"neon", &kNeon, true},  // every 64-bit ARM has it
        {"neon_dotprod", &kNeonDotprod, has(kDotprod, 0)},
        {"neon_i8mm", &kNeonI8mm, has(kDotprod, kI8mm)},
        {"neon_bf16", &kNeonBf16, has(kDotprod, kI8mm | kBf16)},
    };
}

#else

std::vector<InstructionSet> instruction_sets() {
    __builtin_cpu_init();
    const bool avx2 =
        __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    const bool avx512_vnni = avx512 && __builtin_cpu_supports("avx512vnni");
    const bool avx512_bf16 = avx512_vnni && __builtin_cpu_supports("avx512bf16");
    std::vector<InstructionSet> sets = {
        {"avx2", &kAvx2, avx2},
#if defined(PAGODA_AVX_VNNI_EMULATED)
        {"avx_vnni", &kAvxVnni, avx2},
#elif defined(PAGODA_WITH_AVX_VNNI)
        {"avx_vnni", &kAvxVnni, avx2 && __builtin_cpu_supports("avxvnni")},
#endif
        {"avx512", &kAvx512, avx512},
        {"avx512_vnni", &kAvx512Vnni, avx512_vnni},
        {"avx512_bf16", &kAvx512Bf16, avx512_bf16},
    };
#ifdef PAGODA_AMX
    static const KernelTable amx = kAmx.table();
    sets.push_back({"amx", &amx, avx512_bf16 && amx_obstacle().empty()});
#endif
    static const KernelTable emulated = kAmxEmulated.table();
    sets.push_back({kEmulatedAmx, &emulated, avx512_bf16});
    return sets;
}

#endif

}  // namespace pagoda
