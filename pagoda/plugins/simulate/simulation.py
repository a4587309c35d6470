# SPDX-License-Identifier: Apache-2.0
"""One simulation: a topology under a workload, from the first request to the last answer."""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pagoda.fleet.policies import Candidate, RoutingRequest
from pagoda.plugins.simulate.clients import Clients
from pagoda.plugins.simulate.event_loop import run as run_in_virtual_time
from pagoda.plugins.simulate.faults import Faults
from pagoda.plugins.simulate.fleet import Observers, SimFleet, SimHost
from pagoda.plugins.simulate.records import NUM_INTERVALS, Patience, Records, Sample
from pagoda.plugins.simulate.scaling import Scaling
from pagoda.plugins.simulate.topology import Topology
from pagoda.plugins.simulate.workload import Workload

DEFAULT_LEAP = 64
OnDone = Callable[[], None]


@dataclass
class Outcome:
    """Result of a simulation."""

    records: Records
    above: dict[int, tuple[str, ...]]
    """Kinds of the routers in front of each host, and its own."""
    paths: list[str]
    """Paths of hosts by their numbers."""
    host_s: dict[str, float]
    """Seconds for which hosts cost, by kind."""
    events: list[tuple[float, str]] = field(default_factory=list)
    """Events of the request that is watched."""


def simulate(
    topology: Topology,
    workload: Workload,
    seed: int,
    *,
    known_lengths: bool = False,
    leap: int = DEFAULT_LEAP,
    watched: str = "",
    on_done: OnDone = lambda: None,
    patience: Patience | None = None,
    journal: Path | None = None,
) -> Outcome:
    """Runs a workload, whose sessions can be read once, until its last request or until `patience` is over.
    `watched` names a request of which all events are kept; `leap` is as in `SimEngine`, `journal` as in `Scaling`.

    The same arguments give the same outcome.
    """
    logger = logging.getLogger("pagoda")
    level, was_enabled = logger.level, gc.isenabled()
    logger.setLevel(logging.CRITICAL)  # faults are meant
    gc.disable()
    try:
        return run_in_virtual_time(
            _Run(
                topology, workload, seed, known_lengths, leap, watched, on_done, patience, journal
            ).run()
        )
    finally:
        logger.setLevel(level)
        if was_enabled:
            gc.enable()


async def _ended(running: asyncio.Task[None]) -> None:
    """Returns when the task has ended. Raises the failure of an engine, whose requests would be waited for without
    end, or of a rule of faults."""
    failures: list[BaseException] = []

    def on_failure(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        if "handle" in context and "exception" in context:
            failures.append(context["exception"])
            running.cancel()
        else:
            loop.default_exception_handler(context)

    asyncio.get_running_loop().set_exception_handler(on_failure)
    try:
        await running
    except asyncio.CancelledError:
        if failures:
            raise failures[0] from None
        raise


class _Run:
    """The parts of a simulation while it runs."""

    def __init__(
        self,
        topology: Topology,
        workload: Workload,
        seed: int,
        known_lengths: bool,
        leap: int,
        watched: str,
        on_done: OnDone,
        patience: Patience | None,
        journal: Path | None,
    ) -> None:
        self._topology = topology
        self._workload = workload
        self._seed = seed
        self._watched = watched
        self.records = Records()
        self.events: list[tuple[float, str]] = []
        on_choice = self._on_choice if watched else None
        self.fleet = SimFleet(topology, Observers(self._on_placed, on_choice), leap, seed)
        self._scaling = Scaling(topology, self.fleet, journal)
        self.clients = Clients(
            workload,
            self.fleet.generate,
            self.records,
            known_lengths=known_lengths,
            max_model_len=min(self._lengths()),
            on_done=on_done,
            patience=patience,
        )

    def _lengths(self) -> list[int]:
        sims = [host.engine.config.sim for host in self.fleet.hosts]
        return [min(it.max_model_len, it.num_blocks * it.block_size) for it in sims]

    async def run(self) -> Outcome:
        await self.fleet.start()
        gc.freeze()
        self._scaling.start()
        faults = Faults(self._topology.faults, self.fleet, self.records, self._seed)
        running = asyncio.create_task(self.clients.run())
        await asyncio.sleep(0)
        sampling = asyncio.create_task(self._sample())
        await _ended(running)
        self.records.ended_at = self.clients.now()
        sampling.cancel()
        await faults.close()
        await self._scaling.close()
        host_s: dict[str, float] = {}
        for host in self.fleet.hosts:
            host.end_use()
            host_s[host.kind] = host_s.get(host.kind, 0.0) + host.used_s
        self._take_samples()
        await self.fleet.close()
        gc.unfreeze()
        if self._watched:
            self._tell_end()
        return Outcome(
            self.records,
            {host.number: host.above for host in self.fleet.hosts},
            [host.path for host in self.fleet.hosts],
            host_s,
            self.events,
        )

    async def _sample(self) -> None:
        interval_s = max(0.5, self._workload.duration_s / NUM_INTERVALS)
        while True:
            self._take_samples()
            await asyncio.sleep(interval_s)

    def _take_samples(self) -> None:
        now = self.clients.now()
        sums: dict[str, Sample] = {}
        for host in self.fleet.hosts:
            scheduler = host.engine.scheduler
            sample = sums.setdefault(host.kind, Sample(now))
            if scheduler is not None:
                sample.num_up += 1
                sample.num_running += len(scheduler.running)
                sample.num_waiting += len(scheduler.waiting)
                sample.num_prompt_tokens += scheduler.counters.num_prompt_tokens
                sample.num_prefix_hit_tokens += scheduler.counters.num_prefix_hit_tokens
        for kind, sample in sums.items():
            self.records.samples.setdefault(kind, []).append(sample)

    # ---- one request

    def _on_placed(self, request_id: str, host: SimHost) -> None:
        name = request_id.partition("#")[0]  # hosts rename one that they have twice
        record = self.clients.by_name.get(name)
        if record is not None:
            self.records.num_moves += record.host >= 0
            record.host = host.number
        name, _, is_copy = name.partition("/prefill")
        if name == self._watched and (scheduler := host.engine.scheduler) is not None:
            what = "its prompt reaches" if is_copy else "it reaches"
            self._note(
                f"{what} {host.path}, where {len(scheduler.running)} requests run, "
                f"{len(scheduler.waiting)} wait and {scheduler.queue.num_pending_tokens} tokens are to be computed"
            )

    def _on_choice(
        self, router: str, request: RoutingRequest, candidates: Sequence[Candidate], chosen: int
    ) -> None:
        if request.request_id.partition("#")[0].partition("/prefill")[0] != self._watched:
            return
        shown = sorted(candidates, key=lambda it: it is not candidates[chosen])[:8]
        seen = "; ".join(
            f"{it.replica.removeprefix(f'{router}/')}: {it.pending_tokens} tokens pending, "
            f"{it.num_cached_tokens} cached"
            for it in shown
        )
        more = f"; {len(candidates) - len(shown)} more" if len(candidates) > len(shown) else ""
        self._note(f"{router} chooses the first of {seen}{more}")

    def _note(self, text: str) -> None:
        self.events.append((self.clients.now(), text))

    def _tell_end(self) -> None:
        for record in self.records.requests:
            if record.name != self._watched:
                continue
            cached = (
                f"{record.num_cached_tokens} of {record.num_prompt_tokens} prompt tokens cached"
            )
            arrival = f"it arrives with {record.num_prompt_tokens} tokens"
            self.events.insert(0, (record.arrived, arrival))
            if record.first is not None:
                self.events.append((record.first, f"the first token comes, {cached}"))
            if record.ended is not None:
                end = record.error or f"the last of {record.num_output_tokens} tokens comes"
                self.events.append((record.ended, end))
        self.events.sort(key=lambda event: event[0])
