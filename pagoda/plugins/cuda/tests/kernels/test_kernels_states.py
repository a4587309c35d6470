# SPDX-License-Identifier: Apache-2.0
"""Kernels of layers with a state in Triton's interpreter: the reference's results, the same bits in pieces."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from pagoda.backend.base import KVCache, StateCache, TokenBatch
from pagoda.backend.reference import states as reference
from pagoda.plugins.backend_check.attention import Share
from pagoda.plugins.backend_check.subject import batch_of_spans, random_tensor
from pagoda.plugins.cuda.kernels import states
from pagoda.plugins.cuda.kernels.attention import Steps, plan_tiles

LENGTHS, BLOCK = (34, 1, 5), 16
BLOCKS = ([4, 2, 7], [0], [5])
UNUSED = [1, 3, 6]
WHOLE: tuple[Share, ...] = tuple((i, 0, n) for i, n in enumerate(LENGTHS))
PIECES: tuple[tuple[Share, ...], ...] = (
    ((0, 0, 1), (2, 0, 2)),
    ((2, 2, 2), (0, 1, 14)),
    ((0, 15, 1), (1, 0, 1), (2, 4, 1)),
    ((0, 16, 18),),
)
"""Steps that begin and end with a block, of fewer tokens than a state has inputs, and of one token of each."""


@dataclass(frozen=True)
class Layer:
    """A layer with a state, with the rows of its inputs for all tokens."""

    units: int
    floats: int
    width: int
    """Elements of a row of results."""
    inputs: tuple[Tensor, ...]
    compute: Callable[..., Any]
    """Launches kernels on inputs, halves of the cache and places, into results."""
    wanted: Callable[..., Tensor]
    """The reference of inputs, metadata and a cache."""

    def cache(self) -> StateCache:
        """Blocks that nobody has written to, with others' memory before and behind the states."""
        room = (self.units + 1) // 2 * self.floats + 7
        keys, values = (torch.full((8, 1, room), torch.nan) for _ in range(2))
        return StateCache(KVCache(keys, values), BLOCK, self.units, self.floats, offset=5)

    def rows(self, shares: Sequence[Share]) -> list[Tensor]:
        starts = [sum(LENGTHS[:i]) for i in range(len(LENGTHS))]
        return [
            torch.cat([x[starts[i] + done :][:n] for i, done, n in shares]) for x in self.inputs
        ]

    def step(self, cache: StateCache, shares: Sequence[Share], num_drafts: int = 0) -> list[Tensor]:
        """Results of the shares' tokens by the kernels; the last `num_drafts` of each are drafts."""
        inputs = self.rows(shares)
        out = torch.full((len(inputs[0]), self.width), torch.nan)
        halves = tuple(half[:, cache.offset :] for half in cache.halves())
        batch = batch_of(shares)
        batch = replace(batch, context_lens=batch.context_lens - num_drafts)
        self.compute(*inputs, halves=halves, steps=steps_of(batch), out=out)
        return list(torch.split(out, [n for _, _, n in shares]))

    def reference(self, cache: StateCache, shares: Sequence[Share]) -> Tensor:
        plan = reference.plan_states(batch_of(shares), cache, 0)
        return self.wanted(*self.rows(shares), plan, cache)


def batch_of(shares: Sequence[Share]) -> TokenBatch:
    return batch_of_spans([(done, n, BLOCKS[i]) for i, done, n in shares])


def steps_of(batch: TokenBatch) -> Steps:
    """Places of a step, a tile for each sequence and one of padding, whose block table names block 1."""
    tiles = plan_tiles(batch.query_lens, len(batch.positions))
    padding = torch.tensor([[-1, 0, 0]], dtype=torch.int32)
    tables = torch.nn.functional.pad(batch.block_tables[0], (0, 1, 0, 1), value=1)
    return Steps(
        batch.positions.int(), torch.cat((tiles, padding)), batch.context_lens.int(), tables.int()
    )


def conv(
    width: int = 4, channels: int = 13, *, gated: bool = False, activated: bool = False
) -> Layer:
    """A convolution; one that is activated has a bias."""
    weight = random_tensor(width, channels, seed=2)
    bias = random_tensor(channels, seed=3) if activated else None
    x = random_tensor(sum(LENGTHS), channels * (3 if gated else 1))

    def compute(x: Tensor, **places: Any) -> None:
        kinds = {"bias": bias, "gated": gated, "activated": activated, "block_size": BLOCK}
        states.short_conv(x, weight, places["halves"], places["steps"], places["out"], **kinds)

    def wanted(x: Tensor, plan: reference.StateMetadata, cache: StateCache) -> Tensor:
        kinds = {"gated": float(gated), "silu": float(activated)}
        return reference.short_conv(x, plan, cache, weight, bias, **kinds)

    return Layer(channels, width - 1, channels, (x,), compute, wanted)


def delta(
    heads: int = 3, key_heads: int = 1, key_dim: int = 5, value_dim: int = 3, *, gates: float = 1.0
) -> Layer:
    """A delta rule, whose gates have a standard deviation of `gates`."""
    width = 2 * key_heads * key_dim + heads * value_dim
    qkv, both = random_tensor(sum(LENGTHS), width), random_tensor(sum(LENGTHS), 2 * heads, seed=1)
    decay, bias = -random_tensor(heads, seed=6).abs(), random_tensor(heads, seed=7)
    sizes = {"key_heads": key_heads, "key_dim": key_dim}

    def compute(qkv: Tensor, gates: Tensor, **places: Any) -> None:
        states.gated_delta(
            qkv,
            gates,
            decay,
            bias,
            places["halves"],
            places["steps"],
            places["out"],
            block_size=BLOCK,
            **sizes,
        )

    def wanted(
        qkv: Tensor, gates: Tensor, plan: reference.StateMetadata, cache: StateCache
    ) -> Tensor:
        return reference.gated_delta(qkv, gates, plan, cache, decay, bias, **sizes)

    floats = key_dim * value_dim
    return Layer(heads, floats, heads * value_dim, (qkv, gates * both), compute, wanted)


LAYERS: dict[str, Callable[[], Layer]] = {
    "conv": conv,
    "gated conv": partial(conv, 3, gated=True),
    "conv with bias and SiLU": partial(conv, activated=True),
    "conv of one channel": partial(conv, 2, 1),
    "longest conv": partial(conv, states.MAX_CONV_WIDTH, 5),
    "conv of several tiles": partial(conv, 2, 270),
    "delta": delta,
    "delta of several tiles": partial(delta, 1, 1, 65, 17),
    "delta of one head": partial(delta, 1, 1, 1, 1, gates=60.0),
}


@pytest.mark.parametrize("name", LAYERS)
def test_layers(name: str) -> None:
    """Results and states are the reference's, and pieces have the bits of the whole; nothing else is written."""
    layer = LAYERS[name]()
    caches = [layer.cache() for _ in range(3)]
    whole = layer.step(caches[0], WHOLE)
    close = {"atol": 1e-5, "rtol": 1e-5}
    torch.testing.assert_close(torch.cat(whole), layer.reference(caches[1], WHOLE), **close)
    for own, wanted in zip(caches[0].halves(), caches[1].halves(), strict=True):
        torch.testing.assert_close(own, wanted, equal_nan=True, **close)
        assert own[UNUSED].isnan().all()
    parts: list[list[Tensor]] = [[] for _ in LENGTHS]
    for shares in PIECES:
        for (i, _, _), rows in zip(shares, layer.step(caches[2], shares), strict=True):
            parts[i].append(rows)
    for own_parts, rows in zip(parts, whole, strict=True):
        assert torch.equal(torch.cat(own_parts), rows)
    for own, wanted in zip(caches[2].halves(), caches[0].halves(), strict=True):
        assert torch.equal(own.nan_to_num(9.0), wanted.nan_to_num(9.0))


@pytest.mark.parametrize("name", ["gated conv", "longest conv", "delta"])
def test_drafts_leave_states_as_they_were(name: str) -> None:
    """Rows of drafts have the bits of rows in turn; states are those of steps without drafts."""
    layer, length = LAYERS[name](), LENGTHS[0]
    caches = [layer.cache() for _ in range(2)]
    (whole,) = layer.step(layer.cache(), [(0, 0, length)])
    for done in range(0, length, 3):
        known = min(3, length - done)
        num_drafts = min(6, length - done - known)
        (rows,) = layer.step(caches[0], [(0, done, known + num_drafts)], num_drafts)
        layer.step(caches[1], [(0, done, known)])
        assert torch.equal(rows, whole[done : done + known + num_drafts])
        for own, wanted in zip(caches[0].halves(), caches[1].halves(), strict=True):
            assert torch.equal(own.nan_to_num(9.0), wanted.nan_to_num(9.0))


@pytest.mark.parametrize("name", ["gated conv", "delta"])
def test_a_sequence_of_nan_spoils_no_other(name: str) -> None:
    layer = LAYERS[name]()
    shares = WHOLE[1:]
    whole = layer.step(layer.cache(), shares)
    for x in layer.inputs:
        x[LENGTHS[0]] = torch.nan  # the token of the second sequence
    broken, beside = layer.step(layer.cache(), shares)
    assert broken.isnan().all()
    assert torch.equal(beside, whole[1])


@pytest.mark.parametrize("name", ["conv", "delta"])
def test_no_tokens(name: str) -> None:
    layer, nothing = LAYERS[name](), torch.zeros(0, dtype=torch.int32)
    steps = Steps(nothing, nothing.view(0, 3), nothing, nothing.view(0, 1))
    halves = layer.cache().halves()
    inputs = [x[:0] for x in layer.inputs]
    layer.compute(*inputs, halves=halves, steps=steps, out=torch.empty(0, layer.width))
