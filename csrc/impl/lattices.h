// SPDX-License-Identifier: Apache-2.0
// Codes of weights that are kept as the numbers of points; see Lattice in kernels.h.
//
// What makes these formats slow elsewhere is a load for each point. Processors with AVX512_VBMI find 64 points at once instead:
// tables of bytes lie in registers, of which `vpermi2b` chooses.
#pragma once

namespace {

template <int Inputs, int High, int Signs>
struct PointsOf {
    static constexpr int inputs = Inputs, high = High, signs = Signs, points = 256 << High;
};

// Numbers of four points of each of kWidth outputs: their low bytes, and bits of the others, of four points after another.
template <class P>
struct PointNumbers {
    const uint8_t* low;
    uint64_t high[P::high + 1];

    // From the column on whose bits begin at `bits`, `stride` behind each other.
    PAGODA_INLINE PointNumbers(const uint8_t* low, const uint8_t* bits, int64_t stride) : low(low), high{} {
        for (int b = 0; b < P::high; ++b) std::memcpy(high + b, bits + b * stride, kWidth / 2);
    }
    PAGODA_INLINE int of(int lane, int i) const {
        int number = low[4 * lane + i];
        for (int b = 0; b < P::high; ++b) number |= static_cast<int>(high[b] >> (4 * lane + i) & 1) << (8 + b);
        return number;
    }
};

// A word for each output, as f(lane) gives them.
template <class F>
PAGODA_INLINE ints words_of(F f) {
    alignas(64) uint32_t words[kWidth];
    for (int lane = 0; lane < kWidth; ++lane) words[lane] = f(lane);
    return load_ints(reinterpret_cast<const uint8_t*>(words));
}

#ifdef __AVX512VNNI__

PAGODA_INLINE bool permutes_bytes() { return __builtin_cpu_supports("avx512vbmi"); }

// Bytes of a table of 1 << Bits, by their numbers: seven bits of each, and masks of the others.
template <int Bits>
PAGODA_INLINE ints permuted(const uint8_t* table, ints numbers, const __mmask64* high) {
    if constexpr (Bits == 7) {
        asm("vpermi2b %2, %1, %0" : "+v"(numbers) : "v"(load_ints(table)), "v"(load_ints(table + 64)));
        return numbers;
    } else {
        const ints below = permuted<Bits - 1>(table, numbers, high);
        const ints above = permuted<Bits - 1>(table + (1 << (Bits - 1)), numbers, high);
        return _mm512_mask_blend_epi8(high[Bits - 8], below, above);
    }
}

template <class P>
struct PermutedPoints {
    ints low;
    __mmask64 high[P::high + 1];

    PAGODA_INLINE explicit PermutedPoints(const PointNumbers<P>& numbers) : low(load_ints(numbers.low)) {
        high[0] = _mm512_movepi8_mask(low);
        for (int b = 0; b < P::high; ++b) high[b + 1] = numbers.high[b];
    }
    PAGODA_INLINE ints of(const uint8_t* table) const { return permuted<8 + P::high>(table, low, high); }
};

// Bytes of two vectors, one of each in turn: those of the first two of four bytes, and of the others.
PAGODA_INLINE void in_turn(ints a, ints b, ints (&halves)[kHalves]) {
    const auto low = _mm512_castsi512_ps(_mm512_unpacklo_epi8(a, b)), high = _mm512_castsi512_ps(_mm512_unpackhi_epi8(a, b));
    halves[0] = _mm512_castps_si512(_mm512_shuffle_ps(low, high, 0x88));
    halves[1] = _mm512_castps_si512(_mm512_shuffle_ps(low, high, 0xdd));
}

#endif

// Levels of the inputs of points of eight: of each half of a unit, four bytes with two bits of four neighbours.
template <class P>
PAGODA_INLINE void levels_of_eights(const uint8_t* table, const PointNumbers<P>& numbers, ints (&levels)[kHalves]) {
#ifdef __AVX512VNNI__
    if (permutes_bytes()) {
        const PermutedPoints<P> points(numbers);
        return in_turn(points.of(table), points.of(table + P::points), levels);
    }
#endif
    const auto both = [table](int number) { return static_cast<uint32_t>(table[number] | table[P::points + number] << 8); };
    for (int half = 0; half < kHalves; ++half) {
        levels[half] = words_of([&](int lane) {
            return both(numbers.of(lane, 2 * half)) | both(numbers.of(lane, 2 * half + 1)) << 16;
        });
    }
}

// Bit 2 of the codes of eights that share a sign.
PAGODA_INLINE void signs_of_eights(const uint8_t* bits, ints (&signs)[kHalves]) {
    uint64_t set = 0;
    std::memcpy(&set, bits, kWidth / 2);
#ifdef __AVX512F__
    const ints spread = _mm512_maskz_set1_epi8(set, 4);
    const auto low = _mm512_castsi512_ps(_mm512_unpacklo_epi8(spread, spread));
    const auto high = _mm512_castsi512_ps(_mm512_unpackhi_epi8(spread, spread));
    signs[0] = _mm512_castps_si512(_mm512_shuffle_ps(low, high, 0x88));
    signs[1] = _mm512_castps_si512(_mm512_shuffle_ps(low, high, 0xdd));
#else
    for (int half = 0; half < kHalves; ++half) {
        signs[half] = words_of([&](int lane) {
            const auto own = static_cast<uint32_t>(set >> (4 * lane + 2 * half));
            return (own & 1) * 0x0404u + (own >> 1 & 1) * 0x04040000u;
        });
    }
#endif
}

// Numbers of the inputs of points of four in half a unit, whose signs are the bits from 4 * Half on of `signs`.
template <class B, int Half>
PAGODA_INLINE void numbers_of_fours(const uint8_t* table, const PointNumbers<typename B::Points>& numbers, ints signs,
                                    ints* quads) {
    using P = typename B::Points;
#ifdef __AVX512VNNI__
    if (permutes_bytes()) {
        const PermutedPoints<P> points(numbers);
#pragma GCC unroll 4
        for (int k = 0; k < 4; ++k) {
            const ints positive = points.of(table + (2 + k) * P::points);
            const __mmask64 negative = _mm512_test_epi8_mask(signs, _mm512_set1_epi8(static_cast<char>(1 << (4 * Half + k))));
            quads[k] = _mm512_mask_sub_epi8(positive, negative, broadcast_ints(0), positive);  // 256 less 128 and the number
        }
        return;
    }
#endif
    const auto plane = [&](const uint8_t* from) {
        return words_of([&](int lane) {
            uint32_t word = 0;
            for (int i = 0; i < 4; ++i) word |= static_cast<uint32_t>(from[numbers.of(lane, i)]) << (8 * i);
            return word;
        });
    };
    take_plane<2, 0>(plane(table), quads);
    take_plane<1, 2, 4>(plane(table + P::points), quads);
    take_plane<1, 3, 4>(shifted_right<4 * Half>(signs), quads);
#pragma GCC unroll 4
    for (int k = 0; k < 4; ++k) quads[k] = looked_up(numbers_of(B::codebook), quads[k]);
}

// Codes of 32 inputs of a vector of outputs, in the order of QuantizedFormat::transposed; `u` is their unit's number in a block.
template <class B>
PAGODA_INLINE void unpack_points(const QuantizedFormat& format, const uint8_t* block, int64_t u, int column,
                                 ints (&quads)[kQuads]) {
    using P = typename B::Points;
    const int64_t units = format.units_of_block(), stride = units * format.bit_bytes();
    const uint8_t* low = block + format.header_bytes();
    const uint8_t* signs = low + units * format.number_bytes();
    const uint8_t* bits = signs + units * format.sign_bytes() + u * format.bit_bytes() + column / 2;
    const uint8_t* table = format.blocks.lattice.table;
    low += u * format.number_bytes() + 4 * column, signs += u * format.sign_bytes() + 4 * column;
    if constexpr (P::inputs == 4) {
        const ints own = load_ints(signs);
        constexpr int half_bits = kPanel / 2;
        numbers_of_fours<B, 0>(table, {low, bits, stride}, own, quads);
        numbers_of_fours<B, 1>(table, {low + kRowBytes, bits + half_bits, stride}, own, quads + 4);
    } else {
        ints levels[kHalves], shared[kHalves];
        levels_of_eights<P>(table, {low, bits, stride}, levels);
        if constexpr (P::signs == 8) {
            signs_of_eights(bits + P::high * stride, shared);
        } else if constexpr (P::signs == kUnitInputs) {
            shared[0] = shared[1] = multiply_ints(shifted_right<3>(half_bytes(block, u, column)), broadcast_ints(0x04040404));
        }
#pragma GCC unroll 2
        for (int half = 0; half < kHalves; ++half) take_plane<2, 0>(levels[half], quads + 4 * half);
        if constexpr (P::signs == 1) {
            take_plane<1, 2>(load_ints(signs), quads);
        } else {
#pragma GCC unroll 8
            for (int q = 0; q < kQuads; ++q) quads[q] = masked_or(quads[q], -1, shared[q / 4]);
        }
#pragma GCC unroll 8
        for (ints& quad : quads) quad = looked_up(numbers_of(B::codebook), quad);
    }
}

// Trits of 32 inputs, of which a byte holds five: three times the byte, as a number of nine bits, begins with the first.
template <int First>
PAGODA_INLINE void unpack_trits(const uint8_t* words, ints (&quads)[kQuads]) {
    ints rest = load_ints(words);
    const auto advance = [&rest] { rest = add_bytes(rest, add_bytes(rest, rest)); };
    for (int i = 0; i < First; ++i) advance();
#pragma GCC unroll 8
    for (int q = 0; q < kQuads; ++q) {
        quads[q] = masked(shifted_right<6>(average_bytes(rest, average_bytes(rest, broadcast_ints(0)))), 3);
        if (q + 1 == kQuads) break;
        if ((First + q + 1) % kTritsOfByte == 0) {
            rest = load_ints(words + (First + q + 1) / kTritsOfByte * kRowBytes);
        } else {
            advance();
        }
    }
}

template <int First = 0>
PAGODA_INLINE void unpack_trits_from(int first, const uint8_t* words, ints (&quads)[kQuads]) {
    if constexpr (First + 1 < kTritsOfByte) {
        if (first != First) return unpack_trits_from<First + 1>(first, words, quads);
    }
    unpack_trits<First>(words, quads);
}

}  // namespace
