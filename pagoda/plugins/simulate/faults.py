# SPDX-License-Identifier: Apache-2.0
"""Faults of a simulated fleet, as its topology's rules say."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence

from pagoda.concurrency.async_utils import cancel_all, watched_task
from pagoda.plugins.simulate.fleet import SimFleet, SimHost, SimRouter
from pagoda.plugins.simulate.records import Records
from pagoda.plugins.simulate.topology import FaultRule


class Faults:
    """Provokes faults until it is closed."""

    def __init__(
        self, rules: Sequence[FaultRule], fleet: SimFleet, records: Records, seed: int
    ) -> None:
        self._fleet = fleet
        self._records = records
        self._tasks = [
            watched_task(self._follow(rule, random.Random(f"{seed}/{index}")))
            for index, rule in enumerate(rules)
        ]

    async def close(self) -> None:
        await cancel_all(self._tasks)

    async def _follow(self, rule: FaultRule, rng: random.Random) -> None:
        things: list[SimHost | SimRouter] = [it for it in self._fleet.hosts if it.kind == rule.what]
        things += [it for it in self._fleet.routers if it.kind == rule.what]
        if rule.every_s is None:
            await asyncio.sleep(rule.at_s or 0.0)
            for number in range(min(rule.count, len(things))):
                self._provoke(rule, things, number, rule.for_s)
            return
        # Independent faults of many together are a Poisson process of their rates' sum.
        while True:
            await asyncio.sleep(rng.expovariate(len(things) / rule.every_s))
            for_s = rng.expovariate(1 / rule.for_s)
            self._provoke(rule, things, rng.randrange(len(things)), for_s)

    def _provoke(
        self, rule: FaultRule, things: Sequence[SimHost | SimRouter], number: int, for_s: float
    ) -> None:
        self._records.num_faults += 1
        first = number - number % rule.group
        for thing in things[first : first + rule.group]:
            if isinstance(thing, SimHost):
                self._fail(thing, for_s)
            elif rule.kind == "cut":
                thing.cut(for_s)
            elif rule.kind == "router":
                thing.fail(for_s)
            else:
                for router in thing.below():
                    router.fail(for_s)
                    for host in router.hosts:
                        self._fail(host, for_s)

    def _fail(self, host: SimHost, for_s: float) -> None:
        if host.is_up:
            self._records.num_hosts_lost += 1
            host.fail(for_s)
