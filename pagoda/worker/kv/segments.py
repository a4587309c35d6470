# SPDX-License-Identifier: Apache-2.0
"""Cold segments of a step: where attention of each layer finds them.

Those in host memory are read where they lie. Those of a tier come through a staging memory of two halves, each for
one layer's part of a segment: while attention reads one, threads fill the other with what the step needs next.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, compress
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from pagoda.backend.base import ColdContexts, KVCache, LatentCache, StagedSegment
from pagoda.backend.kv_store import KVStore
from pagoda.messages.transfers import HostSlots, TierBlocks
from pagoda.model.decoder import LayerCache
from pagoda.worker.kv.memory import HostArena, page_aligned

AnyCache = KVCache | LatentCache
ColdPlaces = Mapping[int, Sequence[Sequence[HostSlots | TierBlocks]]]
"""Places of the cold segments of each of a step's sequences, by KV group."""

READERS = 4
"""Threads that read a segment from a tier: an SSD is quickest with several reads at once."""
PATIENCE_S = 10.0
"""Seconds without any answer of a tier after which it counts as hanging."""
_FAREWELL_S = 1.0
_HANGS = f"its disk has not answered for {PATIENCE_S:g} s"
ALIGNMENT = 4096


class SegmentUnreadableError(Exception):
    """A block of a segment cannot be read. The text is a clause that says why."""


class PartReader(Protocol):
    """What one thread reads of a tier's blocks."""

    def read(self, key: bytes, place: int, into: memoryview) -> None:
        """Reads one place's part of a block to `into[begin:]`, as `TierParts.begins` says.

        Raises SegmentUnreadableError.
        """


class TierParts(Protocol):
    """A tier of which the parts of blocks can be read that are of single places."""

    @property
    def begins(self) -> Sequence[int]:
        """Where the part of each place begins in the memory that it is read to, which has `part_room` bytes."""

    def open_reader(self) -> PartReader: ...


def part_room(num_bytes: int) -> int:
    """Bytes of aligned memory that a part of a block is read to."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT + ALIGNMENT


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


@dataclass(frozen=True)
class Streamed:
    """What became of a step's cold segments."""

    lost: dict[int, str]
    """Sequences of which a segment could not be read, and why."""
    num_bytes: int
    seconds: float
    """Seconds from the first segment that a layer asks for to its last, of all layers."""


NOTHING_STREAMED = Streamed({}, 0, 0.0)


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
            self._host = {
                place: _elsewhere(
                    cache,
                    part := self._parts[place],
                    memory,
                    part.first,
                    arena.stride,
                    arena.num_slots,
                )
                for place, cache in self._caches.items()
            }
        nothing = torch.zeros(-(-largest // ALIGNMENT) * ALIGNMENT, dtype=torch.uint8)
        self._zeros = {
            place: _elsewhere(cache, self._parts[place], nothing, 0, len(nothing), 1)
            for place, cache in self._caches.items()
        }
        """One block of each place, for segments that cannot be read."""
        self.tiers = tiers
        self._staging: _Staging | None = None
        if tiers:
            most = max(self.num_blocks.values())
            self._staging = _Staging(most, part_room(largest))
        self._hanging: _Filling | None = None

    def open(self, cold: ColdPlaces) -> StepSegments:
        """Segments of a step that is prepared."""
        return StepSegments(self, cold)

    # ---- for a step

    def in_host(self, place: int) -> AnyCache:
        return self._host[place]

    def lost(self, place: int, group: int) -> StagedSegment:
        """What stands for a segment that cannot be read."""
        return StagedSegment(self._zeros[place], [0] * self.num_blocks[group])

    def segment_bytes(self, place: int, group: int) -> int:
        return self.num_blocks[group] * self._parts[place].num_bytes

    def staged(self, place: int, tier: str, half: int, group: int) -> StagedSegment:
        """A half of the staging memory, as the place reads it."""
        staging, count = self._staging, self.num_blocks[group]
        if staging is None:
            raise RuntimeError("Segments of tiers are taken where there are none.")
        cache = staging.known.get((half, place, tier))
        if cache is None:
            first = half * staging.half_bytes + self.tiers[tier].begins[place]
            cache = _elsewhere(
                self._caches[place],
                self._parts[place],
                staging.tensor,
                first,
                staging.room,
                staging.num_blocks,
            )
            staging.known[half, place, tier] = cache
        return StagedSegment(cache, range(count))

    def fill(self, cold: ColdPlaces) -> _Filling | None:
        """Begins to read a step's segments of tiers, in the order in which layers take them."""
        if self._staging is None:
            return None
        items = [
            _Item(layer.group, layer.place, index, sequence, found)
            for layer in self._layers
            for index, (sequence, found) in enumerate(_in_order(cold.get(layer.group, ())))
            if isinstance(found, TierBlocks)
        ]
        if not items:
            return None
        if self._hanging is not None and self._hanging.is_running:
            return self._hanging  # which is closed, so that all are lost
        filling = _Filling(self._staging, self.tiers, items)
        self._hanging = filling
        return filling


def _address(cache: AnyCache) -> int:
    return (cache.latents if isinstance(cache, LatentCache) else cache.values).data_ptr()


def _in_order(
    of_sequences: Sequence[Sequence[HostSlots | TierBlocks]],
) -> list[tuple[int, HostSlots | TierBlocks]]:
    """Sequence and place of each segment, as layers take them."""
    return [(i, place) for i, places in enumerate(of_sequences) for place in places]


class StepSegments:
    """Cold segments of one step, which is computed between `begin` and `end`."""

    def __init__(self, streams: SegmentStreams, cold: ColdPlaces) -> None:
        self._streams = streams
        self._cold = cold
        self.contexts = {
            group: ColdContexts(
                list(map(len, places)), _GroupSegments(self, group, _in_order(places))
            )
            for group, places in cold.items()
        }
        """Segments by KV group, as backends take them."""
        self._filling: _Filling | None = None
        self._lost: dict[int, str] = {}
        self._num_bytes = 0
        self._seconds = 0.0
        self._began: float | None = None

    def of(self, chosen: Sequence[bool]) -> StepSegments | None:
        """Those of the sequences that are chosen; None where they have none."""
        cold = {group: list(compress(places, chosen)) for group, places in self._cold.items()}
        cold = {group: places for group, places in cold.items() if any(places)}
        return StepSegments(self._streams, cold) if cold else None

    def begin(self) -> None:
        self._filling = self._streams.fill(self._cold)

    def end(self) -> None:
        if self._filling is not None:
            self._filling.close()
            self._filling = None

    @property
    def streamed(self) -> Streamed:
        return Streamed(self._lost, self._num_bytes, self._seconds)

    def take(
        self, group: int, values: int, index: int, sequence: int, found: HostSlots | TierBlocks
    ) -> StagedSegment:
        streams, place = self._streams, self._streams.place_of[values]
        if self._began is None:
            self._began = time.perf_counter()
        if sequence in self._lost:
            return streams.lost(place, group)
        if isinstance(found, HostSlots):
            staged = StagedSegment(streams.in_host(place), found.slots)
        else:
            if self._filling is None:
                raise RuntimeError("Segments are taken of a step that has not begun.")
            half, problem = self._filling.take((group, place, index))
            if problem:
                self._lost[sequence] = problem
                return streams.lost(place, group)
            staged = streams.staged(place, found.tier, half, group)
        self._num_bytes += streams.segment_bytes(place, group)
        return staged

    def release(self) -> None:
        if self._began is not None:
            self._seconds += time.perf_counter() - self._began
            self._began = None
        if self._filling is not None:
            self._filling.release()


@contextlib.contextmanager
def computing(segments: StepSegments | None) -> Iterator[None]:
    """A context in which a step with cold segments is computed, or one without."""
    if segments is None:
        yield
        return
    segments.begin()
    try:
        yield
    finally:
        segments.end()


class _GroupSegments:
    """The `SegmentSource` of one group."""

    def __init__(
        self, step: StepSegments, group: int, segments: Sequence[tuple[int, HostSlots | TierBlocks]]
    ) -> None:
        self._step, self._group, self._segments = step, group, segments

    def take(self, values: int, index: int) -> StagedSegment:
        return self._step.take(self._group, values, index, *self._segments[index])

    def release(self, values: int) -> None:  # noqa: ARG002
        self._step.release()


class _Staging:
    """Memory for two segments, each of so many blocks of which one place's part is there."""

    def __init__(self, num_blocks: int, room: int) -> None:
        self.num_blocks, self.room = num_blocks, room
        self.half_bytes = num_blocks * room
        self.memory = page_aligned(2 * self.half_bytes)
        self.tensor = torch.frombuffer(self.memory, dtype=torch.uint8)
        self.known: dict[tuple[int, int, str], AnyCache] = {}

    def block(self, half: int, index: int) -> memoryview:
        first = half * self.half_bytes + index * self.room
        return self.memory[first : first + self.room]


class _Item(NamedTuple):
    """A layer's part of a segment."""

    group: int
    place: int
    number: int
    """Number of the segment, as layers take them."""
    sequence: int
    found: TierBlocks


class _Filling:
    """Threads that fill the halves in turn with items, one item ahead of attention."""

    def __init__(
        self, staging: _Staging, tiers: Mapping[str, TierParts], items: Sequence[_Item]
    ) -> None:
        self._staging, self._tiers, self._items = staging, tiers, items
        self._numbers = {(item.group, item.place, item.number): i for i, item in enumerate(items)}
        self._changed = threading.Condition()
        """Guards all that follows."""
        self._parts_done = [0] * len(items)
        self._num_free = 2
        """Items that may be read: those before them but one are not needed any more."""
        self._taken = -1
        self._problems: dict[int, str] = {}
        """Reasons by sequence."""
        self._heard_at = time.monotonic()
        self._is_closed = False
        self._threads = [
            threading.Thread(target=self._run, args=(i,), name=f"kv-segment-{i}", daemon=True)
            for i in range(READERS)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def is_running(self) -> bool:
        return any(thread.is_alive() for thread in self._threads)

    def take(self, item: tuple[int, int, int]) -> tuple[int, str]:
        """The half that has an item, and the reason why it lacks something, once it is read; gives others back."""
        number = self._numbers.get(item, 0)
        with self._changed:
            self._free_before(number)
            while not self._is_closed and self._parts_done[number] < READERS:
                left_s = self._heard_at + PATIENCE_S - time.monotonic()
                self._is_closed = left_s <= 0
                self._changed.wait(max(0.0, left_s))
            if self._is_closed:
                return 0, _HANGS
            self._taken = number
            return number % 2, self._problems.get(self._items[number].sequence, "")

    def release(self) -> None:
        """Nothing reads the item that was taken any more."""
        with self._changed:
            self._free_before(self._taken + 1)

    def _free_before(self, number: int) -> None:
        if number + 2 > self._num_free:
            self._num_free = number + 2
            self._heard_at = time.monotonic()
            self._changed.notify_all()

    def close(self) -> None:
        """Ends the threads; one that a disk keeps waiting goes on until that answers."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        deadline = time.monotonic() + _FAREWELL_S
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _run(self, part: int) -> None:
        """Reads every so manieth block of each item."""
        readers = {name: tier.open_reader() for name, tier in self._tiers.items()}
        for number, item in enumerate(self._items):
            with self._changed:
                while number >= self._num_free and not self._is_closed:
                    self._changed.wait()
                if self._is_closed:
                    return
                is_wanted = item.sequence not in self._problems
            problem = ""
            if is_wanted:
                problem = self._read(readers[item.found.tier], item, number % 2, part)
            with self._changed:
                if problem:
                    self._problems.setdefault(item.sequence, problem)
                self._parts_done[number] += 1
                self._heard_at = time.monotonic()
                self._changed.notify_all()

    def _read(self, reader: PartReader, item: _Item, half: int, part: int) -> str:
        keys = item.found.keys
        try:
            for index in range(part, len(keys), READERS):
                if self._is_closed:
                    break
                reader.read(keys[index], item.place, self._staging.block(half, index))
                self._heard_at = time.monotonic()
        except SegmentUnreadableError as error:
            return str(error)
        return ""
