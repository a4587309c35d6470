"""Updates of the prefix cache for frontends: all blocks at first, then what has changed.

Unlike events (`pagoda.kv.events`) updates leave out what comes and goes in between; a block in two places is one.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, islice

from pagoda.ipc.clock import Clock
from pagoda.kv.block_keys import SHORT_KEY_BYTES
from pagoda.kv.block_pool import BlockPool
from pagoda.messages.frontend import PrefixCacheUpdate

INTERVAL_S = 0.05
"""Seconds between two updates; after a longer pause an update is sent at once."""
MAX_KEYS = 8192
"""Most keys in one update, some milliseconds of work; the rest comes with the next."""


class CacheReporter:
    """Remembers what each frontend was told. Without a follower there is nothing to do, here or in the pools."""

    def __init__(self, pools: Sequence[BlockPool], clock: Clock) -> None:
        """`pools` are those where a request finds blocks at next to no cost."""
        self._pools = pools
        self._clock = clock
        self._untold: dict[bytes, dict[bytes, None]] = {}
        """Keys changed since the last update sent to each frontend, oldest first."""
        self._newcomers: set[bytes] = set()
        self._next_at = clock.now()

    def follow(self, frontend: bytes) -> None:
        """Tells `frontend` all now, and changes from now on."""
        if not self._untold:
            for pool in self._pools:
                pool.changed = {}
        self._untold[frontend] = dict.fromkeys(chain(*(pool.keys() for pool in self._pools)))
        self._newcomers.add(frontend)

    def drain(self) -> list[tuple[bytes, PrefixCacheUpdate]]:
        """Updates that are due, each with its frontend."""
        if not self._has_news or self._clock.now() < self._next_at:
            return []
        self._next_at = self._clock.now() + INTERVAL_S
        for pool in self._pools:
            if pool.changed:
                for untold in self._untold.values():
                    untold.update(pool.changed)
                pool.changed = {}
        return [
            (frontend, self._tell(frontend, untold))
            for frontend, untold in self._untold.items()
            if untold or frontend in self._newcomers
        ]

    def next_event_at(self) -> float | None:
        """The instant at which `drain` returns an update; None if nothing has changed."""
        return self._next_at if self._has_news else None

    @property
    def _has_news(self) -> bool:
        if not self._untold:
            return False
        changes = (pool.changed for pool in self._pools)
        return bool(self._newcomers) or any(changes) or any(self._untold.values())

    def _tell(self, frontend: bytes, untold: dict[bytes, None]) -> PrefixCacheUpdate:
        keys = list(islice(untold, MAX_KEYS))
        for key in keys:
            del untold[key]
        stored: list[bytes] = []
        removed: list[bytes] = []
        for key in keys:
            is_cached = any(pool.find(key) is not None for pool in self._pools)
            (stored if is_cached else removed).append(key[:SHORT_KEY_BYTES])
        news = PrefixCacheUpdate(
            b"".join(stored), b"".join(removed), starts_anew=frontend in self._newcomers
        )
        self._newcomers.discard(frontend)
        return news
