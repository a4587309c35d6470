# SPDX-License-Identifier: Apache-2.0
"""The policy of a planner: whatever its figures are, and over whole days."""

from __future__ import annotations

import math
from collections import Counter

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagoda.messages.worker_config import Role
from pagoda.plugins.plan.capacity import hosts_needed, waiting_tail
from pagoda.plugins.plan.figures import (
    DAY_S,
    Capacity,
    Figures,
    HostFigures,
    Memory,
    PlanConfig,
    PoolFigures,
    Slo,
)
from pagoda.plugins.plan.policy import decide, foretold, role_changes

CAPACITY = Capacity(step_s=0.025, token_s=2.4e-4, max_num_batched_tokens=512)
CONFIG = PlanConfig(capacity=CAPACITY, slo=Slo(ttft_s=2.0), max_hosts=40)
P, D, BOTH, NONE, STANDBY = Role.PREFILL, Role.DECODE, Role.BOTH, Role.NONE, Role.STANDBY

hosts = st.lists(
    st.builds(
        HostFigures,
        id=st.text("abcdef", min_size=1, max_size=3),
        role=st.sampled_from(list(Role)),
        roles=st.sampled_from([(), (P, D, BOTH, STANDBY), (NONE, STANDBY)]),
        num_requests=st.integers(0, 300),
    ),
    max_size=12,
    unique_by=lambda host: host.id,
).map(tuple)
pools = st.builds(
    PoolFigures,
    name=st.sampled_from(["a", "b"]),
    window_s=st.floats(1, 600),
    num_arrivals=st.integers(0, 100_000),
    prompt_tokens=st.floats(0, 1e6),
    output_tokens=st.floats(0, 1e6),
    num_waiting=st.integers(0, 100_000),
    late_share=st.floats(0, 1),
    slow_share=st.floats(0, 1),
    hosts=hosts,
)
figures = st.builds(
    Figures,
    at_s=st.floats(0, 1e10),
    pools=st.lists(pools, max_size=2, unique_by=lambda pool: pool.name).map(tuple),
)
configs = st.builds(
    PlanConfig,
    capacity=st.just(CAPACITY),
    min_hosts=st.integers(0, 20),
    max_hosts=st.integers(20, 60),
    hold_s=st.floats(0, 3600),
    lead_s=st.floats(0, 7200),
)


@given(config=configs, history=st.lists(figures, min_size=1, max_size=6))
def test_every_plan_is_within_its_limits_and_the_same_again(
    config: PlanConfig, history: list[Figures]
) -> None:
    memory = again = Memory()
    for at in history:
        plan, memory = decide(config, memory, at)
        twin, again = decide(config, again, at)
        assert msgspec.json.encode(plan) == msgspec.json.encode(twin)
        through = msgspec.json.decode(msgspec.json.encode(memory), type=Memory)
        assert through == memory
        for pool in plan.pools:
            assert config.min_hosts <= sum(pool.hosts.values()) <= config.max_hosts
            assert all(count >= 1 for count in pool.hosts.values())
            assert all(pool.need[role] >= 1 for role in pool.hosts)


@given(hosts=hosts, prefill=st.integers(1, 8), decode=st.integers(1, 8))
def test_role_changes_take_nothing_away_that_is_wanted(
    hosts: tuple[HostFigures, ...], prefill: int, decode: int
) -> None:
    wanted = {P: prefill, D: decode}
    before = Counter(host.role for host in hosts)
    changes = list(role_changes(hosts, wanted))
    by_id = {host.id: host for host in hosts}
    after = Counter({host.id: host.role for host in hosts})
    roles = {**{host.id: host.role for host in hosts}, **{c.host_id: c.role for c in changes}}
    after = Counter(roles.values())
    assert len({change.host_id for change in changes}) == len(changes)
    for change in changes:
        assert change.role in by_id[change.host_id].roles
    for role, count in wanted.items():
        assert after[role] >= min(before[role], count)
        assert abs(after[role] - count) <= abs(before[role] - count)
    moved = [c for c in changes if c.role is not STANDBY and by_id[c.host_id].role in wanted]
    assert len(moved) <= 1


@given(
    role=st.sampled_from([NONE, P, D]),
    rate=st.floats(0.01, 50),
    more=st.floats(1, 3),
    prompt=st.floats(1, 4000),
    output=st.floats(1, 1000),
)
def test_more_requests_never_need_fewer_hosts(
    role: Role, rate: float, more: float, prompt: float, output: float
) -> None:
    few, many = (
        hosts_needed(role, one, prompt, output, CAPACITY, CONFIG.slo, 64)
        for one in (rate, rate * more)
    )
    assert 1 <= few <= many <= 65


@pytest.mark.parametrize(
    ("servers", "load", "time", "expected"),
    [
        (1, 0.5, 0.0, 0.5),  # the share of time that the only server is busy
        (1, 0.5, 2.0, 0.5 * math.exp(-1.0)),
        (2, 1.0, 0.0, 1 / 3),
        (5, 4.0, 0.0, 0.5541),  # of the tables of Erlang C
        (3, 3.0, 1.0, 1.0),
    ],
)
def test_waits_are_those_of_erlang(servers: int, load: float, time: float, expected: float) -> None:
    assert waiting_tail(servers, load, time) == pytest.approx(expected, rel=1e-3)


def pool(rate: float, at: Role = NONE, **fields: object) -> PoolFigures:
    return PoolFigures(
        name="a",
        window_s=30.0,
        num_arrivals=round(rate * 30),
        prompt_tokens=1500.0,
        output_tokens=250.0,
        hosts=(HostFigures(id="h", role=at),),
        **fields,  # type: ignore[arg-type]
    )


def sizes(rates: list[float], memory: Memory | None = None, start_s: float = 0.0) -> list[int]:
    """The numbers of hosts that are planned for rates, thirty seconds apart."""
    memory, found = memory or Memory(), []
    for index, rate in enumerate(rates):
        plan, memory = decide(
            CONFIG, memory, Figures(at_s=start_s + 30.0 * index, pools=(pool(rate),))
        )
        found.append(sum(plan.pools[0].hosts.values()))
    return found


def test_a_pool_grows_at_once_and_shrinks_when_fewer_hosts_have_done_for_a_while() -> None:
    found = sizes([2.0] * 10 + [8.0] * 10 + [2.0] * 30)
    assert found[10] > found[9]
    assert found[20] == found[19]
    assert found[-1] == found[9]
    shrinking = found[20:]
    assert shrinking.index(found[-1]) * 30 >= CONFIG.hold_s
    assert shrinking == sorted(shrinking, reverse=True)


def test_a_rate_that_goes_up_and_down_a_little_changes_nothing() -> None:
    found = sizes([5.0] * 20 + [5.5, 4.6] * 40)
    assert len(set(found[20:])) == 1


def test_what_came_yesterday_is_there_before_it_comes() -> None:
    memory = Memory()
    rate_of = lambda at_s: 2.0 if at_s % DAY_S < DAY_S / 2 else 9.0  # noqa: E731
    for index in range(DAY_S // 300):
        at_s = 300.0 * index
        _, memory = decide(CONFIG, memory, Figures(at_s=at_s, pools=(pool(rate_of(at_s)),)))
    before_noon = DAY_S * 1.5 - 600
    _, memory = decide(CONFIG, memory, Figures(at_s=before_noon, pools=(pool(2.0),)))
    of_pool = msgspec.structs.replace(memory.pools["a"], rate=2.0)
    assert foretold(of_pool, before_noon, 60.0) < 6
    assert foretold(of_pool, before_noon, 1200.0) > 8
    assert foretold(of_pool, DAY_S * 1.2, 60.0) == pytest.approx(2.0, abs=0.1)


def test_late_answers_make_a_pool_larger_than_its_rate_says() -> None:
    memory, found = Memory(), []
    for index in range(60):
        late = 0.2 if index >= 20 else 0.0
        at = Figures(at_s=30.0 * index, pools=(pool(5.0, late_share=late),))
        plan, memory = decide(CONFIG, memory, at)
        found.append(sum(plan.pools[0].hosts.values()))
    assert found[-1] > found[19]
    assert memory.pools["a"].stress == 2.0


def test_a_window_in_which_no_answer_ends_says_nothing_of_lengths() -> None:
    _, memory = decide(CONFIG, Memory(), Figures(at_s=0.0, pools=(pool(8.0),)))
    none = msgspec.structs.replace(pool(8.0), prompt_tokens=0.0, output_tokens=0.0)
    _, after = decide(CONFIG, memory, Figures(at_s=30.0, pools=(none,)))
    assert after.pools["a"].prompt_tokens == memory.pools["a"].prompt_tokens == 1500.0


def test_prefill_and_decode_are_counted_apart() -> None:
    plan, _ = decide(CONFIG, Memory(), Figures(at_s=0.0, pools=(pool(8.0, P),)))
    [one] = plan.pools
    assert list(one.hosts) == [P, D]
    assert one.hosts[P] > one.hosts[D] > 0
    assert one.is_enough
    alone, _ = decide(CONFIG, Memory(), Figures(at_s=0.0, pools=(pool(8.0, D),)))
    whole, _ = decide(CONFIG, Memory(), Figures(at_s=0.0, pools=(pool(8.0, NONE),)))
    assert (
        alone.pools[0].hosts[D] == whole.pools[0].hosts[NONE] > one.hosts[D]
    )  # nobody else has prompts


def test_an_objective_that_no_number_of_hosts_keeps_is_said() -> None:
    slow = PlanConfig(capacity=CAPACITY, slo=Slo(tpot_s=0.02), max_hosts=7)
    plan, _ = decide(slow, Memory(), Figures(at_s=0.0, pools=(pool(1.0),)))
    assert (plan.pools[0].is_enough, sum(plan.pools[0].hosts.values())) == (False, 7)
