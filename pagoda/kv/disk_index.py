"""Which blocks are on disk, and which of them was used longest ago.

Millions of entries must be small. One is a number, a slot: of its key in a list, and of its neighbours, time and
directory in arrays. Its key leads to it through one of 256 dictionaries for each directory, as objects lie in as
many fan-out directories; so none of them is ever large enough for its growth to be felt.

All entries are in one ring, in the order of their last use. What is used goes to its end. What is found on disk,
in the order of directories, goes behind the other entries of its minute: the last of each is known.
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


class _Directory:
    __slots__ = ("count", "object_bytes", "slots")

    def __init__(self, object_bytes: int) -> None:
        self.object_bytes = object_bytes
        self.count = 0
        self.slots: list[dict[bytes, int]] = [{} for _ in range(_FAN_OUT)]
        """Key to slot, by the first byte of the key."""


class DiskIndex:
    """The objects of some directories, by directory and key. Times are whole seconds since 1970."""

    def __init__(self) -> None:
        self._directories: dict[int, _Directory] = {}
        self._keys: list[bytes] = [b""]
        self._owner = array("H", [0])
        self._used_at = array("I", [0])
        self._next = array("I", [_ENDS])
        self._previous = array("I", [_ENDS])
        self._free = _ENDS
        """The first slot without an entry; `_next` leads to the others."""
        self._periods: list[int] = []
        """Those in which entries were last used, in their order."""
        self._last: dict[int, int] = {}
        """Period to the newest of its entries."""
        self._num_bytes = 0

    def add_directory(self, directory: int, object_bytes: int) -> None:
        """Gives a directory a number; each of its objects takes `object_bytes`."""
        self._directories[directory] = _Directory(object_bytes)

    @property
    def num_bytes(self) -> int:
        """What all objects take."""
        return self._num_bytes

    def count(self, directory: int) -> int:
        return self._directories[directory].count

    def object_bytes(self, directory: int) -> int:
        return self._directories[directory].object_bytes

    def find(self, directory: int, key: bytes) -> bool:
        """Whether there is an object of `key`."""
        return key in self._directories[directory].slots[key[0]]

    def unknown(self, directory: int, fan_out: int, keys: Set[bytes]) -> Set[bytes]:
        """Those of `keys`, which begin with the byte `fan_out`, that are none of the objects."""
        return keys - self._directories[directory].slots[fan_out].keys()

    def missing(self, directory: int, fan_out: int, keys: Set[bytes], since: int) -> list[bytes]:
        """Objects whose keys begin with the byte `fan_out`, but are not among `keys`; used before `since`."""
        slots = self._directories[directory].slots[fan_out]
        others = slots.keys() - keys
        return [key for key in others if self._used_at[slots[key]] < since]

    def add(self, directory: int, key: bytes, used_at: int) -> bool:
        """Takes in an object that was last used then; False if it is known, unless as used longer ago."""
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
        self._num_bytes += home.object_bytes
        return True

    def touch(self, directory: int, key: bytes, now: int) -> None:
        """An object is used now: no other was used later. One that is not known stays so."""
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
        self._num_bytes -= home.object_bytes
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
        """Puts an entry behind the last of its period, or of those before it."""
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
