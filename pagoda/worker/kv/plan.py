"""Plan of a handoff: the bytes of other ranks' memory that hold the KV of blocks which another engine computed.

Both engines may have cut the model into any number of stages and tensor-parallel ranks; with more ranks than KV
heads several have the same one. What counts is what each rank says of itself: tensors by layer, kind and heads.
Heads are the leading dimension of a block, so those that two tensors have in common are in one piece in both.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pagoda.backend.base import KVCache
from pagoda.errors import PagodaError
from pagoda.messages.transfers import KVPart, KVPeer
from pagoda.model.sharding import Shard
from pagoda.pd.transport.base import Region, Span
from pagoda.worker.kv.memory import host_tensors


class PlanError(PagodaError):
    """The other engine's KV is not what this one needs; a clause says why."""


class OwnPart(NamedTuple):
    part: KVPart
    address: int
    num_blocks: int

    @property
    def region(self) -> Region:
        return Region(self.address, self.num_blocks * block_bytes(self.part))


def block_bytes(part: KVPart) -> int:
    return part.num_heads * part.head_bytes


def own_parts(caches: Sequence[KVCache], shard: Shard) -> tuple[OwnPart, ...]:
    """Parts of the KV tensors of a rank's layers.

    Raises ValueError if a tensor is not in this process's memory or not contiguous.
    """
    heads = shard.kv_heads
    parts = []
    for layer, cache in zip(shard.layers, caches, strict=True):
        for kind, tensor in host_tensors(cache).items():
            head_bytes = tensor[0, 0].nbytes
            part = KVPart(layer, kind, heads.start, len(heads), head_bytes)
            parts.append(OwnPart(part, tensor.data_ptr(), len(tensor)))
    return tuple(parts)


@dataclass(frozen=True)
class Slice:
    """Heads that a tensor there and one here have in common: of each block, one piece."""

    region: int
    """Index of the other rank's memory region."""
    source_offset: int
    """First byte within a block there."""
    source_stride: int
    """Bytes from block to block."""
    target: int
    """Address in block 0 here."""
    target_stride: int
    num_bytes: int

    @property
    def is_whole(self) -> bool:
        """True if blocks that follow one another are contiguous, there and here."""
        return self.source_stride == self.target_stride == self.num_bytes


class Run(NamedTuple):
    """Blocks that follow one another there and here."""

    source: int
    target: int
    length: int


class _Offer(NamedTuple):
    rank: int
    region: int
    part: KVPart

    @property
    def end(self) -> int:
        """First head behind the part."""
        return self.part.first_head + self.part.num_heads


def plan_slices(parts: Iterable[OwnPart], own_rank: int, peer: KVPeer) -> dict[int, list[Slice]]:
    """Slices to read, by rank of the peer. Where several ranks have a head, `own_rank` chooses among them.

    Raises PlanError if a head is on no rank of the peer or has another size there.
    """
    offers: dict[tuple[int, str], list[_Offer]] = {}
    for rank, described in enumerate(peer.ranks):
        for region, part in enumerate(described.parts):
            offers.setdefault((part.layer, part.kind), []).append(_Offer(rank, region, part))
    slices: dict[int, list[Slice]] = {}
    for own in parts:
        head, end = own.part.first_head, own.part.first_head + own.part.num_heads
        while head < end:
            offer = _choose(offers, own.part, head, own_rank)
            count = min(end, offer.end) - head
            slices.setdefault(offer.rank, []).append(_slice(own, offer, head, count))
            head += count
    return slices


def _choose(
    offers: dict[tuple[int, str], list[_Offer]], wanted: KVPart, head: int, own_rank: int
) -> _Offer:
    known = [
        offer
        for offer in offers.get((wanted.layer, wanted.kind), [])
        if offer.part.first_head <= head < offer.end
    ]
    what = f"{wanted.kind} of head {head} of layer {wanted.layer}"
    if not known:
        raise PlanError(f"it has no {what}")
    offer = known[own_rank % len(known)]
    if offer.part.head_bytes != wanted.head_bytes:
        raise PlanError(
            f"its {what} have {offer.part.head_bytes} bytes per block, here they have {wanted.head_bytes}"
        )
    return offer


def _slice(own: OwnPart, offer: _Offer, head: int, count: int) -> Slice:
    head_bytes = own.part.head_bytes
    return Slice(
        region=offer.region,
        source_offset=(head - offer.part.first_head) * head_bytes,
        source_stride=block_bytes(offer.part),
        target=own.address + (head - own.part.first_head) * head_bytes,
        target_stride=block_bytes(own.part),
        num_bytes=count * head_bytes,
    )


def find_runs(sources: Sequence[int], targets: Sequence[int]) -> list[Run]:
    """Pairs of blocks, in their order, put together where they can be."""
    runs: list[Run] = []
    for source, target in zip(sources, targets, strict=True):
        last = runs[-1] if runs else Run(-1, -1, 0)
        if last.length and (source, target) == (
            last.source + last.length,
            last.target + last.length,
        ):
            runs[-1] = last._replace(length=last.length + 1)
        else:
            runs.append(Run(source, target, 1))
    return runs


def make_spans(slices: Iterable[Slice], runs: Sequence[Run]) -> list[Span]:
    """Tensor by tensor, in which blocks that follow one another are one span if the whole block is read."""
    single = [Run(run.source + n, run.target + n, 1) for run in runs for n in range(run.length)]
    return [
        Span(
            piece.region,
            piece.source_offset + run.source * piece.source_stride,
            run.length * piece.num_bytes,
            piece.target + run.target * piece.target_stride,
        )
        for piece in slices
        for run in (runs if piece.is_whole else single)
    ]
