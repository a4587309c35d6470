# SPDX-License-Identifier: Apache-2.0
"""Checks of multi-head latent attention: kinds, number formats, block sizes, company and layout."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from pagoda.backend.base import Backend, HeadLinears, LatentCache
from pagoda.backend.graph import Value
from pagoda.backend.kv_store import KVOnDevice
from pagoda.backend.latent_layers import (
    IndexQueries,
    head_linear,
    indexed_latent_attention,
    latent_attention,
    prepare_head_linears,
    rotate_and_cache_latents,
)
from pagoda.backend.operations import GraphBuilder
from pagoda.messages.kv_formats import KV_FORMATS
from pagoda.plugins.backend_check.attention import (
    DTYPES,
    LENGTHS,
    PIECES,
    TOLERANCE,
    WHOLE,
    Kind,
    Share,
    check_moved,
    ensure_given,
    first_dtype,
    spoil,
    token_batch,
)
from pagoda.plugins.backend_check.products import DENSE
from pagoda.plugins.backend_check.products import TOLERANCE as PRODUCT_TOLERANCE
from pagoda.plugins.backend_check.subject import (
    ROWS,
    Check,
    Record,
    Subject,
    check_rows,
    ensure_close,
    ensure_same,
    outputs,
    random_tensor,
)

_OPERATIONS = ("rotate_and_cache_latents", "latent_attention", "rotary_table")
_INDEXED = ("rotate_and_cache_latents", "indexed_latent_attention", "rotary_table")


@dataclass(frozen=True)
class LatentKind:
    """Latent attention as families have it."""

    heads: int = 4
    rank: int = 64
    rope_dim: int = 16
    is_rotated: bool = True
    index_heads: int = 0
    """Heads of an indexer; 0 without one."""
    index_dim: int = 0
    most: int = 0
    """Tokens that an indexer chooses."""
    block_size: int = 16
    kv_dtype: str = "float32"
    broken: int | None = None
    """Sequence whose numbers are NaN."""

    @property
    def places(self) -> Kind:
        """Blocks of the sequences."""
        return Kind(block_size=self.block_size)

    def rows(self, shares: Sequence[Share], width: int, seed: int) -> Tensor:
        """Random numbers of the shares' tokens, [n, width]."""
        drawn = [random_tensor(n, width, seed=10 * seed + i) for i, n in enumerate(LENGTHS)]
        if self.broken is not None:
            drawn[self.broken].fill_(torch.nan)
        return torch.cat([drawn[i][done : done + n] for i, done, n in shares])


_KINDS = {
    "four heads": LatentKind(),
    "one head": LatentKind(heads=1),
    "more heads than fit the registers": LatentKind(heads=29),
    "sizes of DeepSeek": LatentKind(heads=16, rank=512, rope_dim=64),
    "sizes of no whole vectors": LatentKind(heads=3, rank=38, rope_dim=8),
    "not rotated": LatentKind(is_rotated=False),
}
_INDEXED_KINDS = {
    "an indexer of eight heads": LatentKind(index_heads=8, index_dim=32, most=24),
    "an indexer of sizes of no whole vectors": LatentKind(index_heads=5, index_dim=22, most=9),
    "an indexer that chooses all": LatentKind(index_heads=8, index_dim=32, most=500),
}


def _cache(backend: Backend[Any, Any], kind: LatentKind, new: Any = None) -> LatentCache:
    """Blocks with what ended requests may have left."""
    kv_dtype = DTYPES[kind.kv_dtype]
    dtype = torch.float32 if kv_dtype.itemsize == 1 else kv_dtype
    shape = (kind.places.num_blocks, kind.block_size, kind.rank, kind.rope_dim)
    own = () if new is None else (new,)
    index: dict[str, Any] = {"index_dim": kind.index_dim} if kind.index_dim else {}
    cache = backend.allocate_latent_cache(*shape, dtype, kv_dtype, *own, **index)
    spoil(backend, cache)
    return cache


def _attend(
    backend: Backend[Any, Any],
    kind: LatentKind,
    cache: LatentCache,
    shares: Sequence[Share],
    blocks: Sequence[list[int]] = (),
) -> list[Tensor]:
    """One step; what each share's tokens attend to."""
    batch = token_batch(kind.places, shares, blocks)
    norm = (1 + 0.2 * random_tensor(kind.rank, seed=5)).to(backend.device)
    frequencies = torch.logspace(0, -3, kind.rope_dim // 2).to(backend.device)

    def record(ops: GraphBuilder, metadata: Value, positions: Value, **rows: Value) -> list[Value]:
        table = ops.rotary_table(positions, frequencies, 1.0) if kind.is_rotated else None
        rotary = rotate_and_cache_latents(
            ops, rows["rotary"], rows["latents"], metadata, table, cache, norm, 1e-6
        )
        queries = rows["queries"], rotary
        if not kind.index_heads:
            return [latent_attention(ops, *queries, metadata, cache, scale=0.2)]
        index = IndexQueries(rows["index"], rows["weights"])
        return [
            indexed_latent_attention(
                ops, *queries, index, metadata, cache, scale=0.2, most=kind.most
            )
        ]

    tensors = {
        "positions": batch.positions,
        "queries": kind.rows(shares, kind.heads * kind.rank, 1),
        "rotary": kind.rows(shares, kind.heads * kind.rope_dim, 2),
        "latents": kind.rows(shares, kind.rank + kind.rope_dim + kind.index_dim, 3),
    }
    if kind.index_heads:
        tensors["index"] = kind.rows(shares, kind.index_heads * kind.index_dim, 4)
        tensors["weights"] = kind.rows(shares, kind.index_heads, 5)
    metadata = backend.attention_metadata(batch, kind.heads, cache)
    (out,) = outputs(backend, record, tensors, metadata)
    return list(torch.split(out, [n for _, _, n in shares]))


def _check_kind(subject: Subject, kind: LatentKind, what: str) -> None:
    whole, expected = (
        _attend(backend, kind, _cache(backend, kind), WHOLE) for backend in subject.both
    )
    for own, wanted in zip(whole, expected, strict=True):
        ensure_close(own, wanted, TOLERANCE[kind.kv_dtype], f"latent attention, {what}")
    cache = _cache(subject.backend, kind)
    parts: list[list[Tensor]] = [[] for _ in LENGTHS]
    for shares in PIECES:
        found = _attend(subject.backend, kind, cache, shares)
        for (i, _, _), own in zip(shares, found, strict=True):
            parts[i].append(own)
    for own_parts, wanted in zip(parts, whole, strict=True):
        ensure_same(
            torch.cat(own_parts), wanted, f"latent attention, {what}, in pieces and other company"
        )
    spoil(subject.backend, cache)
    beside = _attend(subject.backend, replace(kind, broken=2), cache, WHOLE)
    for own, wanted in zip(beside[:2], whole, strict=False):
        ensure_same(own, wanted, f"latent attention, {what}, beside a sequence of NaN,")


def _kinds(subject: Subject) -> str:
    subject.needs(*_OPERATIONS)
    for what, kind in _KINDS.items():
        size = subject.backend.capabilities.block_sizes[0]
        own = replace(kind, block_size=size, kv_dtype=first_dtype(subject))
        _check_kind(subject, own, what)
    return ", ".join(_KINDS)


def _indexers(subject: Subject) -> str:
    subject.needs(*_INDEXED)
    capabilities = subject.backend.capabilities
    for kv_dtype in capabilities.kv_cache_dtypes:
        for what, kind in _INDEXED_KINDS.items():
            own = replace(kind, block_size=capabilities.block_sizes[0], kv_dtype=kv_dtype)
            _check_kind(subject, own, f"{what}, {kv_dtype}")
    return ", ".join(_INDEXED_KINDS)


def _caches(subject: Subject) -> str:
    subject.needs(*_OPERATIONS)
    capabilities = subject.backend.capabilities
    sizes = capabilities.block_sizes
    some = sorted({sizes[0], min(sizes), 8, max(sizes)}.intersection(sizes))
    for kv_dtype in capabilities.kv_cache_dtypes:
        for block_size in some:
            kind = LatentKind(kv_dtype=kv_dtype, block_size=block_size)
            _check_kind(subject, kind, f"{kv_dtype} in blocks of {block_size}")
            _check_layout(subject.backend, kind, f"{kv_dtype} in blocks of {block_size}")
    return f"{', '.join(capabilities.kv_cache_dtypes)} in blocks of {', '.join(map(str, some))}"


def _check_layout(backend: Backend[Any, Any], kind: LatentKind, what: str) -> None:
    """A block has the bytes of its vectors, in memory of the caller's, and can be copied to other places."""
    given: list[Tensor] = []

    def new(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        given.append(torch.empty(shape, dtype=dtype))
        return given[-1]

    cache, other = _cache(backend, kind, new), _cache(backend, kind)
    if not isinstance(backend, KVOnDevice):
        ensure_given(cache, given, f"allocate_latent_cache of {what}")
    vector = KV_FORMATS[kind.kv_dtype].vector_bytes(cache.width)
    check_moved(
        backend,
        lambda held, shares, blocks: _attend(backend, kind, held, shares, blocks),
        (cache, other),
        kind.places.blocks(0),
        kind.block_size * vector,
        what,
    )


def _head_linear(subject: Subject) -> str:
    subject.needs("head_linear")
    known = [name for name in DENSE if name in subject.backend.capabilities.weight_formats]
    for name in known:
        for shape in ((3, 64, 20), (1, 33, 96), (16, 7, 48)):
            tensors = {"x": random_tensor(ROWS, shape[0] * shape[2])}
            record = _recorder(random_tensor(*shape, seed=1) / 8, DENSE[name])
            check_rows(subject, record, tensors, PRODUCT_TOLERANCE[DENSE[name]], "head_linear")
    return ", ".join(known)


def _recorder(weight: Tensor, dtype: torch.dtype) -> Callable[[Backend[Any, Any]], Record]:
    def for_backend(backend: Backend[Any, Any]) -> Record:
        maps: HeadLinears[Any] = prepare_head_linears(backend, weight.to(dtype), dtype)

        def record(ops: GraphBuilder, x: Value) -> Value:
            return head_linear(ops, x, maps)

        return record

    return for_backend


_ATTENTION = Check("rotate_and_cache_latents, latent_attention", _kinds)
EXPLICIT = {
    "head_linear": Check("head_linear", _head_linear),
    "rotate_and_cache_latents": _ATTENTION,
    "latent_attention": _ATTENTION,
    "indexed_latent_attention": Check("indexed_latent_attention", _indexers),
}
"""Checks of operations of latent attention."""
FURTHER = (Check("formats, block sizes and layout of latents", _caches),)
