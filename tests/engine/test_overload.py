# SPDX-License-Identifier: Apache-2.0
"""Overload of an engine: a bounded queue, deadlines, shares of keys, and priorities that age."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from harness import Harness, make_request, make_scheduler

from pagoda.engine.fair_shares import OUTPUT_WEIGHT
from pagoda.engine.precedence import AGEING_STEPS
from pagoda.engine.request import Request
from pagoda.fleet.placement import TrackedRequest
from pagoda.messages.encoder_input import encoder_input, text_input
from pagoda.messages.frontend import FinishReason, GenerateRequest, RequestRefused


def refusals_of(harness: Harness, request: GenerateRequest) -> list[str]:
    """Ids of requests that are refused when this one comes."""
    harness.tokens[request.request_id] = []
    answer = harness.core.add(request)
    own = [answer.request_id] if isinstance(answer, RequestRefused) else []
    return own + [one.request_id for one in harness.core.drain_refusals()]


def ask(
    name: str, tenant: str = "", length: int = 4, tokens: int = 4, **fields: object
) -> GenerateRequest:
    prompt = [ord(name[0]) % 90, *range(length - 1)]
    return make_request(name, prompt, max_tokens=tokens, tenant=tenant, **fields)


# ---- the queue


def test_waiting_prompts_are_bounded_by_their_tokens() -> None:
    harness = Harness(max_num_seqs=1, max_num_waiting_tokens=20)
    harness.add(ask("run"))
    assert refusals_of(harness, ask("a", length=15)) == []
    assert refusals_of(harness, ask("b", length=6)) == ["b"]
    assert refusals_of(harness, ask("c", length=5)) == []
    harness.run()
    assert harness.finished.keys() == {"run", "a", "c"}


def test_what_an_encoder_computes_counts_in_the_queue() -> None:
    harness = Harness(max_num_seqs=1, max_num_waiting_tokens=20)
    harness.add(ask("run"))
    assert refusals_of(harness, ask("waits", length=10)) == []
    for beside in (encoder_input(bytes(8), positions=15), text_input(range(15))):
        request = ask("a", encoder_input=beside)
        assert TrackedRequest(request, 0.0).num_tokens == 19
        assert refusals_of(harness, request) == ["a"]


def test_an_empty_queue_takes_a_prompt_of_any_length() -> None:
    harness = Harness(max_num_waiting_tokens=2)
    assert refusals_of(harness, ask("long", length=40)) == []


def test_refused_clients_are_told_how_long_the_queue_takes_to_drain() -> None:
    harness = Harness(max_num_seqs=1, max_num_waiting=4)
    for index in range(5):
        harness.add(ask(f"{index}", tokens=40))
    first = harness.core.add(ask("xx"))
    for _ in range(100):
        harness.tick()
    while len(harness.scheduler.requests) < 5:
        harness.add(ask(f"n{len(harness.tokens)}", tokens=40))
    later = harness.core.add(ask("yy"))
    assert isinstance(first, RequestRefused)
    assert isinstance(later, RequestRefused)
    # One answer of 40 steps of 11 ms at a time: four waiting prompts take about two seconds.
    assert first.retry_after_s == 1
    assert later.retry_after_s in (2, 3)


def test_a_key_that_fills_the_queue_gives_up_its_newest_places_to_others() -> None:
    harness = Harness(max_num_seqs=1, max_num_waiting=3)
    for name in ("h0", "h1", "h2", "h3"):
        harness.add(ask(name, "heavy"))
    assert refusals_of(harness, ask("h4", "heavy")) == ["h4"]
    assert refusals_of(harness, ask("l0", "light")) == ["h3"]
    assert refusals_of(harness, ask("l1", "light")) == ["l1"]  # light would have more than heavy
    assert refusals_of(harness, ask("m0", "other")) == ["h2"]


def test_a_request_that_was_evicted_and_aborted_in_one_turn_is_not_refused_as_well() -> None:
    harness = Harness(max_num_seqs=1, max_num_waiting=2)
    for name in ("h0", "h1", "h2"):
        harness.add(ask(name, "heavy"))
    harness.core.add(ask("l0", "light"))
    harness.core.abort("h2")
    assert harness.core.drain_refusals() == []


# ---- deadlines


def test_a_waiting_request_leaves_the_queue_at_its_deadline_without_a_step() -> None:
    harness = Harness(max_num_seqs=1)
    harness.add(ask("run", tokens=50))
    harness.add(ask("late", timeout_s=0.1))
    harness.run()
    chunk = harness.finished["late"]
    assert (chunk.finish_reason, chunk.timed_out) == (FinishReason.ERROR, True)
    assert harness.tokens["late"] == []
    assert harness.finished["run"].finish_reason is FinishReason.LENGTH


def test_a_running_request_ends_within_a_step_of_its_deadline() -> None:
    harness = Harness()
    harness.add(ask("r", tokens=50, timeout_s=0.2))
    while "r" not in harness.finished:
        assert harness.tick()
    assert harness.clock.now() == pytest.approx(0.2, abs=0.03)
    assert 0 < len(harness.tokens["r"]) < 50
    harness.run()


def test_deadlines_of_requests_that_end_in_time_wake_nobody() -> None:
    harness = Harness()
    harness.add(ask("r", timeout_s=1000))
    harness.run()
    assert harness.clock.now() < 10


# ---- shares


def served(harness: Harness, tenants: Counter[str]) -> Counter[str]:
    """Tokens of each tenant's answers until now."""
    return Counter(
        {t: sum(len(harness.tokens[f"{t}{i}"]) for i in range(n)) for t, n in tenants.items()}
    )


@pytest.mark.parametrize("weight", [1.0, 3.0])
def test_keys_that_want_more_than_there_is_share_by_their_weights(weight: float) -> None:
    harness = Harness(max_num_seqs=2, max_num_batched_tokens=16, prefix_caching=False)
    rng = random.Random(3)
    tenants = Counter({"a": 60, "b": 20})
    for tenant, count in tenants.items():
        for index in range(count):
            length, tokens = rng.randint(1, 8), rng.randint(4, 12)
            own = weight if tenant == "b" else 1.0
            request = ask(f"{tenant}{index}", tenant, length, tokens, weight=own)
            harness.add(request, steps=False)
    harness.step()
    while len(harness.finished) < 24:
        assert harness.tick()
    so_far = served(harness, tenants)
    # Neither is ahead by more than some requests.
    assert so_far["b"] / weight == pytest.approx(
        so_far["a"], abs=3 * (8 + OUTPUT_WEIGHT * 12) / weight
    )


def test_a_light_key_gets_a_slot_at_once_from_a_key_that_has_all() -> None:
    harness = Harness(max_num_seqs=4)
    for index in range(10):
        harness.add(ask(f"h{index}", "heavy", tokens=50))
    for _ in range(6):
        harness.tick()
    harness.add(ask("l", "light", tokens=2))
    began = harness.clock.now()
    while "l" not in harness.finished:
        assert harness.tick()
    assert harness.clock.now() - began < 0.1
    harness.run()
    assert len(harness.finished) == 11


def test_a_light_key_gets_a_second_slot_though_its_tag_is_behind() -> None:
    """Slots of requests that began together become free together: until then no tag is reached."""
    harness = Harness(max_num_seqs=6)
    for index in range(20):
        harness.add(ask(f"h{index}", "heavy", tokens=50), steps=False)
    harness.step()
    for _ in range(6):
        harness.tick()
    began = harness.clock.now()
    for index in range(3):
        harness.add(ask(f"l{index}", "light", tokens=2))
    while not {"l0", "l1", "l2"} <= harness.finished.keys():
        assert harness.tick()
    assert harness.clock.now() - began < 0.15
    harness.run()
    assert len(harness.finished) == 23


def test_a_long_prompt_of_one_key_leaves_room_in_its_steps_for_another_key() -> None:
    scheduler = make_scheduler(num_blocks=200, max_num_seqs=4)
    scheduler.add(make_request("long", list(range(60)), tenant="heavy"))
    plan = scheduler.schedule()
    assert plan is not None
    assert plan.num_tokens == [16]
    scheduler.add(make_request("short", [1, 2, 3], tenant="light"))
    plan = scheduler.schedule()
    assert plan is not None
    assert plan.num_tokens == [13, 3]


def test_without_keys_a_long_prompt_goes_first() -> None:
    scheduler = make_scheduler(num_blocks=200, max_num_seqs=4)
    scheduler.add(make_request("long", list(range(60))))
    scheduler.schedule()
    scheduler.add(make_request("short", [1, 2, 3]))
    plan = scheduler.schedule()
    assert plan is not None
    assert plan.num_tokens == [16]


def noted_preemptions(harness: Harness) -> list[str]:
    """Ids of requests that are preempted from now on, in order."""
    preempted: list[str] = []
    preempt = harness.scheduler.batcher.preempt

    def note(request: Request) -> None:
        preempted.append(request.request_id)
        preempt(request)

    harness.scheduler.batcher.preempt = note  # type: ignore[method-assign]
    return preempted


def test_blocks_are_taken_from_the_key_that_has_most() -> None:
    harness = Harness(max_num_seqs=3, num_blocks=18, prefix_caching=False)
    harness.add(ask("a", "light", length=8, tokens=40))
    harness.add(ask("h", "heavy", length=30, tokens=30))
    harness.add(ask("b", "other", length=4, tokens=4))
    preempted = noted_preemptions(harness)
    harness.run()
    assert preempted
    assert preempted[0] == "h"


def preemptions(heavy: str, light: str) -> Counter[str]:
    """Preemptions by request, while one client of `heavy` keeps the KV cache full and one of `light` asks a short
    question after the other."""
    harness = Harness(
        num_blocks=200,
        max_model_len=512,
        max_num_seqs=16,
        max_num_batched_tokens=64,
        prefix_caching=False,
    )
    preempted = noted_preemptions(harness)
    for index in range(12):
        harness.add(ask(f"h{index}", heavy, length=150, tokens=150), steps=False)
    harness.step()
    for index in range(60):
        harness.add(ask(f"l{index}", light, length=40, tokens=10))
        while f"l{index}" not in harness.finished:
            assert harness.tick()
    harness.run()
    assert len(harness.finished) == 72
    return Counter(preempted)


def test_a_light_key_does_not_preempt_the_same_requests_again_and_again() -> None:
    """A request is preempted for another key when it has got on by as much as it computed again."""
    alone, shared = preemptions("", "").total(), preemptions("heavy", "light")
    assert shared.total() <= 2 * alone  # it was 5.5 times as many
    assert max(shared.values()) <= 3  # from 150 tokens on, of at most 300


def test_a_long_prompt_of_a_light_key_takes_the_places_of_many_short_ones() -> None:
    harness = Harness(max_num_seqs=1, max_num_waiting_tokens=200)
    harness.add(ask("run", "heavy"))
    for index in range(50):
        assert refusals_of(harness, ask(f"h{index}", "heavy", length=4)) == []
    evicted = refusals_of(harness, ask("light", "light", length=90))
    assert evicted == [f"h{index}" for index in range(49, 26, -1)]
    assert refusals_of(harness, ask("wide", "other", length=120)) == ["wide"]


# ---- ageing


def test_a_running_request_of_a_low_priority_gets_on_while_prompts_of_others_fill_the_steps() -> (
    None
):
    harness = Harness(
        max_num_seqs=4,
        max_num_batched_tokens=16,
        num_blocks=400,
        max_model_len=512,
        prefix_caching=False,
    )
    harness.add(ask("low", priority=7, tokens=4))
    assert harness.tick()
    counted = 0
    while "low" not in harness.finished:
        while len(harness.scheduler.requests) < 3:
            counted += 1
            harness.add(ask(f"n{counted}", length=161, priority=0, tokens=1), steps=False)
        assert harness.tick()
        assert counted < 40
    harness.run()


def test_requests_of_a_low_priority_get_their_turn_while_others_keep_coming() -> None:
    """At most `AGEING_STEPS` full steps' tokens go to higher priorities before the first of them is in front."""
    harness = Harness(max_num_seqs=2, max_num_batched_tokens=16)
    harness.add(ask("first", priority=0), steps=False)
    harness.add(ask("second", priority=0), steps=False)
    harness.add(ask("low", priority=7))
    counted = 0
    while "low" not in harness.finished:
        for _ in range(2):
            counted += 1
            harness.add(ask(f"n{counted}", priority=0, tokens=8), steps=False)
        assert harness.tick()
        most = AGEING_STEPS * 16 + 2 * 2 * (4 + 8) + 8
        assert sum(map(len, harness.tokens.values())) <= most
    harness.run()
