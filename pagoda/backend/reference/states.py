# SPDX-License-Identifier: Apache-2.0
"""Layers that keep one state of all tokens so far, in plain PyTorch: token by token, or element by element.

No sum has terms of tokens whose number depends on the step, so results do not depend on how sequences are cut.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pagoda.backend.base import StateCache, TokenBatch
from pagoda.backend.reference.rows import rms_norm, sigmoid

_LENGTH_EPS = 1e-6
"""Number that is added to sums of squares of queries and keys."""


@dataclass(frozen=True)
class _Sequence:
    rows: slice
    """Rows of the step's tokens."""
    begin: int
    """Position of the first of them."""
    kept_end: int
    """Position behind the last token behind which the state is kept."""
    blocks: Tensor
    """[b] int64, the blocks of the sequence."""


@dataclass(frozen=True)
class StateMetadata:
    sequences: list[_Sequence]
    block_size: int


def plan_states(batch: TokenBatch, cache: StateCache, group: int) -> StateMetadata:
    """Metadata of a step for layers with a state."""
    ends = batch.query_lens.cumsum(0).tolist()
    lens, contexts = batch.query_lens.tolist(), batch.context_lens
    kept_ends = contexts if batch.draft_lens is None else contexts - batch.draft_lens
    places = zip(
        ends,
        lens,
        contexts.tolist(),
        kept_ends.tolist(),
        batch.block_tables[group],
        strict=True,
    )
    return StateMetadata(
        [
            _Sequence(slice(end - n, end), context - n, kept_end, blocks)
            for end, n, context, kept_end, blocks in places
        ],
        cache.block_size,
    )


class _States:
    """States of one sequence, before a step and behind those of its tokens that end a block, and the last that is
    no draft."""

    def __init__(self, cache: StateCache, sequence: _Sequence, block_size: int) -> None:
        self._cache = cache
        self._begin, self._size = sequence.begin, block_size
        self._end = sequence.kept_end
        self._blocks = sequence.blocks

    def _parts(self, position: int) -> Iterator[Tensor]:
        """Units of both halves of the block of a position, [units, floats]."""
        cache, block = self._cache, int(self._blocks[position // self._size])
        for half, count in zip(cache.halves(), cache.units_of_halves, strict=True):
            floats = half[block, cache.offset : cache.offset + count * cache.floats]
            yield floats.view(count, cache.floats)

    def before(self) -> Tensor:
        """State [units, floats] before the first token: zeros, or that behind the token before it."""
        if self._begin == 0:
            return torch.zeros(self._cache.units, self._cache.floats)
        return torch.cat([*self._parts(self._begin - 1)])

    def kept(self) -> Iterator[int]:
        """Places among the step's tokens behind which the state is kept."""
        for position in range(self._begin, self._end):
            if (position + 1) % self._size == 0 or position + 1 == self._end:
                yield position - self._begin

    def keep(self, place: int, state: Tensor) -> None:
        """Stores the state [units, floats] behind one of them."""
        split = torch.split(state, [*self._cache.units_of_halves])
        for part, own in zip(self._parts(self._begin + place), split, strict=True):
            part.copy_(own)


def short_conv(
    x: Tensor,
    metadata: StateMetadata,
    cache: StateCache,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    gated: float,
    silu: float,
) -> Tensor:
    before, factor = x, None
    if gated:
        b, factor, own = x.chunk(3, dim=1)
        before = b * own
    width = len(weight)
    out = torch.empty_like(before)
    for sequence in metadata.sequences:
        states = _States(cache, sequence, metadata.block_size)
        inputs = torch.cat([states.before().t(), before[sequence.rows]])
        count = len(inputs) - width + 1
        total = inputs[:count] * weight[0]
        for tap in range(1, width):
            total = total + inputs[tap : tap + count] * weight[tap]
        out[sequence.rows] = total
        for place in states.kept():
            states.keep(place, inputs[place + 1 : place + width].t())
    if bias is not None:
        out = out + bias
    if silu:
        out = _silu(out)
    return out if factor is None else factor * out


def gated_delta(
    qkv: Tensor,
    gates: Tensor,
    metadata: StateMetadata,
    cache: StateCache,
    decay: Tensor,
    dt_bias: Tensor,
    *,
    key_heads: int,
    key_dim: int,
    by_channel: float,
) -> Tensor:
    heads, keys = cache.units, key_heads * key_dim
    q, k, v = torch.split(qkv, [keys, keys, qkv.shape[1] - 2 * keys], dim=1)
    q, k = (
        _unit_length(part.view(len(qkv), key_heads, key_dim)).repeat_interleave(
            heads // key_heads, dim=1
        )
        for part in (q, k)
    )
    v = v.view(len(qkv), heads, -1)
    channels = key_dim if by_channel else 1
    b, a = torch.split(gates, [heads, heads * channels], dim=1)
    kept = torch.exp(decay[:, None] * _softplus(a + dt_bias).view(len(qkv), heads, channels))
    beta = sigmoid(b)
    out = torch.empty_like(v)
    for sequence in metadata.sequences:
        states = _States(cache, sequence, metadata.block_size)
        state = states.before().view(heads, key_dim, -1)
        places = set(states.kept())
        for place, row in enumerate(range(sequence.rows.start, sequence.rows.stop)):
            state = state * kept[row, :, :, None]
            seen = (state * k[row, :, :, None]).sum(1)
            delta = (v[row] - seen) * beta[row, :, None]
            state = state + k[row, :, :, None] * delta[:, None, :]
            out[row] = (state * q[row, :, :, None]).sum(1)
            if place in places:
                states.keep(place, state.flatten(1))
    scale: float = key_dim**-0.5
    return out.flatten(1) * scale


def _silu(x: Tensor) -> Tensor:
    # F.silu takes another path for the last few elements of a tensor than for the rest.
    return x / (1 + torch.exp(-x))


def _softplus(x: Tensor) -> Tensor:
    """log(1 + e^x)."""
    return torch.where(x > 20, x, torch.log1p(torch.exp(x)))


def _unit_length(x: Tensor) -> Tensor:
    """x [..., d] over the root of its sum of squares plus a little."""
    lengths: Tensor = (x.square().sum(-1, keepdim=True) + _LENGTH_EPS).sqrt()
    return x / lengths


def gated_head_norm(
    x: Tensor, gate: Tensor, weight: Tensor, *, head_dim: int, eps: float
) -> Tensor:
    heads = x.view(len(x), -1, head_dim)
    normed: Tensor = rms_norm(heads, weight, eps=eps).flatten(1)
    return normed * _silu(gate)


def rms_norm_groups(x: Tensor, weight: Tensor, *, group_size: int, eps: float) -> Tensor:
    parts = x.view(len(x), -1, group_size)
    normed: Tensor = rms_norm(parts, weight.view(-1, group_size), eps=eps).flatten(1)
    return normed


def selective_scan(
    x: Tensor,
    b: Tensor,
    c: Tensor,
    dt: Tensor,
    metadata: StateMetadata,
    cache: StateCache,
    decay: Tensor,
    dt_bias: Tensor,
    skip: Tensor,
    *,
    groups: int,
    state_dim: int,
    b_first: int,
    c_first: int,
    by_element: float,
    dt_min: float,
    dt_max: float,
) -> Tensor:
    heads, n = cache.units, len(x)
    head_dim, keys = cache.floats // state_dim, groups * state_dim
    x = x[:, : heads * head_dim].reshape(n, heads, head_dim)
    b, c = (
        part[:, first : first + keys]
        .reshape(n, groups, state_dim)
        .repeat_interleave(heads // groups, dim=1)
        for part, first in ((b, b_first), (c, c_first))
    )
    steps = _softplus(dt + dt_bias).clamp(dt_min, dt_max)
    factors = decay.t() if by_element else decay[:, None]
    out = torch.empty_like(x)
    for sequence in metadata.sequences:
        states = _States(cache, sequence, metadata.block_size)
        state = states.before().view(heads, state_dim, head_dim)
        places = set(states.kept())
        for place, row in enumerate(range(sequence.rows.start, sequence.rows.stop)):
            kept = torch.exp(steps[row, :, None] * factors)
            added = steps[row, :, None] * x[row]
            state = state * kept[:, :, None] + b[row, :, :, None] * added[:, None]
            out[row] = (state * c[row, :, :, None]).sum(1)
            if place in places:
                states.keep(place, state.flatten(1))
    return (out + skip[:, None] * x).flatten(1)


OPERATIONS: Mapping[str, Callable[..., Any]] = {
    function.__name__: function
    for function in (short_conv, gated_delta, gated_head_norm, rms_norm_groups, selective_scan)
}
"""Operations by name."""
