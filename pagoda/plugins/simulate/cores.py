# SPDX-License-Identifier: Apache-2.0
"""Cores of a machine that the processes of a server share.

A server is a frontend, and an engine and a worker for each replica. Workers compute steps; engines plan them and
tell of their results; the frontend takes requests and passes tokens on. Each does one thing after the other, and
all at once share the cores: as on Linux, those that sleep most of the time, engines and the frontend, run when
they wake, and workers share what these leave (processor sharing, Kleinrock 1967).
"""

from __future__ import annotations

import asyncio
import heapq
import math
from collections import deque
from collections.abc import Callable
from itertools import count

_SAME_TIME_S = 1e-9


class _Share:
    """Work that is done at one rate, all of it at once."""

    def __init__(self) -> None:
        self.num_threads = 0
        self.rate = 1.0
        self.attained_s = 0.0
        """Seconds of work that each has been given which was there from the beginning."""
        self.ends: list[tuple[float, int, int, Callable[[], None]]] = []
        """A heap: `attained_s` at which work is done, its number, threads, and its listener."""

    def next_s(self) -> float:
        """Seconds until the next work is done at this rate."""
        if not self.ends or not self.rate:
            return math.inf
        return max(0.0, self.ends[0][0] - self.attained_s) / self.rate


class Cores:
    """Cores of one machine; belongs to one event loop."""

    def __init__(self, number: float) -> None:
        """`number` of cores; `math.inf` for processes that never wait for each other."""
        self._number = number
        self._short, self._long = _Share(), _Share()
        self._order = count()
        self._at = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def load(self, more_threads: int = 0) -> float:
        """Threads of workers that compute, and `more_threads`, for each core."""
        return (self._long.num_threads + more_threads) / self._number

    def run(self, seconds: float, on_done: Callable[[], None], threads: int = 0) -> None:
        """Calls `on_done` when work has been done that takes so many seconds by itself: of so many threads of a
        worker or, without threads, of a process that has just woken."""
        self._advance()
        share = self._long if threads else self._short
        share.num_threads += max(1, threads)
        end = share.attained_s + seconds
        heapq.heappush(share.ends, (end, next(self._order), max(1, threads), on_done))
        self._arm()

    def _advance(self) -> None:
        now = asyncio.get_running_loop().time()
        for share in (self._short, self._long):
            share.attained_s += (now - self._at) * share.rate
        self._at = now

    def _arm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        short, long = self._short, self._long
        short.rate = min(1.0, self._number / max(1, short.num_threads))
        left = max(self._number - short.num_threads, 0.0)
        long.rate = min(1.0, left / max(1, long.num_threads))
        next_s = min(short.next_s(), long.next_s())
        if next_s < math.inf:
            self._timer = asyncio.get_running_loop().call_at(self._at + next_s, self._end)

    def _end(self) -> None:
        self._timer = None
        self._advance()
        done: list[Callable[[], None]] = []
        for share in (self._short, self._long):
            while share.ends and share.ends[0][0] <= share.attained_s + _SAME_TIME_S:
                _, _, num_threads, on_done = heapq.heappop(share.ends)
                share.num_threads -= num_threads
                done.append(on_done)
        for on_done in done:
            on_done()
        self._arm()


class SimProcess:
    """A process of a machine, which does one thing after the other."""

    def __init__(self, cores: Cores) -> None:
        self._cores = cores
        self._work: deque[tuple[float, Callable[[], None]]] = deque()
        """Work and what follows it, that under way first."""

    def do(self, seconds: float, on_done: Callable[[], None]) -> None:
        """Calls `on_done` when all work before and this has been done."""
        self._work.append((seconds, on_done))
        if len(self._work) == 1:
            self._begin()

    def _begin(self) -> None:
        self._cores.run(self._work[0][0], self._end)

    def _end(self) -> None:
        self._work[0][1]()
        self._work.popleft()
        if self._work:
            self._begin()
