# SPDX-License-Identifier: Apache-2.0
"""Hosts that start and stop while a simulation runs: as the policy of `pagoda plan` decides, or by a timetable.

The planner is that of `pagoda plan`, with the same inputs: the text of `/metrics` of routers and their lists of
hosts. What an autoscaler does with a plan is a model: hosts that are missing start, which takes their `start_s`,
and hosts that are too many get nothing new, finish, and stop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path

from pagoda.api.monitoring.exposition import render
from pagoda.api.monitoring.metrics import Snapshot
from pagoda.api.monitoring.request_metrics import RequestMetrics
from pagoda.concurrency.async_utils import cancel_all, watched_task
from pagoda.errors import ConfigError
from pagoda.messages.worker_config import Role
from pagoda.plugins.plan.figures import Capacity, PlanConfig
from pagoda.plugins.plan.journal import Journal
from pagoda.plugins.plan.router import ListedHost, Reading, Windows
from pagoda.plugins.simulate.fleet import SimFleet, SimHost, SimRouter
from pagoda.plugins.simulate.topology import ScalingRule, Topology


def plan_config(topology: Topology, rule: ScalingRule) -> PlanConfig:
    """The rules of a planner; what one host can do is that of the routers' first kind of host."""
    children = topology.routers[rule.what].children
    kinds = [topology.hosts[kind] for kind in children]
    host, steps = kinds[0], topology.steps[next(iter(children))]
    most = host.max_num_batched_tokens
    shortest_s = steps.base_s + max(steps.floor_s, steps.per_token_s) + steps.per_sequence_s
    longest_s = steps.base_s + max(steps.floor_s, steps.per_token_s * most) + steps.per_sequence_s
    line = (longest_s - shortest_s) / max(1, most - 1)
    return PlanConfig(
        slo=rule.slo,
        capacity=Capacity(
            step_s=rule.step_s or shortest_s,
            token_s=rule.token_s or max(line, 1e-9),
            max_num_seqs=host.max_num_seqs,
            max_num_batched_tokens=most,
            kv_tokens=host.blocks_with(steps) * host.block_size,
        ),
        min_hosts=rule.least,
        max_hosts=sum(children.values()),
        lead_s=max(it.start_s for it in kinds) if rule.lead_s is None else rule.lead_s,
        hold_s=rule.hold_s,
    )


class ScaledPool:
    """The hosts of one router, of which as many run as are wanted."""

    def __init__(self, router: SimRouter, num_first: int) -> None:
        """Hosts that run from the begin: one of each kind at least, and `num_first` in all."""
        self.router = router
        self._tasks: dict[int, asyncio.Task[None]] = {}
        """Starts and ends under way by the number of the host."""
        self._metrics = RequestMetrics()
        self._metrics.follow(router.tracker)
        self._reading = Reading()
        kinds = {host.kind: host for host in reversed(router.hosts)}
        first = dict.fromkeys([*reversed(kinds.values()), *router.hosts])
        for index, host in enumerate(first):
            host.is_wanted = index < max(num_first, len(kinds))

    async def close(self) -> None:
        await cancel_all(list(self._tasks.values()))

    def resize(self, wanted: Mapping[Role, int]) -> None:
        """Starts and ends hosts until so many of each role are there, as far as there are any."""
        for role, count in wanted.items():
            hosts = [host for host in self.router.hosts if host.spec.role is role]
            there = [host for host in hosts if host.is_wanted]
            missing = count - len(there)
            # Hosts that have not finished yet go on at once.
            others = sorted((it for it in hosts if not it.is_wanted), key=lambda it: not it.is_up)
            for host in others[: max(0, missing)]:
                self._begin(host)
            idle = sorted(there, key=lambda it: (it.is_up, self._num_requests(it), -it.number))
            for host in idle[: max(0, -missing)]:
                self._end(host)

    def _num_requests(self, host: SimHost) -> int:
        router = self.router
        return router.members.num_requests(host.engine.replica) if router.knows(host) else 0

    def _begin(self, host: SimHost) -> None:
        host.is_wanted = True
        ending = self._tasks.pop(host.number, None)
        if ending is not None:
            ending.cancel()
        if self.router.knows(host):
            self.router.members.set_leaving(host.engine.replica, False)
        elif not host.is_up:
            host.use()
            self._tasks[host.number] = watched_task(self._start(host))

    async def _start(self, host: SimHost) -> None:
        await asyncio.sleep(host.spec.start_s)
        await host.engine.start()
        del self._tasks[host.number]

    def _end(self, host: SimHost) -> None:
        host.is_wanted = False
        starting = self._tasks.pop(host.number, None)
        if starting is not None:
            starting.cancel()
        self._tasks[host.number] = watched_task(self._finish(host))

    async def _finish(self, host: SimHost) -> None:
        """Stops a host when it has no requests any more."""
        router, replica = self.router, host.engine.replica
        if router.knows(host):
            router.members.set_leaving(replica, True)
            await router.members.emptied(replica)
        if router.knows(host):
            router.let_go(host)
        host.engine.stop()
        host.end_use()
        del self._tasks[host.number]

    async def reading(self) -> Reading:
        """Figures that the router tells planners; of one that is down, what it said last."""
        router = self.router
        if router.process is not None:
            report = await router.members.dispatcher.load()
            snapshot = Snapshot(router.path, self._metrics, 0.0, (), report, None)
            hosts = tuple(self._listed(host) for host in router.hosts if router.knows(host))
            self._reading = Reading(render(snapshot, aliases=False), hosts)
        return self._reading

    def _listed(self, host: SimHost) -> ListedHost:
        replica = host.engine.replica
        return ListedHost(
            model=self.router.path,
            state=str(replica.state) if host.is_wanted else "leaving",
            id=host.path,
            role=replica.limits.role,
            roles=replica.limits.roles,
            num_requests=self._num_requests(host),
        )


class Scaling:
    """Follows the rules of a topology until it is closed."""

    def __init__(self, topology: Topology, fleet: SimFleet, journal: Path | None = None) -> None:
        """The fleet has not started. `journal` is written as by `pagoda plan run`.

        Raises ConfigError: there is not one planner whose journal it can be, or the file cannot be written.
        """
        planned = [rule for rule in topology.scaling if not rule.timetable]
        if journal is not None and len(planned) != 1:
            raise ConfigError(
                f"--journal is of one planner, and the scaling of {topology.name} has {len(planned)}."
            )
        self._pools = [
            (rule, [ScaledPool(it, _first(rule)) for it in fleet.routers if it.kind == rule.what])
            for rule in topology.scaling
        ]
        self._journals = {
            rule.what: Journal(plan_config(topology, rule), journal) for rule in planned
        }
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Begins to follow the rules; the fleet has started."""
        for rule, pools in self._pools:
            follow = self._follow(rule, pools) if rule.timetable else self._plan(rule, pools)
            self._tasks.append(watched_task(follow))

    async def close(self) -> None:
        await cancel_all(self._tasks)
        for _, pools in self._pools:
            for pool in pools:
                await pool.close()

    async def _follow(self, rule: ScalingRule, pools: Sequence[ScaledPool]) -> None:
        began = asyncio.get_running_loop().time()
        for timed in rule.timetable:
            await asyncio.sleep(began + timed.at_s - asyncio.get_running_loop().time())
            for pool in pools:
                pool.resize({pool.router.hosts[0].spec.role: timed.hosts})

    async def _plan(self, rule: ScalingRule, pools: Sequence[ScaledPool]) -> None:
        windows, journal = Windows(rule.slo), self._journals[rule.what]
        by_path = {pool.router.path: pool for pool in pools}
        while True:
            readings = [await pool.reading() for pool in pools]
            figures = windows.figures(asyncio.get_running_loop().time(), readings)
            if figures is not None:
                for plan in journal.decide(figures).pools:
                    by_path[plan.name].resize(plan.hosts)
            await asyncio.sleep(rule.interval_s)


def _first(rule: ScalingRule) -> int:
    """Hosts of each router at the begin."""
    is_timed = bool(rule.timetable) and not rule.timetable[0].at_s
    return rule.timetable[0].hosts if is_timed else rule.begin or rule.least
