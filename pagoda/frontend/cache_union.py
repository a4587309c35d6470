"""What several replicas have cached together, for those to whom they are one."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from pagoda.frontend.endpoint import CacheListener
from pagoda.frontend.prefix_index import Changes, PrefixIndex, packed
from pagoda.messages.frontend import PrefixCacheUpdate

_MAX_KEYS = 2**16
"""In one message: 512 KiB."""


class CacheUnion:
    """Takes the news of each replica's index, and passes on what they change for all of them together."""

    def __init__(self) -> None:
        self._indexes: list[PrefixIndex] = []
        self._listeners: list[CacheListener] = []

    @property
    def is_followed(self) -> bool:
        return bool(self._listeners)

    def follow(self, listener: CacheListener) -> Callable[[], None]:
        """Tells `listener` all that is known, now, then what changes, until the function returned is called."""
        keys = list(set().union(*(index.told for index in self._indexes)))
        for start in range(0, max(1, len(keys)), _MAX_KEYS):
            some = packed(keys[start : start + _MAX_KEYS])
            listener(PrefixCacheUpdate(some, b"", starts_anew=start == 0))
        self._listeners.append(listener)
        return partial(self._listeners.remove, listener)

    def add(self, index: PrefixIndex) -> None:
        """One more replica."""
        self._indexes.append(index)

    def remove(self, index: PrefixIndex) -> None:
        """A replica has gone."""
        self.clear(index)
        self._indexes = [other for other in self._indexes if other is not index]

    def clear(self, index: PrefixIndex) -> None:
        """A replica's cache is lost."""
        self._pass_on(index, index.clear())

    def take(self, index: PrefixIndex, news: PrefixCacheUpdate) -> None:
        """What a replica says."""
        self._pass_on(index, index.take(news))

    def _pass_on(self, index: PrefixIndex, changes: Changes) -> None:
        if not self._listeners:
            return
        others = [other for other in self._indexes if other is not index]
        stored, removed = (
            [key for key in keys if not any(key in other.told for other in others)]
            for keys in changes
        )
        if not (stored or removed):
            return
        news = PrefixCacheUpdate(packed(stored), packed(removed))
        for listener in list(self._listeners):
            listener(news)
