# SPDX-License-Identifier: Apache-2.0
"""Engines of one replica that were lost: how long the next one waits, and when none follows any more.

Engines that never get as far as a token are given up soon. Those that give some and die all the same, again and
again, might go on so for ever: each would be started at once. So beyond the losses of a bad hour, which come from
outside or from a few requests, each engine waits longer than the one before, and at last none comes.
"""

from __future__ import annotations

from collections import deque

from pagoda.errors import EngineDeadError
from pagoda.ipc.clock import Clock

STABLE_S = 30.0
"""An engine that answered for this many seconds starts a new count of deaths, as does one that gave a token."""
MAX_DEATHS_IN_ROW = 5
"""Engines in a row, each without a token and gone before `STABLE_S`, after which the frontend gives up."""
WINDOW_S = 3600.0
"""Seconds for which a loss counts, whatever the engine did before."""
FREE_LOSSES = 24
"""Losses within `WINDOW_S` behind which the next engine starts at once."""
MAX_LOSSES = 100
"""Losses within `WINDOW_S` after which the frontend gives up; the pauses between them are of 20 minutes."""
_FIRST_PAUSE_S, _MAX_PAUSE_S = 0.5, 16.0
_ROW_PAUSE_S = 0.25


class EngineRestarts:
    """Counts losses, in a row and within a window."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._losses: deque[float] = deque()
        """Times of the losses within the window, the earliest first."""
        self.num_in_row = 0
        """Engines lost in a row: those after the last one that was stable or gave a token, and that one."""

    def on_loss(self, reason: str, *, was_good: bool) -> float:
        """An engine is lost for `reason`, a clause; `was_good` says that it was stable or has given a token.

        Returns the seconds until the next one starts. Raises EngineDeadError if none should.
        """
        now = self._clock.now()
        self._losses.append(now)
        while now - self._losses[0] > WINDOW_S:
            self._losses.popleft()
        self.num_in_row = 1 if was_good else self.num_in_row + 1
        if self.num_in_row > MAX_DEATHS_IN_ROW:
            raise EngineDeadError(f"The engine {reason}, {self.num_in_row} times in a row.")
        num_losses = len(self._losses)
        if num_losses > MAX_LOSSES:
            raise EngineDeadError(
                f"The engine {reason}; {num_losses} engines were lost within an hour."
            )
        return max(self._pause_of_row(), _pause_of_window(num_losses))

    def _pause_of_row(self) -> float:
        return _ROW_PAUSE_S * 2 ** (self.num_in_row - 1) if self.num_in_row > 1 else 0.0


def _pause_of_window(num_losses: int) -> float:
    over = num_losses - FREE_LOSSES
    return min(_MAX_PAUSE_S, _FIRST_PAUSE_S * 2.0 ** (over - 1)) if over > 0 else 0.0
