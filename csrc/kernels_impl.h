// SPDX-License-Identifier: Apache-2.0
// The kernels. A file that includes this is compiled for one instruction set and fills one KernelTable.
//
// No result depends on how many rows are computed together: each output is summed up in one order.
#pragma once

#include "impl/attention.h"
#include "impl/blocks.h"
#include "impl/experts.h"
#include "impl/index.h"
#include "impl/linear.h"
#include "impl/low_rank.h"
#include "impl/quantized.h"
#include "impl/rounding.h"
#include "impl/rows.h"
#include "impl/sampling.h"
#include "impl/small_floats.h"
#include "impl/states.h"

namespace {

constexpr pagoda::KernelTable kTable = {
    packed_size, pack_row, linear_panel, pagoda::kTileRows, low_rank_down, low_rank_up, widen_row,
    small_panel, widen_small_row, sizeof(Code), quantize_row, quantized_panel_of,
    pagoda::kQuantizedRows, dequantize_row_of,
    argmax_outputs, round_to_int8, round_to_int4, round_to_blocks, add_up, rms_norm, silu_and_mul, kRowKernels, route, gate_and_mul, weighted_sum,
    norm_and_rotate, math_of, to_cache, pack_query, attend, merge, merge_segment, normalize,
    total_weight, total_product, weigh, block_maxima, count_above, forbid_unset, conv_row, delta_step, kept_channels, scan_step,
    index_key, index_scores,
};

}  // namespace
