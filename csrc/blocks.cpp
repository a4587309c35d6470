// SPDX-License-Identifier: Apache-2.0
#include <atomic>
#include <cstring>
#include <stdexcept>
#include <vector>

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

// The numbers of points by the levels of their inputs, two or three bits each.
class PointNumbers {
   public:
    static constexpr uint16_t kNone = 0xffff;

    explicit PointNumbers(const Lattice& lattice) : inputs_(lattice.inputs), level_bits_(inputs_ == 8 ? 2 : 3) {
        if (inputs_ != 4 && inputs_ != 8) return;
        numbers_.assign(size_t{1} << (inputs_ * level_bits_), kNone);
        const int points = 256 << lattice.high_bits;
        for (int i = 0; i < points; ++i) {
            const int first = lattice.table[i], second = lattice.table[points + i];
            int key = first | second << 8;
            if (inputs_ == 4) {
                key = 0;
                for (int j = 0; j < 4; ++j) key |= ((first >> 2 * j & 3) | (second >> j & 1) << 2) << (3 * j);
            }
            numbers_[static_cast<size_t>(key)] = static_cast<uint16_t>(i);
        }
    }
    int level_bits() const { return level_bits_; }
    uint16_t of(const uint8_t* codes) const {
        unsigned key = 0;
        for (int i = 0; i < inputs_; ++i) key |= (codes[i] & ((1u << level_bits_) - 1)) << (i * level_bits_);
        return numbers_[key];
    }

   private:
    int inputs_, level_bits_;
    std::vector<uint16_t> numbers_;
};

void set_bit(uint8_t* bits, int64_t bit) { bits[bit / 8] |= static_cast<uint8_t>(1 << bit % 8); }

// The parts of one unit of an output whose 32 codes are of points; `to` is where the block's begin. Returns false if a code is not.
bool pack_points(const QuantizedFormat& format, const PointNumbers& numbers, const uint8_t* codes, int64_t unit, int lane,
                 uint8_t* to) {
    const Lattice& lattice = format.blocks.lattice;
    const int64_t units = format.units_of_block(), stride = units * format.bit_bytes();
    uint8_t* low = to + unit * format.number_bytes();
    uint8_t* signs = to + units * format.number_bytes() + unit * format.sign_bytes() + 4 * lane;
    uint8_t* bits = to + units * (format.number_bytes() + format.sign_bytes()) + unit * format.bit_bytes();
    for (int i = 0; i < kUnitInputs / lattice.inputs; ++i) {
        const uint16_t number = numbers.of(codes + i * lattice.inputs);
        if (number == PointNumbers::kNone) return false;
        const int64_t place = i / 4 * 4 * kPanel + 4 * lane + i % 4;
        low[place] = static_cast<uint8_t>(number);
        for (int b = 0; b < lattice.high_bits; ++b) {
            if ((number >> (8 + b) & 1) != 0) set_bit(bits + b * stride, place);
        }
        const bool sign = codes[i * lattice.inputs] >> numbers.level_bits() != 0;
        if (lattice.sign_inputs == 8 && sign) set_bit(bits + lattice.high_bits * stride, place);
    }
    if (lattice.sign_inputs != 1) return true;
    for (int i = 0; i < kUnitInputs; ++i) {
        const int word = i / 16 * 4 + i % 4, byte = i / 4 % 4;
        if (codes[i] >> numbers.level_bits() != 0) signs[byte] |= static_cast<uint8_t>(1 << word);
    }
    return true;
}

// Trits of a block of an output, whose words begin at `to`: the first of a byte counts most, and fractions are rounded up.
void pack_trits(int64_t inputs, const uint8_t* codes, uint8_t* to) {
    for (int64_t first = 0; first < inputs; first += 4 * kTritsOfByte, to += kRow) {
        for (int j = 0; j < 4; ++j) {
            int value = 0;
            for (int q = 0; q < kTritsOfByte; ++q) {
                const int64_t i = first + 4 * q + j;
                value = 3 * value + (i < inputs ? codes[i] : 0);
            }
            to[j] = static_cast<uint8_t>((value * 256 + 242) / 243);
        }
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
            if (format.blocks.has_points()) {
                // A sign of 32 inputs is that of any.
                const bool sign = format.blocks.lattice.sign_inputs == kUnitInputs &&
                                  from.codes[(first + g) * kUnitInputs] >> (format.bits - 1) != 0;
                const int half = (scales[first + g] >> 1 & 15) | (sign ? 8 : 0);
                to[g / 2 * kPanel + lane] |= static_cast<uint8_t>(half << (g % 2 * 4));
                continue;
            }
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
bool known_points(int bits, int64_t group_size, Codebook codebook, const Lattice& lattice) {
    const auto is = [&](int inputs, int high_bits, int sign_inputs, int64_t group) {
        return lattice.table != nullptr && bits == (inputs == 8 ? 3 : 4) && lattice.inputs == inputs &&
               lattice.high_bits == high_bits && lattice.sign_inputs == sign_inputs && group_size == group;
    };
    switch (codebook) {
        case Codebook::kIq1: return is(8, 3, 8, 16) || is(8, 3, 32, 32);
        case Codebook::kIq2: return is(8, 0, 1, 32) || is(8, 1, 1, 16) || is(8, 2, 1, 16);
        case Codebook::kIq3Xxs: return is(4, 0, 1, 32);
        case Codebook::kIq3S: return is(4, 1, 1, 32);
        default: return false;
    }
}

bool known(int bits, int64_t group_size, bool integer_scales, bool minima, Codebook codebook, bool whole_rows,
           const Lattice& lattice) {
    if (codebook == Codebook::kTernary) {
        return bits == 2 && !integer_scales && !minima && !whole_rows && group_size <= 256 &&
               (lattice.inputs == 0 || lattice.inputs == kTritsOfByte);
    }
    if (codebook > Codebook::kTernary) return integer_scales && !minima && !whole_rows && known_points(bits, group_size, codebook, lattice);
    if (lattice.inputs != 0) return false;
    if (whole_rows) {
        return integer_scales && minima && codebook == Codebook::kNone &&
               (bits == 8 ? group_size == 64 : (bits == 4 || bits == 5) && group_size == 32);
    }
    if (codebook == Codebook::kE2m1 && integer_scales) return bits == 4 && group_size == 16 && !minima;
    if (codebook > Codebook::kE2m1 && integer_scales) return false;
    if (codebook != Codebook::kNone) return bits == 4 && group_size == 32 && !minima;
    if (!integer_scales) return group_size == 32 && (bits == 4 || bits == 5 || (bits == 8 && !minima));
    if (bits == 4 || bits == 5) return group_size == 32 && minima;
    return group_size == 16 && ((bits == 2 && minima) || ((bits == 3 || bits == 6) && !minima));
}

}  // namespace

QuantizedShape QuantizedShape::in_blocks(int64_t outputs, int64_t inputs, int bits, int64_t group_size,
                                         int64_t block_size, bool integer_scales, bool minima, Codebook codebook,
                                         bool whole_rows, const Lattice& lattice) {
    if (!known(bits, group_size, integer_scales, minima, codebook, whole_rows, lattice) || block_size % kUnitInputs != 0 ||
        block_size <= 0 || block_size % group_size != 0 || inputs % block_size != 0 ||
        (!integer_scales && block_size != group_size) || (whole_rows && block_size != inputs)) {
        throw std::invalid_argument("there are no such blocks");
    }
    const int64_t row_group = whole_rows ? group_size : kBlockRowGroup;
    return {inputs, outputs,
            {bits, true, minima, inputs / row_group, row_group,
             {block_size / group_size, group_size, integer_scales, codebook, whole_rows, lattice}}};
}

void pack_blocks(const QuantizedShape& shape, const BlockTensors& tensors, void* packed) {
    const QuantizedFormat& format = shape.format;
    const int64_t blocks = format.num_blocks(), units = format.units_of_block();
    const PointNumbers numbers(format.blocks.lattice);
    const bool has_points = format.blocks.has_points(), has_trits = format.blocks.lattice.inputs == kTritsOfByte;
    std::atomic<bool> all_known{true};
#pragma omp parallel for schedule(static)
    for (int64_t panel = 0; panel < shape.panels(); ++panel) {
        auto* to = static_cast<uint8_t*>(packed) + panel * format.panel_bytes();
        const int outputs = static_cast<int>(std::min<int64_t>(kPanel, shape.outputs - panel * kPanel));
        if (outputs < kPanel || has_points) std::memset(to, 0, static_cast<size_t>(format.panel_bytes()));
        for (int64_t block = 0; block < blocks; ++block, to += format.block_bytes()) {
            // A block's lines stay in the cache while its outputs come one after the other.
            for (int lane = 0; lane < outputs; ++lane) {
                const OutputTensors from = tensors_of(shape, tensors, panel * kPanel + lane);
                pack_header(format, from, block, lane, to);
                const uint8_t* codes = from.codes + block * units * kUnitInputs;
                if (has_trits) {
                    pack_trits(units * kUnitInputs, codes, to + format.header_bytes() + 4 * lane);
                    continue;
                }
                uint8_t* words = to + format.header_bytes() + 4 * lane;
                for (int64_t unit = 0; unit < units; ++unit) {
                    if (has_points) {
                        const uint8_t* own = codes + unit * kUnitInputs;
                        if (!pack_points(format, numbers, own, unit, lane, to + format.header_bytes())) all_known = false;
                        continue;
                    }
                    pack_unit(format.bits, codes + unit * kUnitInputs, words + unit * format.unit_bytes());
                }
            }
        }
    }
    if (!all_known) throw std::invalid_argument("codes are not those of the lattice's points");
}

}  // namespace pagoda
