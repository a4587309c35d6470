# SPDX-License-Identifier: Apache-2.0
"""Hosts that are far away or expensive get requests when waiting for others costs more."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from linked_hosts import Host, until
from scripted_endpoint import ScriptedEndpoint

from benchmarks.dispatch_scale import begin, fleet, request
from pagoda.fleet.policies import PolicyName
from pagoda.messages.frontend import GenerateRequest, HostPool
from pagoda.plugins.router.pools import Distance

NEAR, FAR = HostPool("", region="eu"), HostPool("", region="us", price=2.0)


def test_distance_counts_in_tokens_of_waiting() -> None:
    weighed = Distance(tokens_per_second=10_000, other_region_ms=20, price_tokens=100)
    assert weighed.tokens(NEAR, 0.001, "eu") == 0  # ten tokens are nothing
    assert weighed.tokens(NEAR, 0.1, "eu") == 960  # 1,000, of which four bits count
    assert weighed.tokens(FAR, 0.1, "eu") == 1_280  # 1,400
    assert Distance().tokens(FAR, 9.0, "eu") == 0


@given(
    st.builds(
        Distance,
        tokens_per_second=st.floats(0, 1e9),
        other_region_ms=st.floats(0, 1e6),
        price_tokens=st.floats(0, 1e9),
    ),
    st.floats(0, 1e4),
    st.floats(0, 1e4),
)
def test_what_is_farther_never_counts_less(distance: Distance, one: float, other: float) -> None:
    near, far = sorted((one, other))
    assert 0 <= distance.tokens(FAR, near, "eu") <= distance.tokens(FAR, far, "eu") <= 2**40
    assert distance.tokens(NEAR, near, "eu") <= distance.tokens(FAR, near, "eu")


@pytest.mark.parametrize("policy", ["least-pending-tokens", "prefix-affinity"])
@pytest.mark.parametrize("size", [4, 64])
async def test_requests_spill_over_once_waiting_costs_more_than_distance(
    policy: PolicyName, size: int
) -> None:
    dispatcher, peers = fleet(size, policy)
    near, far = peers[: size // 2], peers[size // 2 :]
    for peer in far:
        peer.replica.set_handicap(2_000)

    def counts() -> tuple[int, int]:
        return sum(len(peer.requests) for peer in near), sum(len(peer.requests) for peer in far)

    def asked(number: int) -> GenerateRequest:
        """A prompt of 512 tokens that has nothing in common with others."""
        return msgspec.structs.replace(request(number), prompt_token_ids=[1 + number] * 512)

    # A near host with four of them has more than 2,000 to do.
    number = 0
    while not counts()[1]:
        await begin(dispatcher, asked(number))
        number += 1
    assert len(near) * 2 <= counts()[0] <= len(near) * 6
    for peer in far:
        peer.replica.set_handicap(0)
    before = counts()[0]
    for more in range(size // 2):
        await begin(dispatcher, asked(number + more))
    assert counts()[0] <= before + size // 8
    await dispatcher.close()


async def test_a_host_says_where_it_is_and_a_router_measures_how_far_that_is() -> None:
    asked: list[tuple[str, float, float]] = []

    def weigh(place: HostPool, round_trip_s: float) -> int:
        asked.append((place.region, place.price, round_trip_s))
        return 777

    async with Host(ScriptedEndpoint(), region="eu", price=1.5) as host:
        client = await host.dial(weigh=weigh)
        await until(lambda: len(asked) == 4)  # one after the other; the next one comes much later
        assert {one[:2] for one in asked} == {("eu", 1.5)}
        assert client.replica.handicap == 777
        assert client.round_trip_s == asked[-1][2] == min(one[2] for one in asked)
        await client.close()
