# SPDX-License-Identifier: Apache-2.0
"""Kernels of the KV cache and of attention in Triton's interpreter, against the reference and in any company."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from pagoda.backend.base import KVCache, LatentCache, TokenBatch
from pagoda.backend.fp8 import E4M3, to_e4m3
from pagoda.backend.host import rotary_table
from pagoda.backend.reference import latents as reference_latents
from pagoda.backend.reference.attention import attention as reference_attention
from pagoda.backend.reference.backend import ReferenceBackend
from pagoda.plugins.backend_check.attention import (
    KINDS,
    TOLERANCE,
    Kind,
    Share,
    attend,
    cache_of,
    spoil,
    token_batch,
)
from pagoda.plugins.backend_check.subject import batch_of_spans, random_tensor
from pagoda.plugins.cuda.kernels import attention as kernels
from pagoda.plugins.cuda.kernels import kv, latents

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


@pytest.mark.parametrize(
    ("kv_dtype", "block_size"), [("float16", 2), ("int8", 16), ("int8", 128), ("fp8", 16)]
)
def test_number_formats_and_block_sizes(kv_dtype: str, block_size: int) -> None:
    check(Kind(lengths=LENGTHS, kv_dtype=kv_dtype, block_size=block_size), PIECES)


def test_all_numbers_become_the_8_bit_floats_of_the_reference() -> None:
    """Those between two neighbours and around them, of any exponent, and what lies beyond all."""
    known = torch.arange(127, dtype=torch.uint8).view(E4M3).float()
    halves = (known[1:] + known[:-1]) / 2
    above, below = (torch.nextafter(halves, torch.full_like(halves, to)) for to in (1e9, 0.0))
    beyond = torch.tensor([448.1, 464.0, 1e9, 3e38, torch.inf, torch.nan, 1e-45, 1e-38])
    drawn = random_tensor(4096) * torch.exp(8 * random_tensor(4096, seed=1))
    found = torch.cat((known, halves, above, below, beyond, drawn))
    numbers = torch.nn.functional.pad(torch.cat((found, -found)), (0, -2 * len(found) % 64))
    rows = numbers.view(-1, 64)
    cache, out = torch.empty((2, 1, len(rows), 64), dtype=E4M3), torch.empty(len(rows), 64)
    qkv, slots = torch.cat((rows, rows, rows), 1), torch.arange(len(rows))
    kv.rotate_and_cache(qkv, slots, cache[:1], cache[1:], out)
    own, wanted = (each.view(torch.uint8) for each in (cache, to_e4m3(rows)))
    broken = rows.isnan()
    for part in own[:, 0]:
        assert torch.equal(part[~broken], wanted[~broken])
        assert bool((part[broken] & 127 == 127).all())


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


@dataclass(frozen=True)
class Spoilt(Kind):
    """Attention of one sequence with some numbers that are not finite."""

    places: tuple[tuple[int, int, float], ...] = ()
    """Tokens, elements of their queries, keys and values, and what is there."""

    def qkv(self, sequence: int) -> Tensor:
        rows = super().qkv(sequence)
        for token, element, number in self.places:
            rows[token, element] = number
        return rows

    def sees(self, row: int, token: int) -> bool:
        first = max(0, row + 1 - (self.window or row + 1), row - row % (self.chunk or row + 1))
        return first <= token <= row


def comparable(found: Sequence[Tensor]) -> Tensor:
    """Rows in which NaN equals NaN."""
    return torch.cat(list(found)).nan_to_num(nan=1e30, posinf=torch.inf, neginf=-torch.inf)


PARTS = [[(0, 0, 9)], [(0, 9, 1)], [(0, 10, 20)], [(0, 30, 10)]]
"""Steps of a sequence of 40 tokens."""


@pytest.mark.parametrize(
    ("name", "kv_dtype", "number"),
    [
        ("grouped queries", "float32", torch.nan),
        ("grouped queries", "float16", -torch.inf),
        ("as many keys as queries", "float32", torch.inf),
        ("not rotated", "int8", torch.nan),
        ("window", "float32", torch.nan),
        ("window", "float16", torch.inf),
        ("chunks", "float16", torch.nan),
        ("sinks and soft cap in a window", "float32", -torch.inf),
    ],
)
def test_what_is_not_finite_reaches_those_alone_who_see_it(
    name: str, kv_dtype: str, number: float
) -> None:
    changes = {"lengths": (40,), "kv_dtype": kv_dtype, "rotated": 0}
    kind, tokens = Spoilt(**(vars(KINDS[name]) | changes)), (3, 14)
    generator = torch.Generator().manual_seed(len(name))
    own = kind.kv_heads * kind.head_dim
    # NaN comes to keys and values, and infinity to values alone: keys have no score that is infinite.
    firsts = [kind.width - (2 - place if number != number else 1) * own for place in range(2)]
    elements = [first + int(torch.randint(own, (1,), generator=generator)) for first in firsts]
    places = tuple(zip(tokens, elements, (number, number), strict=True))
    spoilt = replace(kind, places=places)
    caches = [cache_of(REFERENCE, kind) for _ in range(4)]
    for cache in caches:
        spoil(REFERENCE, cache)
    (clean,) = own_attention(kind, caches[0], [(0, 0, 40)])
    (found,) = own_attention(spoilt, caches[1], [(0, 0, 40)])
    blind = [row for row in range(40) if not any(kind.sees(row, token) for token in tokens)]
    assert len(blind) >= min(tokens)
    assert torch.equal(found[blind], clean[blind])
    assert not found[tokens[0]].isfinite().all()
    # Tokens by themselves cannot get anything of others.
    alone = [attend(REFERENCE, spoilt, caches[2], [(0, row, 1)])[0] for row in range(40)]
    bound = {"atol": TOLERANCE[kv_dtype], "rtol": TOLERANCE[kv_dtype], "equal_nan": True}
    torch.testing.assert_close(found, torch.cat(alone), **bound)
    parts = [own_attention(spoilt, caches[3], part, split=n > 0) for n, part in enumerate(PARTS)]
    assert torch.equal(comparable([part[0] for part in parts]), comparable([found]))


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
    spoilt: tuple[int, float] | None = None
    """A token of which a number of its latent is this one."""

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
        if self.spoilt is not None and first <= self.spoilt[0] < end:
            vectors[self.spoilt[0] - first, 3] = self.spoilt[1]
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
        steps = steps_of(batch, latents.tokens_per_tile(self.heads, torch.float32))
        own |= {"rank": self.rank, "scale": 0.2, "products": torch.float32, "split_programs": 2}
        if how == "split":
            room = (end - first, self.heads, self.rank, self.length, CPU)
            own |= {"partials": kernels.Partials.new(*room)}
        latents.latent_attention(queries, rotated, cache.latents, steps, out, **own)
        return out


@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.int8, E4M3])
def test_latents(kv_dtype: torch.dtype) -> None:
    case = Latents()
    caches = [case.cache(kv_dtype) for _ in range(3)]
    wanted = case.step(caches[0], 0, case.length, "reference")
    found = case.step(caches[1], 0, case.length, "whole")
    torch.testing.assert_close(found, wanted, atol=5e-5, rtol=5e-5)
    steps = ((0, 33, "whole"), (33, 39, "split"), (39, 40, "split"))
    parts = [case.step(caches[2], *step) for step in steps]
    assert torch.equal(torch.cat(parts), found)


@pytest.mark.parametrize(
    ("kv_dtype", "heads"), [(torch.float32, 5), (torch.int8, 5), (torch.float32, 20)]
)
def test_latents_that_are_not_finite_reach_those_alone_who_see_them(
    kv_dtype: torch.dtype, heads: int
) -> None:
    case, token = Latents(heads=heads), 17
    spoilt = replace(case, spoilt=(token, torch.nan))
    clean, found = (
        each.step(each.cache(kv_dtype), 0, case.length, "whole") for each in (case, spoilt)
    )
    assert torch.equal(found[:token], clean[:token])
    assert found[token:].isnan().all()
    cache = case.cache(kv_dtype)
    steps = ((0, 9, "whole"), (9, 39, "split"), (39, 40, "split"))
    parts = [spoilt.step(cache, *step) for step in steps]
    assert torch.equal(comparable(parts), comparable([found]))


@pytest.mark.parametrize("latent", [False, True], ids=["heads", "latents"])
def test_segments_are_merged_in_order(latent: bool) -> None:
    """By one program, and by several that share a context: the same bits, and what the reference finds."""
    contexts = [1100, 512, 20]
    counts = [-(-n // 16) for n in contexts]
    ids = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(1)).tolist()
    spans = [
        (n - 2, 2, [ids.pop() for _ in range(count)])
        for n, count in zip(contexts, counts, strict=True)
    ]
    batch = replace(batch_of_spans(spans), segment=512)
    if latent:
        held: KVCache | LatentCache = REFERENCE.allocate_latent_cache(
            sum(counts), 16, 16, 16, torch.float32
        )
    else:
        held = REFERENCE.allocate_kv_cache(sum(counts), 16, 1, 16, torch.float32)
    for i, part in enumerate(held.tensors.values()):
        part.copy_(random_tensor(part.numel(), seed=i).view(part.shape))
    plan = REFERENCE.attention_metadata(batch, 2, held)
    queries, turned = (random_tensor(2 * len(spans), 32, seed=seed) for seed in (7, 8))
    options: dict[str, Any] = {"scale": 0.4, "products": torch.float32}

    def found(segment: int, partials: kernels.Partials | None) -> Tensor:
        out = torch.full((2 * len(spans), 32), torch.nan)
        more = options | {"partials": partials, "split_programs": 2, "segment": segment}
        if isinstance(held, LatentCache):
            steps = steps_of(batch, latents.tokens_per_tile(2, torch.float32))
            latents.latent_attention(queries, turned, held.latents, steps, out, rank=16, **more)
        else:
            steps = steps_of(batch, kernels.tokens_per_tile(2))
            kernels.attention(queries, held.keys, held.values, steps, out, **more)
        return out

    partials = kernels.Partials.new(len(queries), 2, 16, 1100, CPU)
    whole = found(512, None)
    assert torch.equal(found(512, partials), whole)
    other = found(4096, None)
    assert not torch.equal(other[:2], whole[:2])
    assert torch.equal(other[2:], whole[2:])
    if isinstance(held, LatentCache):
        wanted = reference_latents.latent_attention(queries, turned, plan, held, scale=0.4)
    else:
        limits = dict.fromkeys(("window", "softcap", "chunk"))
        wanted = reference_attention(
            queries, plan, held, head_dim=16, scale=0.4, causal=True, **limits
        )
    torch.testing.assert_close(whole, wanted, atol=1e-5, rtol=1e-5)
