# SPDX-License-Identifier: Apache-2.0
"""Hosts in virtual time whose roles change while they work: no request is lost or goes where it should not."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence

import msgspec
import pytest
from test_prefill_decode import KEYS, LEASE_S, LONG, MIN_TOKENS, SHORT, assert_nothing_left
from virtual_fleet import ask, engine_config, request, run_seeds, virtual

from pagoda.errors import InvalidRequestError
from pagoda.fleet.dispatcher import Dispatcher
from pagoda.fleet.policies import POLICIES
from pagoda.ipc.clock import LoopClock
from pagoda.messages.engine_config import HandoffConfig
from pagoda.messages.worker_config import Role
from pagoda.plugins.router.prefill_decode import PrefillDecodeRouter
from pagoda.plugins.simulate.engine import SimEngine
from pagoda.plugins.simulate.network import SimNetwork

P, D, BOTH, STANDBY = Role.PREFILL, Role.DECODE, Role.BOTH, Role.STANDBY


class Pod:
    """Engines of which each can do everything, behind a router that is told their roles."""

    def __init__(self, roles: Sequence[Role], **fields: object) -> None:
        self.router = PrefillDecodeRouter(POLICIES["least-pending-tokens"], MIN_TOKENS)
        network = SimNetwork(LoopClock())
        self.engines = [
            SimEngine(
                engine_config(
                    handoff=HandoffConfig(
                        role=BOTH, first_role=role, host="sim", keys=KEYS, lease_s=LEASE_S
                    ),
                    **fields,
                ),
                check_kv=True,
                network=network,
                address=f"tcp://host{index}:1",
            )
            for index, role in enumerate(roles)
        ]

    async def start(self) -> None:
        for engine in self.engines:
            await engine.start()
            self.router.add(engine.replica)

    def set_role(self, index: int, role: Role) -> None:
        """What a host tells its routers."""
        replica = self.engines[index].replica
        replica.receive(msgspec.structs.replace(replica.limits, role=role))

    def num_requests(self, index: int) -> int:
        return self.router.num_requests(self.engines[index].replica)

    async def close(self) -> None:
        """Raises AssertionError: something is left."""
        await asyncio.sleep(LEASE_S + 2)
        assert_nothing_left(self.router.dispatcher)
        assert_nothing_left(self.router.prefill)
        by_role = [engine.replica for engine in self.engines if engine.replica.limits.role is P]
        assert {slot.replica for slot in self.router.prefill.slots} == set(by_role)
        for engine in self.engines:
            assert (await engine.replica.load()).num_leases == 0
            self.router.remove(engine.replica)
            await engine.close()
        await self.router.close()


async def live(seed: int) -> None:
    """Requests of all lengths, while every host is given roles at random."""
    draw = random.Random(seed)
    pod = Pod([P, D, BOTH])
    await pod.start()

    async def change() -> None:
        for _ in range(12):
            await asyncio.sleep(draw.random() * 0.1)
            pod.set_role(draw.randrange(3), draw.choice([P, D, BOTH, STANDBY]))

    async def one(number: int) -> bool:
        await asyncio.sleep(draw.random())
        prompt = [number, *draw.choice([LONG, SHORT])]
        answer = await ask(
            pod.router.dispatcher, request(f"r{number}", prompt, draw.randint(1, 30))
        )
        return answer.complete

    changing = asyncio.create_task(change())
    assert all(await asyncio.gather(*(one(number) for number in range(16))))
    await changing
    await pod.close()


@pytest.mark.parametrize("first", [0, 20])
def test_no_request_is_lost_whatever_roles_hosts_are_given(first: int) -> None:
    run_seeds(live, range(first, first + 20))


@virtual
async def test_a_host_that_generates_from_now_on_computes_the_prompts_that_it_has() -> None:
    pod = Pod([P, D], base_s=0.5)
    await pod.start()
    asking = asyncio.create_task(ask(pod.router.dispatcher, request("r", LONG)))
    await asyncio.sleep(0.1)
    assert pod.router.prefill.num_requests(pod.engines[0].replica) == 1
    pod.set_role(0, D)
    assert pod.router.prefill.num_requests(pod.engines[0].replica) == 1
    assert (await asking).complete
    loads = await pod.engines[1].replica.load()
    assert loads.tiers[-1].num_loaded == len(LONG) // 4
    assert len(pod.router.prefill.slots) == 0
    await pod.close()


@virtual
async def test_a_host_that_leaves_gets_no_prompts_when_it_becomes_a_prefill_host_again() -> None:
    pod = Pod([P, D])
    await pod.start()
    pod.router.set_leaving(pod.engines[0].replica, True)
    pod.set_role(0, D)
    pod.set_role(0, P)
    assert pod.router.prefill.slots.takers.num_takers == 0
    pod.router.set_leaving(pod.engines[0].replica, False)
    assert pod.router.prefill.slots.takers.num_takers == 1
    await pod.close()


@virtual
async def test_a_host_on_standby_gets_requests_only_where_no_other_takes_any() -> None:
    pod = Pod([D, D])
    await pod.start()
    pod.set_role(0, STANDBY)
    asking = [asyncio.create_task(ask(pod.router.dispatcher, request(f"r{i}"))) for i in range(4)]
    await asyncio.sleep(0.001)
    assert [pod.num_requests(0), pod.num_requests(1)] == [0, 4]
    pod.set_role(1, STANDBY)
    assert pod.router.dispatcher.limits.role is STANDBY
    asking.append(asyncio.create_task(ask(pod.router.dispatcher, request("last"))))
    assert all(answer.complete for answer in await asyncio.gather(*asking))
    await pod.close()


@virtual
async def test_a_dispatcher_tells_the_role_that_it_was_given_and_takes_no_impossible_one() -> None:
    able, plain = Pod([P]), SimEngine(engine_config())
    one, other = (
        Dispatcher([e.replica], POLICIES["round-robin"]) for e in (able.engines[0], plain)
    )
    told: list[Role] = []
    await one.start()
    await other.start()
    one.watch(lambda: told.append(one.limits.role))
    assert one.limits.role is P
    for role in (D, BOTH, STANDBY, P):
        one.set_role(role)
    assert told == [D, BOTH, STANDBY, P]
    other.set_role(STANDBY)
    with pytest.raises(InvalidRequestError, match="must be none, standby at this host"):
        other.set_role(D)
    with pytest.raises(InvalidRequestError, match="must be prefill, decode, both, standby"):
        one.set_role(Role.NONE)
    await one.close()
    await other.close()
