# SPDX-License-Identifier: Apache-2.0
"""A router joins a router as a host does: what changes below is known above, and nothing goes round in circles."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
import pytest
from linked_hosts import Host, Router, ScriptedHost, until, until_refused

from pagoda.concurrency.async_utils import cancel_all
from pagoda.fleet.endpoint import ReplicaState
from pagoda.messages.frontend import EngineReady, FinishReason
from pagoda.messages.worker_config import Role


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pagoda.plugins.router.registry._RETRY_S", 0.05)
    monkeypatch.setattr("pagoda.plugins.router.registry._REFUSED_RETRY_S", 0.05)


@asynccontextmanager
async def below(lower: Router, *uppers: Router) -> AsyncIterator[Host]:
    """`lower`, which has a host, as a host of others."""
    await lower.registry.first_host()
    door = Host(lower.dispatcher, id=lower.identity.id, is_router=True)
    for upper in uppers:
        door.join(upper)
    try:
        yield door
    finally:
        await door.close()


def limits_of(router: Router) -> EngineReady:
    [replica] = router.dispatcher.replicas
    return replica.limits


async def test_a_router_answers_with_the_hosts_of_a_router_below_it() -> None:
    async with (
        Router() as upper,
        Router() as lower,
        ScriptedHost(lower, "hello"),
        below(lower, upper),
    ):
        await upper.until_hosts(1)
        assert await upper.ask("r1") == ("hello", FinishReason.STOP)
        assert limits_of(upper).routers == (lower.identity.id,)
        assert (await upper.dispatcher.health()).ready
        assert (await upper.dispatcher.load()).num_running == 1  # as its only host says


async def test_limits_grow_and_shrink_with_the_hosts_below() -> None:
    async with Router() as upper, Router() as lower, ScriptedHost(lower), below(lower, upper):
        await upper.until_hosts(1)
        assert upper.dispatcher.limits.max_num_seqs == 8
        second = ScriptedHost(lower)
        await until(lambda: upper.dispatcher.limits.max_num_seqs == 16)
        assert upper.dispatcher.limits.num_blocks == 128
        assert [slot.prefixes.capacity for slot in upper.dispatcher.slots] == [128]
        second.endpoint.limits = msgspec.structs.replace(second.endpoint.limits, max_model_len=99)
        second.endpoint.change()
        await until(lambda: upper.dispatcher.limits.max_model_len == 99)
        await second.close()
        await until(lambda: upper.dispatcher.limits.max_num_seqs == 8)
        assert upper.dispatcher.limits.max_model_len == 256


async def test_a_router_without_hosts_is_avoided_and_then_used_again() -> None:
    async with (
        Router() as upper,
        Router() as lower,
        Router() as other,
        ScriptedHost(other, "other"),
        below(other, upper),
    ):
        only = ScriptedHost(lower, "lower")
        async with below(lower, upper):
            await upper.until_hosts(2)
            await only.close()
            states = lambda: {replica.state for replica in upper.dispatcher.replicas}  # noqa: E731
            await until(lambda: states() == {ReplicaState.READY, ReplicaState.DEGRADED})
            for index in range(4):
                assert await upper.ask(f"r{index}") == ("other", FinishReason.STOP)
            async with ScriptedHost(lower, "lower"):
                await until(lambda: states() == {ReplicaState.READY})
                answers = {(await upper.ask(f"s{index}"))[0] for index in range(4)}
                assert answers == {"lower", "other"}


async def test_a_request_below_a_router_that_lost_its_hosts_goes_on_elsewhere() -> None:
    async with (
        Router() as upper,
        Router() as lower,
        Router() as other,
        ScriptedHost(other, "abcdef"),
    ):
        only = ScriptedHost(lower, "abcdef")
        only.endpoint.pause_after = 3
        async with below(lower, upper):
            await upper.until_hosts(1)
            asking = asyncio.create_task(upper.ask("r1"))
            await only.endpoint.paused.wait()
            async with below(other, upper):
                await upper.until_hosts(2)
                await only.close()
                assert await asking == ("abcdef", FinishReason.STOP)


async def test_a_router_that_leaves_finishes_what_it_has() -> None:
    async with (
        Router() as upper,
        Router() as lower,
        ScriptedHost(lower, "old") as host,
        below(lower, upper) as door,
        ScriptedHost(upper, "new"),
    ):
        await upper.until_hosts(2)
        host.endpoint.pause_after = 1
        asking = [asyncio.create_task(upper.ask(f"r{index}")) for index in range(2)]
        await host.endpoint.paused.wait()
        await door.leave()
        await until(lambda: [slot.fitness for slot in upper.dispatcher.slots].count(None) == 1)
        assert await upper.ask("r3") == ("new", FinishReason.STOP)
        host.endpoint.go_on.set()
        answers = await asyncio.gather(*asking)
        assert {text for text, _ in answers} == {"old", "new"}
        await upper.until_hosts(1)


async def test_a_router_that_joins_itself_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    async with Router() as router, ScriptedHost(router, "hello"):
        async with below(router, router):
            await until(lambda: "does not use this host" in caplog.text)
            assert "requests would go round in circles" in caplog.text
        await router.until_hosts(1)
        assert await router.ask("r1") == ("hello", FinishReason.STOP)


async def test_routers_that_join_each_other_in_a_circle_are_refused(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """However many there are between; also when the circle is closed by a router that had joined before."""
    async with (
        Router() as a,
        Router() as b,
        Router() as c,
        ScriptedHost(c, "hello"),
        below(c, b),
        below(b, a),
        below(a, c),
    ):
        await until(lambda: "requests would go round in circles" in caplog.text)
        await until(lambda: len(c.dispatcher.replicas) == 1)
        assert await a.ask("r1") == ("hello", FinishReason.STOP)
        assert set(limits_of(a).routers) == {b.identity.id, c.identity.id}


async def test_two_that_join_each_other_at_the_same_time_do_not_ask_each_other() -> None:
    async with (
        Router() as a,
        Router() as b,
        ScriptedHost(a, "a"),
        ScriptedHost(b, "b"),
        below(a, b),
        below(b, a),
    ):

        def is_open(router: Router, other: Router) -> bool:
            hosts = router.dispatcher.replicas
            return any(
                host.state is not ReplicaState.FAILED and host.limits.host_id == other.identity.id
                for host in hosts
            )

        refusals = [asyncio.ensure_future(until_refused(router)) for router in (a, b)]
        await asyncio.wait(refusals, return_when=asyncio.FIRST_COMPLETED)
        await cancel_all(refusals)
        await until(lambda: not (is_open(a, b) and is_open(b, a)))
        for router in (a, b):
            text, reason = await router.ask("r1")
            assert (text in {"a", "b"}, reason) == (True, FinishReason.STOP)


async def test_the_role_of_a_router_is_that_of_its_hosts() -> None:
    """With prefill hosts alone it computes prompts for others; with a decode host too it needs nobody else."""
    async with Router() as upper, Router() as lower, ScriptedHost(lower) as host:
        roles(host, Role.PREFILL)
        async with below(lower, upper):
            await until(lambda: len(upper.hosts.prefill.replicas) == 1)
            [link] = upper.dispatcher.replicas
            async with ScriptedHost(lower) as second:
                roles(second, Role.DECODE)
                await until(lambda: upper.dispatcher.limits.role is Role.BOTH)
                assert upper.hosts.prefill.replicas == []
            await until(lambda: len(upper.hosts.prefill.replicas) == 1)
            assert upper.dispatcher.replicas == [link]  # still the same connection


def roles(host: ScriptedHost, role: Role) -> None:
    host.endpoint.limits = msgspec.structs.replace(host.endpoint.limits, role=role)
    host.endpoint.change()
