# SPDX-License-Identifier: Apache-2.0
"""Time for which this process did not run, so that it does not count against those that it waits for.

A terminal stops engine and workers together (Ctrl-Z), and a busy machine may let none of them run. The clock
goes on meanwhile. So whoever waits looks at the clock often, and what passes beyond that was a standstill.
"""

from __future__ import annotations

LOOK_S = 1.0
"""Longest time between two looks while something is awaited."""
_TOLERANCE_S = 0.5
"""A look that comes later than it should by less than this is no standstill."""


class Standstill:
    """Measures by how much looks at the clock come too late."""

    def __init__(self, now: float) -> None:
        self._looked_at = now
        self._look_at: float | None = None

    def next_look_at(self, deadline: float | None) -> float | None:
        """The time of the next look; None if nothing is awaited (`deadline` is None)."""
        self._look_at = None if deadline is None else min(deadline, self._looked_at + LOOK_S)
        return self._look_at

    def look(self, now: float) -> float:
        """Returns for how many seconds this process stood still since `next_look_at` was asked."""
        due, self._look_at = self._look_at, None
        self._looked_at = now
        late_s = 0.0 if due is None else now - due
        return late_s if late_s > _TOLERANCE_S else 0.0
