// SPDX-License-Identifier: Apache-2.0
// What instruction sets with tiles (Intel's AMX) compute otherwise than AVX-512 with bf16 does.
#pragma once

#include <string>

#include "kernels.h"

namespace pagoda {

// What the members of KernelTable of the same names are.
struct TileKernels {
    decltype(KernelTable::linear_panel) linear_panel;
    decltype(KernelTable::low_rank_down) low_rank_down;
    decltype(KernelTable::low_rank_up) low_rank_up;
    decltype(KernelTable::quantized_panel) quantized_panel;
    decltype(KernelTable::pack_query) pack_query;
    decltype(KernelTable::attend) attend;
    // sums [rows, 32] += a [rows, words] times b [words, 32], for tests: rows are 1 to 32, words 1 to 16, each a pair of
    // bf16 for sums of floats, or four bytes, signed in `a` and unsigned in `b`, for sums of integers.
    void (*multiply)(bool bf16, int rows, int words, const void* a, const void* b, void* sums);

    KernelTable table() const {
        KernelTable all = kAvx512Bf16;
        all.linear_panel = linear_panel, all.linear_rows = kMostPanelRows;
        all.low_rank_down = low_rank_down, all.low_rank_up = low_rank_up;
        all.quantized_panel = quantized_panel, all.quantized_rows = kMostPanelRows;
        all.pack_query = pack_query, all.attend = attend;
        return all;
    }
};

extern const TileKernels kAmx;          // only in a build whose compiler knows AMX
extern const TileKernels kAmxEmulated;  // of AVX-512 instructions, for tests

// Whether the processor has tiles, for bf16 and bytes.
bool has_amx();

// Asks the kernel for the use of tiles by this process. Returns why it may not use them, empty if it may.
std::string amx_obstacle();

}  // namespace pagoda
