# SPDX-License-Identifier: Apache-2.0
"""Messages between the two halves of plugins' tiers, where workers are on other hosts than their engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from pagoda.messages.transfers import TierWord


class Listener(NamedTuple):
    """An engine's half of a tier."""

    take: Callable[[bytes], object]
    """Takes what a worker's half tells."""
    connected: Callable[[], object]
    """The workers are there, and know nothing of what was told to those before."""


class TierPost:
    """Hands on what is told. Nothing is kept for workers to come."""

    def __init__(self) -> None:
        self._listeners: dict[str, Listener] = {}
        self._outbox: list[TierWord] = []
        self._has_workers = False

    def listen(self, tier: str, listener: Listener) -> None:
        """The listener is the tier's from now on; it is told at once of workers that are there."""
        self._listeners[tier] = listener
        if self._has_workers:
            listener.connected()

    def tell(self, tier: str, body: bytes) -> None:
        """Tells all ranks, if they are there."""
        if self._has_workers:
            self._outbox.append(TierWord(tier, body))

    def take(self, word: TierWord) -> None:
        if word.tier in self._listeners:
            self._listeners[word.tier].take(word.body)

    def drain(self) -> list[TierWord]:
        """Returns the words since the last call."""
        words, self._outbox = self._outbox, []
        return words

    def workers_ready(self) -> None:
        self._has_workers = True
        for listener in self._listeners.values():
            listener.connected()

    def workers_lost(self) -> None:
        self._has_workers = False
        self._outbox.clear()
