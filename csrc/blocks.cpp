// SPDX-License-Identifier: Apache-2.0
#include <cstring>
#include <stdexcept>

#include "ops.h"
#include "panels.h"

namespace pagoda {

namespace {

constexpr int64_t kRow = 4 * kPanel;  // bytes
constexpr int kQuads = kUnitInputs / 4;

// The planes of one unit of an output, whose 32 codes are given; `to` is its word of the first row.
void pack_unit(int bits, const uint8_t* codes, uint8_t* to) {
    uint32_t quads[kQuads];
    std::memcpy(quads, codes, sizeof(quads));
    int taken = 0;
    for (const int width : {8, 4, 2, 1}) {
        if (bits - taken < width) continue;
        const uint32_t mask = 0x01010101u * ((1u << width) - 1);
        const int per_word = 8 / width;
        for (int row = 0; row < kQuads / per_word; ++row, to += kRow) {
            uint32_t word = 0;
            for (int i = 0; i < per_word; ++i) word |= ((quads[row * per_word + i] >> taken) & mask) << (i * width);
            std::memcpy(to, &word, 4);
        }
        taken += width;
    }
}

struct OutputTensors {
    const uint8_t* codes;
    const char *scales, *minima, *block_scales, *block_minima;
};

const char* row_of(const void* tensor, int64_t output, int64_t row_bytes) {
    return tensor == nullptr ? nullptr : at(tensor, output * row_bytes);
}

OutputTensors tensors_of(const QuantizedShape& shape, const BlockTensors& tensors, int64_t output) {
    const QuantizedFormat& format = shape.format;
    const int64_t groups = format.num_blocks() * format.blocks.groups * (format.blocks.integer_scales ? 1 : 2);
    const int64_t blocks = format.num_blocks() * 2;
    return {tensors.codes + output * shape.inputs, row_of(tensors.scales, output, groups),
            row_of(tensors.minima, output, groups), row_of(tensors.block_scales, output, blocks),
            row_of(tensors.block_minima, output, blocks)};
}

// Scales and minima of a block of one output.
void pack_header(const QuantizedFormat& format, const OutputTensors& from, int64_t block, int lane, uint8_t* to) {
    const char *scales = from.scales, *minima = from.minima;
    if (format.blocks.integer_scales) {
        const int64_t groups = format.blocks.groups, first = block * groups;
        for (int64_t g = 0; g < groups; ++g) {
            uint8_t* scale = to + g * kPanel + lane;
            *scale = static_cast<uint8_t>(scales[first + g]);
            if (minima == nullptr) continue;
            const auto minimum = static_cast<uint8_t>(minima[first + g]);
            if (format.bits == 2) {
                *scale = static_cast<uint8_t>((*scale & 15) | minimum << 4);
            } else {
                scale[groups * kPanel] = minimum;
            }
        }
        scales = from.block_scales, minima = from.block_minima;
    }
    uint8_t* halves = to + format.integer_bytes() + 2 * lane;
    std::memcpy(halves, scales + 2 * block, 2);
    if (minima != nullptr) std::memcpy(halves + 2 * kPanel, minima + 2 * block, 2);
}

// The formats of with_blocks in impl/blocks.h.
bool known(int bits, int64_t group_size, bool integer_scales, bool minima, Codebook codebook, bool whole_rows) {
    if (whole_rows) {
        return integer_scales && minima && codebook == Codebook::kNone &&
               (bits == 8 ? group_size == 64 : (bits == 4 || bits == 5) && group_size == 32);
    }
    if (codebook > Codebook::kFp4 || (codebook > Codebook::kE2m1 && integer_scales)) return false;
    if (codebook == Codebook::kE2m1 && integer_scales) return bits == 4 && group_size == 16 && !minima;
    if (codebook != Codebook::kNone) return bits == 4 && group_size == 32 && !minima;
    if (!integer_scales) return group_size == 32 && (bits == 4 || bits == 5 || (bits == 8 && !minima));
    if (bits == 4 || bits == 5) return group_size == 32 && minima;
    return group_size == 16 && ((bits == 2 && minima) || ((bits == 3 || bits == 6) && !minima));
}

}  // namespace

QuantizedShape QuantizedShape::in_blocks(int64_t outputs, int64_t inputs, int bits, int64_t group_size,
                                         int64_t block_size, bool integer_scales, bool minima, Codebook codebook,
                                         bool whole_rows) {
    if (!known(bits, group_size, integer_scales, minima, codebook, whole_rows) || block_size % kUnitInputs != 0 ||
        block_size <= 0 || block_size % group_size != 0 || inputs % block_size != 0 ||
        (!integer_scales && block_size != group_size) || (whole_rows && block_size != inputs)) {
        throw std::invalid_argument("there are no such blocks");
    }
    const int64_t row_group = whole_rows ? group_size : kBlockRowGroup;
    return {inputs, outputs,
            {bits, true, minima, inputs / row_group, row_group,
             {block_size / group_size, group_size, integer_scales, codebook, whole_rows}}};
}

void pack_blocks(const QuantizedShape& shape, const BlockTensors& tensors, void* packed) {
    const QuantizedFormat& format = shape.format;
    const int64_t blocks = format.num_blocks(), units = format.units_of_block();
#pragma omp parallel for schedule(static)
    for (int64_t panel = 0; panel < shape.panels(); ++panel) {
        auto* to = static_cast<uint8_t*>(packed) + panel * format.panel_bytes();
        const int outputs = static_cast<int>(std::min<int64_t>(kPanel, shape.outputs - panel * kPanel));
        if (outputs < kPanel) std::memset(to, 0, static_cast<size_t>(format.panel_bytes()));
        for (int64_t block = 0; block < blocks; ++block, to += format.block_bytes()) {
            // A block's lines stay in the cache while its outputs come one after the other.
            for (int lane = 0; lane < outputs; ++lane) {
                const OutputTensors from = tensors_of(shape, tensors, panel * kPanel + lane);
                pack_header(format, from, block, lane, to);
                const uint8_t* codes = from.codes + block * units * kUnitInputs;
                uint8_t* words = to + format.header_bytes() + 4 * lane;
                for (int64_t unit = 0; unit < units; ++unit) {
                    pack_unit(format.bits, codes + unit * kUnitInputs, words + unit * format.unit_bytes());
                }
            }
        }
    }
}

}  // namespace pagoda
