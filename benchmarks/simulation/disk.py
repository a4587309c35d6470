# SPDX-License-Identifier: Apache-2.0
"""A disk in virtual time, and a scanner that looks at it."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any, cast

from pagoda.ipc.clock import Clock
from pagoda.kv.connector import KVConnector, OtherBlocks
from pagoda.kv.plugin import TierContext
from pagoda.messages.engine_config import KVTiersConfig
from pagoda.messages.worker_config import KVTierConfig
from pagoda.plugins.disk_tier.directory import MIN_TOUCHES, TIER
from pagoda.plugins.disk_tier.scanner import (
    OWN,
    DirectoryFound,
    DiskScanner,
    FanOutListed,
    News,
    ObjectsFound,
    Probe,
    ProbeAnswer,
    Removed,
    ScanEnded,
)
from pagoda.plugins.disk_tier.tier import open_tier
from pagoda.plugins.sim.executor import Cells

Job = Callable[[], list[News]]
OTHER_BYTES = 50
"""Bytes of each object in directories of other models."""


def disk_tiers(num_bytes: int, min_touches: int, host_bytes: int = 0) -> KVTiersConfig:
    """A tier on a disk in virtual time, behind one in host memory where that has bytes."""
    disk = KVTierConfig("/nowhere", num_bytes, {MIN_TOUCHES: min_touches})
    return KVTiersConfig(host_bytes=host_bytes, further={TIER: disk})


class SimDisk:
    """Objects that outlive engines. Every look at them takes as long as `delay_s` says."""

    def __init__(self, delay_s: Callable[[], float] = lambda: 0.001) -> None:
        self.objects: dict[bytes, Cells] = {}
        self._delay_s = delay_s
        self._scanner: SimScanner | None = None
        self._clock: Clock | None = None
        self._hangs_until = 0.0

    def open(self, clock: Clock) -> SimScanner:
        self._clock = clock
        self._scanner = SimScanner({OWN: self.objects}, clock, self._delay_s, 1e9)
        return self._scanner

    def open_tier(self, context: TierContext) -> KVConnector:
        """The engine's half of a tier on this disk."""
        return open_tier(context, lambda _, clock: cast(DiskScanner, self.open(clock)))

    def next_event_at(self) -> float | None:
        return None if self._scanner is None else self._scanner.next_event_at()

    def hang(self, for_s: float) -> None:
        """Postpones all answers that the scanner owes; steps wait in vain meanwhile."""
        if self._scanner is not None:
            self._scanner.postpone(for_s)
        if self._clock is not None:
            self._hangs_until = max(self._hangs_until, self._clock.now() + for_s)

    def hangs(self) -> bool:
        return self._clock is not None and self._clock.now() < self._hangs_until

    def close(self) -> None:
        """The engine that looked at the disk has ended."""
        self._scanner = None


class SimScanner:
    """Looks at the objects in directories when asked, and gives its answers `delay_s` later."""

    def __init__(
        self,
        disk: Mapping[int, MutableMapping[bytes, Any]],
        clock: Clock,
        delay_s: Callable[[], float],
        epoch_s: float,
        used_at: Callable[[object], int] | None = None,
    ) -> None:
        """`used_at` tells the last use of an object by what is in the `disk`; all are used now if None."""
        self.disk = disk
        self.removed: list[tuple[int, Sequence[bytes]]] = []
        self.probed: list[str] = []
        self.forgotten: list[str] = []
        self.num_rescans = 0
        self.is_closed = False
        self._clock = clock
        self._delay_s = delay_s
        self._epoch_s = epoch_s
        self._used_at = used_at
        self._met = {OWN}
        self._order = itertools.count()
        self.jobs: list[tuple[float, int, Job]] = []
        """A heap of what is to be done, by the time of its answer."""
        self._news: list[News] = []
        self.later(self.scan)

    def later(self, job: Job, at: float | None = None) -> None:
        """Does a job at a time; if None, after a delay."""
        if at is None:
            at = self._clock.now() + self._delay_s()
        heapq.heappush(self.jobs, (at, next(self._order), job))

    def postpone(self, for_s: float) -> None:
        """All that is to be done is done so many seconds later."""
        self.jobs = [(at + for_s, order, job) for at, order, job in self.jobs]

    def work(self, count: int = 1000) -> None:
        """Does so many jobs now."""
        while self.jobs and count:
            self._news += heapq.heappop(self.jobs)[2]()
            count -= 1

    def scan(self) -> list[News]:
        now = int(self._epoch_s + self._clock.now())
        news: list[News] = []
        for directory, objects in self.disk.items():
            if directory not in self._met:
                self._met.add(directory)
                news.append(DirectoryFound(directory, OTHER_BYTES))
            used_at = {
                key: now if self._used_at is None else self._used_at(it)
                for key, it in objects.items()
            }
            news += [ObjectsFound(directory, used_at), *list_fan_outs(directory, used_at, now)]
        return [*news, ScanEnded(0.0)]

    def probe(self, probe: Probe, keys: Sequence[bytes], others: OtherBlocks | None = None) -> None:
        def answer() -> list[News]:
            is_there = self.disk[OWN].__contains__
            there = list(itertools.takewhile(is_there, keys))
            if others is not None:
                there += others(len(there), is_there)
            return [ProbeAnswer(probe, there)]

        self.probed.append(probe.request_id)
        self.later(answer)

    def cancel_probe(self, probe: Probe) -> None:
        """Answers anyway."""
        self.forgotten.append(probe.request_id)

    def remove(self, directory: int, keys: Sequence[bytes]) -> None:
        def remove() -> list[News]:
            for key in keys:
                self.disk[directory].pop(key, None)
            return [Removed(directory, keys)]

        self.removed.append((directory, list(keys)))
        self.later(remove)

    def rescan(self) -> None:
        self.num_rescans += 1

    def poll(self) -> list[News]:
        while self.jobs and self.jobs[0][0] <= self._clock.now():
            self.work(1)
        news, self._news = self._news, []
        return news

    def next_event_at(self) -> float | None:
        return self.jobs[0][0] if self.jobs else None

    def fileno(self) -> int:
        raise AssertionError("nobody waits for file descriptors in virtual time")

    def close(self) -> None:
        self.is_closed = True
        self.jobs.clear()


def list_fan_outs(directory: int, used_at: Mapping[bytes, int], listed_at: int) -> list[News]:
    """A listing of each fan-out directory."""
    by_fan_out: list[dict[bytes, int]] = [{} for _ in range(256)]
    for key, at in used_at.items():
        by_fan_out[key[0]][key] = at
    return [
        FanOutListed(directory, number, objects, listed_at)
        for number, objects in enumerate(by_fan_out)
    ]
