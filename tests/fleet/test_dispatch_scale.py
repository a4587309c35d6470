# SPDX-License-Identifier: Apache-2.0
"""The work of a dispatcher, in operations: a request costs the same in any fleet, a join too."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import msgspec
import pytest
from operations import assert_constant, assert_linear

from benchmarks.dispatch_scale import (
    StaticPeer,
    begin,
    catalogue,
    fleet,
    place_by_name,
    place_one,
    request,
)
from pagoda.api.catalogue import Catalogue
from pagoda.concurrency.async_utils import cancel_all
from pagoda.errors import OverloadedError
from pagoda.fleet.dispatcher import Dispatcher
from pagoda.fleet.endpoint import ReplicaState
from pagoda.fleet.policies import POLICIES, PolicyName
from pagoda.fleet.prefix_index import CacheUnion, PrefixIndex
from pagoda.messages.worker_config import Role
from pagoda.plugins.simulate.event_loop import VirtualTimeLoop


@pytest.fixture
def loops() -> Iterator[Callable[[], asyncio.Runner]]:
    """Event loops that end with the test."""
    with ExitStack() as stack:
        yield lambda: stack.enter_context(asyncio.Runner(loop_factory=VirtualTimeLoop))


async def built(
    size: int, policy: PolicyName, num_requests: int = 0
) -> tuple[Dispatcher, list[StaticPeer]]:
    """A fleet with requests that wait for their tokens."""
    dispatcher, peers = fleet(size, policy)
    for number in range(num_requests):
        await begin(dispatcher, request(10**6 + number, 64))
    return dispatcher, peers


@pytest.mark.parametrize("policy", POLICIES)
def test_placing_a_request_takes_as_long_in_any_fleet(policy: PolicyName, loops) -> None:
    def make(size: int) -> Callable[[], object]:
        runner = loops()
        dispatcher, _ = runner.run(built(size, policy, num_requests=32))

        async def place_some() -> None:
            for number in range(8):
                await place_one(dispatcher, number)

        return lambda: runner.run(place_some())

    assert_constant(make, (10, 32, 128, 1024), slack=1.2)


def test_a_request_that_names_a_model_takes_as_long_among_any_number_of_pools(loops) -> None:
    def make(num_pools: int) -> Callable[[], object]:
        runner = loops()

        async def make_models() -> Catalogue:
            return catalogue(num_pools, 20)

        models = runner.run(make_models())

        async def place_some() -> None:
            for number in range(8):
                await place_by_name(models, number * num_pools // 8)

        return lambda: runner.run(place_some())

    assert_constant(make, (1, 8, 64), slack=1.2)


def test_finding_a_long_prefix_takes_hardly_longer_than_finding_a_short_one() -> None:
    def make(num_blocks: int) -> Callable[[], object]:
        union = CacheUnion()
        index = PrefixIndex(2**20, union=union)
        keys = list(range(num_blocks))
        index.add(keys)
        return lambda: (index.num_cached(keys), index.num_told(keys), union.holders(keys, 8))

    assert_constant(make, (64, 128, 256, 512, 1024), slack=1.3)


def judging(loops, size: int, num_requests: int) -> Callable[[], object]:
    runner = loops()
    dispatcher, _ = runner.run(built(size, "round-robin", num_requests))
    for slot in dispatcher.slots:
        for _ in range(20):
            slot.health.progress("r", 1, 0.0, 0.1)

    async def judge() -> None:
        dispatcher.slots.judge()

    return lambda: runner.run(judge())


def test_judging_takes_work_in_proportion_to_the_fleet_alone(loops) -> None:
    assert_linear(lambda size: judging(loops, size, size), (100, 200, 400))
    assert_constant(lambda num_requests: judging(loops, 8, num_requests), (16, 64, 256))


def test_joins_take_work_in_proportion_to_the_fleet(loops) -> None:
    def make(size: int) -> Callable[[], object]:
        runner = loops()

        async def join() -> None:
            await built(size, "prefix-affinity")

        return lambda: runner.run(join())

    assert_linear(make, (100, 200, 400))


def test_limits_of_a_fleet_take_as_long_when_all_its_hosts_differ(loops) -> None:
    def make(size: int) -> Callable[[], object]:
        runner = loops()
        dispatcher, peers = runner.run(built(size, "prefix-affinity"))
        own = peers[0].replica.limits

        async def differ() -> None:
            for number, peer in enumerate(peers):
                summary = f"KV cache of {number} blocks"
                limits = msgspec.structs.replace(own, num_blocks=number + 1, summary=summary)
                peer.replica.receive(limits)

        runner.run(differ())
        assert dispatcher.limits.num_blocks == size * (size + 1) // 2

        async def change() -> None:
            peers[0].replica.receive(msgspec.structs.replace(own, role=Role.BOTH))
            assert dispatcher.limits.role is Role.BOTH

        return lambda: runner.run(change())

    assert_constant(make, (32, 128, 512))


def test_losing_a_replica_looks_at_its_own_requests_alone(loops) -> None:
    def make(size: int) -> Callable[[], object]:
        runner = loops()
        _, peers = runner.run(built(size, "round-robin", num_requests=2 * size))

        async def lose() -> None:
            peers[3].enter(ReplicaState.DEGRADED)

        return lambda: runner.run(lose())

    assert_constant(make, (32, 128, 512))


def test_what_waits_is_woken_once_when_replicas_come(loops) -> None:
    def make(size: int) -> Callable[[], object]:
        runner = loops()
        dispatcher, peers = runner.run(built(4, "least-pending-tokens"))

        async def wait() -> None:
            for peer in peers:
                peer.enter(ReplicaState.STARTING)
            for number in range(size):
                await begin(dispatcher, request(number, 64))

        async def come() -> None:
            for peer in peers:
                peer.enter(ReplicaState.READY)
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            assert sum(len(peer.requests) for peer in peers) == size

        runner.run(wait())
        return lambda: runner.run(come())

    assert_linear(make, (64, 128, 256))


@pytest.mark.parametrize("policy", POLICIES)
async def test_requests_spread_over_a_large_fleet(policy: PolicyName) -> None:
    size = 100
    _, peers = await built(size, policy, num_requests=4 * size)
    counts = Counter(len(peer.requests) for peer in peers)
    if policy in ("round-robin", "least-pending-tokens"):
        assert counts == {4: size}
    else:
        assert max(counts) <= 24
        assert size - counts[0] >= 0.4 * size


async def test_a_prefix_is_found_in_a_large_fleet() -> None:
    dispatcher, peers = await built(100, "prefix-affinity")
    await begin(dispatcher, request(5, 512))
    [first] = [peer for peer in peers if peer.requests]
    await begin(dispatcher, request(5 + 64, 512))
    assert len(first.requests) == 2


async def test_sessions_stay_where_they_are_in_a_large_fleet() -> None:
    async def homes(dispatcher: Dispatcher) -> dict[str, str]:
        readings = [await begin(dispatcher, request(number, 64)) for number in range(200)]
        found = {
            asked.request_id: peer.replica.name
            for peer in peers
            for asked in peer.requests.values()
        }
        await cancel_all(readings)
        return found

    dispatcher, peers = fleet(60, "session-affinity")
    before = await homes(dispatcher)
    assert len(set(before.values())) > 40
    gone = peers[7]
    gone.enter(ReplicaState.STARTING)
    without = await homes(dispatcher)
    moved = {name for name in before if without[name] != before[name]}
    assert moved == {name for name in before if before[name] == gone.replica.name}
    gone.enter(ReplicaState.READY)
    assert await homes(dispatcher) == before
    backwards = Dispatcher([], POLICIES["session-affinity"])
    for peer in reversed(peers):
        backwards.add(peer.replica)
    assert await homes(backwards) == before


@pytest.mark.parametrize("policy", POLICIES)
async def test_a_full_fleet_is_asked_once_and_a_replica_with_room_is_found(
    policy: PolicyName,
) -> None:
    dispatcher, peers = fleet(100, policy)
    for peer in peers:
        peer.refuses = peer is not peers[77]
    await begin(dispatcher, request(0))
    assert len(peers[77].requests) == 1
    peers[77].refuses = True
    for number in (1, 2):
        with pytest.raises(OverloadedError) as refusal:
            await anext(dispatcher.generate(request(number)))
        assert refusal.value.retry_after_s == 3
    assert sum(peer.num_refused for peer in peers) <= 100 + 2 * 16
