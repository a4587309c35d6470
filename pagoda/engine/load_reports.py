"""Load reports that an engine sends without being asked."""

from __future__ import annotations

from pagoda.ipc.clock import Clock

REPORT_INTERVAL_S = 1.0
"""Steps are reported at most this long after they have ended: what an engine counted in the last moments before it
was killed is all that its frontend does not know."""


class LoadReportSchedule:
    """Decides when a report is due: at once when the worker changes, and `REPORT_INTERVAL_S` after a step."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._num_steps = 0
        """Steps that were reported."""
        self._is_worker_ready = True
        """Value in the last report; `EngineReady` counts as one that is True."""
        self._due_at: float | None = None

    def is_due(self, num_steps: int, *, is_worker_ready: bool) -> bool:
        """True if a report is to be sent now, with these values."""
        now = self._clock.now()
        if self._due_at is None and num_steps != self._num_steps:
            self._due_at = now + REPORT_INTERVAL_S
        is_late = self._due_at is not None and now >= self._due_at
        if not is_late and is_worker_ready == self._is_worker_ready:
            return False
        self._num_steps, self._is_worker_ready, self._due_at = num_steps, is_worker_ready, None
        return True

    def next_event_at(self) -> float | None:
        return self._due_at
