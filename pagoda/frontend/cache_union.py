"""Blocks that several replicas have cached together, for a router above and for finding who has a prefix."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from pagoda.frontend.endpoint import CacheListener
from pagoda.frontend.prefix_index import Changes, Holders, PrefixIndex, packed
from pagoda.messages.frontend import PrefixCacheUpdate

_MAX_KEYS = 2**16
"""Keys in one message: 512 KiB."""


class CacheUnion:
    """Joins the prefix indexes of all replicas, and tells listeners what changes for all of them together."""

    def __init__(self) -> None:
        self._told = Holders()
        self._sent = Holders()
        self._listeners: list[CacheListener] = []

    @property
    def has_listeners(self) -> bool:
        return bool(self._listeners)

    def listen(self, listener: CacheListener) -> Callable[[], None]:
        """Tells `listener` all keys at once, then what changes, until the function returned is called."""
        keys = list(self._told)
        for start in range(0, max(1, len(keys)), _MAX_KEYS):
            some = packed(keys[start : start + _MAX_KEYS])
            listener(PrefixCacheUpdate(some, b"", starts_anew=start == 0))
        self._listeners.append(listener)
        return partial(self._listeners.remove, listener)

    def new_index(self, replica: int, capacity: int) -> PrefixIndex:
        """An index for the replica of this number, whose cache has `capacity` blocks."""
        return PrefixIndex(capacity, replica=replica, sent_holders=self._sent)

    def clear(self, index: PrefixIndex) -> None:
        """Forgets what a replica has: its cache is lost, or the replica has gone."""
        self._pass_on(index, index.clear())

    def apply(self, index: PrefixIndex, update: PrefixCacheUpdate) -> None:
        """Takes what a replica tells."""
        self._pass_on(index, index.apply(update))

    def holders(self, keys: Sequence[int], num_replicas: int) -> list[int]:
        """Numbers of up to `num_replicas` replicas believed to have the longest prefix of `keys`, a chain.

        A replica that has a block has those before it too, so that the last block that anybody has is found by
        bisection. Where fewer replicas have that block, those that have half of the prefix follow, and so on.
        """
        low, high = 0, len(keys)
        while low < high:
            middle = (low + high) // 2
            key = keys[middle]
            if key in self._told or key in self._sent:
                low = middle + 1
            else:
                high = middle
        found: dict[int, None] = {}
        while low and len(found) < num_replicas:
            for holders in (self._told, self._sent):
                for replica in holders.of(keys[low - 1]):
                    if len(found) == num_replicas:
                        break
                    found[replica] = None
            low //= 2
        return list(found)

    def _pass_on(self, index: PrefixIndex, changes: Changes) -> None:
        number = index.replica
        stored = [key for key in changes.stored if self._told.add(key, number)]
        removed = [key for key in changes.removed if self._told.discard(key, number)]
        if self._listeners and (stored or removed):
            update = PrefixCacheUpdate(packed(stored), packed(removed))
            for listener in list(self._listeners):
                listener(update)
