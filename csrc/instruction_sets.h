// SPDX-License-Identifier: Apache-2.0
// The instruction sets that kernels are compiled for, and those that this CPU has.
#pragma once

#include <vector>

#include "kernels.h"

namespace pagoda {

struct InstructionSet {
    const char* name;
    const KernelTable* table;
    bool present;
};

// For tests of the kernels on tiles, on any machine with AVX-512 and bf16; only chosen by name.
constexpr const char* kEmulatedAmx = "amx_emulated";

// From the lowest to the highest; behind them, for tests, what emulates one.
std::vector<InstructionSet> instruction_sets();

}  // namespace pagoda
