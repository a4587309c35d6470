# SPDX-License-Identifier: Apache-2.0
"""Adapters of the ranks of a replica: those that they have, and loads that are under way on all of them."""

from __future__ import annotations

from collections.abc import Sequence

from pagoda.messages.adapters import Adapter, AdapterLoaded


class GroupAdapters:
    """Joins the answers of all ranks: an adapter is loaded when it is on every rank.

    Workers that start load all adapters that are there or on the way; a loss of workers ends no load.
    """

    def __init__(self, adapters: Sequence[Adapter], num_ranks: int) -> None:
        self._adapters = {adapter.digest: adapter for adapter in adapters}
        self._num_ranks = num_ranks
        self._awaited: dict[str, set[int]] = {}
        """Ranks that have loaded an adapter, by digest, of loads under way."""
        self._given: set[str] = set()
        """Adapters that the present workers had at their start or were told of."""

    def start(self) -> tuple[Adapter, ...]:
        """New workers start; returns what they load."""
        self._given = set(self._adapters)
        for ranks in self._awaited.values():
            ranks.clear()
        return tuple(self._adapters.values())

    def load(self, adapter: Adapter) -> None:
        self._adapters[adapter.digest] = adapter
        self._awaited.setdefault(adapter.digest, set())

    def unload(self, digest: str) -> None:
        self._adapters.pop(digest, None)
        self._given.discard(digest)
        self._awaited.pop(digest, None)

    def ready(self) -> list[AdapterLoaded]:
        """All workers are ready; returns the loads that have ended with their start."""
        ended = [digest for digest in self._awaited if digest in self._given]
        for digest in ended:
            del self._awaited[digest]
        return [AdapterLoaded(digest) for digest in ended]

    def take_orders(self) -> list[Adapter]:
        """Adapters that the present workers, which are ready, are to be told of now."""
        untold = [
            adapter for digest, adapter in self._adapters.items() if digest not in self._given
        ]
        self._given.update(adapter.digest for adapter in untold)
        return untold

    def answered(self, rank: int, message: AdapterLoaded) -> AdapterLoaded | None:
        """Returns the end of a load, once a rank has failed or the last one has loaded."""
        ranks = self._awaited.get(message.digest)
        if ranks is None:
            return None
        ranks.add(rank)
        if not message.error and len(ranks) < self._num_ranks:
            return None
        del self._awaited[message.digest]
        return message
