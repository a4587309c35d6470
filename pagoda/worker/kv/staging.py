# SPDX-License-Identifier: Apache-2.0
"""A staging memory of two halves, each for one layer's part of a segment of a tier.

While attention reads one half, threads fill the other with what the step needs next.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import torch

from pagoda.messages.transfers import TierBlocks
from pagoda.messages.worker import LostSegments
from pagoda.worker.kv.memory import page_aligned

READERS = 8
"""Threads that read a segment: an SSD is quickest with several reads at once."""
PATIENCE_S = 10.0
"""Seconds without any answer of a tier after which it counts as hanging."""
_FAREWELL_S = 1.0
_HANGS = f"its disk has not answered for {PATIENCE_S:g} s"
ALIGNMENT = 4096
"""Alignment of memory that parts of blocks are read to, in bytes, as direct I/O requires."""

_log = logging.getLogger(__name__)


class SegmentUnreadableError(Exception):
    """A block of a segment cannot be read. The text is a clause that says why."""


class PartReader(Protocol):
    """One thread's reader of a tier's blocks."""

    def read(self, key: bytes, place: int, into: memoryview) -> None:
        """Reads one place's part of a block to `into[begin:]`, as `TierParts.begins` says.

        Raises SegmentUnreadableError.
        """


class TierParts(Protocol):
    """A tier of whose blocks the parts of single places can be read."""

    @property
    def begins(self) -> Sequence[int]:
        """Offsets of each place's part in the memory that it is read to, which has `part_room` bytes."""

    def open_reader(self) -> PartReader: ...


def part_room(num_bytes: int) -> int:
    """Bytes of aligned memory that a part of a block is read to."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT + ALIGNMENT


class Staging:
    """Memory for two segments, each of so many blocks of which one place's part is there."""

    def __init__(self, num_blocks: int, room: int) -> None:
        self.num_blocks, self.room = num_blocks, room
        self.half_bytes = num_blocks * room
        self.memory = page_aligned(2 * self.half_bytes)
        self.tensor = torch.frombuffer(self.memory, dtype=torch.uint8)

    def block(self, half: int, index: int) -> memoryview:
        first = half * self.half_bytes + index * self.room
        return self.memory[first : first + self.room]


class Item(NamedTuple):
    """A layer's part of a segment."""

    group: int
    place: int
    number: int
    """Number of the segment, as layers take them."""
    sequence: int
    in_sequence: int
    """Number of the segment in the sequence."""
    found: TierBlocks


class Filling:
    """Threads that fill the halves in turn with items, one item ahead of attention."""

    def __init__(
        self, staging: Staging, tiers: Mapping[str, TierParts], items: Sequence[Item]
    ) -> None:
        self._staging, self._tiers, self._items = staging, tiers, items
        self._numbers = {(item.group, item.place, item.number): i for i, item in enumerate(items)}
        self._changed = threading.Condition()
        """Guards all that follows."""
        self._parts_done = [0] * len(items)
        self._num_free = 2
        """Items that may be read: those before them but one are not needed any more."""
        self._taken = -1
        self._lost: dict[int, LostSegments] = {}
        """Losses by sequence."""
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

    def take(self, item: tuple[int, int, int], index: int) -> tuple[int, LostSegments | None]:
        """The half that has an item, and what its sequence lacks, once it is read; gives others back.

        `index` is that of the segment in its sequence: threads that a tier keeps waiting know older items."""
        number = self._numbers.get(item, 0)
        with self._changed:
            self._free_before(number)
            while not self._is_closed and self._parts_done[number] < READERS:
                left_s = self._heard_at + PATIENCE_S - time.monotonic()
                self._is_closed = left_s <= 0
                self._changed.wait(max(0.0, left_s))
            if self._is_closed:
                return 0, LostSegments(_HANGS, index, hangs=True)
            self._taken = number
            return number % 2, self._lost.get(self._items[number].sequence)

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
                is_wanted = item.sequence not in self._lost
            problem = ""
            if is_wanted:
                problem = self._read(readers[item.found.tier], item, number % 2, part)
            with self._changed:
                if problem:
                    lost = LostSegments(problem, item.in_sequence)
                    self._lost[item.sequence] = self._lost.get(item.sequence, lost).joined(lost)
                self._parts_done[number] += 1
                self._heard_at = time.monotonic()
                self._changed.notify_all()

    def _read(self, reader: PartReader, item: Item, half: int, part: int) -> str:
        keys = item.found.keys
        try:
            for index in range(part, len(keys), READERS):
                if self._is_closed:
                    break
                reader.read(keys[index], item.place, self._staging.block(half, index))
                self._heard_at = time.monotonic()
        except SegmentUnreadableError as error:
            return str(error)
        except Exception as error:
            _log.exception("a segment could not be read")
            return f"{type(error).__name__}: {error}"
        return ""
