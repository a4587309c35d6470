"""Keeps a quota: what was used longest ago goes, of whichever directory, when nearly all of it is taken."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pagoda.kv.disk_index import DiskIndex
from pagoda.kv.disk_scanner import OWN, DiskScanner, Removed

_HIGH_PERCENT = 95
_LOW_PERCENT = 85
"""Of the quota: when it is filled to the high mark, objects are removed down to the low one."""
_MAX_REMOVING = 512
"""Objects that the scanner is asked to remove at a time."""


class Evictor:
    """Takes objects out of an index, and has them removed by a scanner, which takes its time.

    Those that are being removed are still on disk: they take room, and scans find them.
    """

    def __init__(
        self,
        index: DiskIndex,
        scanner: DiskScanner,
        quota_bytes: int,
        forget: Callable[[int, bytes], object],
    ) -> None:
        """`forget` takes an object, given by directory and key, out of the index."""
        self._index = index
        self._scanner = scanner
        self._quota_bytes = quota_bytes
        self._high_bytes = quota_bytes * _HIGH_PERCENT // 100
        self._low_bytes = quota_bytes * _LOW_PERCENT // 100
        self._forget = forget
        self._removing: set[tuple[int, bytes]] = set()
        self._removing_bytes = 0
        self._is_evicting = False
        """Since the high mark was passed, and until the low one is reached."""

    def is_removing(self, directory: int, key: bytes) -> bool:
        return (directory, key) in self._removing

    def make_room(self, count: int, num_storing: int) -> int:
        """How many of `count` further objects may be written now, besides `num_storing` that are being written."""
        each = self._index.object_bytes(OWN)
        # No more than evictions make room for: one long prompt is not to take the place of everything else.
        room = self._high_bytes - min(self._used_bytes(num_storing), self._low_bytes)
        count = min(count, max(1, room // each))
        if self._used_bytes(num_storing) + count * each > self._high_bytes:
            self._is_evicting = True
            self.go_on(num_storing)
        taken = self._used_bytes(num_storing) + self._removing_bytes
        return min(count, max(0, self._quota_bytes - taken) // each)

    def check(self, num_storing: int) -> None:
        """Others may have written."""
        if self._used_bytes(num_storing) > self._high_bytes:
            self._is_evicting = True
            self.go_on(num_storing)

    def go_on(self, num_storing: int) -> None:
        """Removes what was used longest ago, a part at a time: the next when that is gone."""
        keys: dict[int, list[bytes]] = {}
        while self._is_evicting and len(self._removing) < _MAX_REMOVING:
            oldest = self._index.oldest()
            if oldest is None or self._used_bytes(num_storing) <= self._low_bytes:
                self._is_evicting = False
                break
            directory, key = oldest
            keys.setdefault(directory, []).append(key)
            self._drop_from_index(directory, key)
        for directory, some in keys.items():
            self._scanner.remove(directory, some)

    def discard(self, keys: Sequence[bytes]) -> None:
        """Removes objects that are not good; also where they are not known: another rank's may be."""
        fresh = [key for key in keys if not self.is_removing(OWN, key)]
        for key in fresh:
            self._drop_from_index(OWN, key)
        if fresh:
            self._scanner.remove(OWN, fresh)

    def removed(self, news: Removed) -> None:
        self._removing.difference_update((news.directory, key) for key in news.keys)
        self._removing_bytes -= len(news.keys) * self._index.object_bytes(news.directory)

    def _drop_from_index(self, directory: int, key: bytes) -> None:
        self._forget(directory, key)
        self._removing.add((directory, key))
        self._removing_bytes += self._index.object_bytes(directory)

    def _used_bytes(self, num_storing: int) -> int:
        """What is there, and what is being written."""
        return self._index.num_bytes + num_storing * self._index.object_bytes(OWN)
