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

#ifdef __AVX512F__

// Bytes of two vectors, one of each in turn: those of the first two of four bytes, and of the others.
PAGODA_INLINE void in_turn(ints a, ints b, ints (&halves)[kHalves]) {
    const auto low = _mm512_castsi512_ps(_mm512_unpacklo_epi8(a, b)), high = _mm512_castsi512_ps(_mm512_unpackhi_epi8(a, b));
    halves[0] = _mm512_castps_si512(_mm512_shuffle_ps(low, high, 0x88));
    halves[1] = _mm512_castps_si512(_mm512_shuffle_ps(low, high, 0xdd));
}

#endif
#ifdef __AVX512VNNI__

PAGODA_INLINE bool permutes_bytes() { return __builtin_cpu_supports("avx512vbmi"); }

// Bytes of a table of 1 << Bits for each of some vectors of numbers: seven bits of each, and masks of the others. A table is read
// once for all.
template <int Bits, int Count, int Masks>
PAGODA_INLINE void permute(const uint8_t* table, const ints (&numbers)[Count], const __mmask64 (&high)[Count][Masks],
                           ints (&found)[Count]) {
    if constexpr (Bits == 7) {
        const ints first = load_ints(table), second = load_ints(table + 64);
#pragma GCC unroll 2
        for (int i = 0; i < Count; ++i) {
            found[i] = numbers[i];
            asm("vpermi2b %2, %1, %0" : "+v"(found[i]) : "v"(first), "v"(second));
        }
    } else {
        ints above[Count];
        permute<Bits - 1>(table, numbers, high, found);
        permute<Bits - 1>(table + (1 << (Bits - 1)), numbers, high, above);
#pragma GCC unroll 2
        for (int i = 0; i < Count; ++i) found[i] = _mm512_mask_blend_epi8(high[i][Bits - 8], found[i], above[i]);
    }
}

// Some vectors of four points of each output.
template <class P, int Count>
struct PermutedPoints {
    ints low[Count];
    __mmask64 high[Count][P::high + 1];

    PAGODA_INLINE explicit PermutedPoints(const PointNumbers<P> (&numbers)[Count]) {
        for (int i = 0; i < Count; ++i) {
            low[i] = load_ints(numbers[i].low);
            high[i][0] = _mm512_movepi8_mask(low[i]);
            for (int b = 0; b < P::high; ++b) high[i][b + 1] = numbers[i].high[b];
        }
    }
    PAGODA_INLINE void find(const uint8_t* table, ints (&found)[Count]) const {
        permute<8 + P::high>(table, low, high, found);
    }
};

// Numbers of codes of three bits: two of `levels` that are shifted by `Right`, and one of `signs`.
template <int Right>
PAGODA_INLINE ints numbers_of_levels(ints book, ints levels, ints signs) {
    const ints codes = _mm512_ternarylogic_epi32(_mm512_set1_epi8(3), shifted_right<Right>(levels), signs, 0xca);
    ints numbers;
    asm("vpermb %2, %1, %0" : "=v"(numbers) : "v"(codes), "v"(book));  // its 64 bytes are eight times the eight numbers
    return numbers;
}
template <class P, int Q = 0>
PAGODA_INLINE void numbers_of_eights(ints book, const ints (&levels)[kHalves], const ints (&shared)[kHalves], ints own,
                                     ints (&quads)[kQuads]) {
    if constexpr (P::signs == 1) {
        quads[Q] = numbers_of_levels<Q % 4 * 2>(book, levels[Q / 4], shifted_right<Q - 2>(own));
    } else {
        quads[Q] = numbers_of_levels<Q % 4 * 2>(book, levels[Q / 4], shared[Q / 4]);
    }
    if constexpr (Q + 1 < kQuads) numbers_of_eights<P, Q + 1>(book, levels, shared, own, quads);
}

#endif

// Levels of the inputs of points of eight in one or two units: of each half of a unit, four bytes with two bits of four neighbours.
template <class P, int Count>
PAGODA_INLINE void find_levels(const uint8_t* table, const PointNumbers<P> (&numbers)[Count], ints (&levels)[Count][kHalves]) {
#ifdef __AVX512VNNI__
    if (permutes_bytes()) {
        const PermutedPoints<P, Count> points(numbers);
        ints first[Count], second[Count];
        points.find(table, first);
        points.find(table + P::points, second);
        for (int i = 0; i < Count; ++i) in_turn(first[i], second[i], levels[i]);
        return;
    }
#endif
    const auto both = [table](int number) { return static_cast<uint32_t>(table[number] | table[P::points + number] << 8); };
    for (int i = 0; i < Count; ++i) {
        for (int half = 0; half < kHalves; ++half) {
            levels[i][half] = words_of([&](int lane) {
                return both(numbers[i].of(lane, 2 * half)) | both(numbers[i].of(lane, 2 * half + 1)) << 16;
            });
        }
    }
}

// Bit 2 of the codes of eights that share a sign.
PAGODA_INLINE void signs_of_eights(const uint8_t* bits, ints (&signs)[kHalves]) {
    uint64_t set = 0;
    std::memcpy(&set, bits, kWidth / 2);
#ifdef __AVX512F__
    const ints spread = _mm512_maskz_set1_epi8(set, 4);
    in_turn(spread, spread, signs);
#else
    for (int half = 0; half < kHalves; ++half) {
        signs[half] = words_of([&](int lane) {
            const auto own = static_cast<uint32_t>(set >> (4 * lane + 2 * half));
            return (own & 1) * 0x0404u + (own >> 1 & 1) * 0x04040000u;
        });
    }
#endif
}

// Numbers of the inputs of points of four in a unit, whose signs are words.
template <class B>
PAGODA_INLINE void numbers_of_fours(const uint8_t* table, const PointNumbers<typename B::Points> (&numbers)[kHalves], ints signs,
                                    ints (&quads)[kQuads]) {
    using P = typename B::Points;
#ifdef __AVX512VNNI__
    if (permutes_bytes()) {
        const PermutedPoints<P, kHalves> points(numbers);
#pragma GCC unroll 4
        for (int k = 0; k < 4; ++k) {
            ints positive[kHalves];
            points.find(table + (2 + k) * P::points, positive);
#pragma GCC unroll 2
            for (int half = 0; half < kHalves; ++half) {
                const int q = 4 * half + k;
                const __mmask64 negative = _mm512_test_epi8_mask(signs, _mm512_set1_epi8(static_cast<char>(1 << q)));
                // 256 less 128 and the number.
                quads[q] = _mm512_mask_sub_epi8(positive[half], negative, _mm512_setzero_si512(), positive[half]);
            }
        }
        return;
    }
#endif
    for (int half = 0; half < kHalves; ++half) {
        const auto plane = [&](const uint8_t* from) {
            return words_of([&](int lane) {
                uint32_t word = 0;
                for (int i = 0; i < 4; ++i) word |= static_cast<uint32_t>(from[numbers[half].of(lane, i)]) << (8 * i);
                return word;
            });
        };
        take_plane<2, 0>(plane(table), quads + 4 * half);
        take_plane<1, 2, 4>(plane(table + P::points), quads + 4 * half);
    }
    take_plane<1, 3>(signs, quads);
#pragma GCC unroll 8
    for (ints& quad : quads) quad = looked_up(numbers_of(B::codebook), quad);
}

// Where the parts of a unit lie that are of the outputs from `column` on.
struct UnitOfPoints {
    const uint8_t *low, *signs, *bits;
    int64_t stride;  // of bits

    PAGODA_INLINE UnitOfPoints(const QuantizedFormat& format, const uint8_t* block, int64_t u, int column) {
        const int64_t units = format.units_of_block();
        low = block + format.header_bytes() + u * format.number_bytes() + 4 * column;
        signs = block + format.header_bytes() + units * format.number_bytes() + u * format.sign_bytes() + 4 * column;
        bits = block + format.header_bytes() + units * (format.number_bytes() + format.sign_bytes()) + u * format.bit_bytes() +
               column / 2;
        stride = units * format.bit_bytes();
    }
};

// Numbers of 32 inputs that are of points of eight.
template <class B>
PAGODA_INLINE void unpack_levels(const uint8_t* block, int64_t u, int column, const UnitOfPoints& unit,
                                 const ints (&levels)[kHalves], ints (&quads)[kQuads]) {
    using P = typename B::Points;
    ints shared[kHalves], own = broadcast_ints(0);
    if constexpr (P::signs == 8) {
        signs_of_eights(unit.bits + P::high * unit.stride, shared);
    } else if constexpr (P::signs == kUnitInputs) {
        shared[0] = shared[1] = multiply_ints(shifted_right<3>(half_bytes(block, u, column)), broadcast_ints(0x04040404));
    } else {
        own = load_ints(unit.signs);
    }
#ifdef __AVX512VNNI__
    if (permutes_bytes()) {
        int64_t eight;
        std::memcpy(&eight, numbers_of(B::codebook), 8);
        return numbers_of_eights<P>(_mm512_set1_epi64(eight), levels, shared, own, quads);
    }
#endif
    for (int half = 0; half < kHalves; ++half) take_plane<2, 0>(levels[half], quads + 4 * half);
    if constexpr (P::signs == 1) take_plane<1, 2>(own, quads);
#pragma GCC unroll 8
    for (int q = 0; q < kQuads; ++q) {
        if (P::signs != 1) quads[q] = masked_or(quads[q], -1, shared[q / 4]);
        quads[q] = looked_up(numbers_of(B::codebook), quads[q]);
    }
}

// Numbers of 32 inputs of a vector of outputs, in the order of QuantizedFormat::transposed; `u` is their unit's in a block.
template <class B>
PAGODA_INLINE void unpack_points(const QuantizedFormat& format, const uint8_t* block, int64_t u, int column,
                                 ints (&quads)[kQuads]) {
    using P = typename B::Points;
    const UnitOfPoints unit(format, block, u, column);
    const uint8_t* table = format.blocks.lattice.table;
    if constexpr (P::inputs == 4) {
        const PointNumbers<P> numbers[] = {{unit.low, unit.bits, unit.stride},
                                           {unit.low + kRowBytes, unit.bits + kPanel / 2, unit.stride}};
        numbers_of_fours<B>(table, numbers, load_ints(unit.signs), quads);
    } else {
        ints levels[1][kHalves];
        find_levels<P, 1>(table, {{unit.low, unit.bits, unit.stride}}, levels);
        unpack_levels<B>(block, u, column, unit, levels[0], quads);
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
        // Averages are rounded up: of one less they are what three times the byte has in its upper two of nine bits.
        const ints less = less_one_bytes(rest);
        quads[q] = masked(shifted_right<6>(average_bytes(less, average_bytes(less, broadcast_ints(0)))), 3);
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

template <Codebook B>
struct Book {
    static constexpr Codebook value = B;
};

// Calls f(Blocks<...>{}) for a format of blocks of points: those of IQ1_S and IQ1_M; IQ2_XXS, IQ2_XS and IQ2_S; IQ3_XXS; IQ3_S.
template <class F>
PAGODA_INLINE void with_points(const pagoda::BlockFormat& blocks, F f) {
    const auto call = [&f](auto codebook, auto group, auto points) {
        constexpr int bits = decltype(points)::inputs == 8 ? 3 : 4;
        f(Blocks<bits, decltype(codebook)::value, true, false, decltype(group)::value, false, decltype(points)>{});
    };
    constexpr Count<16> narrow;
    constexpr Count<32> wide;
    switch (blocks.codebook) {
        case Codebook::kIq1:
            if (blocks.lattice.sign_inputs == 8) return call(Book<Codebook::kIq1>{}, narrow, PointsOf<8, 3, 8>{});
            return call(Book<Codebook::kIq1>{}, wide, PointsOf<8, 3, 32>{});
        case Codebook::kIq2:
            if (blocks.lattice.high_bits == 0) return call(Book<Codebook::kIq2>{}, wide, PointsOf<8, 0, 1>{});
            if (blocks.lattice.high_bits == 1) return call(Book<Codebook::kIq2>{}, narrow, PointsOf<8, 1, 1>{});
            return call(Book<Codebook::kIq2>{}, narrow, PointsOf<8, 2, 1>{});
        case Codebook::kIq3Xxs: return call(Book<Codebook::kIq3Xxs>{}, wide, PointsOf<4, 0, 1>{});
        default: return call(Book<Codebook::kIq3S>{}, wide, PointsOf<4, 1, 1>{});
    }
}

}  // namespace
