# SPDX-License-Identifier: Apache-2.0
"""Shares of API keys in what all clients have together: what is kept, and what waits.

What can be taken back goes to whoever comes, and makes room again: the least recently used of the key that has
most goes first (`LruByKey`). Of what cannot, a key may have as much as is left free (`KeyShares.check`): dynamic
thresholds, after Choudhury and Hahne, "Dynamic Queue Length Thresholds for Shared-Memory Packet Switches" (1998).
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class KeyShares:
    """Amounts of something that API keys have. Each call costs O(log n) for n keys."""

    def __init__(self) -> None:
        self.total = 0
        self._of: dict[str, int] = {}
        """Amounts by the name of the key; none is 0."""
        self._heap: list[tuple[int, str]] = []
        """Negative amounts and names, the largest amount first; an entry counts if the key has so much now."""

    def of(self, key_name: str) -> int:
        return self._of.get(key_name, 0)

    def change(self, key_name: str, amount: int) -> None:
        """Gives so much more to a key; `amount` may be negative."""
        self.total += amount
        now = self._of[key_name] = self.of(key_name) + amount
        if not now:
            del self._of[key_name]
            return
        if len(self._heap) > 2 * len(self._of) + 64:
            self._heap = [(-have, name) for name, have in self._of.items()]
            heapq.heapify(self._heap)
        else:
            heapq.heappush(self._heap, (-now, key_name))

    def greatest(self) -> str:
        """The key that has most. Raises IndexError if none has any."""
        while -self._heap[0][0] != self._of.get(self._heap[0][1]):
            heapq.heappop(self._heap)
        return self._heap[0][1]

    def has_room(self, key_name: str, most: int, amount: int = 1) -> bool:
        """True if a key may have so much more where all together may have `most`: it then has no more than is left
        free for others. On a server without keys (`key_name` is empty) all may be taken."""
        free = most - self.total - amount
        return free >= (self.of(key_name) + amount if key_name else 0)


class LruByKey(Generic[T]):
    """Objects of API keys by id, with the bytes that they take."""

    def __init__(self) -> None:
        self._of: dict[str, OrderedDict[str, tuple[T, int]]] = {}
        """Objects by the name of the key; the least recently used ones first."""
        self.bytes, self._counts = KeyShares(), KeyShares()

    def __len__(self) -> int:
        return self._counts.total

    def get(self, key_name: str, id_: str) -> T | None:
        """The object, which counts as used now."""
        objects = self._of.get(key_name)
        if objects is None or id_ not in objects:
            return None
        objects.move_to_end(id_)
        return objects[id_][0]

    def put(self, key_name: str, id_: str, value: T, num_bytes: int) -> None:
        """Keeps an object, as the last one used, in place of one with this id."""
        self.pop(key_name, id_)
        self._of.setdefault(key_name, OrderedDict())[id_] = value, num_bytes
        self.bytes.change(key_name, num_bytes)
        self._counts.change(key_name, 1)

    def pop(self, key_name: str, id_: str) -> T | None:
        objects = self._of.get(key_name)
        if objects is None or id_ not in objects:
            return None
        value, num_bytes = objects.pop(id_)
        if not objects:
            del self._of[key_name]
        self.bytes.change(key_name, -num_bytes)
        self._counts.change(key_name, -1)
        return value

    def make_room(self, max_bytes: int, max_count: int) -> Iterator[T]:
        """Removes objects, which it gives, until the others fit."""
        while self._counts.total and (self.bytes.total > max_bytes or len(self) > max_count):
            shares = self.bytes if self.bytes.total > max_bytes else self._counts
            key_name = shares.greatest()
            value = self.pop(key_name, next(iter(self._of[key_name])))
            if value is not None:
                yield value
