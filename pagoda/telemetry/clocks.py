# SPDX-License-Identifier: Apache-2.0
"""Measures how far another process's clock is ahead, by asking that process.

A question is sent, and the answer holds the time that the other clock showed in between. That instant is taken to
lie half-way, so the error is at most half of the round trip. The shortest of some round trips counts (Cristian
1989).
"""

from __future__ import annotations

from collections.abc import Callable

from pagoda.telemetry.tracer import Tracer

NUM_PINGS = 8


class ClockComparison:
    """One measurement: questions one after the other. Knows no sockets; whoever has it sends `next_ping`."""

    def __init__(self, clock_ns: Callable[[], int], num_pings: int = NUM_PINGS) -> None:
        self._clock_ns = clock_ns
        self._left = num_pings
        self._sent_ns: int | None = None
        self._best: tuple[int, int, str] | None = None
        """Round trip and offset in nanoseconds, and whose clock it was."""

    def next_ping(self) -> int | None:
        """The number of the question that is to be sent now; None when enough is known."""
        if self._left == 0:
            return None
        self._left -= 1
        self._sent_ns = self._clock_ns()
        return self._sent_ns

    def pong(self, number: int, uid: str, now_ns: int) -> bool:
        """The process `uid` has answered; False if that is not what was asked last."""
        if number != self._sent_ns:
            return False
        round_trip_ns = self._clock_ns() - number
        offset_ns = now_ns - number - round_trip_ns // 2
        self._sent_ns = None
        measured = (round_trip_ns, offset_ns, uid)
        if self._best is None or measured < self._best:
            self._best = measured
        return True

    def note(self, tracer: Tracer) -> None:
        if self._best is not None:
            round_trip_ns, offset_ns, uid = self._best
            tracer.clock_offset(uid, offset_ns, round_trip_ns)
