# SPDX-License-Identifier: Apache-2.0
"""Index for prefix-aware routing: blocks that a dispatcher believes to be in the prefix caches of its replicas.

Blocks are known by short keys: the first 8 bytes of their keys (`pagoda.kv.block_keys`) as a number.
"""

from __future__ import annotations

import heapq
import struct
from collections import OrderedDict
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain, islice

from pagoda.fleet.answer_check import PeerError
from pagoda.fleet.endpoint import CacheListener
from pagoda.kv.block_keys import SHORT_KEY_BYTES
from pagoda.kv.layout import KVLayout
from pagoda.messages.frontend import PrefixCacheUpdate
from pagoda.messages.ranges import MAX_ITEMS

MOST_SEEN = 32
"""Replicas with a prefix that are looked at for one request."""
_MOST_PASSED = 1024
"""Replicas with a prefix among which those are."""
_SPARE_TOLD = 2**20
_MAX_TOLD_SHARE = 64
"""Blocks that a replica may tell, and as many for each of its own cache: it tells those in host memory too."""


class Holders:
    """The numbers of the replicas that have each block: a multimap that stores the only holder of a key bare."""

    def __init__(self) -> None:
        self.by_key: dict[int, int | set[int]] = {}
        """Numbers of replicas; read it as a container of keys where a call for each look costs too much."""

    def __contains__(self, key: object) -> bool:
        return key in self.by_key

    def __len__(self) -> int:
        return len(self.by_key)

    def __iter__(self) -> Iterator[int]:
        return iter(self.by_key)

    def of(self, key: int) -> tuple[int, ...] | set[int]:
        found = self.by_key.get(key, ())
        return (found,) if isinstance(found, int) else found

    def some_of(self, key: int, turn: int) -> Iterable[int]:
        """Replicas that have a block, `MOST_SEEN` of them at most: others with each `turn`."""
        found = self.of(key)
        if isinstance(found, tuple) or len(found) <= MOST_SEEN:
            return found
        start = turn * MOST_SEEN % min(len(found), _MOST_PASSED)
        return islice(chain(found, found), start, start + MOST_SEEN)

    def add(self, key: int, replica: int) -> bool:
        """Returns True if the replica is the first to have the block."""
        found = self.by_key.setdefault(key, replica)
        if isinstance(found, set):
            found.add(replica)
        elif found != replica:
            self.by_key[key] = {found, replica}
        else:
            return True
        return False

    def discard(self, key: int, replica: int) -> bool:
        """Returns True if the replica was the last to have the block."""
        found = self.by_key.get(key)
        if isinstance(found, set):
            found.discard(replica)
            if len(found) == 1:
                [self.by_key[key]] = found
        elif found == replica:
            del self.by_key[key]
            return True
        return False


class CacheUnion:
    """Blocks that several replicas have together, by who has them, for a router above and for finding a prefix."""

    def __init__(self, layout: KVLayout | None = None) -> None:
        """`layout` is that of the group whose blocks replicas tell, which keeps all if None."""
        self.layout = layout or KVLayout(1)
        self.told = Holders()
        self.sent = Holders()
        self.listeners: list[CacheListener] = []

    def listen(self, listener: CacheListener) -> Callable[[], None]:
        """Tells `listener` all told keys at once, then what changes, until the function returned is called."""
        keys = list(self.told)
        for start in range(0, max(1, len(keys)), MAX_ITEMS):
            some = packed(keys[start : start + MAX_ITEMS])
            listener(PrefixCacheUpdate(some, b"", starts_anew=start == 0))
        self.listeners.append(listener)
        return partial(self.listeners.remove, listener)

    def change(self, replica: int, stored: Iterable[int], removed: Iterable[int]) -> None:
        """Takes keys that the replica has told now and had not, and keys that it had and has no more."""
        first = [key for key in stored if self.told.add(key, replica)]
        last = [key for key in removed if self.told.discard(key, replica)]
        for start in range(0, max(len(first), len(last)) if self.listeners else 0, MAX_ITEMS):
            part = slice(start, start + MAX_ITEMS)
            update = PrefixCacheUpdate(packed(first[part]), packed(last[part]))
            for listener in list(self.listeners):
                listener(update)

    def holders(
        self,
        keys: Sequence[int],
        num_replicas: int,
        cost: Callable[[int], float] = lambda _: 0,
        turn: int = 0,
    ) -> list[int]:
        """Numbers of up to `num_replicas` replicas believed to have the longest prefix of `keys`, a chain.

        Where fewer have the last block of it, those that have half of the prefix follow, and so on. Of many that
        have it, those of least `cost` among `MOST_SEEN` are taken, which others are with each `turn`: else all
        requests with a popular prefix would go to the same few.
        """
        length = self.longest_prefix(keys, len(keys), self.told.by_key, self.sent.by_key)
        found: dict[int, None] = {}
        while length and len(found) < num_replicas:
            key = keys[length - 1]
            seen = chain(self.told.some_of(key, turn), self.sent.some_of(key, turn))
            others = dict.fromkeys(r for r in seen if r not in found)
            found |= dict.fromkeys(heapq.nsmallest(num_replicas - len(found), others, key=cost))
            length //= 2
            if not self.layout.is_chain:
                length = self.longest_prefix(keys, length, self.told.by_key, self.sent.by_key)
        return list(found)

    def longest_prefix(
        self, keys: Sequence[int], end: int, told: Container[int], sent: Container[int]
    ) -> int:
        """The longest usable prefix of at most `end` of `keys`, a chain, by blocks that are told or sent."""
        if self.layout.is_chain:  # who has a block has those before it too
            low = 0
            while low < end:  # a search by halves without a call for each look
                middle = (low + end) // 2
                if keys[middle] in told or keys[middle] in sent:
                    low = middle + 1
                else:
                    end = middle
            return low
        [ratio] = self.layout.ratios

        def has(_group: int, index: int) -> bool:
            key = keys[(index + 1) * ratio - 1]
            return key in told or key in sent

        return self.layout.longest_usable(end, has)


class PrefixIndex:
    """Blocks that a replica says it has (told), and blocks of prompts that were sent there since (sent).

    Where there are more sent blocks than the replica's cache has room for, those not sent for the longest time go
    first; and all of a request's go a little after its end. A replica that says nothing, or not yet, is known by
    what was sent alone. A wrong belief costs time, never correctness.
    """

    def __init__(self, capacity: int, *, replica: int = 0, union: CacheUnion | None = None) -> None:
        """`capacity` is the number of blocks of the replica's cache. `union` is told what changes here, under the
        number of the replica."""
        self.capacity = capacity
        self.replica = replica
        self._union = union or CacheUnion()
        self.told: set[int] = set()
        self.sent: OrderedDict[int, int] = OrderedDict()
        """The number of the last call of `add` by key; no key is told too."""
        self.num_running: dict[int, int] = {}
        """Requests at the replica that begin with each key."""
        self.num_added = 0
        """Calls of `add` so far."""
        self.ended: OrderedDict[int, int] = OrderedDict()
        """Keys that the last request with them has left in `sent`, with `num_updates` at that time; oldest
        first."""
        self.num_updates = 0
        """Updates from the replica since its cache was last lost."""

    def __len__(self) -> int:
        return len(self.told) + len(self.sent)

    def num_cached(self, keys: Sequence[int]) -> int:
        """The longest usable prefix of `keys`, a chain from its root, by what is told or sent."""
        return self._union.longest_prefix(keys, len(keys), self.told, self.sent)

    def num_told(self, keys: Sequence[int]) -> int:
        """The longest usable prefix of `keys` by what is told: more may be on the way to the replica."""
        return self._union.longest_prefix(keys, len(keys), self.told, ())

    def num_sharing(self, key: int) -> int:
        return self.num_running.get(key, 0)

    def resize(self, capacity: int) -> None:
        self.capacity = capacity
        self._trim()

    def _trim(self) -> None:
        while len(self.sent) > self.capacity:
            self._forget(next(iter(self.sent)))

    def _forget(self, key: int) -> None:
        if self.sent.pop(key, None) is not None:
            self.ended.pop(key, None)
            self._union.sent.discard(key, self.replica)

    def add(self, keys: Sequence[int]) -> int:
        """Counts a prompt with these blocks as sent; returns a number for `end`.

        Ends of chains go before their roots, as in the block pool.
        """
        self.num_added += 1
        for key in reversed(keys):
            self.num_running[key] = self.num_running.get(key, 0) + 1
            if key not in self.told:
                if key in self.sent:
                    self.sent.move_to_end(key)
                    self.ended.pop(key, None)
                else:
                    self._union.sent.add(key, self.replica)
                self.sent[key] = self.num_added
        self._trim()
        return self.num_added

    def end(self, number: int, keys: Sequence[int]) -> None:
        """Ends a request with these blocks: updates will soon have told which of them stay."""
        for key in keys:
            num_running = self.num_running.pop(key, 1) - 1
            if num_running:
                self.num_running[key] = num_running
            if self.num_updates and self.sent.get(key) == number:
                self.ended[key] = self.num_updates

    def apply(self, update: PrefixCacheUpdate) -> None:
        """Takes what the replica tells. Raises PeerError: it tells more blocks than it can have."""
        keys = short_keys_in(update.stored)
        stored = [key for key in keys if key not in self.told]
        removed = self.told
        if not update.starts_anew:
            removed = removed.intersection(short_keys_in(update.removed))
        removed = removed.difference(keys)
        self.told -= removed
        self.told.update(stored)
        for key in stored:
            self._forget(key)
        self.num_updates += 1
        self._forget_ended()
        self._union.change(self.replica, stored, removed)
        if len(self.told) > _SPARE_TOLD + _MAX_TOLD_SHARE * self.capacity:
            raise PeerError(
                f"told of {len(self.told)} cached blocks, and its cache has {self.capacity}"
            )

    def clear(self) -> None:
        """Forgets all: the replica's cache is lost, or the replica has gone."""
        removed, self.told = self.told, set()
        for key in list(self.sent):
            self._forget(key)
        self.num_updates = 0
        self._union.change(self.replica, (), removed)

    def _forget_ended(self) -> None:
        """The first update after a request's end may have been on its way then; the second knows of the end."""
        while self.ended:
            key = next(iter(self.ended))
            if self.ended[key] + 2 > self.num_updates:
                return
            self._forget(key)


def short_keys(keys: Iterable[bytes]) -> list[int]:
    return [int.from_bytes(key[:SHORT_KEY_BYTES], "little") for key in keys]


def short_keys_in(packed: bytes) -> Sequence[int]:
    """The short keys in a field of `PrefixCacheUpdate`. Raises PeerError: the last one is cut off."""
    if len(packed) % SHORT_KEY_BYTES:
        raise PeerError("told of a cached block by a part of its key")
    return struct.unpack(f"<{len(packed) // SHORT_KEY_BYTES}Q", packed)


def packed(keys: Sequence[int]) -> bytes:
    """A field of `PrefixCacheUpdate` with these short keys."""
    return struct.pack(f"<{len(keys)}Q", *keys)
