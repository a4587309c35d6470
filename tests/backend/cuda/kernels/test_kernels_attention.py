"""Kernels of the KV cache and of attention in Triton's interpreter, against the reference and in any company."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from pagoda.backend.base import KVCache, LatentCache, TokenBatch
from pagoda.backend.cuda.kernels import attention as kernels
from pagoda.backend.cuda.kernels import kv, latents
from pagoda.backend.host import rotary_table
from pagoda.backend.reference import latents as reference_latents
from pagoda.backend.reference.backend import ReferenceBackend
from pagoda.backend_check.attention import (
    KINDS,
    TOLERANCE,
    Kind,
    Share,
    attend,
    cache_of,
    spoil,
    token_batch,
)
from pagoda.backend_check.subject import batch_of_spans, random_tensor

CPU, REFERENCE = torch.device("cpu"), ReferenceBackend()
LENGTHS = (40, 1, 12)
WHOLE: tuple[Share, ...] = tuple((i, 0, n) for i, n in enumerate(LENGTHS))
PIECES: tuple[tuple[Share, ...], ...] = (
    ((2, 0, 9), (0, 0, 39)),
    ((0, 39, 1), (1, 0, 1), (2, 9, 3)),
)
APART: tuple[tuple[Share, ...], ...] = (((2, 0, 12), (0, 0, 40)), ((1, 0, 1),))


def slots_of(batch: TokenBatch, block_size: int) -> Tensor:
    blocks = batch.block_tables[0][batch.sequence_ids, batch.positions // block_size]
    return blocks * block_size + batch.positions % block_size


def steps_of(batch: TokenBatch, per_tile: int) -> kernels.Steps:
    """Places of a step, with a tile of padding."""
    tiles = kernels.plan_tiles(batch.query_lens, per_tile)
    padding = torch.tensor([[-1, 0, 0]], dtype=torch.int32)
    return kernels.Steps(
        batch.positions.int(),
        torch.cat((tiles, padding)),
        batch.context_lens.int(),
        batch.block_tables[0].int(),
    )


def own_attention(
    kind: Kind, cache: KVCache, shares: Sequence[Share], *, split: bool = False
) -> list[Tensor]:
    """Attention as `attend` has it of a backend, by the kernels."""
    batch = token_batch(kind, shares)
    qkv = torch.cat([kind.qkv(i)[done : done + n] for i, done, n in shares])
    options: dict[str, Any] = {}
    if kind.rotated:
        frequencies = torch.logspace(0, -3, kind.rotated // 2)
        cosines, sines = rotary_table(batch.positions, frequencies, scale=1.0)
        options |= {"cosines": cosines, "sines": sines}
    if kind.norms:
        whole = kind.norms == "all"
        sizes = [kind.head_dim * (heads if whole else 1) for heads in (kind.heads, kind.kv_heads)]
        norms = [1 + 0.2 * random_tensor(n, seed=n + i) for i, n in enumerate(sizes)]
        options |= {"query_norm": norms[0], "key_norm": norms[1], "eps": 1e-6}
        options |= {"squares": torch.empty(len(qkv), 2) if whole else None}
    queries, out = (torch.full((len(qkv), kind.heads * kind.head_dim), torch.nan) for _ in range(2))
    scales = {"key_scales": cache.key_scales, "value_scales": cache.value_scales}
    slots = slots_of(batch, kind.block_size)
    kv.rotate_and_cache(qkv, slots, cache.keys, cache.values, queries, **options, **scales)
    kernels.attention(
        queries,
        cache.keys,
        cache.values,
        steps_of(batch, kernels.tokens_per_tile(kind.heads // kind.kv_heads)),
        out,
        scale=0.3,
        window=kind.window,
        chunk=kind.chunk,
        softcap=kind.softcap,
        causal=kind.causal,
        sinks=torch.tensor(kind.sinks) if kind.sinks else None,
        products=torch.float16 if kind.kv_dtype == "float16" else torch.float32,
        partials=kernels.Partials.new(
            len(qkv), kind.heads, kind.head_dim, int(batch.context_lens.max()), CPU
        )
        if split
        else None,
        split_programs=2,
        **scales,
    )
    return list(torch.split(out, [n for _, _, n in shares]))


def check(kind: Kind, pieces: Sequence[Sequence[Share]], whole: Sequence[Share] = WHOLE) -> None:
    """Compares whole sequences with the reference, and pieces with whole sequences in every bit; contexts of all
    but the first are split."""
    caches = [cache_of(REFERENCE, kind) for _ in range(3)]
    for cache in caches:
        spoil(REFERENCE, cache)
    wanted, found = attend(REFERENCE, kind, caches[0], whole), own_attention(kind, caches[1], whole)
    tolerance = TOLERANCE[kind.kv_dtype]
    for own, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(own, other, atol=tolerance, rtol=tolerance)
    parts: list[list[Tensor]] = [[] for _ in whole]
    for number, shares in enumerate(pieces):
        split = kind.causal and number > 0
        attended = own_attention(kind, caches[2], shares, split=split)
        for (i, _, _), own in zip(shares, attended, strict=True):
            parts[i].append(own)
    for own_parts, own in zip(parts, found, strict=True):
        assert torch.equal(torch.cat(own_parts), own)


@pytest.mark.parametrize("name", KINDS)
def test_kinds(name: str) -> None:
    kind = replace(KINDS[name], lengths=LENGTHS)
    check(kind, PIECES if kind.causal else APART)


@pytest.mark.parametrize(("kv_dtype", "block_size"), [("float16", 2), ("int8", 16), ("int8", 128)])
def test_number_formats_and_block_sizes(kv_dtype: str, block_size: int) -> None:
    check(Kind(lengths=LENGTHS, kv_dtype=kv_dtype, block_size=block_size), PIECES)


@pytest.mark.parametrize("window", [None, 200])
def test_contexts_of_several_splits(window: int | None) -> None:
    """Splits lie at fixed places: few tokens of a long context have the bits of the whole."""
    kind = Kind(heads=1, kv_heads=1, head_dim=16, rotated=0, window=window, lengths=(300,))
    pieces = [[(0, 0, 290)], [(0, 290, 8)], [(0, 298, 1)], [(0, 299, 1)]]
    check(kind, pieces, [(0, 0, 300)])


def test_a_sequence_of_nan_spoils_no_other() -> None:
    kind = Kind(lengths=LENGTHS)
    caches = [cache_of(REFERENCE, kind) for _ in range(2)]
    found = own_attention(kind, caches[0], WHOLE)
    beside = own_attention(replace(kind, broken=2), caches[1], WHOLE)
    assert all(torch.equal(one, other) for one, other in zip(found[:2], beside, strict=False))
    assert beside[2].isnan().all()


def test_what_may_not_be_cached() -> None:
    """A token without a slot writes nothing."""
    kind = Kind(lengths=(3,))
    cache = cache_of(REFERENCE, kind)
    for tensor in cache.tensors.values():
        tensor.zero_()
    queries = torch.empty(3, kind.heads * kind.head_dim)
    kv.rotate_and_cache(kind.qkv(0), torch.tensor([-1, 5, -1]), cache.keys, cache.values, queries)
    assert cache.keys[0, :, 5].all()
    assert int(cache.keys.count_nonzero()) == kind.kv_heads * kind.head_dim
    assert int(cache.values.count_nonzero()) == kind.kv_heads * kind.head_dim


def test_plans_of_tiles() -> None:
    assert kernels.plan_tiles(torch.tensor([5, 1, 8]), 4).tolist() == [
        [0, 0, 4],
        [0, 4, 1],
        [1, 5, 1],
        [2, 6, 4],
        [2, 10, 4],
    ]
    assert kernels.tokens_per_tile(4) == 16
    assert kernels.tokens_per_tile(7) == 9
    assert kernels.tokens_per_tile(100) == 1


@dataclass(frozen=True)
class Latents:
    """Inputs of latent attention of a sequence."""

    heads: int = 5
    rank: int = 24
    rope: int = 8
    block_size: int = 16
    length: int = 40

    def cache(self, kv_dtype: torch.dtype) -> LatentCache:
        sizes = (6, self.block_size, self.rank, self.rope)
        cache = REFERENCE.allocate_latent_cache(*sizes, torch.float32, kv_dtype)
        spoil(REFERENCE, cache)
        return cache

    def step(self, cache: LatentCache, first: int, end: int, how: str) -> Tensor:
        """Attention of some tokens `how`: by the reference, or the kernels, which may share out the context."""
        batch = batch_of_spans([(first, end - first, [5, 3, 4])])
        widths = (self.heads * self.rope, self.rank + self.rope, self.heads * self.rank)
        given = [random_tensor(self.length, n, seed=n)[first:end].clone() for n in widths]
        turned, vectors, queries = given
        norm = random_tensor(self.rank)
        table = rotary_table(batch.positions, torch.logspace(0, -1, self.rope // 2), scale=1.0)
        if how == "reference":
            plan = REFERENCE.attention_metadata(batch, self.heads, cache)
            turned = reference_latents.rotate_and_cache_latents(
                turned, vectors, plan, *table, cache, norm, eps=1e-6
            )
            return reference_latents.latent_attention(queries, turned, plan, cache, scale=0.2)
        rotated, out = torch.empty_like(turned), torch.full_like(queries, torch.nan)
        slots = slots_of(batch, self.block_size)
        own = {"scales": cache.latent_scales}
        more = {"eps": 1e-6, "cosines": table[0], "sines": table[1]} | own
        kv.rotate_and_cache_latents(turned, vectors, slots, cache.latents, norm, rotated, **more)
        steps = steps_of(batch, latents.tokens_per_tile(self.heads))
        own |= {"rank": self.rank, "scale": 0.2, "products": torch.float32, "split_programs": 2}
        if how == "split":
            room = (end - first, self.heads, self.rank, self.length, CPU)
            own |= {"partials": kernels.Partials.new(*room)}
        latents.latent_attention(queries, rotated, cache.latents, steps, out, **own)
        return out


@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.int8])
def test_latents(kv_dtype: torch.dtype) -> None:
    case = Latents()
    caches = [case.cache(kv_dtype) for _ in range(3)]
    wanted = case.step(caches[0], 0, case.length, "reference")
    found = case.step(caches[1], 0, case.length, "whole")
    torch.testing.assert_close(found, wanted, atol=5e-5, rtol=5e-5)
    steps = ((0, 33, "whole"), (33, 39, "split"), (39, 40, "split"))
    parts = [case.step(caches[2], *step) for step in steps]
    assert torch.equal(torch.cat(parts), found)
