# SPDX-License-Identifier: Apache-2.0
"""Checks of attention and of the KV cache: kinds, number formats, block sizes, company and layout."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from pagoda.backend.base import Backend, HeadNorms, KVCache, LatentCache, TokenBatch
from pagoda.backend.decoder_operations import alibi_attention
from pagoda.backend.graph import Value
from pagoda.backend.kv_store import KVOnDevice
from pagoda.backend.operations import GraphBuilder
from pagoda.backend.relative_attention import (
    columns,
    disentangled_attention,
    relative_attention,
)
from pagoda.messages.kv_formats import KV_FORMATS
from pagoda.messages.kv_groups import KVGroup, KVKind
from pagoda.plugins.backend_check.subject import (
    Check,
    FailedError,
    Subject,
    batch_of_spans,
    ensure,
    ensure_close,
    ensure_same,
    outputs,
    random_tensor,
)
from pagoda.worker.kv.store import store_of

LENGTHS = (150, 1, 70)
"""Tokens of the sequences."""
LONG = 1100
"""Tokens of a long context, which backends may read in parts."""
REACH, NUM_BUCKETS = 160, 7
"""Largest distance of tokens, and buckets of distances."""
BUCKETS = [min(NUM_BUCKETS - 1, abs(i - 10) // 9) for i in range(-REACH, REACH + 1)]
"""Bucket of each distance."""
SPARE_BLOCKS = 3
TOLERANCE = dict.fromkeys(KV_FORMATS, 3e-2) | {"float32": 5e-5, "float16": 5e-3}
DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, row.dtype) for name, row in KV_FORMATS.items()
}
"""Dtypes of K and V by the names that capabilities have for them."""
Share = tuple[int, int, int]
"""Part of a sequence in a step: its number, tokens before, tokens now."""
WHOLE: tuple[Share, ...] = tuple((i, 0, n) for i, n in enumerate(LENGTHS))
PIECES: tuple[tuple[Share, ...], ...] = (
    ((2, 0, 33), (0, 0, 7)),
    ((0, 7, 1), (1, 0, 1)),
    ((2, 33, 36),),
    ((0, 8, 142), (2, 69, 1)),
)

APART: tuple[tuple[Share, ...], ...] = (((2, 0, 70), (0, 0, 150)), ((1, 0, 1),))
"""Whole sequences, for attention that is not causal."""


@dataclass(frozen=True)
class Kind:
    """Attention as families have it."""

    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    rotated: int = 32
    """Elements of a head that are rotated."""
    norms: str = ""
    """`heads`, or `all` of them together."""
    softcap: float | None = None
    sinks: tuple[float, ...] = ()
    slopes: tuple[float, ...] = ()
    """Slopes of scores by distance (ALiBi); such attention has nothing else of its own."""
    by_distance: Literal["", "numbers", "buckets"] = ""
    """Scores by numbers of distances, or, of encoders, of queries and keys in the buckets of these."""
    window: int | None = None
    chunk: int | None = None
    causal: bool = True
    block_size: int = 16
    kv_dtype: str = "float32"
    lengths: tuple[int, ...] = LENGTHS
    broken: int | None = None
    """Sequence whose numbers are NaN."""

    @property
    def width(self) -> int:
        return (self.heads + 2 * self.kv_heads) * self.head_dim

    def blocks(self, sequence: int) -> list[int]:
        """Blocks of a sequence, not in order, and apart from those of others."""
        counts = [-(-n // self.block_size) for n in self.lengths]
        first = SPARE_BLOCKS + sum(counts[:sequence])
        return list(range(first + counts[sequence] - 1, first - 1, -1))

    @property
    def num_blocks(self) -> int:
        return SPARE_BLOCKS + sum(-(-n // self.block_size) for n in self.lengths)

    def qkv(self, sequence: int) -> Tensor:
        rows = random_tensor(self.lengths[sequence], self.width, seed=sequence)
        return rows.fill_(torch.nan) if sequence == self.broken else rows

    def numbers(self, sequence: int) -> Tensor:
        """Numbers of queries, and of keys, in each bucket."""
        width = 2 * self.heads * NUM_BUCKETS
        return random_tensor(self.lengths[sequence], width, seed=sequence + 5)


KINDS = {
    "as many keys as queries": Kind(kv_heads=4),
    "grouped queries": Kind(heads=6, kv_heads=2, head_dim=64, rotated=64),
    "one key for all": Kind(kv_heads=1),
    "partly rotated": Kind(rotated=8),
    "not rotated": Kind(rotated=0),
    "norms of heads": Kind(norms="heads"),
    "norms of all heads": Kind(norms="all"),
    "soft cap": Kind(softcap=2.5),
    "window": Kind(window=20),
    "chunks": Kind(chunk=20),
    "sinks": Kind(sinks=(-3.0, 0.5, 4.0, 90.0)),
    "both ways": Kind(causal=False),
    "a window both ways": Kind(causal=False, window=20),
    "sinks and soft cap in a window": Kind(sinks=(1.0, 0.0, 2.0, 3.0), softcap=30.0, window=33),
}


def cache_of(backend: Backend[Any, Any], kind: Kind, new: Any = None) -> KVCache:
    kv_dtype = DTYPES[kind.kv_dtype]
    shape = (kind.num_blocks, kind.block_size, kind.kv_heads, kind.head_dim)
    dtype = torch.float32 if kv_dtype.itemsize == 1 else kv_dtype
    return backend.allocate_kv_cache(*shape, dtype, kv_dtype, *(() if new is None else (new,)))


def spoil(backend: Backend[Any, Any], cache: KVCache | LatentCache) -> None:
    """Fills blocks with what ended requests may have left."""
    if isinstance(backend, KVOnDevice):
        store = backend.open_kv_store([cache])
        nan = memoryview(bytearray(b"\xff" * store.block_bytes))
        store.write(range(store.num_blocks), [nan] * store.num_blocks).wait()
        return
    for tensor in cache.tensors.values():
        tensor.fill_(torch.nan if tensor.is_floating_point() else -128)


def token_batch(
    kind: Kind, shares: Sequence[Share], blocks: Sequence[list[int]] = ()
) -> TokenBatch:
    """A step of shares of the sequences, whose blocks are those of the kind unless others are given."""
    tables = blocks or [kind.blocks(i) for i, _, _ in shares]
    return batch_of_spans(
        [(done, n, own) for (_, done, n), own in zip(shares, tables, strict=True)]
    )


def attend(
    backend: Backend[Any, Any],
    kind: Kind,
    cache: KVCache,
    shares: Sequence[Share],
    blocks: Sequence[list[int]] = (),
    metadata: object = None,
) -> list[Tensor]:
    """One step; what each share's tokens attend to. Metadata is made for it where none is given."""
    batch = token_batch(kind, shares, blocks)
    if metadata is None:
        metadata = backend.attention_metadata(batch, kind.heads, cache)
    norms = None
    if kind.norms:
        sizes = (kind.head_dim, kind.head_dim)
        if kind.norms == "all":
            sizes = (kind.heads * kind.head_dim, kind.kv_heads * kind.head_dim)
        weights = [
            (1 + 0.2 * random_tensor(n, seed=n + i)).to(backend.device) for i, n in enumerate(sizes)
        ]
        norms = HeadNorms(weights[0], weights[1], 1e-6)
    sinks = torch.tensor(kind.sinks).to(backend.device) if kind.sinks else None

    def record(
        ops: GraphBuilder,
        qkv: Value,
        positions: Value,
        metadata: Value,
        numbers: Value | None = None,
    ) -> Value:
        table = None
        if kind.rotated:
            frequencies = torch.logspace(0, -3, kind.rotated // 2).to(backend.device)
            table = ops.rotary_table(positions, frequencies, 1.0)
        heads = {"num_heads": kind.heads, "head_dim": kind.head_dim}
        queries = ops.rotate_and_cache(qkv, metadata, table, cache, norms, **heads)
        sizes: dict[str, Any] = {"head_dim": kind.head_dim, "scale": 0.3}
        if kind.by_distance == "numbers":
            distances = random_tensor(kind.heads, 2 * REACH + 1, seed=3).to(backend.device)
            own = sizes | {"causal": kind.causal}
            return relative_attention(ops, queries, metadata, cache, distances, **own)
        if numbers is not None:
            width = kind.heads * NUM_BUCKETS
            first, second = (columns(ops, numbers, it, width) for it in (0, width))
            return disentangled_attention(
                ops, queries, metadata, first, second, cache, BUCKETS, **sizes
            )
        if kind.slopes:
            slopes = torch.tensor(kind.slopes).to(backend.device)
            return alibi_attention(ops, queries, metadata, cache, slopes, **sizes)
        return ops.attention(
            queries,
            metadata,
            cache,
            **sizes,
            window=kind.window,
            softcap=kind.softcap,
            sinks=sinks,
            chunk=kind.chunk,
            causal=kind.causal,
        )

    qkv = torch.cat([kind.qkv(i)[done : done + n] for i, done, n in shares])
    tensors = {"qkv": qkv, "positions": batch.positions}
    if kind.by_distance == "buckets":
        tensors["numbers"] = torch.cat([kind.numbers(i)[done : done + n] for i, done, n in shares])
    (out,) = outputs(backend, record, tensors, metadata)
    return list(torch.split(out, [n for _, _, n in shares]))


def _check_kind(subject: Subject, kind: Kind, what: str) -> None:
    caches = [cache_of(backend, kind) for backend in subject.both]
    for backend, cache in zip(subject.both, caches, strict=True):
        spoil(backend, cache)
    whole, expected = (
        attend(backend, kind, cache, WHOLE)
        for backend, cache in zip(subject.both, caches, strict=True)
    )
    for own, wanted in zip(whole, expected, strict=True):
        ensure_close(own, wanted, TOLERANCE[kind.kv_dtype], f"attention, {what}")
    cache = cache_of(subject.backend, kind)
    spoil(subject.backend, cache)
    parts: list[list[Tensor]] = [[] for _ in LENGTHS]
    for shares in PIECES if kind.causal else APART:
        found = attend(subject.backend, kind, cache, shares)
        for (i, _, _), own in zip(shares, found, strict=True):
            parts[i].append(own)
    for own_parts, wanted in zip(parts, whole, strict=True):
        ensure_same(torch.cat(own_parts), wanted, f"attention, {what}, in pieces and other company")
    spoil(subject.backend, cache)
    beside = attend(subject.backend, replace(kind, broken=2), cache, WHOLE)
    for own, wanted in zip(beside[:2], whole, strict=False):
        ensure_same(own, wanted, f"attention, {what}, beside a sequence of NaN,")


def _kinds(subject: Subject) -> str:
    subject.needs("rotate_and_cache", "attention", "rotary_table")
    for what, kind in KINDS.items():
        _check_kind(subject, fitted(subject, kind), what)
    return ", ".join(KINDS)


def _slopes(subject: Subject) -> str:
    subject.needs("rotate_and_cache", "alibi_attention")
    for rotated in (0, 32):
        kind = Kind(rotated=rotated, slopes=(0.25, 0.0625, 0.015625, 0.00390625))
        _check_kind(subject, fitted(subject, kind), f"slopes, {rotated} elements rotated")
    return "slopes of heads"


def _distances(subject: Subject) -> str:
    subject.needs("rotate_and_cache", "relative_attention", "disentangled_attention", "columns")
    for causal in (False, True):
        kind = Kind(causal=causal, by_distance="numbers")
        _check_kind(subject, fitted(subject, kind), "numbers, causal" if causal else "numbers")
    _check_kind(subject, fitted(subject, Kind(causal=False, by_distance="buckets")), "buckets")
    return "numbers of distances, numbers of their buckets"


def fitted(subject: Subject, kind: Kind) -> Kind:
    """The same in blocks and numbers that the backend has."""
    size = subject.backend.capabilities.block_sizes[0]
    return replace(kind, block_size=size, kv_dtype=first_dtype(subject))


def _long(subject: Subject) -> str:
    """Long contexts are as the reference has them, however they are cut."""
    subject.needs("rotate_and_cache", "attention", "rotary_table")
    length = min(LONG, subject.backend.capabilities.max_model_len)
    for what, kind in {"all of it": Kind(), "a window": Kind(window=length * 2 // 3)}.items():
        own = replace(fitted(subject, kind), lengths=(length,))
        caches = [cache_of(backend, own) for backend in (*subject.both, subject.backend)]
        for backend, cache in zip((*subject.both, subject.backend), caches, strict=True):
            spoil(backend, cache)
        whole, expected, parts = (
            torch.cat([attend(backend, own, cache, [share])[0] for share in _cut(length, size)])
            for backend, cache, size in zip(
                (*subject.both, subject.backend), caches, (300, 300, 77), strict=True
            )
        )
        ensure_close(whole, expected, TOLERANCE[own.kv_dtype], f"{what} of {length} tokens")
        ensure_same(parts, whole, f"{what} of {length} tokens, cut another way,")
    return f"{length} tokens, all seen or in a window"


def _cut(length: int, size: int) -> list[Share]:
    return [(0, done, min(size, length - done)) for done in range(0, length, size)]


def _behind(subject: Subject) -> str:
    """Block tables may name any blocks behind what `Capabilities.window_multiple` says that attention reads."""
    subject.needs("rotate_and_cache", "attention", "rotary_table")
    backend, done = subject.backend, 140
    for what, kind in (("window", KVKind.WINDOW), ("chunks", KVKind.CHUNK)):
        own = fitted(subject, KINDS[what])
        group = KVGroup(
            layers=(0,),
            kind=kind,
            block_size=own.block_size,
            window=own.window or own.chunk or 0,
            window_multiple=backend.capabilities.window_multiple,
        )
        cache, last = cache_of(backend, own), [(0, done, LENGTHS[0] - done)]
        spoil(backend, cache)
        attend(backend, own, cache, [(0, 0, done)])
        (wanted,) = attend(backend, own, cache, last)
        blocks, first = own.blocks(0), group.first_block(done)
        (found,) = attend(backend, own, cache, last, [[0] * first + blocks[first:]])
        ensure_same(found, wanted, f"attention, {what}, with other blocks behind what is read,")
    return "windows and chunks, any blocks behind them"


def first_dtype(subject: Subject) -> str:
    """Number format of KV that the backend has, float32 if it can be."""
    known = subject.backend.capabilities.kv_cache_dtypes
    return "float32" if "float32" in known else known[0]


def _caches(subject: Subject) -> str:
    subject.needs("rotate_and_cache", "attention", "rotary_table")
    capabilities = subject.backend.capabilities
    sizes = capabilities.block_sizes
    by_bits = {size.bit_length(): size for size in sorted(sizes)}
    several = sorted({sizes[0], *by_bits.values()})
    for kv_dtype in capabilities.kv_cache_dtypes:
        some = sorted({sizes[0], min(sizes), max(sizes)})
        for block_size in several if kv_dtype == capabilities.kv_cache_dtypes[0] else some:
            kind = Kind(kv_dtype=kv_dtype, block_size=block_size)
            _check_kind(subject, kind, f"{kv_dtype} in blocks of {block_size}")
    listed = ", ".join(map(str, several))
    return f"{', '.join(capabilities.kv_cache_dtypes)} in blocks of {listed}"


def _layout(subject: Subject) -> str:
    """Blocks are what is planned for, lie where they should, and can be moved as bytes."""
    subject.needs("rotate_and_cache", "attention", "rotary_table")
    for kv_dtype in subject.backend.capabilities.kv_cache_dtypes:
        kind = replace(fitted(subject, Kind(window=50)), kv_dtype=kv_dtype)
        _check_layout(subject.backend, kind, kv_dtype)
    return "bytes of a block, memory of the caller's, blocks copied to other places"


def _check_layout(backend: Backend[Any, Any], kind: Kind, what: str) -> None:
    given: list[Tensor] = []

    def new(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        given.append(torch.empty(shape, dtype=dtype))
        return given[-1]

    cache = cache_of(backend, kind, new)
    if not isinstance(backend, KVOnDevice):
        ensure_given(cache, given, f"allocate_kv_cache of {what}")
    for name, tensor in cache.tensors.items():
        ensure(
            tensor.shape[:2] == (kind.num_blocks, kind.kv_heads),
            f"{name} of {what} are {list(tensor.shape)}, which do not begin with blocks and heads",
        )
    head = KV_FORMATS[kind.kv_dtype].vector_bytes(kind.head_dim)
    wanted = 2 * kind.kv_heads * kind.block_size * head
    spoil(backend, cache)
    other = cache_of(backend, kind)
    spoil(backend, other)
    check_moved(
        backend,
        lambda held, shares, blocks: attend(backend, kind, held, shares, blocks),
        (cache, other),
        kind.blocks(0),
        wanted,
        what,
    )


def ensure_given(cache: KVCache | LatentCache, given: Sequence[Tensor], what: str) -> None:
    """Raises FailedError: a cache lies elsewhere than in the memory that its backend was given."""
    ensure(
        {each.data_ptr() for each in cache.tensors.values()} == {each.data_ptr() for each in given},
        f"{what} takes memory that `new` did not give",
    )


Attend = Callable[[Any, Sequence[Share], Sequence[list[int]]], list[Tensor]]
"""Computes a step with a cache, shares of sequences and other blocks than theirs, if there are any."""


def check_moved(
    backend: Backend[Any, Any],
    attend: Attend,
    caches: tuple[Any, Any],
    blocks: list[int],
    block_bytes: int,
    what: str,
) -> None:
    """Copies the blocks of sequence 0 as bytes from one cache to other places in another one.

    Raises FailedError: that cannot be done, or a token behind them has other bits there.
    """
    try:
        store, target = (store_of(backend, [cache]) for cache in caches)
    except ValueError as error:
        raise FailedError(f"the cache of {what} cannot be moved as bytes: {error}") from None
    ensure(
        store.block_bytes == block_bytes,
        f"a block of {what} takes {store.block_bytes} bytes, but {block_bytes} are planned for",
    )
    attend(caches[0], [(0, 0, 149), (2, 0, 70)], ())
    moved = blocks[1:] + blocks[:1]
    copies = [memoryview(bytearray(store.block_bytes)) for _ in blocks]
    store.read(blocks, copies, store.computed()).wait()
    target.write(moved, copies, target.computed()).wait()
    last = [(0, 149, 1)]
    ensure_same(
        attend(caches[1], last, [moved])[0],
        attend(caches[0], last, ())[0],
        f"a token behind blocks of {what} that were copied as bytes to other places",
    )


def _ahead(subject: Subject) -> str:
    """Metadata of a step is made while the step before it has not been computed."""
    subject.needs("rotate_and_cache", "attention", "rotary_table")
    backend, kind = subject.backend, fitted(subject, Kind())
    once, ahead = cache_of(backend, kind), cache_of(backend, kind)
    spoil(backend, once)
    spoil(backend, ahead)
    first, second = [(0, 0, 100)], [(0, 100, 50), (2, 0, 70)]
    attend(backend, kind, once, first)
    expected = attend(backend, kind, once, second)
    metadata = backend.attention_metadata(token_batch(kind, second), kind.heads, ahead)
    attend(backend, kind, ahead, first)
    found = attend(backend, kind, ahead, second, metadata=metadata)
    for own, wanted in zip(found, expected, strict=True):
        ensure_same(own, wanted, "a step whose metadata was made ahead of time")
    return "made before the step before it is computed"


_KINDS = Check("rotate_and_cache, attention", _kinds)
_BY_DISTANCE = Check("relative_attention, disentangled_attention", _distances)
EXPLICIT = {
    "rotate_and_cache": _KINDS,
    "attention": _KINDS,
    "relative_attention": _BY_DISTANCE,
    "disentangled_attention": _BY_DISTANCE,
    "alibi_attention": Check("alibi_attention", _slopes),
}
"""Checks of operations on the KV cache."""
FURTHER = (
    Check("KV formats and block sizes", _caches),
    Check("KV layout and store", _layout),
    Check("metadata ahead of steps", _ahead),
    Check("long contexts", _long),
    Check("blocks behind windows", _behind),
)
