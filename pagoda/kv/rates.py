# SPDX-License-Identifier: Apache-2.0
"""Measured speeds, and what work takes behind all that is queued."""

from __future__ import annotations

from collections import defaultdict

from pagoda.messages.transfers import Transfer, TransferEnd, num_places, tier_name

_DECAY = 0.9

DEVICE = "device"
"""The device among the names of tiers."""


class Rate:
    """Seconds per unit of work; what was seen lately weighs most."""

    def __init__(self) -> None:
        self._units = self._seconds = 0.0

    def observe(self, units: float, seconds: float) -> None:
        self._units = _DECAY * self._units + units
        self._seconds = _DECAY * self._seconds + seconds

    def doubt(self) -> None:
        """Thinks the work cheaper: what seems too dear is tried again some time."""
        self._seconds *= _DECAY

    def seconds(self, units: float) -> float:
        """Seconds that so much work takes; 0 before any was seen."""
        return units * self._seconds / self._units if self._units else 0.0


class _Lane:
    """Transfers from one tier to another, which end about one after the other."""

    def __init__(self) -> None:
        self.rate = Rate()
        self.num_queued = 0
        """Blocks of transfers that have not ended."""
        self.since = 0.0
        """Time from which on nothing but the next transfer to end was copied."""


class TransferRates:
    """Speeds of transfers by their tiers. Blocks of a model are of one size, so bytes are counted in blocks."""

    def __init__(self) -> None:
        self._lanes: defaultdict[tuple[str, str], _Lane] = defaultdict(_Lane)

    def begun(self, transfer: Transfer, now: float) -> None:
        lane = self._lane(transfer)
        if not lane.num_queued:
            lane.since = now
        lane.num_queued += num_places(transfer.source)

    def ended(self, transfer: Transfer, end: TransferEnd, now: float) -> None:
        lane, count = self._lane(transfer), num_places(transfer.source)
        if not end.failed:
            lane.rate.observe(count, now - lane.since)
        lane.since = now
        lane.num_queued -= count

    def lost(self) -> None:
        """No transfer is under way any more."""
        for lane in self._lanes.values():
            lane.num_queued = 0

    def seconds(self, source: str, target: str, count: int, now: float) -> float:
        """Seconds that `count` further blocks take, with those that are queued; 0 before any were seen."""
        lane = self._lanes[source, target]
        silence = now - lane.since if lane.num_queued else 0.0
        return max(silence, lane.rate.seconds(lane.num_queued + count))

    def num_queued(self, source: str, target: str) -> int:
        """Blocks of transfers that have not ended."""
        return self._lanes[source, target].num_queued

    def doubt(self, source: str, target: str) -> None:
        self._lanes[source, target].rate.doubt()

    def _lane(self, transfer: Transfer) -> _Lane:
        return self._lanes[tier_name(transfer.source), tier_name(transfer.target)]
