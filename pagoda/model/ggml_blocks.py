"""The blocks of numbers in GGUF tensors, as grouped weights or as floats.

The layouts are those of ggml's `ggml-quants.h`. Formats with a scale for 32 weights keep their integers: what
changes is only that scales and offsets are rounded to float16. Those with a scale for 16 weights have none that a
`GroupedWeight` could hold; they are rounded anew, to 8 bits by the highest magnitude of every 32 weights.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from pagoda.backend.weights import DenseWeight, GroupedWeight, LinearWeight, dequantize
from pagoda.checkpoints.gguf.config import DENSE, GROUP_SIZE
from pagoda.checkpoints.gguf.reader import BlockType

_DTYPES = dict(zip(DENSE, (torch.float32, torch.float16, torch.bfloat16), strict=True))

_CHUNK_WEIGHTS = 2**20
"""Weights that are widened to floats at once; few enough to stay in the caches."""


def linear_weight(rows: Tensor, block: BlockType, dtype: torch.dtype) -> LinearWeight:
    """The weight in `rows` [out, bytes] uint8; a dense one in `dtype`, perhaps still in the same memory."""
    if block.name in DENSE:
        return DenseWeight(rows.view(_DTYPES[block.name]).to(dtype))
    if block.name in _GROUPED:
        return _GROUPED[block.name](_blocks(rows, block), rows.shape[0])
    return _rounded(rows, block)


def floats(rows: Tensor, block: BlockType) -> Tensor:
    """The numbers in `rows` [out, bytes] uint8 as [out, in] float32."""
    if block.name in _FLOATS:
        return _FLOATS[block.name](_blocks(rows, block)).view(rows.shape[0], -1)
    return dequantize(linear_weight(rows, block, torch.float32))


def _blocks(rows: Tensor, block: BlockType) -> Tensor:
    return rows.reshape(-1, block.num_bytes)


def _halves(blocks: Tensor, at: int) -> Tensor:
    """The float16 numbers that begin at byte `at` of each block, [blocks, 1] float32."""
    return blocks[:, at : at + 2].contiguous().view(torch.float16).float()


def _grouped(
    codes: Tensor, scales: Tensor, offsets: Tensor | None, bits: int, num_rows: int
) -> GroupedWeight:
    return GroupedWeight(
        codes=codes.view(num_rows, -1),
        scales=scales.half().view(num_rows, -1),
        offsets=None if offsets is None else offsets.half().view(num_rows, -1),
        bits=bits,
        group_size=GROUP_SIZE,
    )


# ---- formats with a scale for every 32 weights


def _q8_0(blocks: Tensor, num_rows: int) -> GroupedWeight:
    """Scale, 32 signed bytes."""
    return _grouped(blocks[:, 2:] ^ 128, _halves(blocks, 0), None, 8, num_rows)


def _q4_0(blocks: Tensor, num_rows: int) -> GroupedWeight:
    """Scale, 32 halves of bytes from which 8 is taken."""
    return _grouped(_nibbles(blocks[:, 2:], 16), _halves(blocks, 0), None, 4, num_rows)


def _q4_1(blocks: Tensor, num_rows: int) -> GroupedWeight:
    """Scale, lowest value, 32 halves of bytes."""
    scales, lowest = _halves(blocks, 0), _halves(blocks, 2)
    return _grouped(_nibbles(blocks[:, 4:], 16), scales, lowest + 8 * scales, 4, num_rows)


def _q5_0(blocks: Tensor, num_rows: int) -> GroupedWeight:
    """Scale, 32 fifth bits, 32 halves of bytes; 16 is taken from each five bits."""
    codes = _nibbles(blocks[:, 6:], 16) | _fifth_bits(blocks[:, 2:6])
    return _grouped(codes + (128 - 16), _halves(blocks, 0), None, 8, num_rows)


def _q5_1(blocks: Tensor, num_rows: int) -> GroupedWeight:
    """Scale, lowest value, 32 fifth bits, 32 halves of bytes."""
    codes = _nibbles(blocks[:, 8:], 16) | _fifth_bits(blocks[:, 4:8])
    return _grouped(codes + 128, _halves(blocks, 0), _halves(blocks, 2), 8, num_rows)


def _q4_k(blocks: Tensor, num_rows: int) -> GroupedWeight:
    """Scales and lowest values of eight groups, 256 halves of bytes."""
    scales, lowest = _scales_and_lowest(blocks)
    return _grouped(_nibbles(blocks[:, 16:], GROUP_SIZE), scales, 8 * scales - lowest, 4, num_rows)


def _q5_k(blocks: Tensor, num_rows: int) -> GroupedWeight:
    """Scales and lowest values of eight groups, 256 fifth bits, 256 halves of bytes."""
    scales, lowest = _scales_and_lowest(blocks)
    codes = _nibbles(blocks[:, 48:], GROUP_SIZE)
    shifts = torch.arange(8, dtype=torch.uint8)[:, None]
    fifth = ((blocks[:, None, 16:48] >> shifts) & 1) << 4
    codes.view(-1, 8, GROUP_SIZE).bitwise_or_(fifth)
    # Sixteen below the middle, so that the rounding of scales is half as far from exact.
    codes += 128 - 16
    return _grouped(codes, scales, 16 * scales - lowest, 8, num_rows)


def _nibbles(packed: Tensor, run: int) -> Tensor:
    """Low halves of each `run` bytes, then their high halves; [blocks, 2 bytes] uint8."""
    runs = packed.view(packed.shape[0], -1, run)
    codes = torch.empty((packed.shape[0], runs.shape[1], 2, run), dtype=torch.uint8)
    torch.bitwise_and(runs, 15, out=codes[:, :, 0])
    torch.bitwise_right_shift(runs, 4, out=codes[:, :, 1])
    return codes.view(packed.shape[0], -1)


def _fifth_bits(packed: Tensor) -> Tensor:
    """[blocks, 4] bytes to [blocks, 32], each 0 or 16."""
    shifts = torch.arange(8, dtype=torch.uint8)
    return (((packed[:, :, None] >> shifts) & 1) << 4).flatten(1)


def _scales_and_lowest(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Scales and lowest values of the eight groups of a block: two times [blocks, 8] float32.

    Two float16 numbers are multiplied by eight six-bit numbers each. Twelve bytes hold these: the first four of
    both kinds in the low six bits, the low four bits of the others in the last four bytes, and their high two bits
    where the first ones leave room.
    """
    first, second, last = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = torch.cat([first & 63, (last & 15) | ((first >> 6) << 4)], dim=1)
    lowest = torch.cat([second & 63, (last >> 4) | ((second >> 6) << 4)], dim=1)
    return _halves(blocks, 0) * scales, _halves(blocks, 2) * lowest


# ---- formats with a scale for every 16 weights


def _q2_k(blocks: Tensor) -> Tensor:
    """Scales and lowest values of sixteen groups in four bits each, 256 times two bits, what scales them."""
    codes = _two_bits(blocks[:, 16:80]).view(-1, 16, 16)
    scales = _halves(blocks, 80) * (blocks[:, :16] & 15)
    lowest = _halves(blocks, 82) * (blocks[:, :16] >> 4)
    return codes * scales[:, :, None] - lowest[:, :, None]


def _q3_k(blocks: Tensor) -> Tensor:
    """256 third bits, 256 times two bits, scales of sixteen groups in six bits, what scales them."""
    shifts = torch.arange(8, dtype=torch.uint8)[:, None]
    third = ((blocks[:, None, :32] >> shifts) & 1) << 2
    codes = (_two_bits(blocks[:, 32:96]).view(-1, 8, 32) | third).view(-1, 16, 16)
    low, high = blocks[:, 96:104], blocks[:, 104:108]
    high_bits = torch.cat([(high >> shift) & 3 for shift in (0, 2, 4, 6)], dim=1)
    six_bits = torch.cat([low & 15, low >> 4], dim=1) | (high_bits << 4)
    scales = _halves(blocks, 108) * (six_bits.float() - 32)
    return (codes.float() - 4) * scales[:, :, None]


def _q6_k(blocks: Tensor) -> Tensor:
    """256 halves of bytes, 256 times two bits, scales of sixteen groups in a signed byte, what scales them."""
    codes = _nibbles(blocks[:, :128], 64) | (_two_bits(blocks[:, 128:192]) << 4)
    scales = _halves(blocks, 208) * blocks[:, 192:208].contiguous().view(torch.int8)
    return (codes.view(-1, 16, 16).float() - 32) * scales[:, :, None]


def _two_bits(packed: Tensor) -> Tensor:
    """The lowest two bits of each 32 bytes, then the next two and so on; [blocks, 4 bytes] uint8."""
    runs = packed.view(packed.shape[0], -1, 1, 32)
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8)[:, None]
    codes: Tensor = (runs >> shifts) & 3
    return codes.flatten(1)


def _rounded(rows: Tensor, block: BlockType) -> GroupedWeight:
    """8 bits by the highest magnitude of every 32 weights."""
    num_rows = rows.shape[0]
    num_inputs = rows.shape[1] // block.num_bytes * block.weights
    codes = torch.empty((num_rows, num_inputs), dtype=torch.uint8)
    scales = torch.empty((num_rows, num_inputs // GROUP_SIZE), dtype=torch.float16)
    step = max(1, _CHUNK_WEIGHTS // num_inputs)
    for start in range(0, num_rows, step):
        part = slice(start, start + step)
        groups = floats(rows[part], block).view(-1, num_inputs // GROUP_SIZE, GROUP_SIZE)
        lowest, highest = groups.aminmax(dim=2)
        scales[part] = torch.maximum(highest, -lowest) / 127
        used = scales[part].float()
        inverse = torch.where(used > 0, 1 / used, 0)
        # A scale that float16 can hardly hold is rounded down by much.
        whole = groups.mul_(inverse[:, :, None]).round_().clamp_(-127, 127).add_(128)
        codes[part] = whole.flatten(1)
    return GroupedWeight(codes, scales, None, 8, GROUP_SIZE)


_GROUPED: dict[str, Callable[[Tensor, int], GroupedWeight]] = {
    "Q8_0": _q8_0,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
}
_FLOATS: dict[str, Callable[[Tensor], Tensor]] = {"Q2_K": _q2_k, "Q3_K": _q3_k, "Q6_K": _q6_k}
