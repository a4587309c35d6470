# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks.planning`: the planner on a day with a burst, against a fixed size and an oracle.

Requests of a day are queued in virtual time at hosts that are started and stopped as the planner's policy says,
the same function that `pagoda plan` calls. A host is a fluid: while prompts wait, its steps have all their
tokens, and streams take one of each; otherwise steps have the streams alone. Its steps cost what `CAPACITY`
says. A request goes to the host with the least work. The planner has seen the day before, without the burst.

The best fixed size is the smallest number of hosts that keeps the objective all day. The oracle knows the true
rate of every minute, starts and stops hosts at once, and has the margin of the capacity model lowered until the
objective is just kept.
"""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from random import Random

from msgspec.structs import replace

from pagoda.messages.worker_config import Role
from pagoda.plugins.plan.capacity import hosts_needed
from pagoda.plugins.plan.figures import (
    DAY_S,
    Capacity,
    Figures,
    HostFigures,
    Memory,
    PlanConfig,
    PoolFigures,
    Slo,
)
from pagoda.plugins.plan.policy import decide

CAPACITY = Capacity(step_s=0.025, token_s=2.4e-4, max_num_batched_tokens=512)
SLO = Slo(ttft_s=2.0, tpot_s=0.06, share=0.99)
PROMPT, OUTPUT = 1500, 250
"""Mean lengths; they are spread between half and one and a half times as much."""
LEAST, MOST = 1.5, 14.0
"""Requests a second at night and by day."""
BURST_AT_S, BURST_S, BURST = 20.5 * 3600, 900, 1.6
"""A burst in the evening: so many times as much, growing over two minutes."""
INTERVAL_S = 30.0
LEAD_S = 120.0
"""Seconds from when a host is asked for until it answers."""
_MOST_HOSTS = 64


def rate_at(at_s: float, *, burst: bool) -> float:
    """Requests a second at an instant of the day."""
    hour = at_s % DAY_S / 3600
    shape = (1 - math.cos((hour - 3) / 24 * 2 * math.pi)) / 2
    rate = LEAST + (MOST - LEAST) * math.pow(shape, 1.5)
    if burst and at_s >= BURST_AT_S:
        grown = min(1.0, (at_s - BURST_AT_S) / 120) * (at_s < BURST_AT_S + BURST_S)
        rate *= 1 + (BURST - 1) * grown
    return rate


def arrivals(seed: int, *, burst: bool) -> Iterator[float]:
    """Instants of a Poisson process with the rate of the day, by thinning (Lewis and Shedler 1979)."""
    draw, at_s, most = Random(seed), 0.0, MOST * BURST
    while (at_s := at_s + draw.expovariate(most)) < DAY_S:
        if draw.random() * most < rate_at(at_s, burst=burst):
            yield at_s


@dataclass(slots=True)
class _Stream:
    arrived_s: float
    output: float
    first_s: float = 0.0


@dataclass(slots=True)
class _Host:
    """One host, whose state is that of `at_s`."""

    number: int
    at_s: float = 0.0
    prompts: list[tuple[_Stream, float]] = field(default_factory=list)
    """Waiting prompts with the tokens that each has, the first one's with those that are left."""
    head: int = 0
    pending: float = 0.0
    streams: list[tuple[float, int, _Stream]] = field(default_factory=list)
    """A heap by the progress at which a stream ends."""
    progress: float = 0.0
    """Tokens that each stream has got since the host began."""
    version: int = 0
    stops: bool = False

    def rates(self) -> tuple[float, float]:
        """Prompt tokens a second, and tokens a second of each stream."""
        k = len(self.streams)
        if self.head < len(self.prompts):
            size = CAPACITY.max_num_batched_tokens
            step_s = CAPACITY.step_s + CAPACITY.token_s * size
            return (size - k) / step_s, 1 / step_s
        return 0.0, 1 / (CAPACITY.step_s + CAPACITY.token_s * k)

    def advance(self, now_s: float) -> None:
        prompt_rate, token_rate = self.rates()
        passed_s = now_s - self.at_s
        self.at_s = now_s
        if self.streams:
            self.progress += token_rate * passed_s
        if prompt_rate:
            done = prompt_rate * passed_s
            stream, left = self.prompts[self.head]
            self.prompts[self.head] = stream, left - done
            self.pending -= done

    def next_event_s(self) -> float:
        prompt_rate, token_rate = self.rates()
        ends = [math.inf]
        if prompt_rate:
            ends.append(max(0.0, self.prompts[self.head][1]) / prompt_rate)
        if self.streams:
            ends.append(max(0.0, self.streams[0][0] - self.progress) / token_rate)
        return self.at_s + min(ends)

    @property
    def load(self) -> float:
        return self.pending + len(self.streams)


@dataclass
class Day:
    """Outcome of a day."""

    num_requests: int = 0
    num_kept: int = 0
    """Requests that kept the objective."""
    host_s: float = 0.0

    @property
    def share(self) -> float:
        return self.num_kept / self.num_requests

    @property
    def host_hours(self) -> float:
        return self.host_s / 3600


@dataclass
class Window:
    """Figures of a planning interval, as the router counts them."""

    num_arrivals: int = 0
    prompt_tokens: float = 0.0
    output_tokens: float = 0.0
    num_first: int = 0
    num_late: int = 0
    num_ended: int = 0
    num_slow: int = 0


SizeOf = Callable[[float, "Fleet"], int]
"""The number of hosts that are wanted at an instant."""


class Fleet:
    """Hosts over one day; `size_of` is asked every `INTERVAL_S`."""

    def __init__(
        self, seed: int, size_of: SizeOf, first: int, *, burst: bool, lead_s: float
    ) -> None:
        self.window = Window()
        self.day = Day()
        self._draw = Random(seed + 1)
        self._arrivals = arrivals(seed, burst=burst)
        self._size_of, self._lead_s = size_of, lead_s
        self._events: list[tuple[float, int, str, int]] = []
        self._numbers = 0
        self.hosts: dict[int, _Host] = {}
        self._num_starting = 0
        self._num_streams = 0
        for _ in range(first):
            self._open(0.0)

    @property
    def serving(self) -> list[_Host]:
        return [host for host in self.hosts.values() if not host.stops]

    @property
    def num_waiting(self) -> int:
        return sum(max(0, len(host.prompts) - host.head - 1) for host in self.hosts.values())

    def _push(self, at_s: float, kind: str, number: int = 0, version: int = 0) -> None:
        heapq.heappush(self._events, (at_s, number, kind, version))

    def _open(self, now_s: float) -> None:
        self._numbers += 1
        self.hosts[self._numbers] = _Host(self._numbers, now_s)

    def run(self) -> Day:
        self._push(next(self._arrivals), "arrival")
        self._push(0.0, "plan")
        last_s = 0.0
        while self._events:
            now_s, number, kind, version = heapq.heappop(self._events)
            # Hosts cost from when they are asked for until they have finished.
            self.day.host_s += (len(self.hosts) + self._num_starting) * (min(now_s, DAY_S) - last_s)
            last_s = min(now_s, DAY_S)
            if kind == "arrival":
                self._arrive(now_s)
                following = next(self._arrivals, None)
                if following is not None:
                    self._push(following, "arrival")
            elif kind == "host":
                host = self.hosts.get(number)
                if host is not None and host.version == version:
                    self._serve(host, now_s)
            elif kind == "open":
                self._num_starting -= 1
                self._open(now_s)
            elif now_s < DAY_S:
                self._resize(now_s)
                self._push(now_s + INTERVAL_S, "plan")
        return self.day

    def _resize(self, now_s: float) -> None:
        wanted = self._size_of(now_s, self)
        self.window = Window()
        there = len(self.serving) + self._num_starting
        for _ in range(wanted - there):
            self._num_starting += 1
            self._push(now_s + self._lead_s, "open")
        for host in sorted(self.serving, key=lambda one: one.load)[: max(0, there - wanted)]:
            host.stops = True
            self._drop_if_done(host)

    def _drop_if_done(self, host: _Host) -> None:
        if host.stops and not host.streams and host.head == len(host.prompts):
            del self.hosts[host.number]

    def _arrive(self, now_s: float) -> None:
        prompt = PROMPT * (0.5 + self._draw.random())
        output = OUTPUT * (0.5 + self._draw.random())
        self.day.num_requests += 1
        self.window.num_arrivals += 1
        self.window.prompt_tokens += prompt
        self.window.output_tokens += output
        host = min(self.serving, key=lambda one: one.load)
        host.advance(now_s)
        host.prompts.append((_Stream(now_s, output), prompt))
        host.pending += prompt
        self._schedule(host)

    def _schedule(self, host: _Host) -> None:
        host.version += 1
        at_s = host.next_event_s()
        if at_s < math.inf:
            self._push(at_s, "host", host.number, host.version)

    def _serve(self, host: _Host, now_s: float) -> None:
        host.advance(now_s)
        while host.head < len(host.prompts) and host.prompts[host.head][1] <= 1e-6:
            stream, _ = host.prompts[host.head]
            host.head += 1
            stream.first_s = now_s
            self.window.num_first += 1
            self.window.num_late += now_s - stream.arrived_s > SLO.ttft_s
            self._num_streams += 1
            end = host.progress + stream.output - 1
            heapq.heappush(host.streams, (end, self._num_streams, stream))
        if host.head == len(host.prompts):
            host.prompts.clear()
            host.head, host.pending = 0, 0.0
        while host.streams and host.streams[0][0] <= host.progress + 1e-6:
            self._end(heapq.heappop(host.streams)[2], now_s)
        self._drop_if_done(host)
        self._schedule(host)

    def _end(self, stream: _Stream, now_s: float) -> None:
        is_slow = (now_s - stream.first_s) / (stream.output - 1) > SLO.tpot_s
        is_late = stream.first_s - stream.arrived_s > SLO.ttft_s
        self.window.num_ended += 1
        self.window.num_slow += is_slow
        self.day.num_kept += not (is_slow or is_late)


class Planner:
    """The policy of `pagoda plan`, asked as the command asks it."""

    def __init__(self) -> None:
        self._config = PlanConfig(slo=SLO, capacity=CAPACITY, lead_s=LEAD_S, max_hosts=_MOST_HOSTS)
        self._memory = Memory()
        self._day_s = 0.0

    def next_day(self) -> None:
        self._day_s += DAY_S

    def __call__(self, now_s: float, fleet: Fleet) -> int:
        window = fleet.window
        pool = PoolFigures(
            name="pool",
            window_s=INTERVAL_S,
            num_arrivals=window.num_arrivals,
            prompt_tokens=window.prompt_tokens / max(1, window.num_arrivals),
            output_tokens=window.output_tokens / max(1, window.num_arrivals),
            num_waiting=fleet.num_waiting,
            late_share=window.num_late / max(1, window.num_first),
            slow_share=window.num_slow / max(1, window.num_ended),
            hosts=tuple(HostFigures(id=str(host.number), role=Role.NONE) for host in fleet.serving),
        )
        figures = Figures(at_s=self._day_s + now_s, pools=(pool,))
        plan, self._memory = decide(self._config, self._memory, figures)
        return sum(plan.pools[0].hosts.values())


def oracle(margin: float) -> SizeOf:
    """The size that the capacity model gives for `margin` times the true rate of the next interval."""

    def size_of(now_s: float, _: Fleet) -> int:
        rate = max(
            rate_at(now_s + ahead, burst=True) for ahead in (0.0, INTERVAL_S / 2, INTERVAL_S)
        )
        slo = replace(SLO, share=0.5)  # the margin is `margin` alone
        work = rate * margin
        return hosts_needed(Role.NONE, work, PROMPT, OUTPUT, CAPACITY, slo, _MOST_HOSTS)

    return size_of


def _run(seed: int, size_of: SizeOf, first: int, *, burst: bool = True, lead_s: float = 0.0) -> Day:
    return Fleet(seed, size_of, first, burst=burst, lead_s=lead_s).run()


def main() -> int:
    """Prints a table; 1 if the planner does not do what docs/plan.md says."""
    began, seed = time.perf_counter(), 1
    planner = Planner()
    _run(seed + 100, planner, 2, burst=False, lead_s=LEAD_S)
    planner.next_day()
    planned = _run(seed, planner, 2, lead_s=LEAD_S)
    fixed, size = None, 1
    for size in range(1, _MOST_HOSTS):
        peak = hosts_needed(
            Role.NONE, MOST, PROMPT, OUTPUT, CAPACITY, replace(SLO, share=0.5), _MOST_HOSTS
        )
        if size >= peak - 2:
            fixed = _run(seed, lambda *_, size=size: size, size)
            if fixed.share >= SLO.share:
                break
    best: tuple[float, Day] | None = None
    for margin in (0.9, 0.95, 1.0, 1.05, 1.1, 1.15, 1.2, 1.3):
        day = _run(seed, oracle(margin), 2)
        if day.share >= SLO.share:
            best = margin, day
            break
    if fixed is None or best is None:
        print("No fixed size or oracle keeps the objective.")
        return 1
    print("| | kept the objective | host-hours | of the best fixed size | of the oracle |")
    print("|---|---|---|---|---|")
    rows = {"planner": planned, f"best fixed size, {size} hosts": fixed, "oracle": best[1]}
    for name, day in rows.items():
        print(
            f"| {name} | {day.share:.2%} | {day.host_hours:.1f} "
            f"| {day.host_hours / fixed.host_hours:.2f} | {day.host_hours / best[1].host_hours:.2f} |"
        )
    print(f"{planned.num_requests} requests; margin {best[0]}; {time.perf_counter() - began:.0f} s")
    is_good = (
        planned.share >= 0.99
        and planned.host_hours <= 0.75 * fixed.host_hours
        and planned.host_hours <= 1.15 * best[1].host_hours
    )
    return 0 if is_good else 1


if __name__ == "__main__":
    raise SystemExit(main())
