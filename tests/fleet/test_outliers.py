# SPDX-License-Identifier: Apache-2.0
"""Which replicas are left out, and for how long. Replicas are lists of what they do at which time."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from pagoda.fleet.outliers import (
    EJECTION_S,
    FORGIVEN_S,
    MAX_EJECTION_S,
    MAX_FAILURES,
    RETURN_S,
    SILENCE_S,
    STUCK_S,
    Ejection,
    OutlierDetector,
    ReplicaHealth,
    Waiting,
)
from pagoda.ipc.clock import VirtualClock


class Group:
    """Members that answer one request each, step by step."""

    def __init__(self, count: int) -> None:
        self.clock = VirtualClock()
        self.detector = OutlierDetector(self.clock)
        self.health: dict[int, ReplicaHealth] = {}
        self.since = dict.fromkeys(range(count), 0.0)
        for member in range(count):
            self.join(member)

    def join(self, member: int, group: str = "group") -> None:
        health = self.health[member] = ReplicaHealth(member)
        self.detector.add(health, group)

    def pass_time(self, seconds: float) -> None:
        self.clock.advance_to(self.clock.now() + seconds)

    def steps(self, count: int, step_s: float, *, without: tuple[int, ...] = ()) -> None:
        for _ in range(count):
            self.pass_time(step_s)
            for member in self.health:
                if member not in without:
                    self.step(member, step_s)

    def step(self, member: int, step_s: float, num_tokens: int = 1) -> None:
        now = self.clock.now()
        self.health[member].progress(f"r{member}", num_tokens, now, step_s)
        self.since[member] = now

    def check(self) -> tuple[list[int], list[int]]:
        waiting = {member: Waiting(since) for member, since in self.since.items()}
        ejected, stuck = self.detector.check(waiting.get)
        return [ejection.replica for ejection in ejected], stuck

    def shares(self) -> dict[int, float]:
        return {one: health.share(self.clock.now()) for one, health in self.health.items()}

    def fail(self, member: int) -> Ejection | None:
        return self.detector.on_failure(self.health[member])

    def lose(self, member: int) -> Ejection | None:
        return self.detector.on_loss(self.health[member])


def test_members_that_are_alike_all_stay() -> None:
    group = Group(3)
    for step_s in (0.01, 5.0, 0.001):
        group.steps(40, step_s)
        assert group.check() == ([], [])
    assert group.shares() == {0: 1, 1: 1, 2: 1}


def test_a_silent_member_gets_nothing_new_and_then_loses_what_it_has() -> None:
    group = Group(3)
    group.steps(40, 0.01)
    group.steps(int(SILENCE_S / 0.1) + 1, 0.1, without=(1,))
    assert group.check() == ([1], [])
    assert group.shares() == {0: 1, 1: 0, 2: 1}
    assert group.check() == ([], [])
    group.steps(int(STUCK_S / 0.1), 0.1, without=(1,))
    assert group.check()[1] == [1]


def test_long_steps_are_no_silence() -> None:
    group = Group(2)
    group.steps(20, 10.0)
    group.pass_time(5.0)
    group.step(0, 5.0)
    group.pass_time(15.0)
    assert group.check() == ([], [])


@pytest.mark.parametrize(
    ("waiting", "patience_s"),
    [
        (Waiting(0.0, 2048), 13.0),  # they wait for a step that computes a part of a prompt
        (Waiting(0.0, 100), 3.5),
        (Waiting(0.0, 100, kv_s=30.0), 33.5),
        (Waiting(0.0, 10**6, kv_s=30.0), 123.0),
        (Waiting(0.0, 200, kv_s=30.0).merge(Waiting(0.0)), 4.0),
    ],
)
def test_a_prompt_takes_its_time(waiting: Waiting, patience_s: float) -> None:
    assert waiting.patience_s == patience_s
    group = Group(3)
    group.steps(40, 0.05)
    began = group.clock.now()
    while group.clock.now() < began + patience_s + 1:
        group.steps(1, 0.05, without=(1,))
        ejected, stuck = group.detector.check({1: waiting._replace(since=began)}.get)
        late_s = group.clock.now() - began - patience_s
        if ejected:
            break
        assert not stuck
    assert abs(late_s) < 0.1
    assert [ejection.replica for ejection in ejected] == [1]


def test_silence_is_that_of_requests_while_others_get_on() -> None:
    group = Group(3)
    group.steps(40, 0.01)
    group.pass_time(100)
    assert group.check() == ([], [])  # all are silent: it is not one of them
    group = Group(2)
    group.steps(40, 0.01)
    del group.since[1]
    group.pass_time(STUCK_S)
    assert group.check() == ([0], [0])  # the other is idle


def test_a_member_without_requests_is_not_silent() -> None:
    group = Group(2)
    group.steps(40, 0.01)
    del group.since[1]
    group.steps(1000, 0.1, without=(1,))
    assert group.check() == ([], [])
    group.since[1] = group.clock.now()  # its first request since then
    group.steps(10, 0.1, without=(1,))
    assert group.check() == ([], [])


@pytest.mark.parametrize(
    ("step_s", "other_s", "num_tokens", "is_slow"),
    [
        (0.02, 0.2, 1, True),
        (0.02, 0.2, 2048, False),  # a long prompt
        (0.001, 0.03, 1, False),  # fast enough for anybody
        (0.02, 0.02, 10, False),  # its client took ten times as long
    ],
)
def test_a_member_is_slow_that_takes_longer_for_the_same(
    step_s: float, other_s: float, num_tokens: int, is_slow: bool
) -> None:
    group = Group(3)
    for _ in range(40):
        group.steps(10, step_s, without=(2,))
        group.step(2, other_s, num_tokens=num_tokens)
    assert group.check() == ([2] * is_slow, [])


def test_a_slow_member_that_nobody_waits_for_stays() -> None:
    group = Group(3)
    for _ in range(40):
        group.steps(10, 0.02, without=(2,))
        group.step(2, 0.2)
    del group.since[2]
    assert group.check() == ([], [])


def test_long_prompts_are_compared_with_long_prompts() -> None:
    group = Group(3)
    for member, step_s in ((0, 0.2), (1, 0.2), (2, 2.0)):
        for _ in range(40):
            group.step(member, step_s, num_tokens=2048)
    assert group.check() == ([2], [])


def test_failures_in_a_row_with_nothing_in_between() -> None:
    group = Group(2)
    for _ in range(2):
        group.step(0, 0.01)
        for _ in range(MAX_FAILURES - 1):
            assert group.fail(0) is None
    reason = "2 requests in a row were left unanswered"
    assert group.fail(0) == Ejection(0, EJECTION_S, reason)


def test_one_that_is_lost_again_and_again() -> None:
    group = Group(2)
    assert group.lose(0) is None
    group.pass_time(FORGIVEN_S)
    assert group.lose(0) is None
    durations = []
    for _ in range(4):
        group.pass_time(20)
        ejection = group.lose(0)
        durations.append(ejection and ejection.duration_s)
    assert durations == [EJECTION_S, 2 * EJECTION_S, 3 * EJECTION_S, 4 * EJECTION_S]


def test_ejections_have_a_limit_and_are_forgiven() -> None:
    group = Group(2)

    def eject() -> float:
        """However many times it takes."""
        while (ejection := group.lose(0)) is None:
            pass
        return ejection.duration_s

    last = 0.0
    while last < MAX_EJECTION_S:
        group.pass_time(last)
        last = eject()
    group.pass_time(last + 1000 * FORGIVEN_S)
    assert eject() == EJECTION_S


def test_the_share_of_one_that_is_back_grows() -> None:
    group = Group(2)
    group.lose(0)
    group.lose(0)
    shares = []
    for _ in range(int(EJECTION_S + RETURN_S) + 1):
        shares.append(group.shares()[0])
        group.pass_time(1.0)
    assert shares[: int(EJECTION_S)] == [0] * int(EJECTION_S)
    back = shares[int(EJECTION_S) :]
    assert 0 < back[0] < 0.2
    assert back == sorted(back)
    assert back[-1] == 1


@pytest.mark.parametrize(("count", "most"), [(1, 0), (2, 1), (3, 1), (4, 2), (5, 2), (8, 4)])
def test_at_most_half_are_ejected(count: int, most: int) -> None:
    group = Group(count)
    for member in group.health:
        group.lose(member)
        group.lose(member)
    assert list(group.shares().values()).count(0) == most


def test_members_of_other_kinds_are_not_compared() -> None:
    group = Group(2)
    group.detector.add(group.health[1], "another")
    group.lose(0)
    assert group.lose(0) is None
    for _ in range(40):
        group.step(0, 0.01)
        group.step(1, 1.0)
    assert group.check() == ([], [])


class Fleet(RuleBasedStateMachine):
    """Whatever members do: at least half of each group are in, and ejected ones come back in time."""

    members = Bundle("members")

    def __init__(self) -> None:
        super().__init__()
        self.fleet = Group(0)
        self.groups: dict[int, str] = {}
        self.ejected_until: dict[int, float] = {}
        self.num_joined = 0

    @rule(target=members, group=st.sampled_from("ab"))
    def join(self, group: str) -> int:
        member = self.num_joined
        self.num_joined += 1
        self.fleet.join(member, group)
        self.groups[member] = group
        return member

    @rule(member=consumes(members))
    def leave(self, member: int) -> None:
        self.fleet.detector.remove(self.fleet.health.pop(member))
        del self.groups[member]
        self.fleet.since.pop(member, None)
        self.ejected_until.pop(member, None)

    @rule(member=members, step_s=st.sampled_from([0.0, 0.01, 1.0]), count=st.integers(1, 30))
    def work(self, member: int, step_s: float, count: int) -> None:
        for _ in range(count):
            self.fleet.step(member, step_s)

    @rule(member=members)
    def stop(self, member: int) -> None:
        self.fleet.health[member].probe = None
        self.fleet.since.pop(member, None)

    @rule(member=members, go_wrong=st.sampled_from([Group.lose, Group.fail]))
    def go_wrong(self, member: int, go_wrong: Callable[[Group, int], Ejection | None]) -> None:
        before = self.num_ejected(self.groups[member])
        ejection = go_wrong(self.fleet, member)
        if ejection is not None:
            self.note(ejection)
            assert self.num_ejected(self.groups[member]) == before + 1

    @rule(num_prompt_tokens=st.sampled_from([0, 10**6]), kv_s=st.sampled_from([0.0, 9.0]))
    def judge(self, num_prompt_tokens: int, kv_s: float) -> None:
        since = self.fleet.since
        waiting = {one: Waiting(since[one], num_prompt_tokens, kv_s) for one in since}
        ejections, stuck = self.fleet.detector.check(waiting.get)
        for ejection in ejections:
            self.note(ejection)
        assert set(stuck) <= since.keys()

    @rule(seconds=st.sampled_from([0.1, 1.0, 4.0, 30.0]))
    def wait(self, seconds: float) -> None:
        self.fleet.pass_time(seconds)

    def note(self, ejection: Ejection) -> None:
        member, now = ejection.replica, self.fleet.clock.now()
        assert self.ejected_until.get(member, 0.0) <= now
        assert EJECTION_S <= ejection.duration_s <= MAX_EJECTION_S
        group = self.groups[member]
        assert 2 * self.num_ejected(group) <= list(self.groups.values()).count(group)
        self.ejected_until[member] = now + ejection.duration_s

    def num_ejected(self, group: str) -> int:
        shares = self.fleet.shares()
        return sum(shares[member] == 0 for member in self.groups if self.groups[member] == group)

    @invariant()
    def ejected_members_are_back_in_time(self) -> None:
        for member, share in self.fleet.shares().items():
            is_ejected = self.fleet.clock.now() < self.ejected_until.get(member, 0.0)
            assert (share == 0) == is_ejected
            assert 0 <= share <= 1


TestFleet = Fleet.TestCase
TestFleet.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
