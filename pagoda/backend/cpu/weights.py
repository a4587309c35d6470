# SPDX-License-Identifier: Apache-2.0
"""Weights, caches and steps as the native kernels take them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pagoda.backend.base import Experts
from pagoda.backend.low_rank import LowRank, LowRankPart

if TYPE_CHECKING:
    from pagoda.backend import _native

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""The numbers that kernels know them by."""
KV_DTYPES = {**DTYPES, torch.int8: 3, torch.float8_e4m3fn: 4}
GATES = {"silu": 0, "swiglu_oai": 1, "gelu_tanh": 2, "relu": 3, "clamped_silu": 4}
_LARGE_PAGE = 2**21
_CHUNK = 2**27
_ALIGNMENT = 64


@dataclass(frozen=True)
class WeightSegment:
    """Outputs of a linear layer whose weights have one format."""

    panels: Tensor
    """Bytes of the weight [out, in] in panels of 32 outputs; see csrc/kernels.h."""
    bias: Tensor | None
    """[out rounded up to whole panels] float32."""
    outputs: int
    shape: tuple[int, int, int, int] | _native.QuantizedShape
    """Dtype, outputs and inputs of dense weights, and of 8-bit floats inputs that share a scale; or shape and
    format of quantized ones."""
    act_order: Tensor | None = None
    """See `GroupedWeight`."""

    @property
    def num_bytes(self) -> int:
        return self.panels.nbytes + (0 if self.bias is None else self.bias.nbytes)


@dataclass(frozen=True)
class PackedLinear:
    segments: tuple[WeightSegment, ...]
    """Segments whose outputs follow one another."""
    outputs: int
    inputs: int


@dataclass(frozen=True)
class NativeAttentionMetadata:
    native: _native.AttentionMetadata
    num_heads: int
    head_dim: int


def packed_low_rank(
    part: LowRank, dtype: torch.dtype, block: int, memory: WeightMemory
) -> LowRankPart:
    """The matrices in blocks of outputs; see csrc/low_rank.h."""

    def packed(matrix: Tensor) -> Tensor:
        outputs, inputs = matrix.shape
        side_by_side = 2 if dtype == torch.bfloat16 else 1
        padding = (0, -inputs % side_by_side, 0, -outputs % block)
        padded = torch.nn.functional.pad(matrix.to(dtype), padding)
        blocks = padded.view(-1, block, padded.shape[1] // side_by_side, side_by_side)
        packed = memory.take(blocks.nbytes).view(dtype).view(blocks.transpose(1, 2).shape)
        return packed.copy_(blocks.transpose(1, 2))

    return LowRankPart(len(part.down), part.scale, packed(part.down), packed(part.up))


def check_experts(experts: Experts[PackedLinear], limit: int) -> None:
    """Raises ValueError where kernels cannot compute these experts."""
    routing, held = experts.routing, len(experts.gate)
    hidden, inner = experts.gate[0].inputs, experts.gate[0].outputs
    if routing.num_experts > limit:
        raise ValueError(f"At most {limit} experts, not {routing.num_experts}.")
    if not 0 <= experts.first <= routing.num_experts - held:
        raise ValueError(f"There are no {held} experts from {experts.first} on.")
    for maps, outputs, inputs in (
        (experts.gate, inner, hidden),
        (experts.up, inner, hidden),
        (experts.down, hidden, inner),
    ):
        if len(maps) != held or any((m.outputs, m.inputs) != (outputs, inputs) for m in maps):
            raise ValueError("Experts must be of one shape.")
        if any(len(m.segments) > 1 for m in maps):
            raise ValueError("The maps of experts are of one part.")
    counts, correction = experts.counts, experts.correction
    if correction is not None and (
        correction.dtype != torch.float32
        or correction.shape != (routing.num_experts,)
        or not correction.is_contiguous()
    ):
        raise ValueError(f"A correction must be {routing.num_experts} of float32.")
    if counts.dtype != torch.int64 or counts.shape != (routing.num_experts,):
        raise ValueError(f"Counts must be {routing.num_experts} of int64.")


def address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


class WeightMemory:
    """Gives out bytes in large pages, that live as long as their tensors. What is never written takes no memory.

    A step reads all weights from one end to the other; in pages of 4 KiB the processor spends much of that time
    on finding where they lie. Large pages are aligned, so weights that are smaller lie in one chunk together.
    """

    def __init__(self, advise_large_pages: Callable[[int, int], None]) -> None:
        self._advise = advise_large_pages
        self._free = torch.empty(0, dtype=torch.uint8)

    def take(self, num_bytes: int) -> Tensor:
        """[num_bytes] uint8, unwritten, at a cache line."""
        if num_bytes > len(self._free):
            self._free = self._chunk(max(num_bytes, _CHUNK))
        taken = self._free[:num_bytes]
        self._free = self._free[-(-num_bytes // _ALIGNMENT) * _ALIGNMENT :]
        return taken

    def _chunk(self, num_bytes: int) -> Tensor:
        size = -(-num_bytes // _LARGE_PAGE) * _LARGE_PAGE
        memory = torch.empty(size + _LARGE_PAGE, dtype=torch.uint8)
        start = -memory.data_ptr() % _LARGE_PAGE
        self._advise(memory.data_ptr() + start, size)
        return memory[start : start + size]
