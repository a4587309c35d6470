# SPDX-License-Identifier: Apache-2.0
"""Cold segments of a step, as attention of each layer finds them.

Segments in host memory are read where they lie; those of tiers come through a staging memory (`staging`).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, chain, compress
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pagoda.backend.base import ColdContexts, KVCache, LatentCache, StagedSegment
from pagoda.backend.kv_store import KVStore
from pagoda.messages.segments import ColdSegment
from pagoda.messages.transfers import HostSlots, TierBlocks, num_places, tier_name
from pagoda.messages.worker import LostSegments
from pagoda.model.caches import LayerCache
from pagoda.worker.kv.memory import HostArena
from pagoda.worker.kv.staging import ALIGNMENT, Filling, Item, Staging, TierParts, part_room

AnyCache = KVCache | LatentCache
ColdPlaces = Mapping[int, Sequence[Sequence[HostSlots | TierBlocks]]]
"""Places of the cold segments of each of a step's sequences, by KV group."""


class BlockPart(NamedTuple):
    """Bytes of a block that are one place's, and where in them its tensors begin."""

    first: int
    num_bytes: int
    tensors: dict[str, int]

    @property
    def end(self) -> int:
        return self.first + self.num_bytes


def place_parts(store: KVStore) -> list[BlockPart]:
    """The part of each place of a store."""
    parts: list[BlockPart] = []
    ends = accumulate(tensor.block_bytes for tensor in store.tensors)
    for tensor, end in zip(store.tensors, ends, strict=True):
        begin = end - tensor.block_bytes
        if tensor.place == len(parts):
            parts.append(BlockPart(begin, 0, {}))
        part = parts[tensor.place]
        part.tensors[tensor.kind] = begin - part.first
        parts[tensor.place] = part._replace(num_bytes=end - part.first)
    return parts


def _elsewhere(
    cache: AnyCache, part: BlockPart, memory: Tensor, first: int, stride: int, count: int
) -> AnyCache:
    """Blocks of a place in memory [bytes] uint8, of which the part of the first begins at `first`."""

    def there(kind: str, tensor: Tensor) -> Tensor:
        shape, inner = tensor.shape[1:], tensor[0].stride()
        begin = first + part.tensors[kind]
        size = tensor.itemsize
        of_type = memory.view(tensor.dtype)
        return of_type.as_strided((count, *shape), (stride // size, *inner), begin // size)

    found: Mapping[str, Any] = {kind: there(kind, each) for kind, each in cache.tensors.items()}
    return replace(cache, **found)


class _Layer(NamedTuple):
    group: int
    place: int
    values: int
    """Address of its values, or latents."""


@dataclass
class Streamed:
    """Outcome of a step's cold segments so far."""

    lost: dict[int, LostSegments] = field(default_factory=dict)
    """Sequences of which a segment could not be read."""
    num_bytes: int = 0
    seconds: float = 0.0
    """Seconds from the first segment that a layer asks for to its last, of all layers."""


def joined_losses(
    one: Mapping[int, LostSegments], other: Mapping[int, LostSegments]
) -> dict[int, LostSegments]:
    """Losses by slot in two stages, of which each reads its own layers."""
    both = {slot: one[slot].joined(other[slot]) for slot in one.keys() & other.keys()}
    return {**one, **other, **both}


class SegmentStreams:
    """Cold segments of one rank."""

    def __init__(
        self,
        layers: Sequence[LayerCache],
        places: Sequence[int],
        store: KVStore,
        arena: HostArena | None,
        tiers: Mapping[str, TierParts],
        segment: int,
        groups: Mapping[int, int],
    ) -> None:
        """`layers` and their `places` in blocks are the model's; `groups` stream, in blocks of so many tokens."""
        self.segment = segment
        self._parts = place_parts(store)
        self._caches = {place: layer.cache for layer, place in zip(layers, places, strict=True)}
        self._layers = [
            _Layer(layer.group, place, _address(layer.cache))
            for layer, place in zip(layers, places, strict=True)
            if layer.group in groups
        ]
        self.place_of = {layer.values: layer.place for layer in self._layers}
        self.num_blocks = {group: segment // size for group, size in groups.items()}
        largest = max((self._parts[layer.place].num_bytes for layer in self._layers), default=0)
        self._host: dict[int, AnyCache] = {}
        if arena is not None:
            memory = torch.frombuffer(arena.memory, dtype=torch.uint8)
            sizes = arena.stride, arena.num_slots
            for place, cache in self._caches.items():
                part = self._parts[place]
                self._host[place] = _elsewhere(cache, part, memory, part.first, *sizes)
        nothing = torch.zeros(-(-largest // ALIGNMENT) * ALIGNMENT, dtype=torch.uint8)
        self._zeros = {
            place: _elsewhere(self._caches[place], self._parts[place], nothing, 0, len(nothing), 1)
            for place in self.place_of.values()
        }
        """One block of each place that streams, for segments that cannot be read."""
        self.tiers = tiers
        self._staging: Staging | None = None
        if tiers:
            self._staging = Staging(max(self.num_blocks.values()), part_room(largest))
        self._staged: dict[tuple[int, int, str], AnyCache] = {}
        """Halves of the staging memory as places read them, by half, place and tier."""
        self._last: Filling | None = None
        """The filling of the last step that had one, whose threads a tier may still keep waiting."""

    def open(self, cold: ColdPlaces) -> StepSegments:
        """Segments of a step that is prepared."""
        return StepSegments(self, cold)

    def check(self, cold: ColdSegment) -> None:
        """Raises ValueError: a segment is not in places that this worker has."""
        place, count = cold.place, num_places(cold.place)
        known = place.tier in self.tiers if isinstance(place, TierBlocks) else bool(self._host)
        if not known or self.num_blocks.get(cold.group) != count:
            raise ValueError(
                f"A segment of slot {cold.slot} in {count} blocks of group {cold.group} ({tier_name(place)}) "
                "cannot be streamed here."
            )

    # ---- for a step

    def in_host(self, place: int) -> AnyCache:
        return self._host[place]

    def lost(self, place: int, group: int, count: int) -> StagedSegment:
        """Zeros in place of segments that cannot be read."""
        return StagedSegment(self._zeros[place], [0] * count * self.num_blocks[group])

    def segment_bytes(self, place: int, group: int) -> int:
        return self.num_blocks[group] * self._parts[place].num_bytes

    def staged(self, place: int, tier: str, half: int, group: int) -> StagedSegment:
        """A half of the staging memory, as the place reads it."""
        staging, count = self._staging, self.num_blocks[group]
        if staging is None:
            raise RuntimeError("Segments of tiers are taken where there are none.")
        cache = self._staged.get((half, place, tier))
        if cache is None:
            part, sizes = self._parts[place], (staging.room, staging.num_blocks)
            first = half * staging.half_bytes + self.tiers[tier].begins[place]
            cache = _elsewhere(self._caches[place], part, staging.tensor, first, *sizes)
            self._staged[half, place, tier] = cache
        return StagedSegment(cache, range(count))

    def fill(self, cold: ColdPlaces) -> Filling | None:
        """Begins to read a step's segments of tiers, in the order in which layers take them."""
        if self._staging is None:
            return None
        items = [
            Item(layer.group, layer.place, number, sequence, index, found)
            for layer in self._layers
            for number, (sequence, index, found) in enumerate(_in_order(cold.get(layer.group, ())))
            if isinstance(found, TierBlocks)
        ]
        if not items:
            return None
        if self._last is None or not self._last.is_running:
            self._last = Filling(self._staging, self.tiers, items)
        return self._last  # one that is running still is closed, so that all is lost


def _address(cache: AnyCache) -> int:
    return (cache.latents if isinstance(cache, LatentCache) else cache.values).data_ptr()


def _in_order(
    of_sequences: Sequence[Sequence[HostSlots | TierBlocks]],
) -> list[tuple[int, int, HostSlots | TierBlocks]]:
    """Sequence of each segment, its number there, and its place, as layers take them."""
    return [
        (sequence, index, place)
        for sequence, places in enumerate(of_sequences)
        for index, place in enumerate(places)
    ]


class StepSegments:
    """Cold segments of one step, which is computed between `begin` and `end`."""

    def __init__(self, streams: SegmentStreams, cold: ColdPlaces) -> None:
        self._streams = streams
        self._cold = cold
        self.contexts = {
            group: ColdContexts(
                list(map(len, places)),
                _GroupSegments(self, group, _in_order(places)),
                [isinstance(found, HostSlots) for *_, found in _in_order(places)],
            )
            for group, places in cold.items()
        }
        """Segments by KV group, as backends take them."""
        self._filling: Filling | None = None
        self.streamed = Streamed()
        self._began: float | None = None

    def of(self, chosen: Sequence[bool]) -> StepSegments | None:
        """Segments of the sequences that are chosen; None where they have none."""
        cold = {group: list(compress(places, chosen)) for group, places in self._cold.items()}
        cold = {group: places for group, places in cold.items() if any(places)}
        return StepSegments(self._streams, cold) if cold else None

    def begin(self) -> None:
        self._filling = self._streams.fill(self._cold)

    def end(self) -> None:
        if self._filling is not None:
            self._filling.close()
            self._filling = None

    def take(
        self,
        group: int,
        values: int,
        number: int,
        count: int,
        segment: tuple[int, int, Sequence[int] | TierBlocks],
    ) -> StagedSegment:
        """Segments from `number` on, in the order of layers: the sequence and the number there of the first one,
        and slots of the arena or blocks of a tier, which has one segment at a time."""
        streams, place = self._streams, self._streams.place_of[values]
        sequence, index, found = segment
        if self._began is None:
            self._began = time.perf_counter()
        if sequence in self.streamed.lost:
            return streams.lost(place, group, count)
        if not isinstance(found, TierBlocks):
            staged = StagedSegment(streams.in_host(place), found)
        else:
            if self._filling is None:
                raise RuntimeError("Segments are taken of a step that has not begun.")
            half, lost = self._filling.take((group, place, number), index)
            if lost is not None:
                self.streamed.lost[sequence] = lost
                return streams.lost(place, group, count)
            staged = streams.staged(place, found.tier, half, group)
        self.streamed.num_bytes += count * streams.segment_bytes(place, group)
        return staged

    def release(self) -> None:
        if self._began is not None:
            self.streamed.seconds += time.perf_counter() - self._began
            self._began = None
        if self._filling is not None:
            self._filling.release()


@contextlib.contextmanager
def computing(segments: StepSegments | None) -> Iterator[Streamed]:
    """A context in which a step is computed, with cold segments or without; gives what becomes of them."""
    if segments is None:
        yield Streamed()
        return
    segments.begin()
    try:
        yield segments.streamed
    finally:
        segments.end()


class _GroupSegments:
    """The `SegmentSource` of one group."""

    def __init__(
        self,
        step: StepSegments,
        group: int,
        segments: Sequence[tuple[int, int, HostSlots | TierBlocks]],
    ) -> None:
        self._step, self._group, self._segments = step, group, segments
        self._slots: dict[tuple[int, int], Sequence[int]] = {}
        """Slots of segments in the arena, by the number of the first and how many they are."""

    def take(self, values: int, index: int, count: int = 1) -> StagedSegment:
        sequence, number, found = self._segments[index]
        if isinstance(found, TierBlocks):
            return self._step.take(self._group, values, index, count, (sequence, number, found))
        slots = self._slots.get((index, count))
        if slots is None:
            places = [place for *_, place in self._segments[index : index + count]]
            of_each = (place.slots for place in places if isinstance(place, HostSlots))
            slots = self._slots[index, count] = list(chain.from_iterable(of_each))
        return self._step.take(self._group, values, index, count, (sequence, number, slots))

    def release(self, values: int) -> None:  # noqa: ARG002
        self._step.release()
