# SPDX-License-Identifier: Apache-2.0
"""Plan of a handoff: the bytes of other ranks' memory that hold the KV of blocks which another engine computed.

Both engines may have cut the model into any number of stages and tensor-parallel ranks; with more ranks than KV
heads several have the same one. Either may have several pools of ranks, which hold other blocks. What counts is
what each rank says of itself: tensors by layer, kind and heads.
Layers of several KV groups may share a tensor, of which each uses the blocks of its group.
Heads are the leading dimension of a block, so those that two tensors have in common are in one piece in both.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import msgspec

from pagoda.backend.kv_store import KVStore, KVTensor
from pagoda.errors import PagodaError
from pagoda.kv.memory import Extent
from pagoda.messages.transfers import KVPart, KVPeer
from pagoda.model.sharding import Shard
from pagoda.plugins.disaggregation.transport.base import MemorySpan
from pagoda.worker.memory_plan import LayerPlace


class PlanError(PagodaError):
    """The other engine's KV is not what this one needs; a clause says why."""


class OwnPart(NamedTuple):
    part: KVPart
    num_blocks: int


def own_parts(store: KVStore, shard: Shard, places: Sequence[LayerPlace]) -> tuple[OwnPart, ...]:
    """Parts of the KV of a rank's layers, which lie at `places`."""
    parts: list[OwnPart] = []
    for layer, (group, place) in zip(shard.layers, places, strict=True):
        tensors = [
            (region, tensor) for region, tensor in enumerate(store.tensors) if tensor.place == place
        ]
        described = _state_parts if shard.states(layer) else _attention_parts
        for region, part in described(shard, layer, tensors):
            tensor = store.tensors[region]
            whole = msgspec.structs.replace(
                part, layer=layer, group=group, region=region, stride=tensor.block_stride
            )
            parts.append(OwnPart(whole, store.num_blocks))
    return tuple(parts)


_Tensors = Sequence[tuple[int, KVTensor]]
"""Tensors of a place, and the regions that they are."""


def _attention_parts(shard: Shard, layer: int, tensors: _Tensors) -> Iterator[tuple[int, KVPart]]:
    for region, tensor in tensors:
        # Latents are of all heads: every rank has them.
        heads = range(1) if tensor.kind.startswith("latent") else shard.kv_heads
        yield region, KVPart(layer, tensor.kind, heads.start, len(heads), tensor.head_stride)


def _state_parts(shard: Shard, layer: int, tensors: _Tensors) -> Iterator[tuple[int, KVPart]]:
    """Units of states lie in the halves of a block, as `pagoda.backend.base.StateCache` says."""
    kept = {tensor.kind: (region, tensor) for region, tensor in tensors}
    if "latents" in kept:
        region, tensor = kept["latents"]
        halves = {"keys": (region, 0), "values": (region, tensor.block_bytes // 8 * 4)}
    else:
        halves = {kind: (region, 0) for kind, (region, _) in kept.items()}
    states, offset = shard.states(layer), 0
    for number, (state, units) in enumerate(zip(states, shard.state_units(layer), strict=True)):
        numbers = list(chain.from_iterable(units))
        middle = (len(numbers) + 1) // 2
        for kind, held in (("keys", numbers[:middle]), ("values", numbers[middle:])):
            for index, run in _runs_of(held):
                yield (
                    halves[kind][0],
                    KVPart(
                        layer,
                        f"state {number}",
                        run.start,
                        len(run),
                        4 * state.floats,
                        offset=halves[kind][1] + offset + 4 * state.floats * index,
                    ),
                )
        offset += state.half_bytes


def _runs_of(numbers: Sequence[int]) -> Iterator[tuple[int, range]]:
    """Numbers that follow one another, and the index of the first of them."""
    start = 0
    for index in range(1, len(numbers) + 1):
        if index == len(numbers) or numbers[index] != numbers[index - 1] + 1:
            yield start, range(numbers[start], numbers[index - 1] + 1)
            start = index


@dataclass(frozen=True)
class Slice:
    """Heads of a layer that a tensor there and one here have in common: of each block of a group, one piece."""

    group: int
    region: int
    """Index of the other rank's memory region."""
    source_offset: int
    """First byte within a block there."""
    source_stride: int
    """Bytes from block to block."""
    target_region: int
    """Index of the tensor here."""
    target_offset: int
    """First byte within a block here."""
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
    part: KVPart

    @property
    def end(self) -> int:
        """First head behind the part."""
        return self.part.first_head + self.part.num_heads


def plan_slices(
    parts: Iterable[OwnPart], own_rank: int, peer: KVPeer, pool: int = 0
) -> dict[int, list[Slice]]:
    """Slices to read of blocks of one of the peer's pools, by rank of the peer. Where several ranks have a head,
    `own_rank` chooses among them.

    Raises PlanError if a head is on no rank of the peer or has another size there.
    """
    offers: dict[tuple[int, str], list[_Offer]] = {}
    for rank, described in enumerate(peer.ranks):
        for part in described.parts if described.pool == pool else ():
            offers.setdefault((part.layer, part.kind), []).append(_Offer(rank, part))
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
    if offer.part.group != wanted.group:
        raise PlanError(
            f"its layer {wanted.layer} is in KV group {offer.part.group}, here it is in {wanted.group}"
        )
    return offer


def _slice(own: OwnPart, offer: _Offer, head: int, count: int) -> Slice:
    head_bytes = own.part.head_bytes
    return Slice(
        group=own.part.group,
        region=offer.part.region,
        source_offset=offer.part.offset + (head - offer.part.first_head) * head_bytes,
        source_stride=offer.part.stride,
        target_region=own.part.region,
        target_offset=own.part.offset + (head - own.part.first_head) * head_bytes,
        target_stride=own.part.stride,
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


def make_spans(
    slices: Iterable[Slice], runs: Sequence[Run], addresses: Sequence[int]
) -> list[MemorySpan]:
    """Spans to read into tensors here, which are in host memory at `addresses`.

    Tensor by tensor, in which blocks that follow one another are one span if the whole block is read.
    """
    spans: list[MemorySpan] = []
    for piece, own in _contiguous(slices, runs):
        target = addresses[piece.target_region] + piece.target_offset
        spans += [
            MemorySpan(
                piece.region,
                piece.source_offset + run.source * piece.source_stride,
                run.length * piece.num_bytes,
                target + run.target * piece.target_stride,
            )
            for run in own
        ]
    return spans


def make_staged_spans(
    slices: Iterable[Slice], runs: Sequence[Run], address: int
) -> tuple[list[MemorySpan], list[Extent]]:
    """The same, to be read into one buffer from `address` on; and where each span belongs then."""
    spans: list[MemorySpan] = []
    extents: list[Extent] = []
    for piece, own in _contiguous(slices, runs):
        for run in own:
            num_bytes = run.length * piece.num_bytes
            source = piece.source_offset + run.source * piece.source_stride
            target = piece.target_offset + run.target * piece.target_stride
            spans.append(MemorySpan(piece.region, source, num_bytes, address))
            extents.append(Extent(piece.target_region, target, num_bytes))
            address += num_bytes
    return spans, extents


def _contiguous(
    slices: Iterable[Slice], runs: Sequence[Run]
) -> Iterator[tuple[Slice, Sequence[Run]]]:
    """Slices, and the runs of blocks in which they are one piece, there and here."""
    single = [Run(run.source + n, run.target + n, 1) for run in runs for n in range(run.length)]
    for piece in slices:
        yield piece, runs if piece.is_whole else single
