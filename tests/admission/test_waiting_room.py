# SPDX-License-Identifier: Apache-2.0
"""Who gives up places in a full queue, against a plain model, and how much looking that takes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from operations import assert_constant

from pagoda.admission.waiting_room import Bounds, Newcomer, WaitingRoom
from pagoda.ipc.clock import VirtualClock

WEIGHTS = {"a": 1.0, "b": 1.0, "c": 0.5, "d": 4.0}
ARRIVALS = st.lists(st.tuples(st.sampled_from(sorted(WEIGHTS)), st.integers(1, 9)), max_size=25)


def newcomer(name: str, tenant: str, num_tokens: int) -> Newcomer:
    return Newcomer(name, tenant, WEIGHTS.get(tenant, 1.0), num_tokens)


def modelled(waiting: list[Newcomer], new: Newcomer, bounds: Bounds) -> list[str] | None:
    """Takes the newest request of the heaviest other tenant, while one is too many."""
    rest = list(waiting)

    def size(tenant: str, measure: int) -> float:
        own = [one for one in rest if one.tenant == tenant]
        return (len(own) if measure == 0 else sum(one.num_tokens for one in own)) / WEIGHTS[tenant]

    evicted: list[str] = []
    for measure, own in ((0, 1), (1, new.num_tokens)):
        while rest:
            num_tokens = sum(one.num_tokens for one in rest) + new.num_tokens
            if (
                (len(rest) < bounds.num_requests)
                if measure == 0
                else num_tokens <= bounds.num_tokens
            ):
                break
            others = sorted({one.tenant for one in rest} - {new.tenant})
            if not others:
                return None
            heaviest = min(others, key=lambda tenant: (-size(tenant, measure), tenant))
            victim = [one for one in rest if one.tenant == heaviest][-1]
            rest.remove(victim)
            if size(heaviest, measure) < size(new.tenant, measure) + own / new.weight:
                return None
            evicted.append(victim.request_id)
        if not rest and measure == 0 and bounds.num_requests < 1:
            return None
    return evicted


@given(ARRIVALS, st.integers(0, 3), st.tuples(st.sampled_from(sorted(WEIGHTS)), st.integers(1, 40)))
def test_the_heaviest_give_up_their_newest_places(
    arrivals: list[tuple[str, int]], num_gone: int, last: tuple[str, int]
) -> None:
    room, bounds = WaitingRoom(VirtualClock()), Bounds(12, 50)
    waiting: list[Newcomer] = []
    for index, (tenant, num_tokens) in enumerate([*arrivals, last]):
        new = newcomer(f"r{index}", tenant, num_tokens)
        expected = modelled(waiting, new, bounds) if waiting else []
        assert room.evictions_for(new, bounds) == expected
        if expected is None:
            continue
        for request_id in expected:
            room.remove(request_id, has_begun=False)
        waiting = [one for one in waiting if one.request_id not in expected]
        for gone in waiting[: num_gone if index % 5 == 4 else 0]:
            room.remove(gone.request_id, has_begun=True)
            waiting.remove(gone)
        room.add(new)
        waiting.append(new)
        assert room.num_requests == len(waiting)
        assert room.num_tokens == sum(one.num_tokens for one in waiting)


@pytest.mark.parametrize("num_tokens", [4, 9])
def test_a_newcomer_of_a_full_queue_costs_the_same_however_many_keys_wait(num_tokens: int) -> None:
    def made(size: int) -> Callable[[], object]:
        room = WaitingRoom(VirtualClock())
        for index in range(size):
            room.add(newcomer(f"r{index}", f"t{index}", 4))
        for index in range(3):
            room.add(newcomer(f"h{index}", "heavy", 4))
        bounds = Bounds(room.num_requests, room.num_tokens)
        new = newcomer("new", "new", num_tokens)
        assert (room.evictions_for(new, bounds) is None) == (num_tokens > 8)

        def comes() -> None:
            room.evictions_for(new, bounds)
            room.add(new)

        return comes

    assert_constant(made, (256, 512, 1024))
