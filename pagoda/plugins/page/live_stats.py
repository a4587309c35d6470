# SPDX-License-Identifier: Apache-2.0
"""Live statistics of a server: snapshots for all open pages, and for those that will be opened.

There is one a second. Once a server has had nothing to do for `WINDOW_S`, there is one in three seconds for open
pages, and none without one until something goes on.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import AsyncGenerator, Callable, Iterable
from itertools import accumulate
from typing import Any, NamedTuple, Protocol

import msgspec

from pagoda.errors import EngineDeadError
from pagoda.fleet.endpoint import StepListener
from pagoda.messages.frontend import StepBin, StepStatistics
from pagoda.messages.load import LoadReport, ReplicaLoad
from pagoda.plugins.page.live_history import LiveHistory
from pagoda.telemetry.histogram import Histogram, total
from pagoda.telemetry.request_tracker import RequestStatistics, RequestTracker

_log = logging.getLogger(__name__)

INTERVAL_S = 1.0
IDLE_SNAPSHOTS = 3
"""Snapshots from one report of an endpoint with nothing to do: a question goes through all of its processes. After
a while there is only one snapshot in that time."""
WINDOW_S = 10
"""Seconds that percentiles and the rate of prefix hits look back."""
MAX_REPLICAS = 256
MAX_UNWATCHED_REPLICAS = 64
"""Replicas or hosts of which snapshots are made without an open page: each is asked for every one."""
MAX_STEP_BINS = 1024
"""Step bins in one snapshot, for all replicas together."""

LiveSnapshot = dict[str, Any]


class Watched(Protocol):
    """The one that is shown: an endpoint, or a fleet of several."""

    async def load(self) -> LoadReport: ...

    def subscribe_steps(self, listener: StepListener) -> Callable[[], None]: ...


class LiveStats:
    """Makes snapshots while somebody watches or something goes on. Belongs to one event loop."""

    def __init__(self, tracker: RequestTracker) -> None:
        self._tracker = tracker
        self._progress = Progress()
        self._feed: _Feed | None = None
        self._closed = False

    def begin(self, endpoint: Watched) -> None:
        """Keeps figures of `endpoint` from now on, also while nobody watches."""
        self._feed = _Feed(endpoint, self._tracker, self._progress)

    async def watch(self, endpoint: Watched) -> AsyncGenerator[LiveSnapshot, None]:
        """Yields snapshots until `close` is called or `endpoint` has ended; a slow watcher misses some.

        The first one comes at once, with the steps of the last minute, and with `history`, the points of charts
        before it.
        """
        if self._closed:
            return
        if self._feed is None or self._feed.task.done():
            self.begin(endpoint)
        feed = self._feed
        assert feed is not None
        feed.num_watchers += 1
        try:
            if (snapshot := await feed.first()) is not None:
                yield snapshot
                while (snapshot := await asyncio.shield(feed.next)) is not None:
                    yield snapshot
        finally:
            feed.num_watchers -= 1

    def close(self) -> None:
        self._closed = True
        if self._feed is not None:
            self._feed.task.cancel()


class _Feed:
    """The snapshots for all watchers, made by one task, and what is compared from one to the next."""

    def __init__(self, endpoint: Watched, tracker: RequestTracker, progress: Progress) -> None:
        loop = asyncio.get_running_loop()
        self.num_watchers = 0
        self.next: asyncio.Future[LiveSnapshot | None] = loop.create_future()
        self._endpoint = endpoint
        self._tracker = tracker
        self._progress = progress
        self._clock = loop.time
        num_windows = round(WINDOW_S / INTERVAL_S)
        self._latencies = Latencies(tracker, num_windows)
        self._steps: dict[str, list[tuple[float, StepBin]]] = {}
        """Step bins by replica, with the time at which they came."""
        self._num_bins = 0
        self._began = self._clock()
        self._last: tuple[float, int] | None = None
        """Time of the last snapshot, and the tokens of all answers until then."""
        self._report: LoadReport | None = None
        self._report_age = 0
        """Snapshots that were made from the report after the first one, or could have been."""
        self._num_idle = 0
        """Snapshots in a row of an endpoint with nothing to do."""
        self._stirred = asyncio.Event()
        """Set when an answer begins, steps end or somebody begins to watch."""
        self._history = LiveHistory(self._began)
        self._latest: LiveSnapshot | None = None
        """The last snapshot, unless none has been made for a while."""
        self._growths: deque[Growth] = deque(maxlen=num_windows)
        self._unsubscribe = endpoint.subscribe_steps(self._on_steps)
        self._forget_starts = tracker.subscribe(on_start=lambda _: self._stirred.set())
        self.task = asyncio.create_task(self._sample())
        self.task.add_done_callback(self._end)

    def _end(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("nothing more can be shown on the page", exc_info=error)
        self._latencies.close()
        self._unsubscribe()
        self._forget_starts()
        self.next.set_result(None)

    async def _sample(self) -> None:
        with contextlib.suppress(EngineDeadError):  # the server ends, and says why
            await self._pause()
            due = self._clock()
            while True:
                self._stirred.clear()
                snapshot = self._latest = await self._snapshot()
                told, self.next = self.next, asyncio.get_running_loop().create_future()
                told.set_result(snapshot)
                due = max(due + INTERVAL_S, self._clock())
                is_at_rest = self._num_idle > round(WINDOW_S / INTERVAL_S)
                if not self.num_watchers and (is_at_rest or self._is_large):
                    if is_at_rest:
                        self._history.rest(self._clock())
                    self._latest = None
                    await self._pause()
                elif is_at_rest:  # nothing that is shown can change
                    await self._rest(due + (IDLE_SNAPSHOTS - 1) * INTERVAL_S)
                await asyncio.sleep(due - self._clock())

    @property
    def _is_large(self) -> bool:
        return self._report is not None and len(self._report.replicas) > MAX_UNWATCHED_REPLICAS

    async def _pause(self) -> None:
        """Returns when something is to be done, or somebody watches: there is no timer meanwhile."""
        self._report_age = IDLE_SNAPSHOTS
        while not self.num_watchers:
            await self._stirred.wait()  # what came during the last snapshot counts
            if not self._is_large:
                return
            self._stirred.clear()

    async def first(self) -> LiveSnapshot | None:
        """The first snapshot of somebody who begins to watch; None if there is none any more."""
        self._stirred.set()
        snapshot = self._latest or await asyncio.shield(self.next)
        if snapshot is None:
            return None
        now = self._clock()
        points = self._history.points(now)
        return {**snapshot, "steps": self._history.steps(now), "history": points[:-1]}

    async def _rest(self, until: float) -> None:
        """Returns at a time of the loop's clock, or before that when something is to be done."""
        self._report_age = IDLE_SNAPSHOTS
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(until):
                await self._stirred.wait()

    def _on_steps(self, steps: StepStatistics) -> None:
        self._stirred.set()
        room = MAX_STEP_BINS - self._num_bins
        bins = steps.bins[:0] if room <= 0 else steps.bins[-room:]
        self._num_bins += len(bins)
        now = self._clock()
        self._steps.setdefault(steps.replica, []).extend((now, one) for one in bins)

    def _drain_steps(self) -> dict[str, list[StepBin]]:
        """Steps that have ended since the last snapshot, by replica; `age_s` is their age now."""
        steps, self._steps, self._num_bins = self._steps, {}, 0
        now = self._clock()

        def aged(one: StepBin, told_at: float) -> StepBin:
            age_s = round(one.age_s + now - told_at, 4)
            step_time_s = round(one.step_time_s, 6)
            return msgspec.structs.replace(one, age_s=age_s, step_time_s=step_time_s)

        return {name: [aged(one, at) for at, one in bins] for name, bins in steps.items()}

    async def _load(self) -> LoadReport:
        """The load now, or what it was a few snapshots ago if nothing is seen to have begun or gone on since."""
        last, self._report_age = self._report, self._report_age + 1
        is_idle = last is not None and self._is_idle(last)
        self._num_idle = self._num_idle + 1 if is_idle else 0
        if last is None or not is_idle or self._report_age >= IDLE_SNAPSHOTS:
            self._report_age = 0
            self._report = last = await self._endpoint.load()
        return last

    def _is_idle(self, report: LoadReport) -> bool:
        num_told_tokens = None if self._last is None else self._last[1]
        return not (
            report.num_running
            or report.num_waiting
            or report.num_awaiting_kv
            or self._tracker.running
            or self._steps
            or self._tracker.num_tokens != num_told_tokens
        )

    async def _snapshot(self) -> LiveSnapshot:
        """The first snapshot has no rates: they are None. Raises EngineDeadError when the endpoint has ended."""
        report = await self._load()
        now, num_tokens = self._clock(), self._tracker.num_tokens
        growth = self._progress.update(report, now, self._began)
        self._growths.append(growth)
        prompt_rate = output_rate = None
        if self._last is not None:
            last_at, last_num_tokens = self._last
            prompt_rate = round(growth.prompt_tokens_per_s, 1)
            output_rate = round((num_tokens - last_num_tokens) / max(now - last_at, 1e-3), 1)
        self._last = now, num_tokens
        num_prompt_tokens = sum(one.num_prompt_tokens for one in self._growths)
        num_hits = sum(one.num_prefix_hit_tokens for one in self._growths)
        num_drafts = sum(one.num_drafts for one in self._growths)
        num_accepted = sum(one.num_accepted_tokens for one in self._growths)
        ttft, itl = self._latencies.next_window()
        steps = self._drain_steps()
        snapshot = {
            "prompt_tokens_per_s": prompt_rate,
            "output_tokens_per_s": output_rate,
            "ttft_ms": ttft,
            "itl_ms": itl,
            "num_running": report.num_running,
            "num_waiting": report.num_waiting,
            "num_awaiting_kv": report.num_awaiting_kv,
            "prefix_hit_rate": (
                round(min(num_hits / num_prompt_tokens, 1.0), 4) if num_prompt_tokens else None
            ),
            "draft_length": round(1 + num_accepted / num_drafts, 2) if num_drafts else None,
            "num_preemptions": self._progress.num_preemptions,
            "num_restarts": self._progress.num_restarts,
            "tiers": _tiers(report),
            "num_replicas": len(report.replicas),
            "of_pools": sums_of_pools(report),
            "replicas": [_replica(replica) for replica in report.replicas[:MAX_REPLICAS]],
            "steps": steps,
        }
        self._history.add(now, snapshot, steps)
        return snapshot


def sums_of_pools(report: LoadReport) -> dict[str, dict[str, int]]:
    """Hosts of each pool, and requests there, of all hosts: the list of them is cut."""
    pools: dict[str, dict[str, int]] = {}
    for host in report.replicas:
        sums = pools.setdefault(host.model, {"hosts": 0, "num_running": 0, "num_waiting": 0})
        sums["hosts"] += 1
        if host.report is not None:
            sums["num_running"] += host.report.num_running
            sums["num_waiting"] += host.report.num_waiting
    return pools


def _tiers(report: LoadReport) -> list[dict[str, Any]]:
    """Blocks of each KV tier, the device first. `num_cached` blocks can be evicted."""
    device = {
        "name": "device",
        "num_total": report.num_blocks,
        "num_used": report.num_blocks - report.num_free_blocks,
        "num_cached": report.num_cached_blocks,
        "is_indexed": True,
    }
    below = [
        {
            "name": tier.name,
            "num_total": tier.num_total_blocks,
            "num_used": 0,
            "num_cached": tier.num_blocks,
            "is_indexed": tier.is_indexed,
        }
        for tier in report.tiers
    ]
    return [device, *below]


_REPLICA_FIGURES: dict[str, Callable[[LoadReport], float]] = {
    "num_running": lambda report: report.num_running,
    "num_waiting": lambda report: report.num_waiting + report.num_awaiting_kv,
    "num_blocks": lambda report: report.num_blocks,
    "num_used_blocks": lambda report: report.num_blocks - report.num_free_blocks,
    "num_cached_blocks": lambda report: report.num_cached_blocks,
    "step_time_ms": lambda report: round(report.step_time_s * 1e3, 3),
}


def _replica(replica: ReplicaLoad) -> dict[str, Any]:
    """One engine or host. Its own figures are None while it does not answer."""
    report = replica.report
    return {
        "name": replica.name,
        "model": replica.model,
        "state": replica.state,
        "num_requests": replica.num_requests,
        **{n: None if report is None else of(report) for n, of in _REPLICA_FIGURES.items()},
    }


_BOUNDS_MS = tuple(2 ** (i / 16) for i in range(-160, 352))
"""Bounds from 1 µs to an hour, 4 % apart: a time is known as well as that."""


class LivePercentiles(msgspec.Struct, frozen=True):
    """Percentiles in milliseconds, and the number of times that they are of."""

    p50: float
    p90: float
    p99: float
    count: int


class Latencies:
    """Times to the first token (TTFT) and between tokens (ITL) in the last windows, as a `RequestTracker` records
    them until `close`."""

    def __init__(self, tracker: RequestTracker, num_windows: int) -> None:
        self._ttft = deque([Histogram(_BOUNDS_MS)], maxlen=num_windows)
        self._itl = deque([Histogram(_BOUNDS_MS)], maxlen=num_windows)
        self.close = tracker.subscribe(on_tokens=self._on_tokens)

    def _on_tokens(
        self,
        record: RequestStatistics,  # noqa: ARG002
        num_tokens: int,  # noqa: ARG002
        waited_ns: int,
        is_first: bool,
    ) -> None:
        (self._ttft if is_first else self._itl)[-1].observe(waited_ns / 1e6)

    def next_window(self) -> tuple[LivePercentiles | None, LivePercentiles | None]:
        """Returns TTFT and ITL of the windows that are kept, None without a token, and begins a new window."""
        answer = percentiles(self._ttft), percentiles(self._itl)
        for windows in (self._ttft, self._itl):
            windows.append(Histogram(_BOUNDS_MS))
        return answer


def percentiles(windows: Iterable[Histogram]) -> LivePercentiles | None:
    """Percentiles of all windows together: the smallest bounds with so many times at or below them."""
    below = list(accumulate(total(windows, _BOUNDS_MS).counts))
    count, bounds = below[-1], (*_BOUNDS_MS, _BOUNDS_MS[-1])
    if count == 0:
        return None
    ranks = (share * count for share in (0.5, 0.9, 0.99))
    p50, p90, p99 = (round(bounds[bisect_left(below, rank)], 3) for rank in ranks)
    return LivePercentiles(p50, p90, p99, count)


_COUNTERS = (
    "num_prompt_tokens",
    "num_prefix_hit_tokens",
    "num_preemptions",
    "num_worker_restarts",
    "num_drafts",
    "num_accepted_tokens",
)


class Growth(NamedTuple):
    """Growth of all replicas, each since its own last report."""

    num_prompt_tokens: int
    num_prefix_hit_tokens: int
    prompt_tokens_per_s: float
    num_drafts: int = 0
    num_accepted_tokens: int = 0


class Progress:
    """Keeps the last counters of each replica, and totals that never fall."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[float, Counter[str]]] = {}
        """The time and the counters of the last report, by replica."""
        self._losses: Counter[str] = Counter()
        self._totals: Counter[str] = Counter()

    @property
    def num_preemptions(self) -> int:
        return self._totals["num_preemptions"]

    @property
    def num_restarts(self) -> int:
        return self._totals["num_worker_restarts"] + self._losses.total()

    def update(self, report: LoadReport, now: float, since: float) -> Growth:
        """Takes a report. A replica whose last report is from before `since` adds nothing to the growth."""
        grown: Counter[str] = Counter()
        rate = 0.0
        own = ReplicaLoad(name="", state="", num_requests=0, weighed_tokens=0, report=report)
        for replica in report.replicas or (own,):
            self._losses[replica.name] = max(self._losses[replica.name], replica.num_losses)
            if replica.report is None:
                continue
            counts = Counter({name: getattr(replica.report, name) for name in _COUNTERS})
            seen_at, before = self._seen.get(replica.name, (None, Counter()))
            more = counts - before  # a host that was started again counts from zero: no growth
            self._seen[replica.name] = now, counts
            self._totals.update(more)
            if seen_at is not None and seen_at >= since:
                grown.update(more)
                rate += more["num_prompt_tokens"] / max(now - seen_at, 1e-3)
        return Growth(
            grown["num_prompt_tokens"],
            grown["num_prefix_hit_tokens"],
            rate,
            grown["num_drafts"],
            grown["num_accepted_tokens"],
        )
