# SPDX-License-Identifier: Apache-2.0
"""Detects a peer that is alive and does not answer: stopped, in an endless loop, or stuck in a system call."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

_TICKS = 8


class Watchdog:
    """Calls `on_silence` when a peer that owes an answer sends nothing for `timeout_s`.

    Silence is counted in ticks of a timer on this event loop, not in elapsed time: when this process itself was
    stopped or busy, it reads what has arrived before it counts the next tick. The peer is probed after a quarter
    of the time-out at most, and has the rest to answer.
    """

    def __init__(
        self,
        timeout_s: float,
        *,
        is_owed: Callable[[], bool],
        probe: Callable[[], None],
        on_silence: Callable[[], None],
    ) -> None:
        """`is_owed` says if an answer is outstanding; one that is always True has an idle peer probed, too, about
        four times in `timeout_s`. `probe` sends a message that the peer answers at once."""
        self._tick_s = timeout_s / _TICKS
        self._is_owed = is_owed
        self._probe = probe
        self._on_silence = on_silence
        self._timer: asyncio.TimerHandle | None = None
        self._num_silent_ticks = 0
        self._is_unanswered = False
        """The peer has said nothing since `expect`, though who asked may have given up."""

    def expect(self) -> None:
        """The peer was sent something that it answers. Counting starts unless it has started before."""
        self._is_unanswered = True
        if self._timer is None:
            self._num_silent_ticks = 0
            self._count_later()

    def heard(self) -> None:
        self._num_silent_ticks = 0
        self._is_unanswered = False

    def stop(self) -> None:
        self._is_unanswered = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _count_later(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self._tick_s, self._tick)

    def _tick(self) -> None:
        self._timer = None
        self._num_silent_ticks += 1
        if self._num_silent_ticks == 1 and not (self._is_unanswered or self._is_owed()):
            return
        if self._num_silent_ticks == _TICKS:
            self._on_silence()
            return
        if self._num_silent_ticks == 2:
            self._probe()
        self._count_later()
