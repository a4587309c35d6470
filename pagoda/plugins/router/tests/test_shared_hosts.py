# SPDX-License-Identifier: Apache-2.0
"""Routers that share a host know of one another's requests there."""

from __future__ import annotations

import asyncio

from linked_hosts import Host, Router, until
from virtual_fleet import request

from benchmarks.dispatch_scale import begin, fleet
from benchmarks.routing import Timed, replica
from benchmarks.shared_hosts import Setting, serve
from pagoda.concurrency import event_loop
from pagoda.concurrency.async_utils import cancel_all


def pending(router: Router) -> int:
    [slot] = router.dispatcher.slots
    return slot.work.pending_tokens


async def test_a_router_counts_what_others_have_given_to_a_host_and_not_twice_its_own() -> None:
    dispatcher, _ = fleet(1, "round-robin")
    async with Router() as one, Router() as other, Host(dispatcher) as host:
        for router in (one, other):
            host.join(router)
            await router.until_hosts(1)
        asking = [await begin(one.dispatcher, request("a", [1] * 100, 50))]
        await until(lambda: pending(other) >= 100)
        asking.append(await begin(other.dispatcher, request("b", [1] * 200, 50)))
        await until(lambda: pending(one) >= 300)
        assert abs(pending(one) - pending(other)) < 100
        own = await begin(dispatcher, request("own", [1] * 120, 50))
        await until(lambda: pending(one) >= 420 and pending(other) >= 420)
        await cancel_all([*asking, own])
        await until(lambda: pending(one) == 0 == pending(other))
        assert not dispatcher.requests
    await dispatcher.close()


def test_requests_that_come_at_once_are_all_aborted_on_the_event_loop_of_servers() -> None:
    """Its handles for what is due at once are other ones than those of asyncio."""

    async def ask() -> None:
        dispatcher, _ = fleet(1, "round-robin")
        async with Router() as one, Host(dispatcher) as host:
            host.join(one)
            await one.until_hosts(1)
            asking = [asyncio.create_task(one.ask(f"{number}")) for number in range(8)]
            await until(lambda: len(dispatcher.requests) == 8)
            await cancel_all(asking)
            await until(lambda: not dispatcher.requests)
        await dispatcher.close()

    event_loop.run(ask())


async def test_the_work_of_a_router_that_is_lost_is_forgotten() -> None:
    dispatcher, _ = fleet(1, "round-robin")
    async with Router() as one, Host(dispatcher) as host:
        host.join(one)
        async with Router() as other:
            host.join(other)
            await one.until_hosts(1)
            await other.until_hosts(1)
            asking = asyncio.create_task(other.ask("a"))
            await until(lambda: pending(one) > 0)
        await until(lambda: pending(one) == 0)
        await cancel_all([asking])
    await dispatcher.close()


def test_routers_hear_of_each_others_requests_before_they_choose_the_same_host() -> None:
    """Four equal requests come to four routers of four hosts, each 4 ms behind the other, in virtual time: none
    waits for another."""
    traffic = [
        Timed(second + gap, request(f"{second}+{gap}", [second + 1] * 4000, 2))
        for second in range(4)
        for gap in (0.0, 0.004, 0.008, 0.012)
    ]
    outcome = serve(traffic, Setting(4), 4, replica())
    assert max(outcome.ttfts) < 1.01 * min(outcome.ttfts)
