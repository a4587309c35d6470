# SPDX-License-Identifier: Apache-2.0
"""Operations of the scheduler against the number of requests."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import cast

import pytest
from harness import Harness, make_request, make_scheduler
from hypothesis import given
from hypothesis import strategies as st
from operations import assert_constant, assert_linear

from pagoda.engine.plans import Demand
from pagoda.engine.request import Request
from pagoda.engine.scheduler import Scheduler
from pagoda.messages.engine_config import KVTiersConfig

SIZES = (256, 512, 1024)


def many(num_requests: int) -> Scheduler:
    scheduler = make_scheduler(
        num_blocks=4 * num_requests,
        max_num_seqs=num_requests,
        max_num_batched_tokens=4 * num_requests,
    )
    add(scheduler, num_requests)
    return scheduler


def tiered(num_requests: int, max_num_seqs: int) -> Scheduler:
    harness = Harness(
        num_blocks=4 * num_requests,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=4 * num_requests,
        kv_host_slots=num_requests,
        kv_tiers=KVTiersConfig(host_bytes=1),
    )
    return harness.scheduler


def add(scheduler: Scheduler, num_requests: int) -> None:
    for index in range(num_requests):
        scheduler.add(make_request(f"r{index}", [index % 50, index // 50, 1], max_tokens=9))


def arrivals(size: int) -> Callable[[], object]:
    scheduler = tiered(size, max_num_seqs=size)
    return lambda: add(scheduler, size)


def admissions(size: int) -> Callable[[], object]:
    scheduler = tiered(size, max_num_seqs=size)
    add(scheduler, size)
    return scheduler.schedule


def test_a_burst_of_arrivals_with_a_tier_is_linear() -> None:
    assert_linear(arrivals, SIZES)


def test_admitting_many_in_one_step_is_linear() -> None:
    assert_linear(admissions, SIZES)


def test_planning_a_step_is_linear() -> None:
    def planning(size: int) -> Callable[[], object]:
        scheduler = many(size)
        scheduler.schedule()
        return scheduler.schedule

    assert_linear(planning, SIZES)


@pytest.mark.parametrize("num_tenants", [1, 4, 10_000])
def test_planning_chunks_of_many_prompts_is_linear(num_tenants: int) -> None:
    def planning(size: int) -> Callable[[], object]:
        scheduler = make_scheduler(
            num_blocks=16 * size,
            max_num_seqs=size,
            max_num_batched_tokens=4 * size,
            max_chunk_tokens=2,
        )
        for index in range(size):
            prompt = [index % 50, index // 50, *[1] * 38]
            tenant = f"t{index % num_tenants}"
            scheduler.add(make_request(f"r{index}", prompt, tenant=tenant))
        scheduler.schedule()
        assert len(scheduler.running) == size

        def plan() -> None:
            step = scheduler.schedule()
            assert step is not None
            assert step.num_tokens == [2] * size

        return plan

    assert_linear(planning, SIZES)


@given(
    st.lists(st.tuples(*[st.integers(0, 2)] * 2, st.sampled_from([0, 1, 1, 5, 9])), max_size=12),
    st.data(),
)
def test_the_demand_behind_each_request_is_that_of_a_look_at_all(
    running: list[tuple[int, int, int]], data: st.DataObject
) -> None:
    running.sort(key=lambda it: it[0])
    requests = [
        SimpleNamespace(
            order_key=(priority, float(index), index),
            tenant=f"t{tenant}",
            charge=SimpleNamespace(weight=2.0**tenant),
            num_schedulable_tokens=wanted,
        )
        for index, (priority, tenant, wanted) in enumerate(running)
    ]
    demand = Demand(cast(list[Request], requests))
    for index, one in enumerate(requests):
        equals = [it for it in requests[index + 1 :] if it.order_key[0] == one.order_key[0]]
        prompts = [it for it in equals if it.num_schedulable_tokens > 1]
        others = [it for it in prompts if it.tenant != one.tenant]
        place = len(requests) - 1 - index
        assert demand.behind(place) == (
            sum(it.num_schedulable_tokens == 1 for it in equals),
            sum(it.num_schedulable_tokens for it in others),
            sum({it.tenant: it.charge.weight for it in others}.values()),
        )
        name = data.draw(st.sampled_from(["t0", "t1", "t2"]))
        has_prompt = any(it.tenant == name for it in prompts)
        assert demand.has_prompt_behind(place, one.order_key[0], name) == has_prompt


def test_an_arrival_costs_the_same_however_many_run_or_wait() -> None:
    def arrival(size: int) -> Callable[[], object]:
        scheduler = tiered(2 * size, max_num_seqs=size)
        add(scheduler, size)
        scheduler.schedule()
        for index in range(size):
            scheduler.add(make_request(f"w{index}", [7, index % 50, 1]))
        assert (len(scheduler.running), len(scheduler.waiting)) == (size, size)
        return lambda: scheduler.add(make_request("last", [1, 2, 3]))

    assert_constant(arrival, SIZES)


def test_making_way_for_another_key_costs_the_same_however_long_the_line_is() -> None:
    def planning(size: int) -> Callable[[], object]:
        scheduler = make_scheduler(num_blocks=600, max_num_seqs=4)
        for index in range(size):
            prompt = [index % 50, index // 50, 1]
            scheduler.add(make_request(f"h{index}", prompt, max_tokens=9, tenant="heavy"))
        scheduler.schedule()
        far = make_request("l", [1] * 40, max_tokens=9, tenant="light")
        scheduler.batcher.shares.charge(far)  # its tag is not reached yet
        for _ in range(size):
            scheduler.batcher.shares.charge(far)
        scheduler.add(far)
        assert scheduler.waiting.last is scheduler.requests["l"]
        return scheduler.batcher.schedule

    assert_constant(planning, SIZES, slack=1.5)


def test_an_abort_costs_the_same_however_many_run_or_wait() -> None:
    def abort(size: int) -> Callable[[], object]:
        scheduler = tiered(2 * size, max_num_seqs=size)
        add(scheduler, 2 * size)
        scheduler.schedule()
        return lambda: (scheduler.abort("r0"), scheduler.abort(f"r{2 * size - 1}"))

    assert_constant(abort, SIZES)
