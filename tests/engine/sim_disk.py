"""A disk in virtual time: the simulated worker's objects, and somebody who looks at them."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from itertools import count

from pagoda.executor.sim import Cells
from pagoda.ipc.clock import Clock
from pagoda.kv.disk_scanner import (
    OWN,
    FanOutListed,
    News,
    ObjectsFound,
    ProbeAnswer,
    Removed,
    ScanEnded,
)


class SimDisk:
    """Objects that outlive engines. Every look at them takes as long as `delay_s` says."""

    def __init__(self, delay_s: Callable[[], float] = lambda: 0.001) -> None:
        self.objects: dict[bytes, Cells] = {}
        self._delay_s = delay_s
        self._scanner: SimScanner | None = None

    def open(self, clock: Clock) -> SimScanner:
        self._scanner = SimScanner(self.objects, clock, self._delay_s)
        return self._scanner

    def next_event_at(self) -> float | None:
        return None if self._scanner is None else self._scanner.next_event_at()


class SimScanner:
    """Looks at objects when asked, and gives its answers later."""

    def __init__(
        self, objects: dict[bytes, Cells], clock: Clock, delay_s: Callable[[], float]
    ) -> None:
        self._objects = objects
        self._clock = clock
        self._delay_s = delay_s
        self._order = count()
        self._answers: list[tuple[float, int, Callable[[], list[News]]]] = []
        self._later(self._scan)

    def _later(self, answer: Callable[[], list[News]]) -> None:
        heapq.heappush(
            self._answers, (self._clock.now() + self._delay_s(), next(self._order), answer)
        )

    def _scan(self) -> list[News]:
        now = int(1e9 + self._clock.now())
        listed: list[News] = [
            FanOutListed(
                OWN, fan_out, {key: now for key in self._objects if key[0] == fan_out}, now
            )
            for fan_out in {key[0] for key in self._objects}
        ]
        return [ObjectsFound(OWN, dict.fromkeys(self._objects, now)), *listed, ScanEnded(0.0)]

    def probe(self, probe_id: int, keys: Sequence[bytes]) -> None:
        def answer() -> list[News]:
            found: list[bytes] = []
            for key in keys:
                if key not in self._objects:
                    break
                found.append(key)
            return [ProbeAnswer(probe_id, found)]

        self._later(answer)

    def cancel_probe(self, probe_id: int) -> None:
        """Answers anyway."""

    def remove(self, directory: int, keys: Sequence[bytes]) -> None:
        def answer() -> list[News]:
            for key in keys:
                self._objects.pop(key, None)
            return [Removed(directory, keys)]

        self._later(answer)

    def rescan(self) -> None:
        """Nothing to do: all objects are known from the first scan on."""

    def poll(self) -> list[News]:
        news: list[News] = []
        while self._answers and self._answers[0][0] <= self._clock.now():
            news += heapq.heappop(self._answers)[2]()
        return news

    def next_event_at(self) -> float | None:
        return self._answers[0][0] if self._answers else None

    def fileno(self) -> int:
        raise AssertionError("nobody waits for file descriptors in virtual time")

    def close(self) -> None:
        self._answers.clear()
