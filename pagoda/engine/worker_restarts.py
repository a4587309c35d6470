"""Restarts of lost workers, and the point at which the engine gives up."""

from __future__ import annotations

from pagoda.errors import EngineDeadError
from pagoda.ipc.clock import Clock

STABLE_S = 30.0
"""A worker that lived this many seconds starts a new count of losses."""
MAX_IDLE_LOSSES = 8
"""Short-lived workers in a row, lost without a step in flight, after which the engine gives up. Of losses during
steps the scheduler fails the request that causes them."""
_MAX_PAUSE_S = 10.0


class WorkerRestarts:
    """Counts losses. The pause before a restart doubles with each loss in a row."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.count = 0
        self._restart_at: float | None = None
        self._ready_at: float | None = None
        self._losses_in_row = 0
        self._idle_losses_in_row = 0

    def on_ready(self) -> None:
        self._ready_at = self._clock.now()

    def on_step(self) -> None:
        self._idle_losses_in_row = 0

    def on_loss(self, reason: str, *, is_idle: bool) -> None:
        """The worker is lost; `is_idle` says that no step was in flight.

        Raises:
            EngineDeadError: too many were lost in a row.
        """
        now, ready_at = self._clock.now(), self._ready_at
        self._ready_at = None
        if ready_at is not None and now - ready_at >= STABLE_S:
            self._losses_in_row = self._idle_losses_in_row = 0
        self.count += 1
        self._losses_in_row += 1
        self._idle_losses_in_row += is_idle
        if self._idle_losses_in_row > MAX_IDLE_LOSSES:
            raise EngineDeadError(f"{MAX_IDLE_LOSSES} workers were lost in a row; last: {reason}")
        pause_s = 0.25 * 2 ** (self._losses_in_row - 2) if self._losses_in_row > 1 else 0.0
        self._restart_at = now + min(_MAX_PAUSE_S, pause_s)

    def is_due(self) -> bool:
        """True, once, when the worker is to be started."""
        if self._restart_at is None or self._clock.now() < self._restart_at:
            return False
        self._restart_at = None
        return True

    def next_event_at(self) -> float | None:
        return self._restart_at
