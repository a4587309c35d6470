# SPDX-License-Identifier: Apache-2.0
"""Index of the blocks on disk, in the order of their last use.

There may be millions of entries, so each is small: a slot number, which indexes a list of keys and arrays of
neighbours, times and directories. One of 256 dicts per directory maps a key to its slot, one for each fan-out
directory, so no dict is large enough for its growth to be felt.

All entries are in one ring, least recently used first. A used entry moves to the end. Entries found on disk come
in the order of directories, and each goes behind the last entry of its period of about a minute.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Set

_FAN_OUT = 256
_ENDS = 0
"""The slot that closes the ring: its `next` is the oldest entry, its `previous` the newest."""
_PERIOD_BITS = 6
"""Entries found on disk are in the order of their last use to within this power of two of seconds."""


class _IndexedDirectory:
    __slots__ = ("count", "object_bytes", "slots")

    def __init__(self, object_bytes: int) -> None:
        self.object_bytes = object_bytes
        self.count = 0
        self.slots: list[dict[bytes, int]] = [{} for _ in range(_FAN_OUT)]
        """Key to slot, by the first byte of the key."""


class DiskIndex:
    """The objects of some directories, by directory and key. Times are whole seconds since 1970."""

    def __init__(self) -> None:
        self._directories: dict[int, _IndexedDirectory] = {}
        self._keys: list[bytes] = [b""]
        self._owner = array("H", [0])
        self._used_at = array("I", [0])
        self._next = array("I", [_ENDS])
        self._previous = array("I", [_ENDS])
        self._free = _ENDS
        """First slot without an entry; `_next` links the others."""
        self._periods: list[int] = []
        """Periods in which entries were last used, oldest first."""
        self._last: dict[int, int] = {}
        self.num_bytes = 0

    def add_directory(self, directory: int, object_bytes: int) -> None:
        self._directories[directory] = _IndexedDirectory(object_bytes)

    @property
    def num_slots(self) -> int:
        """Slots that were ever used at a time."""
        return len(self._keys) - 1

    def count(self, directory: int) -> int:
        return self._directories[directory].count

    def object_bytes(self, directory: int) -> int:
        return self._directories[directory].object_bytes

    def has(self, directory: int, key: bytes) -> bool:
        return key in self._directories[directory].slots[key[0]]

    def compare(
        self, directory: int, fan_out: int, keys: Set[bytes], since: int
    ) -> tuple[Set[bytes], list[bytes]]:
        """Compares the index with `keys`, all that begin with the byte `fan_out`.

        Returns those that are not in the index, and the indexed ones that are not in `keys` and were last used
        before `since`.
        """
        slots = self._directories[directory].slots[fan_out]
        others = slots.keys() - keys
        return keys - slots.keys(), [key for key in others if self._used_at[slots[key]] < since]

    def add(self, directory: int, key: bytes, used_at: int) -> bool:
        """Adds an object that was last used at `used_at`, or moves a known one forward; returns True if it is
        new."""
        home = self._directories[directory]
        slots = home.slots[key[0]]
        slot = slots.get(key)
        if slot is not None:
            if used_at > self._used_at[slot]:
                self._unlink(slot)
                self._link(slot, used_at)
            return False
        slot = self._allocate_slot()
        slots[key] = slot
        self._keys[slot] = key
        self._owner[slot] = directory
        self._link(slot, used_at)
        home.count += 1
        self.num_bytes += home.object_bytes
        return True

    def touch(self, directory: int, key: bytes, now: int) -> None:
        """Makes a known object the most recently used one."""
        slot = self._directories[directory].slots[key[0]].get(key)
        if slot is None:
            return
        newest = self._used_at[self._previous[_ENDS]]
        self._unlink(slot)
        self._link(slot, max(now, newest))

    def remove(self, directory: int, key: bytes) -> bool:
        """Forgets an object; False if it is not known."""
        home = self._directories[directory]
        slot = home.slots[key[0]].pop(key, None)
        if slot is None:
            return False
        self._unlink(slot)
        self._keys[slot] = b""
        self._next[slot] = self._free
        self._free = slot
        home.count -= 1
        self.num_bytes -= home.object_bytes
        return True

    def oldest(self) -> tuple[int, bytes] | None:
        """Directory and key of the object that was used longest ago; None if there is none."""
        slot = self._next[_ENDS]
        return None if slot == _ENDS else (self._owner[slot], self._keys[slot])

    def _allocate_slot(self) -> int:
        slot = self._free
        if slot != _ENDS:
            self._free = self._next[slot]
            return slot
        self._keys.append(b"")
        for column in (self._owner, self._used_at, self._next, self._previous):
            column.append(0)
        return len(self._keys) - 1

    def _link(self, slot: int, used_at: int) -> None:
        """Links an entry behind the last of its period, or of the periods before."""
        period = used_at >> _PERIOD_BITS
        before = self._last.get(period)
        if before is None:
            position = bisect_left(self._periods, period)
            before = self._last[self._periods[position - 1]] if position else _ENDS
            self._periods.insert(position, period)
        self._last[period] = slot
        self._used_at[slot] = used_at
        behind = self._next[before]
        self._previous[slot], self._next[slot] = before, behind
        self._next[before] = self._previous[behind] = slot

    def _unlink(self, slot: int) -> None:
        before, behind = self._previous[slot], self._next[slot]
        self._next[before] = behind
        self._previous[behind] = before
        period = self._used_at[slot] >> _PERIOD_BITS
        if self._last[period] != slot:
            return
        if before != _ENDS and self._used_at[before] >> _PERIOD_BITS == period:
            self._last[period] = before
        else:
            del self._last[period]
            del self._periods[bisect_left(self._periods, period)]
