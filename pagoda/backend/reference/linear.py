# SPDX-License-Identifier: Apache-2.0
"""Linear layers, embeddings and adapters in plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pagoda.backend.host import check_token_ids
from pagoda.backend.low_rank import LowRank, LowRankMaps, LowRankPart
from pagoda.backend.reference.quantized import (
    PackedBlocks,
    PackedGroups,
    Quantized,
    embedding_rows,
    num_rows,
    quantized_product,
)
from pagoda.backend.reference.tiles import ROWS
from pagoda.backend.weights import (
    BlockWeight,
    DenseWeight,
    Fp8Weight,
    Int8Weight,
    LinearWeight,
    total_outputs,
    weight_shape,
)

OUTPUTS = 32
"""Outputs of an adapter's matrices are a multiple of this."""
WIDENED_BYTES = 1 << 20
"""Bytes of weights that are widened to float32 at once, which stay in the processor's cache: a product of 16 rows
with a map of 34,816 by 5,120 elements took six times as long without."""
LEAST_OUTPUTS = 64
"""Outputs whose weights are widened at once at the least."""


@dataclass(frozen=True)
class Linear:
    outputs: int
    inputs: int
    parts: tuple[Tensor | Quantized, ...]
    """Weights whose outputs follow one another; dense ones are [out, in]."""
    dtype: torch.dtype
    """Dtype of dense weights, for which inputs of 8-bit floats are rounded too."""
    bias: Tensor | None
    """[out] float32."""


def prepare_linear(
    parts: Sequence[LinearWeight], bias: Tensor | None, dtype: torch.dtype
) -> Linear:
    wide_bias = None if bias is None else bias.float()
    if all(isinstance(part, DenseWeight) for part in parts):
        joined = torch.cat([part.values.to(dtype) for part in parts])  # type: ignore[union-attr]
        held: tuple[Tensor | Quantized, ...] = (joined,)
    else:
        held = tuple(_prepared(part, dtype) for part in parts)
    return Linear(total_outputs(parts), weight_shape(parts[0])[1], held, dtype, wide_bias)


def linear(x: Tensor, weight: Linear) -> Tensor:
    x = x.flatten(1)
    if not len(x):
        return x.new_empty((0, sum(map(num_rows, weight.parts))))
    out = torch.cat([_product(x, part, weight.dtype) for part in weight.parts], dim=1)
    return out if weight.bias is None else out.add_(weight.bias)


def linear_argmax(x: Tensor, weight: Linear, *, first_id: int) -> Tensor:
    logits = linear(x, weight)
    columns = logits.argmax(dim=1)
    bits = logits.gather(1, columns[:, None]).flatten().view(torch.int32).long()
    finite = logits.isfinite().all(dim=1)
    return torch.stack((columns + first_id, bits, finite.long()), dim=1)


def embedding(token_ids: Tensor, weight: Linear, *, first_id: int, vocab_size: int) -> Tensor:
    (table,) = weight.parts
    outputs = num_rows(table)
    check_token_ids(token_ids, vocab_size)
    own = token_ids - first_id
    foreign = (own < 0) | (own >= outputs)
    own = own.masked_fill(foreign, 0)
    if isinstance(table, Tensor):
        rows = F.embedding(own, table).float()
    else:
        rows = embedding_rows(own, table)
    return rows.masked_fill(foreign[:, None], 0)


def add_low_rank(out: Tensor, x: Tensor, adapters: Tensor | None, maps: LowRankMaps) -> Tensor:
    if adapters is None:
        return out
    for adapter, parts in maps.parts.items():
        (rows,) = (adapters == adapter).nonzero(as_tuple=True)
        first = 0
        for part, outputs in zip(parts, maps.outputs, strict=True):
            if part is not None and len(rows):
                narrow = _dense_product(x[rows], part.down) * part.scale
                out[rows, first : first + outputs] += _dense_product(narrow, part.up)[:, :outputs]
            first += outputs
    return out


def set_low_rank(maps: LowRankMaps, adapter: int, parts: Sequence[LowRank | None]) -> None:
    maps.check(parts)
    maps.parts[adapter] = tuple(
        None
        if part is None
        else LowRankPart(
            len(part.down),
            part.scale,
            _padded(part.down.to(maps.dtype), 0),
            _padded(part.up.to(maps.dtype), -len(part.down) % OUTPUTS),
        )
        for part in parts
    )


def _padded(matrix: Tensor, more_inputs: int) -> Tensor:
    """A narrow matrix with outputs and inputs of zeros: of one that has few, libraries take rows another way."""
    return F.pad(matrix, (0, more_inputs, 0, -len(matrix) % OUTPUTS))


def _prepared(part: LinearWeight, dtype: torch.dtype) -> Tensor | Quantized:
    if isinstance(part, DenseWeight):
        return part.values.to(dtype, copy=True)
    if isinstance(part, BlockWeight):
        return PackedBlocks.of(part)
    if isinstance(part, Fp8Weight):  # it may lie in a mapped file
        return Fp8Weight(part.values.clone(), part.scales.clone(), part.group_size)
    return part if isinstance(part, Int8Weight) else PackedGroups.of(part)


def _product(x: Tensor, part: Tensor | Quantized, dtype: torch.dtype) -> Tensor:
    if isinstance(part, Tensor):
        return _dense_product(x, part)
    return (
        _fp8_product(x, part, dtype) if isinstance(part, Fp8Weight) else quantized_product(x, part)
    )


def _fp8_product(x: Tensor, weight: Fp8Weight, dtype: torch.dtype) -> Tensor:
    """x [n, in] float32 times 8-bit floats, inputs rounded as for a dense weight of `dtype`: [n, out] float32."""
    if dtype == torch.bfloat16:
        x = x.to(torch.bfloat16).float()
    total = x.new_zeros(len(x), len(weight.values))
    for inputs, scales in weight.groups():
        # Libraries may take rows of other strides another way.
        total += _dense_product(x[:, inputs].contiguous(), weight.values[:, inputs]) * scales
    return total


def _dense_product(x: Tensor, matrix: Tensor) -> Tensor:
    """x [n, in] float32 times a matrix [out, in] of any dtype: [n, out] float32."""
    if matrix.dtype == torch.bfloat16:
        x = x.to(torch.bfloat16).float()
    num_tokens = x.shape[0]
    x = F.pad(x, (0, 0, 0, -num_tokens % ROWS))
    out = x.new_empty(x.shape[0], matrix.shape[0])
    first = 0
    for part in _widened_at_once(matrix):
        outputs = slice(first, first := first + len(part))
        # Products of half-precision numbers are exact in float32, in which they are added up.
        wide = part.float().t()
        for start in range(0, x.shape[0], ROWS):
            rows = slice(start, start + ROWS)
            out[rows, outputs] = x[rows] @ wide
    return out[:num_tokens]


def _widened_at_once(matrix: Tensor) -> Sequence[Tensor]:
    """Parts of a matrix [out, in] of about as many outputs each; one part if it is float32 already.

    No part has few outputs: of one that has, libraries take rows another way.
    """
    if matrix.dtype == torch.float32:
        return (matrix,)
    outputs, inputs = matrix.shape
    at_once = max(LEAST_OUTPUTS, WIDENED_BYTES // (4 * inputs))
    return matrix.tensor_split(-(-outputs // at_once))


OPERATIONS: Mapping[str, Callable[..., Any]] = {
    function.__name__: function for function in (embedding, linear, linear_argmax, add_low_rank)
}
"""Operations by name."""
