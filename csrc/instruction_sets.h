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

// From the lowest to the highest.
std::vector<InstructionSet> instruction_sets();

}  // namespace pagoda
