// SPDX-License-Identifier: Apache-2.0
// Weights in blocks: what their codes stand for, and how they lie in panels.
#pragma once

#include <cstdint>

namespace pagoda {

// Inputs whose codes lie together in blocks: eight quads of 32 outputs.
constexpr int kUnitInputs = 32;
// Inputs whose activations are rounded by one scale there.
constexpr int kBlockRowGroup = 16;

// Numbers that codes stand for, if not for themselves: those of ggml's IQ4_NL, twice those of E2M1 (MXFP4, NVFP4), those of
// bitsandbytes' NF4 and FP4, those less 1 of TQ1_0 and TQ2_0, eight times those of IQ1, or those of IQ2, IQ3_XXS and IQ3_S.
enum class Codebook { kNone, kIq4, kE2m1, kNf4, kFp4, kTernary, kIq1, kIq2, kIq3Xxs, kIq3S };

// Codes that are kept as points: eight or four neighbouring inputs have one of 256 << high_bits combinations of levels, and
// each input, or 8 or 32 of them together, have a sign, which is the highest bit of codes. Or five times four neighbours are
// the trits of four bytes.
//
// In a panel a block of 32 outputs has, behind its header: words of the low bytes of points' numbers, one for 32 inputs or two,
// of all units; words of the signs of inputs, if each has its own: bit i of byte j is of code i of word j in the order of
// QuantizedFormat::transposed; and bits of the others in the numbers, and of the signs of eight, one after the other: of all
// units, of their 16 inputs if a point has four, of all outputs, of four points. A sign of 32 inputs is the high bit of their
// scale's. Of trits there are words only, of which byte j has those of input j of five neighbouring quads.
struct Lattice {
    int inputs = 0;  // of a point, or 5; 0 of other weights
    int high_bits = 0;
    int sign_inputs = 0;  // that share a sign
    // Of eight inputs [2, points]: two bits of the levels of each of the first four, and of the others. Of four [6, points]: two
    // bits of each level, and the third ones; and for each input 128 and its number.
    const uint8_t* table = nullptr;
};
constexpr int kTritsOfByte = 5;

// Blocks of ggml, in which a weight is scale * (code - zero) + minimum. In a panel a block of 32 outputs has, one behind
// the other: its groups' scales [groups, 32] int8, or with E2M1 floats of eight bits (E4M3) that count 2^-8; their minima (those
// of 2-bit codes are the high halves of the scales' bytes); 32 float16 that the scales are multiplied by and 32 for the minima; or, where scales are no integers, these
// alone; then the codes of every 32 inputs. Of those all eight or the low four bits come first, if there are as many, then
// the next two, then the last one; each as words of 32 outputs, whose bytes are of four neighbouring inputs: with four bits the
// first eight inputs, the first quad in the low halves; with two bits sixteen inputs, with one all 32.
struct BlockFormat {
    int64_t groups = 0;  // of a block; 0 of weights that are not in blocks
    int64_t group_inputs = 0;  // that share a scale; those of a row's groups are fewer
    bool integer_scales = false;
    Codebook codebook = Codebook::kNone;
    bool whole_rows = false;  // a block is a row of inputs, and a row of activations has one scale
    Lattice lattice = {};     // scales of points are odd, and half of each is kept, in four bits: of two groups in a byte

    bool has_points() const { return lattice.inputs == 4 || lattice.inputs == 8; }
};

// The numbers of a codebook, and 128.
constexpr uint8_t kIq4Codebook[16] = {1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241};
constexpr uint8_t kE2m1Codebook[16] = {128, 129, 130, 131, 132, 134, 136, 140, 128, 127, 126, 125, 124, 122, 120, 116};
constexpr uint8_t kNf4Codebook[16] = {5, 42, 63, 79, 93, 105, 117, 128, 138, 148, 158, 170, 182, 197, 217, 251};
constexpr uint8_t kFp4Codebook[16] = {128, 129, 208, 248, 168, 188, 148, 158, 128, 127, 48, 8, 88, 68, 108, 98};
constexpr uint8_t kIq1Codebook[16] = {121, 129, 137, 128, 119, 127, 135, 128};
constexpr uint8_t kIq2Codebook[16] = {136, 153, 171, 128, 120, 103, 85, 128};
constexpr uint8_t kIq3XxsCodebook[16] = {132, 140, 148, 156, 164, 172, 180, 190, 124, 116, 108, 100, 92, 84, 76, 66};
constexpr uint8_t kIq3SCodebook[16] = {129, 131, 133, 135, 137, 139, 141, 143, 127, 125, 123, 121, 119, 117, 115, 113};

// What scales of points are counted in, times the block's.
constexpr float unit_of_scales(Codebook codebook) {
    return codebook == Codebook::kIq1 || codebook == Codebook::kIq2 ? 0.125f : codebook == Codebook::kIq3Xxs ? 0.25f : 1.0f;
}

}  // namespace pagoda
