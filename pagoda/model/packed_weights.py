# SPDX-License-Identifier: Apache-2.0
"""Linear layers of small integers with scales of groups: compressed-tensors, AWQ and GPTQ in safetensors files.

Files pack unsigned integers into 32-bit words, the first in the lowest bits; what they mean is
`scale * (code - zero point)`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pagoda.backend.weights import BlockWeight, GroupedWeight
from pagoda.checkpoints.checkpoint_quantization import GroupScheme
from pagoda.checkpoints.linears import LinearSpec
from pagoda.checkpoints.weight_formats import BlockFormat, held_group_size
from pagoda.errors import ConfigError
from pagoda.model.ggml_blocks import nibbles
from pagoda.model.weights import READABLE, CheckpointWeights, check_finite

_INT32, _INT8 = {"I32": "int32"}, {"I8": "int8"}
_INTEGERS = {"I32": "int32", "I64": "int64"}
_AWQ_SLOTS = (0, 2, 4, 6, 1, 3, 5, 7)
"""Codes in the order of their places in a word, from the lowest bits on."""
_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""Places of the eight codes in a word: the even ones lie below the odd ones."""
_MARLIN_TILE = 16
_MARLIN_CODES = tuple(
    # Of four tiles, as a warp's threads take them (Frantar et al. 2024).
    16 * row + thread // 4 + 8 * half + 256 * tile
    for thread in range(32)
    for tile in range(4)
    for place in _AWQ_SLOTS
    for half, row in [(place // 4, 2 * (thread % 4) + (0, 1, 8, 9)[place % 4])]
)
_MARLIN_SCALES = tuple(first + 8 * step for first in range(8) for step in range(8))
_MARLIN_ROW_SCALES = tuple(
    2 * first + step for first in range(4) for step in (0, 1, 8, 9, 16, 17, 24, 25)
)
"""Outputs among 64 or 32 whose scales lie one after the other."""


class GroupReader:
    """Reads one linear layer of a `GroupScheme`."""

    def __init__(self, tensors: CheckpointWeights, linear: LinearSpec, scheme: GroupScheme) -> None:
        name, inputs = linear.name, linear.inputs
        self._tensors = tensors
        self._name = name
        self._outputs = linear.outputs
        self._inputs = inputs
        self._scheme = scheme
        self._held_group_size = held_group_size(name, inputs, scheme.group_size)
        self._group_size = scheme.group_size or inputs
        self._num_groups = inputs // self._group_size

    def read(self, layout: str) -> GroupedWeight | BlockWeight:
        """The layer, whose tensors are those of a `checkpoint_quantization.Layout`."""
        match layout:
            case "compressed-tensors":
                if not self._tensors.has(f"{self._name}.weight_packed"):
                    return self._in_bytes()
                return self._compressed_tensors()
            case "awq":
                return self._awq()
            case "awq_gemv":
                return self._awq_gemv()
            case "marlin":
                return self._marlin()
        return self._gptq(zero_offset=1 if layout == "gptq" else 0)

    def _in_bytes(self) -> GroupedWeight | BlockWeight:
        """Signed integers in bytes of their own."""
        low = 2 ** (self._scheme.bits - 1)
        values = self._tensors.tensor(f"{self._name}.weight", (self._outputs, self._inputs), _INT8)
        scales = self._scales("weight_scale", self._outputs, self._num_groups)
        kind, offsets = "weight_zero_point", None
        if not self._scheme.symmetric:
            shape = (self._outputs, self._num_groups)
            zeros = self._tensors.tensor(f"{self._name}.{kind}", shape, _INT8)
            offsets = self._offsets(kind, scales, zeros.float() + low)
        codes = (values.clamp(-low, low - 1) + low).view(torch.uint8)
        return self._weight(codes, scales, offsets, self._act_order("weight_g_idx"))

    def _compressed_tensors(self) -> GroupedWeight | BlockWeight:
        self._check_stored_shape()
        words = self._words("weight_packed", self._outputs, self._num_words(self._inputs))
        scales = self._scales("weight_scale", self._outputs, self._num_groups)
        offsets = None
        if not self._scheme.symmetric:
            kind, packed_outputs = "weight_zero_point", self._num_words(self._outputs)
            zeros = self._unpacked(self._words(kind, packed_outputs, self._num_groups).t())
            offsets = self._offsets(kind, scales, zeros[:, : self._outputs].t())
        return self._weight(self._unpacked(words), scales, offsets, self._act_order("weight_g_idx"))

    def _awq(self) -> GroupedWeight | BlockWeight:
        packed_outputs = self._packed_outputs()
        codes = self._unpacked(self._words("qweight", self._inputs, packed_outputs))
        scales = self._scales("scales", self._num_groups, self._outputs).t()
        zeros = self._unpacked(self._words("qzeros", self._num_groups, packed_outputs))
        offsets = self._offsets("qzeros", scales, _in_awq_order(zeros).t())
        return self._weight(_in_awq_order(codes).t(), scales, offsets, None)

    def _awq_gemv(self) -> GroupedWeight | BlockWeight:
        words = self._words("qweight", self._outputs, self._num_words(self._inputs))
        # Rows are filled up to whole words, and more of them where groups are small.
        stored = self._tensors.shape(f"{self._name}.qzeros")
        packed_groups = max(stored[-1] if stored else 0, self._num_words(self._num_groups))
        zeros = self._unpacked(self._words("qzeros", self._outputs, packed_groups))
        scales = self._scales("scales", self._outputs, zeros.shape[1])[:, : self._num_groups]
        offsets = self._offsets("qzeros", scales, zeros[:, : self._num_groups])
        return self._weight(self._unpacked(words), scales, offsets, None)

    def _marlin(self) -> GroupedWeight | BlockWeight:
        if self._inputs % _MARLIN_TILE or self._outputs % (4 * _MARLIN_TILE):
            raise ConfigError(
                f"{self._name}.B has {self._inputs} inputs and {self._outputs} outputs, which must be multiples "
                f"of {_MARLIN_TILE} and {4 * _MARLIN_TILE} in the layout of Marlin."
            )
        words = self._words("B", self._inputs // _MARLIN_TILE, 2 * self._outputs)
        codes, order = self._unpacked(words).view(-1, len(_MARLIN_CODES)), list(_MARLIN_CODES)
        tiles = torch.empty_like(codes)
        tiles[:, order] = codes
        tiles = tiles.view(-1, self._outputs // _MARLIN_TILE, _MARLIN_TILE, _MARLIN_TILE)
        # Whole rows have another order of scales than groups.
        order = list(_MARLIN_ROW_SCALES if self._num_groups == 1 else _MARLIN_SCALES)
        stored = self._scales("s", self._num_groups, self._outputs).view(-1, len(order))
        scales = torch.empty_like(stored)
        scales[:, order] = stored
        straight = tiles.transpose(1, 2).reshape(self._inputs, self._outputs).t()
        return self._weight(straight, scales.view(self._num_groups, -1).t(), None, None)

    def _gptq(self, zero_offset: int) -> GroupedWeight | BlockWeight:
        words = self._words("qweight", self._num_words(self._inputs), self._outputs)
        scales = self._scales("scales", self._num_groups, self._outputs).t()
        zeros = self._unpacked(self._words("qzeros", self._num_groups, self._packed_outputs()))
        # A zero point may be 2 ** bits, which bytes do not hold.
        offsets = self._offsets("qzeros", scales, zeros.t().float() + zero_offset)
        return self._weight(self._unpacked(words.t()), scales, offsets, self._act_order("g_idx"))

    def _check_stored_shape(self) -> None:
        name = f"{self._name}.weight_shape"
        stored = self._tensors.tensor(name, (2,), _INTEGERS).tolist()
        if stored != [self._outputs, self._inputs]:
            raise ConfigError(
                f"{self._tensors.path_of(name)}: {name} says {stored}, "
                f"config.json calls for {[self._outputs, self._inputs]}."
            )

    def _packed_outputs(self) -> int:
        if self._outputs * self._scheme.bits % 32:
            raise ConfigError(
                f"{self._name}.qweight has {self._outputs} outputs of {self._scheme.bits} bits, "
                "which must fill 32-bit words."
            )
        return self._num_words(self._outputs)

    def _num_words(self, codes: int) -> int:
        return -(-codes * self._scheme.bits // 32)

    def _words(self, kind: str, *shape: int) -> Tensor:
        return self._tensors.tensor(f"{self._name}.{kind}", shape, _INT32)

    def _unpacked(self, words: Tensor) -> Tensor:
        """Codes [n, m * 32 / bits] uint8 of words [n, m], the lowest bits first; those of 3 lie across words."""
        # Bytes of a word lie in memory from the lowest to the highest on all machines that torch runs on.
        # `contiguous` alone leaves a matrix of one column any stride.
        octets, bits = words.flatten().contiguous().view(torch.uint8), self._scheme.bits
        octets = octets.view(len(words), -1)
        if bits == 8:
            return octets
        if bits == 4:
            return nibbles(octets, 1)
        singles = (octets[..., None] >> torch.arange(8, dtype=torch.uint8) & 1).flatten(1)
        weights = 1 << torch.arange(bits, dtype=torch.uint8)
        codes: Tensor = (singles.view(len(singles), -1, bits) * weights).sum(-1, dtype=torch.uint8)
        return codes

    def _scales(self, kind: str, *shape: int) -> Tensor:
        name = f"{self._name}.{kind}"
        scales = self._tensors.tensor(name, shape, READABLE).to(torch.float16)
        check_finite(self._tensors, name, scales, "float16")
        return scales

    def _act_order(self, kind: str) -> Tensor | None:
        """Inputs by their groups; None where they lie so already."""
        name = f"{self._name}.{kind}"
        if not (self._scheme.act_order or self._tensors.has(name)):
            return None
        groups = self._tensors.tensor(name, (self._inputs,), _INTEGERS).long()
        in_order = torch.arange(self._num_groups).repeat_interleave(self._group_size)
        if torch.equal(groups, in_order):
            return None
        sorted_groups, order = groups.sort(stable=True)
        if not torch.equal(sorted_groups, in_order):
            raise ConfigError(
                f"{self._tensors.path_of(name)}: {name} must put {self._group_size} inputs into each of "
                f"{self._num_groups} groups."
            )
        return order

    def _offsets(self, kind: str, scales: Tensor, zeros: Tensor) -> Tensor | None:
        """Offsets from scales and zero points [out, groups]."""
        distances = 2 ** (self._scheme.bits - 1) - zeros.float()
        if not bool(distances.any()):
            return None
        offsets: Tensor = (scales.float() * distances).to(torch.float16)
        check_finite(self._tensors, f"{self._name}.{kind}", offsets, "float16")
        return offsets

    def _weight(
        self, codes: Tensor, scales: Tensor, offsets: Tensor | None, order: Tensor | None
    ) -> GroupedWeight | BlockWeight:
        """The weight of codes [out, in], scales and offsets [out, groups]."""
        repeats = self._group_size // self._held_group_size
        scales = scales.repeat_interleave(repeats, dim=1)
        if offsets is not None:
            offsets = offsets.repeat_interleave(repeats, dim=1)
        if order is not None:
            codes = codes[:, order]
        blocks = self._scheme.blocks(self._held_group_size)
        if blocks is not None and order is None:
            return self._in_blocks(blocks, codes.contiguous(), scales, offsets)
        # The middle of fewer bits becomes that of four.
        bits = max(self._scheme.bits, 4)
        codes = codes + (2 ** (bits - 1) - 2 ** (self._scheme.bits - 1))
        return GroupedWeight(
            codes.contiguous(), scales, offsets, bits, self._held_group_size, order
        )

    def _in_blocks(
        self, held: BlockFormat, codes: Tensor, scales: Tensor, offsets: Tensor | None
    ) -> BlockWeight:
        """Codes of 2 bits, in which no group has a scale of its own within its block."""
        ones = torch.ones((self._outputs, self._inputs // held.group_size), dtype=torch.int8)
        minima = -2 * scales if offsets is None else offsets - 2 * scales
        return BlockWeight(held, codes, ones, ones, scales, minima)


def _in_awq_order(codes: Tensor) -> Tensor:
    return codes.view(len(codes), -1, 8)[:, :, list(_AWQ_PLACES)].flatten(1)
