# SPDX-License-Identifier: Apache-2.0
"""Policies are functions: what they choose is looked up, not simulated."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagoda.fleet.policies import (
    POLICIES,
    Candidate,
    RoutingRequest,
    least_pending_tokens,
    power_of_two,
    prefix_affinity,
    round_robin,
    session_affinity,
)


def asking(number: int = 0, *, session: str | None = None) -> RoutingRequest:
    return RoutingRequest(f"r{number}", number, session)


def candidates(*pending: int) -> list[Candidate]:
    return [Candidate(str(i), tokens) for i, tokens in enumerate(pending)]


@pytest.mark.parametrize("name", POLICIES)
@given(
    number=st.integers(0, 2**40),
    pending=st.lists(st.integers(0, 2**40), min_size=1, max_size=64),
    session=st.none() | st.text(),
)
def test_every_policy_chooses_one_of_the_candidates(
    name: str, number: int, pending: list[int], session: str | None
) -> None:
    asked = asking(number, session=session)
    choose = POLICIES[name].choose  # type: ignore[index]
    chosen = choose(asked, candidates(*pending))
    assert 0 <= chosen < len(pending)
    assert choose(asked, candidates(*pending)) == chosen


def test_round_robin_takes_turns() -> None:
    assert [round_robin(asking(i), candidates(9, 0, 5)) for i in range(5)] == [0, 1, 2, 0, 1]


def test_the_least_work_is_chosen_and_equals_take_turns() -> None:
    for choose in (least_pending_tokens, prefix_affinity, session_affinity):
        assert choose(asking(), candidates(7, 3, 5)) == 1
        assert choose(asking(), candidates(7)) == 0
        chosen = Counter(choose(asking(i), candidates(4, 0, 0, 0)) for i in range(30))
        assert chosen == {1: 10, 2: 10, 3: 10}


def test_power_of_two_avoids_the_busiest_and_reaches_all_others() -> None:
    pending = (1000, 0, 10, 20)
    chosen = Counter(power_of_two(asking(i), candidates(*pending)) for i in range(600))
    assert set(chosen) == {1, 2, 3}
    # Of the six pairs, the idle one is in three, and the next best in two without it.
    assert 240 < chosen[1] < 360
    assert 140 < chosen[2] < 260
    assert {power_of_two(asking(i), candidates(5, 0)) for i in range(50)} == {1}


@pytest.mark.parametrize(
    ("there", "other", "chosen"),
    [
        (Candidate("0", 1599, 400), Candidate("1", 0), 0),
        (Candidate("0", 1601, 400), Candidate("1", 0), 1),
        (Candidate("0", 50, 16), Candidate("1", 50, 32), 1),
        # A prefix that many have in common draws less.
        (Candidate("0", 1500, 400, num_sharing=0), Candidate("1", 0), 0),
        (Candidate("0", 1500, 400, num_sharing=1), Candidate("1", 0), 1),
        (Candidate("0", 900, 400, num_sharing=1), Candidate("1", 0), 0),
        (Candidate("0", 410, 400, num_sharing=100), Candidate("1", 0), 0),
        (Candidate("0", 420, 400, num_sharing=100), Candidate("1", 0), 1),
    ],
)
def test_a_cached_prefix_draws_a_request_until_its_replica_is_far_behind(
    there: Candidate, other: Candidate, chosen: int
) -> None:
    assert prefix_affinity(asking(), [there, other]) == chosen


def test_a_session_stays_where_it_is() -> None:
    everyone = candidates(10, 0, 500, 3)
    for session in map(str, range(100)):
        home = session_affinity(asking(session=session), everyone)
        assert session_affinity(asking(9, session=session), candidates(0, 9, 9, 9)) == home
        others = [one for one in everyone if one.replica != str((home + 1) % 4)]
        assert others[session_affinity(asking(session=session), others)].replica == str(home)


def test_sessions_are_spread() -> None:
    homes = Counter(
        session_affinity(asking(session=str(i)), candidates(0, 0, 0, 0)) for i in range(400)
    )
    assert len(homes) == 4
    assert min(homes.values()) > 60
