"""Leaves out replicas that do worse than others, and finds those whose requests should go on elsewhere."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from pagoda.frontend.outliers import Ejection, OutlierDetector, Waiting
from pagoda.frontend.replica_set import ReplicaSet
from pagoda.frontend.replica_slot import ReplicaSlot

_INTERVAL_S = 1.0

_log = logging.getLogger(__name__)


class ReplicaJudge:
    """Compares replicas once a second, for as long as there are requests."""

    def __init__(
        self,
        slots: ReplicaSet,
        outliers: OutlierDetector,
        has_requests: Callable[[], bool],
        on_stuck: Callable[[ReplicaSlot], None],
    ) -> None:
        """`on_stuck` is called with replicas whose requests have not got on for long."""
        self._slots = slots
        self._outliers = outliers
        self._has_requests = has_requests
        self._on_stuck = on_stuck
        self._timer: asyncio.TimerHandle | None = None

    @property
    def is_running(self) -> bool:
        return self._timer is not None

    def start(self) -> None:
        """Judges from now on, if there is more than one replica."""
        if self._timer is None and len(self._slots) > 1:
            self._timer = asyncio.get_running_loop().call_later(_INTERVAL_S, self._tick)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _tick(self) -> None:
        self._timer = None
        if self._has_requests():
            self.start()
            self.judge()

    def judge(self) -> None:
        """Compares all replicas once."""
        verdicts = self._outliers.check(self._waiting)
        for ejection in verdicts.ejected:
            self._eject(ejection)
        for number in verdicts.stuck:
            self._on_stuck(self._slots.by_number(number))

    def _waiting(self, number: int) -> Waiting | None:
        return self._slots.by_number(number).waiting()

    def on_loss(self, slot: ReplicaSlot) -> None:
        """Counts that all the replica had is lost."""
        self._eject(self._outliers.on_loss(slot.health))

    def on_failure(self, slot: ReplicaSlot) -> None:
        """Counts that the replica has left a request unanswered."""
        self._eject(self._outliers.on_failure(slot.health))

    def _eject(self, ejection: Ejection | None) -> None:
        if ejection is None:
            return
        slot = self._slots.by_number(ejection.replica)
        self._slots.refit(slot)
        _log.warning(
            "%sgets no new requests for %g s: %s",
            self._slots.prefix(slot),
            ejection.duration_s,
            ejection.reason,
        )
