# SPDX-License-Identifier: Apache-2.0
"""The blocks of numbers in GGUF tensors, as weights that keep their codes, scales and minima, or as floats.

The layouts are those of ggml's `ggml-quants.h`. No number is rounded but the scale of I2_S, to float16.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from pagoda.backend.lattices import point_codes
from pagoda.backend.weights import BlockWeight, DenseWeight, LinearWeight, dequantize
from pagoda.checkpoints import lattices
from pagoda.checkpoints.gguf.config import BLOCKS, DENSE
from pagoda.checkpoints.gguf.reader import BlockType

_DTYPES = dict(zip(DENSE, (torch.float32, torch.float16, torch.bfloat16), strict=True))


def linear_weight(rows: Tensor, block: BlockType, dtype: torch.dtype) -> LinearWeight:
    """The weight in `rows` [out, bytes] uint8; a dense one in `dtype`, perhaps still in the same memory."""
    if block.name in DENSE:
        return DenseWeight(rows.view(_DTYPES[block.name]).to(dtype))
    num_rows = rows.shape[0]
    if block.behind:
        scale = rows[:, -block.behind :][:, :4].contiguous().view(torch.float32)
        rows = _as_tq2_0(rows[:, : -block.behind], scale)
        block = BlockType("TQ2_0", 256, 66)
    blocks = rows.reshape(-1, block.num_bytes)
    codes, scales, *others = _PARTS[block.name](blocks)
    minima, block_scales, block_minima = (
        None if part is None else part.reshape(num_rows, -1) for part in others
    )
    return BlockWeight(
        BLOCKS[block.name],
        codes.reshape(num_rows, -1),
        scales.reshape(num_rows, -1),
        minima,
        block_scales,
        block_minima,
    )


def floats(rows: Tensor, block: BlockType) -> Tensor:
    """The numbers in `rows` [out, bytes] uint8 as [out, in] float32."""
    return dequantize(linear_weight(rows, block, torch.float32))


def _halves(blocks: Tensor, at: int) -> Tensor:
    """The float16 numbers that begin at byte `at` of each block, [blocks, 1]."""
    return blocks[:, at : at + 2].contiguous().view(torch.float16)


def nibbles(packed: Tensor, run: int) -> Tensor:
    """Low halves of each `run` bytes, then their high halves; [blocks, 2 bytes] uint8."""
    runs = packed.view(packed.shape[0], -1, run)
    codes = torch.empty((packed.shape[0], runs.shape[1], 2, run), dtype=torch.uint8)
    torch.bitwise_and(runs, 15, out=codes[:, :, 0])
    torch.bitwise_right_shift(runs, 4, out=codes[:, :, 1])
    return codes.view(packed.shape[0], -1)


# ---- codes, scales and minima of groups, and scales and minima of blocks

_Parts = tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]


def _q8_0(blocks: Tensor) -> _Parts:
    """Scale, 32 signed bytes."""
    return blocks[:, 2:] ^ 128, _halves(blocks, 0), None, None, None


def _q4_0(blocks: Tensor) -> _Parts:
    """Scale, 32 halves of bytes."""
    return nibbles(blocks[:, 2:], 16), _halves(blocks, 0), None, None, None


def _q4_1(blocks: Tensor) -> _Parts:
    """Scale, minimum, 32 halves of bytes."""
    return nibbles(blocks[:, 4:], 16), _halves(blocks, 0), _halves(blocks, 2), None, None


def _q5_0(blocks: Tensor) -> _Parts:
    """Scale, 32 fifth bits, 32 halves of bytes."""
    codes = nibbles(blocks[:, 6:], 16) | _fifth_bits(blocks[:, 2:6])
    return codes, _halves(blocks, 0), None, None, None


def _q5_1(blocks: Tensor) -> _Parts:
    """Scale, minimum, 32 fifth bits, 32 halves of bytes."""
    codes = nibbles(blocks[:, 8:], 16) | _fifth_bits(blocks[:, 4:8])
    return codes, _halves(blocks, 0), _halves(blocks, 2), None, None


def _iq4_nl(blocks: Tensor) -> _Parts:
    """Scale, 32 halves of bytes."""
    return nibbles(blocks[:, 2:], 16), _halves(blocks, 0), None, None, None


def _mxfp4(blocks: Tensor) -> _Parts:
    """Exponent of the scale, 32 halves of bytes."""
    return nibbles(blocks[:, 1:], 16), mxfp4_scales(blocks[:, :1]), None, None, None


def mxfp4_scales(exponents: Tensor) -> Tensor:
    """Half the scales 2^(e - 127) of bytes e as float16, for codes that stand for twice their numbers.

    Scales below 2^-23 become zero, those from 2^17 on infinite; nothing between is rounded.
    """
    ones = torch.ones(exponents.shape)
    return torch.ldexp(ones, exponents.to(torch.int32) - 128).half()


def _iq4_xs(blocks: Tensor) -> _Parts:
    """Scale of the block, high two bits of eight scales, their low four bits, 256 halves of bytes."""
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8)
    high = ((blocks[:, 2:4, None] >> shifts) & 3).flatten(1)
    six_bits = nibbles(blocks[:, 4:8], 1) | high << 4
    return nibbles(blocks[:, 8:], 16), _less_32(six_bits), None, _halves(blocks, 0), None


def _iq1_s(blocks: Tensor) -> _Parts:
    """Scale of the block, low bytes of 32 points' numbers; then words of 32 inputs each.

    A word has the high three bits of four numbers, a scale in three bits, and a sign.
    """
    high = _words(blocks[:, 34:50])
    numbers = _with_high_bits(blocks[:, 2:34], _fields(high, 3, 4) & 7)
    codes = point_codes(lattices.IQ1_S, numbers, _octets(high >> 15))
    return codes, _odd(high >> 12 & 7), None, _halves(blocks, 0), None


def _iq1_m(blocks: Tensor) -> _Parts:
    """Low bytes of 32 points' numbers; the high three bits and a sign of each, in half a byte; four words.

    A word has four scales of three bits, and in its last four bits a part of the block's scale.
    """
    words, high = _words(blocks[:, 48:56]), nibbles(blocks[:, 32:48], 1)
    numbers = _with_high_bits(blocks[:, :32], high & 7)
    shifts = torch.tensor([12, 8, 4, 0], dtype=torch.int32)
    halves = ((words & 0xF000) >> shifts).sum(1, keepdim=True)
    block_scales = torch.cat([_octets(halves), _octets(halves >> 8)], dim=1)
    codes = point_codes(lattices.IQ1_M, numbers, high >> 3)
    return codes, _odd(_fields(words, 3, 4) & 7), None, _halves(block_scales, 0), None


def _iq2_xxs(blocks: Tensor) -> _Parts:
    """Scale of the block; of each 32 inputs four points' numbers and a word of 32 bits.

    A word has the signs of each point in seven bits, and a scale in four.
    """
    parts = blocks[:, 2:].view(len(blocks), 8, 8)
    words = _words(parts[:, :, 4:].flatten(1), 4)
    numbers = parts[:, :, :4].flatten(1)
    codes = point_codes(lattices.IQ2_XXS, numbers, _even_signs(_fields(words, 7, 4)))
    return codes, _odd(words >> 28 & 15), None, _halves(blocks, 0), None


def _iq2_xs(blocks: Tensor) -> _Parts:
    """Scale of the block; of 32 points nine bits of the number and seven of signs; 16 scales in four bits."""
    words = _words(blocks[:, 2:66])
    codes = point_codes(lattices.IQ2_XS, words & 511, _even_signs(words >> 9))
    return codes, _odd(nibbles(blocks[:, 66:74], 1)), None, _halves(blocks, 0), None


def _iq2_s(blocks: Tensor) -> _Parts:
    """Scale of the block; of 32 points low bytes of numbers, signs, and high two bits; 16 scales."""
    numbers = _with_high_bits(blocks[:, 2:34], _fields(blocks[:, 66:74], 2, 4) & 3)
    codes = point_codes(lattices.IQ2_S, numbers, _bits(blocks[:, 34:66]))
    return codes, _odd(nibbles(blocks[:, 74:82], 1)), None, _halves(blocks, 0), None


def _iq3_xxs(blocks: Tensor) -> _Parts:
    """Scale of the block, 64 points' numbers, and of each 32 inputs a word as in IQ2_XXS."""
    words = _words(blocks[:, 66:98], 4)
    codes = point_codes(lattices.IQ3_XXS, blocks[:, 2:66], _even_signs(_fields(words, 7, 4)))
    return codes, _odd(words >> 28 & 15), None, _halves(blocks, 0), None


def _iq3_s(blocks: Tensor) -> _Parts:
    """Scale of the block; of 64 points low bytes of numbers, and high bits; 256 signs; eight scales."""
    numbers = _with_high_bits(blocks[:, 2:66], _bits(blocks[:, 66:74]))
    codes = point_codes(lattices.IQ3_S, numbers, _bits(blocks[:, 74:106]))
    return codes, _odd(nibbles(blocks[:, 106:110], 1)), None, _halves(blocks, 0), None


def _tq1_0(blocks: Tensor) -> _Parts:
    """240 and 16 trits, five of a byte and four, as fractions of 256; scale."""
    parts = _trits(blocks[:, :32], 5), _trits(blocks[:, 32:48], 5), _trits(blocks[:, 48:52], 4)
    return torch.cat(parts, dim=1), _halves(blocks, 52), None, None, None


def _trits(octets: Tensor, count: int) -> Tensor:
    """The first trits of all bytes, then the second ones and so on."""
    powers = torch.tensor([3**i for i in range(count)], dtype=torch.uint8)[:, None]
    thrice: Tensor = (octets[:, None, :] * powers).to(torch.int16) * 3 >> 8
    return thrice.to(torch.uint8).flatten(1)


def _tq2_0(blocks: Tensor) -> _Parts:
    """256 times two bits, scale."""
    return _two_bits(blocks[:, :64]), _halves(blocks, 64), None, None, None


def _as_tq2_0(rows: Tensor, scale: Tensor) -> Tensor:
    """Rows of I2_S, whose first 32 weights of 128 have the highest bits of 32 bytes, with a scale a block."""
    turned = (rows & 3) << 6 | (rows & 12) << 2 | (rows & 48) >> 2 | rows >> 6
    blocks = turned.reshape(len(rows), -1, 64)
    scales = scale.half().view(torch.uint8)[:, None].expand(-1, blocks.shape[1], -1)
    return torch.cat([blocks, scales], dim=2).flatten(1)


def _nvfp4(blocks: Tensor) -> _Parts:
    """Scales of four groups without signs, and of each group low halves of eight bytes, then their high halves."""
    octets, halves = blocks[:, :4] & 127, blocks[:, 4:]
    scales = torch.where(octets == 127, 0, octets).view(torch.float8_e4m3fn)
    # Of scales 2^-8 counts, and numbers of the codebook are doubled.
    unit = torch.full((len(blocks), 1), 2.0**7, dtype=torch.float16)
    return nibbles(halves.contiguous(), 8), scales, None, unit, None


def _words(octets: Tensor, size: int = 2) -> Tensor:
    """Words of so many bytes each, as [blocks, words] int32 for 2 and int64 for 4."""
    dtype = torch.int32 if size == 2 else torch.int64
    parts = octets.reshape(len(octets), -1, size).to(dtype)
    return (parts << torch.arange(0, 8 * size, 8, dtype=dtype)).sum(2, dtype=dtype)


def _fields(words: Tensor, width: int, count: int) -> Tensor:
    """Each word shifted by 0, 1 and so on times `width`: [blocks, words * count], bits above those left in."""
    shifts = torch.arange(0, width * count, width, dtype=words.dtype)
    return (words[:, :, None] >> shifts).flatten(1)


def _with_high_bits(low: Tensor, high: Tensor) -> Tensor:
    """Numbers [blocks, n] int16 of which the low eight bits are in bytes, and others in `high`."""
    return low.to(torch.int16) | high.to(torch.int16) << 8


def _bits(octets: Tensor) -> Tensor:
    """[blocks, bytes] to [blocks, 8 bytes] uint8, the lowest bit of each byte first."""
    return _fields(octets, 1, 8) & 1


def _even_signs(sevens: Tensor) -> Tensor:
    """Signs of eight inputs by seven bits each; those of all eight are even in number."""
    seven = _octets(sevens & 127)
    bits = _fields(seven, 1, 7).view(*seven.shape, 7) & 1
    last = bits.sum(2, keepdim=True, dtype=torch.uint8) & 1
    return torch.cat([bits, last], dim=2).flatten(1)


def _octets(numbers: Tensor) -> Tensor:
    return (numbers & 255).to(torch.uint8)


def _odd(halves: Tensor) -> Tensor:
    return 2 * halves.to(torch.int8) + 1


def _q4_k(blocks: Tensor) -> _Parts:
    """Scales and minima of eight groups, 256 halves of bytes."""
    return nibbles(blocks[:, 16:], 32), *_scales_and_minima(blocks)


def _q5_k(blocks: Tensor) -> _Parts:
    """Scales and minima of eight groups, 256 fifth bits, 256 halves of bytes."""
    codes = nibbles(blocks[:, 48:], 32)
    codes |= _bits_of_octets(blocks[:, 16:48]) << 4
    return codes, *_scales_and_minima(blocks)


def _q2_k(blocks: Tensor) -> _Parts:
    """Scales and minima of sixteen groups in four bits each, 256 times two bits, scales of both."""
    scales, minima = blocks[:, :16] & 15, blocks[:, :16] >> 4
    block_scales, block_minima = _halves(blocks, 80), -_halves(blocks, 82)
    return _two_bits(blocks[:, 16:80]), _signed(scales), _signed(minima), block_scales, block_minima


def _q3_k(blocks: Tensor) -> _Parts:
    """256 third bits, 256 times two bits, scales of sixteen groups in six bits, scale of the block."""
    codes = _two_bits(blocks[:, 32:96]) | _bits_of_octets(blocks[:, :32]) << 2
    low, high = blocks[:, 96:104], blocks[:, 104:108]
    high_bits = torch.cat([(high >> shift) & 3 for shift in (0, 2, 4, 6)], dim=1)
    six_bits = torch.cat([low & 15, low >> 4], dim=1) | (high_bits << 4)
    return codes, _less_32(six_bits), None, _halves(blocks, 108), None


def _q6_k(blocks: Tensor) -> _Parts:
    """256 halves of bytes, 256 times two bits, scales of sixteen groups in a byte, scale of the block."""
    codes = nibbles(blocks[:, :128], 64) | (_two_bits(blocks[:, 128:192]) << 4)
    return codes, _signed(blocks[:, 192:208]), None, _halves(blocks, 208), None


def _fifth_bits(packed: Tensor) -> Tensor:
    """[blocks, 4] bytes to [blocks, 32], each 0 or 16."""
    shifts = torch.arange(8, dtype=torch.uint8)
    return (((packed[:, :, None] >> shifts) & 1) << 4).flatten(1)


def _bits_of_octets(packed: Tensor) -> Tensor:
    """The lowest bits of 32 bytes, then the next and so on; [blocks, 256] uint8."""
    shifts = torch.arange(8, dtype=torch.uint8)[:, None]
    bits: Tensor = (packed[:, None, :] >> shifts) & 1
    return bits.flatten(1)


def _two_bits(packed: Tensor) -> Tensor:
    """The lowest two bits of each 32 bytes, then the next two and so on; [blocks, 4 bytes] uint8."""
    runs = packed.view(packed.shape[0], -1, 1, 32)
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8)[:, None]
    codes: Tensor = (runs >> shifts) & 3
    return codes.flatten(1)


def _scales_and_minima(blocks: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Scales and minima of the eight groups of a block, 0 to 63, and of the blocks.

    Twelve bytes hold the former: the first four of both kinds in the low six bits, the low four bits of the others
    in the last four bytes, and their high two bits where the first ones leave room.
    """
    first, second, last = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = torch.cat([first & 63, (last & 15) | ((first >> 6) << 4)], dim=1)
    minima = torch.cat([second & 63, (last >> 4) | ((second >> 6) << 4)], dim=1)
    return _signed(scales), _signed(minima), _halves(blocks, 0), -_halves(blocks, 2)


def _signed(octets: Tensor) -> Tensor:
    return octets.contiguous().view(torch.int8)


def _less_32(six_bits: Tensor) -> Tensor:
    return _signed(six_bits) - 32


_PARTS: dict[str, Callable[[Tensor], _Parts]] = {
    "Q8_0": _q8_0,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
    "MXFP4": _mxfp4,
    "IQ1_S": _iq1_s,
    "IQ1_M": _iq1_m,
    "IQ2_XXS": _iq2_xxs,
    "IQ2_XS": _iq2_xs,
    "IQ2_S": _iq2_s,
    "IQ3_XXS": _iq3_xxs,
    "IQ3_S": _iq3_s,
    "TQ1_0": _tq1_0,
    "TQ2_0": _tq2_0,
    "NVFP4": _nvfp4,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}
