"""Stores that fail are not tried at once again: a full disk answers every write slowly, and with the same."""

from __future__ import annotations

from pagoda.ipc.clock import Clock

_PATIENCE = 3
_FIRST_PAUSE_S = 10.0
_LONGEST_PAUSE_S = 300.0


class WriteBackoff:
    """Stores stop for a while after some failures in a row, and for twice as long whenever they fail again."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._num_failures = 0
        self._ends_at = 0.0
        self._next_pause_s = _FIRST_PAUSE_S

    @property
    def is_on(self) -> bool:
        return self._num_failures >= _PATIENCE and self._clock.now() < self._ends_at

    def failed(self) -> float | None:
        """A store has failed. How long the first pause is that follows, in seconds; else None."""
        if self.is_on:  # begun before the pause
            return None
        self._num_failures += 1
        if self._num_failures < _PATIENCE:
            return None
        pause_s = self._next_pause_s
        self._ends_at = self._clock.now() + pause_s
        self._next_pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        return pause_s if self._num_failures == _PATIENCE else None

    def succeeded(self) -> bool:
        """A store has not failed; whether there was a pause before."""
        was_paused = self._num_failures >= _PATIENCE
        self._num_failures = 0
        self._next_pause_s = _FIRST_PAUSE_S
        return was_paused
