"""What a dispatcher believes to be in the prefix cache of one replica, and what it therefore has all together.

Blocks are known by short keys: the first 8 bytes of theirs, as a number.
"""

from __future__ import annotations

import struct
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from pagoda.kv.block_keys import SHORT_KEY_BYTES
from pagoda.messages.frontend import PrefixCacheUpdate


class PrefixIndex:
    """What the replica says that it has, and what was sent there and it has said nothing of yet.

    Of the latter, those not sent for the longest time go first where there are more than the replica's cache has
    blocks; and all of a request's are gone a little after its end. A replica that says nothing, or not yet, is
    known by what was sent alone. A wrong belief costs time, never correctness.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self.told: set[int] = set()
        """What the replica says that it has."""
        self._sent: OrderedDict[int, int] = OrderedDict()
        """By key, the number of the last call of `add` with it."""
        self._num_running: dict[int, int] = {}
        """By key, how many of the requests that are there now begin with it."""
        self._num_added = 0
        self._ended: OrderedDict[int, int] = OrderedDict()
        """By key that the last request with it has left in `_sent`, how many news there had been; oldest first."""
        self._num_news = 0

    def __len__(self) -> int:
        return len(self.told) + len(self._sent)

    def num_cached(self, keys: Sequence[int]) -> int:
        """How many leading ones of `keys`, a chain from its root, are believed to be there."""
        count = self.num_told(keys)
        for key in keys[count:]:
            if key not in self.told and key not in self._sent:
                return count
            count += 1
        return count

    def num_told(self, keys: Sequence[int]) -> int:
        """How many leading ones of `keys` the replica says that it has: more may be on the way there."""
        if self.told.issuperset(keys):  # in a quarter of the time that the loop takes
            return len(keys)
        return next(count for count, key in enumerate(keys) if key not in self.told)

    def num_sharing(self, key: int) -> int:
        """How many of the requests that are there now begin with this block."""
        return self._num_running.get(key, 0)

    def resize(self, capacity: int) -> None:
        """The replica's cache has another size."""
        self._capacity = capacity
        self._trim()

    def _trim(self) -> None:
        while len(self._sent) > self._capacity:
            key, _ = self._sent.popitem(last=False)
            self._ended.pop(key, None)

    def add(self, keys: Sequence[int]) -> int:
        """A prompt with these blocks was sent; returns a number for `end`.

        Ends of chains go before their roots, as in the block pool.
        """
        self._num_added += 1
        for key in reversed(keys):
            self._num_running[key] = self._num_running.get(key, 0) + 1
            if key not in self.told:
                self._sent[key] = self._num_added
                self._sent.move_to_end(key)
                self._ended.pop(key, None)
        self._trim()
        return self._num_added

    def end(self, number: int, keys: Sequence[int]) -> None:
        """A request with these blocks is not there any more: what it left behind, news will have told soon."""
        for key in keys:
            num_running = self._num_running.pop(key, 1) - 1
            if num_running:
                self._num_running[key] = num_running
            if self._num_news and self._sent.get(key) == number:
                self._ended[key] = self._num_news

    def take(self, news: PrefixCacheUpdate) -> Changes:
        """What the replica says; returns what is new in it."""
        if news.starts_anew:
            removed = self.told
            self.told = set()
        else:
            removed = self.told.intersection(short_keys_in(news.removed))
            self.told -= removed
        stored = [key for key in short_keys_in(news.stored) if key not in self.told]
        self.told.update(stored)
        for key in stored:
            self._sent.pop(key, None)
            self._ended.pop(key, None)
        self._num_news += 1
        self._forget_ended()
        if news.starts_anew:
            stored, removed = [k for k in stored if k not in removed], removed - self.told
        return Changes(stored, removed)

    def clear(self) -> Changes:
        """The replica's cache is lost."""
        removed, self.told = self.told, set()
        self._sent.clear()
        self._ended.clear()
        self._num_news = 0
        return Changes([], removed)

    def _forget_ended(self) -> None:
        """The first news after a request's end may have been on their way; the second know of it."""
        while self._ended:
            key = next(iter(self._ended))
            if self._ended[key] + 2 > self._num_news:
                return
            del self._ended[key], self._sent[key]


class Changes(NamedTuple):
    """What a replica has now and had not, and the other way round."""

    stored: Iterable[int]
    removed: Iterable[int]


def short_keys(keys: Iterable[bytes]) -> list[int]:
    """Of whole ones."""
    return [int.from_bytes(key[:SHORT_KEY_BYTES], "little") for key in keys]


def short_keys_in(packed: bytes) -> Sequence[int]:
    """Of a field of `PrefixCacheUpdate`."""
    return struct.unpack(f"<{len(packed) // SHORT_KEY_BYTES}Q", packed)


def packed(keys: Sequence[int]) -> bytes:
    """As a field of `PrefixCacheUpdate`."""
    return struct.pack(f"<{len(keys)}Q", *keys)
