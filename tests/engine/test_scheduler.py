# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from typing import Any

import msgspec
import pytest
from harness import Harness, assert_complete, expected_tokens, make_request, make_scheduler

from pagoda.engine.batching import SchedulerLimits
from pagoda.engine.request import OrderKey
from pagoda.engine.request_queue import MAX_CRASHES
from pagoda.engine.scheduler import Scheduler
from pagoda.messages.engine_config import EngineConfig
from pagoda.messages.frontend import FinishReason, GenerateRequest, Pooling, Work
from pagoda.messages.kv_groups import KVGroup, KVKind
from pagoda.messages.sampling_params import SamplingParams
from pagoda.messages.worker import Capabilities, StepPlan, StepResult, WorkerReady
from pagoda.messages.worker_config import WorkerConfig


@pytest.fixture
def harness() -> Harness:
    return Harness()


def plan_of(scheduler: Scheduler) -> StepPlan:
    plan = scheduler.schedule()
    assert plan is not None
    return plan


def answer(plan: StepPlan, sampling_slots: list[int], token_id: int = 7) -> StepResult:
    return StepResult(plan.step, sampling_slots, [[token_id]] * len(sampling_slots))


def test_a_pool_that_cannot_hold_one_sequence_is_refused() -> None:
    with pytest.raises(ValueError, match="cannot hold one sequence of 64 tokens"):
        make_scheduler(num_blocks=15)


def test_a_long_prompt_is_computed_in_chunks_within_the_budget() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", list(range(40))))
    counts = []
    for samples in (False, False, True):
        plan = plan_of(scheduler)
        counts.append(plan.num_tokens)
        scheduler.update(answer(plan, plan.slots if samples else []))
    assert counts == [[16], [16], [8]]
    assert plan_of(scheduler).num_tokens == [1]


@pytest.mark.parametrize(("threshold", "longest"), [(0, 1 << 62), (1, 8), (20, 20)])
def test_chunks_of_a_prompt_are_no_longer_than_the_threshold(threshold: int, longest: int) -> None:
    [limits] = _limits((96,), threshold)
    assert min(limits.max_chunk_tokens, 1 << 62) == longest
    scheduler = make_scheduler(max_chunk_tokens=min(longest, 6))
    scheduler.add(make_request("a", list(range(40))))
    scheduler.add(make_request("b", list(range(50, 90))))
    assert plan_of(scheduler).num_tokens == [6, 6]


def test_decodes_and_a_prompt_chunk_share_a_step() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", [1, 2, 3]))
    plan = plan_of(scheduler)
    scheduler.add(make_request("b", list(range(40))))
    mixed = plan_of(scheduler)
    assert mixed.num_tokens == [1, 15]
    assert [start.slot for start in mixed.starts] == [mixed.slots[1]]
    scheduler.update(answer(plan, plan.slots))


def test_without_mixed_steps_kinds_take_turns() -> None:
    scheduler = make_scheduler(mixed_steps=False)
    scheduler.add(make_request("a", [1, 2, 3]))
    plan_of(scheduler)
    scheduler.add(make_request("b", list(range(20))))
    assert [plan_of(scheduler).num_tokens for _ in range(4)] == [[1], [16], [1], [4]]


def chunk_before_decodes(num_decodes: int, priority: int, **limits: object) -> Scheduler:
    """A prompt of 40 tokens, half admitted, in front of requests that decode."""

    def order(message: GenerateRequest, start: float, arrival: int) -> OrderKey:
        is_long = message.request_id == "long"
        return (priority, start, -1) if is_long else (message.priority, start, arrival)

    scheduler = make_scheduler(max_num_seqs=40, num_blocks=200, order=order, **limits)
    for index in range(num_decodes):
        scheduler.add(make_request(f"d{index}", [index], priority=1))
    while len(scheduler.waiting):
        plan = plan_of(scheduler)
        scheduler.update(answer(plan, plan.slots))
    scheduler.add(make_request("long", list(range(40)), priority=1))
    plan = plan_of(scheduler)
    scheduler.update(
        answer(plan, [s for s, n in zip(plan.slots, plan.num_tokens, strict=True) if n == 1])
    )
    return scheduler


@pytest.mark.parametrize(
    ("num_decodes", "priority", "num_tokens"),
    [
        (3, 1, [13, 1, 1, 1]),  # a token is left to each request behind
        (14, 1, [8] + 8 * [1]),  # at least half of the budget is taken
        (14, 0, [16]),  # nothing is left to lower priorities
    ],
)
def test_a_chunk_leaves_tokens_to_requests_behind(
    num_decodes: int, priority: int, num_tokens: list[int]
) -> None:
    assert plan_of(chunk_before_decodes(num_decodes, priority)).num_tokens == num_tokens


@pytest.mark.parametrize(
    ("length", "limits", "chunks"),
    [
        (30, {"batch_multiple": 8, "max_num_batched_tokens": 20}, [[16], [14]]),
        (40, {"num_stages": 3}, [[16], [16], [8]]),
    ],
)
def test_chunks_of_a_prompt_follow_each_other(
    length: int, limits: dict[str, int], chunks: list[list[int]]
) -> None:
    """Those that do not end the prompt are cut to the batch multiple; stages need not wait for each other."""
    scheduler = make_scheduler(**limits)
    scheduler.add(make_request("a", list(range(length))))
    assert [plan_of(scheduler).num_tokens for _ in chunks] == chunks


def test_a_step_of_chunks_leaves_nothing_for_decodes() -> None:
    scheduler = chunk_before_decodes(3, priority=1, mixed_steps=False)
    assert [16] in [plan_of(scheduler).num_tokens for _ in range(2)]


def test_a_higher_priority_that_waits_comes_before_a_lower_one_that_runs() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("low", list(range(40)), priority=10))
    plan_of(scheduler)
    scheduler.add(make_request("high", [1, 2, 3], priority=-10))
    plan = plan_of(scheduler)
    assert plan.num_tokens == [3, 13]
    assert [start.token_ids for start in plan.starts] == [[1, 2, 3]]


def test_nobody_yields_to_a_request_that_still_waits_for_its_last_sample() -> None:
    scheduler = make_scheduler(max_num_seqs=1)
    scheduler.add(make_request("low", [1, 2, 3], priority=1))
    plan_of(scheduler)
    scheduler.add(make_request("high", [1, 2, 3], priority=0))
    scheduler.requests["high"].num_pending_samples = 1
    assert plan_of(scheduler).starts == []
    assert scheduler.counters.num_preemptions == 0
    scheduler.requests["high"].num_pending_samples = 0
    assert len(plan_of(scheduler).starts) == 1
    assert scheduler.counters.num_preemptions == 1


def _limits(budgets: tuple[int, ...], threshold: int = 0, **options: Any) -> list[SchedulerLimits]:
    """Limits of budgets on a backend that computes multiples of eight tokens."""
    capabilities = Capabilities(
        block_sizes=(16,),
        max_batch_tokens=100,
        max_batch_seqs=4,
        max_model_len=70,
        batch_multiple=8,
    )
    worker = WorkerReady(
        capabilities=capabilities,
        num_blocks=9,
        block_size=16,
        max_model_len=99,
        vocab_size=9,
        summary="",
        **options,
    )
    config = EngineConfig(
        worker=WorkerConfig(model="m"), max_num_seqs=9, long_prefill_token_threshold=threshold
    )
    return [
        SchedulerLimits.within(
            msgspec.structs.replace(config, max_num_batched_tokens=budget), worker
        )
        for budget in budgets
    ]


def test_a_budget_below_the_batch_multiple_is_raised_to_it() -> None:
    limits = _limits((5, 30, 1000))
    assert [one.max_num_batched_tokens for one in limits] == [8, 24, 96]
    assert {(one.max_num_seqs, one.max_model_len) for one in limits} == {(4, 70)}


def test_the_longest_whole_prompt_need_not_be_a_batch_multiple() -> None:
    """A step that was cut to a multiple would never take it."""
    groups = (KVGroup(layers=(0, 1), kind=KVKind.STEP, block_size=16),)
    limits = _limits((5, 30, 1000), kv_groups=groups)
    assert [one.max_num_batched_tokens for one in limits] == [70, 70, 96]
    assert {(one.whole_prompts, one.max_model_len) for one in limits} == {(True, 70)}


def test_a_blocked_head_is_looked_at_again_only_when_something_became_free(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scheduler = make_scheduler(num_blocks=16, max_num_batched_tokens=64)
    scheduler.add(make_request("runs", list(range(30)), max_tokens=30))
    plan = plan_of(scheduler)
    scheduler.add(make_request("waits", list(range(100, 140)), max_tokens=4))
    looks = []
    find_prefix = scheduler.kv.find_prefix
    monkeypatch.setattr(
        scheduler.kv, "find_prefix", lambda *args: looks.append(1) or find_prefix(*args)
    )
    for _ in range(10):
        following = plan_of(scheduler)
        scheduler.update(answer(plan, plan.slots))
        plan = following
    assert 1 <= len(looks) <= 2
    scheduler.abort("runs")
    assert plan_of(scheduler).starts[0].token_ids == list(range(100, 140))


def test_steps_run_ahead_of_results_and_stop_at_the_last_sample() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", [1, 2, 3], max_tokens=2))
    first = plan_of(scheduler)
    second = plan_of(scheduler)
    assert (first.num_tokens, second.num_tokens) == ([3], [1])
    assert second.starts == []
    assert scheduler.schedule() is None
    scheduler.update(answer(first, first.slots))
    (chunk,) = scheduler.update(answer(second, second.slots))
    assert chunk.finish_reason is FinishReason.LENGTH
    assert not scheduler.requests


def test_a_token_computed_past_the_end_is_dropped() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", [1, 2, 3], eos_token_ids=(7,)))
    first, second = plan_of(scheduler), plan_of(scheduler)
    (chunk,) = scheduler.update(answer(first, first.slots, token_id=7))
    assert chunk.finish_reason is FinishReason.STOP
    assert scheduler.update(answer(second, second.slots)) == []
    assert scheduler.kv.pool.num_available == 64


def test_plans_of_known_requests_carry_only_what_changed() -> None:
    encode = msgspec.msgpack.Encoder().encode
    sizes = []
    for length in (8, 48):
        scheduler = make_scheduler(max_num_batched_tokens=64)
        scheduler.add(make_request("a", list(range(length))))
        plan_of(scheduler)
        sizes.append(len(encode(plan_of(scheduler))))
    assert sizes[0] == sizes[1]


def test_a_cached_prompt_still_computes_its_last_token(harness: Harness) -> None:
    request = make_request("a", list(range(16)))
    harness.serve(request)
    harness.serve(msgspec.structs.replace(request, request_id="b"))
    assert harness.finished["a"].num_cached_tokens == 0
    assert harness.finished["b"].num_cached_tokens == 12
    assert harness.tokens["a"] == harness.tokens["b"]


def test_higher_priority_preempts_lower_and_both_complete() -> None:
    harness = Harness(num_blocks=16, max_num_seqs=1)
    low = make_request("low", list(range(20)), max_tokens=20, priority=5)
    high = make_request("high", list(range(100, 120)), max_tokens=4, priority=1)
    harness.add(low)
    harness.ticks(4)
    harness.add(high)
    while not harness.finished:
        assert harness.tick()
    assert list(harness.finished) == ["high"]
    harness.run()
    assert harness.scheduler.counters.num_preemptions == 1
    assert_complete(harness, [low, high])


def test_a_returning_request_continues_behind_its_tokens(harness: Harness) -> None:
    request = make_request("a", [3, 1, 4], max_tokens=10)
    whole = expected_tokens(request)
    harness.serve(msgspec.structs.replace(request, output_token_ids=whole[:6]))
    complete = msgspec.structs.replace(request, request_id="b", output_token_ids=whole)
    harness.add(complete, steps=False)
    assert harness.finished["b"].finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize(
    ("prompt", "message"), [([], "no tokens"), (list(range(64)), "64 tokens, the context holds 64")]
)
def test_impossible_requests_fail_alone(harness: Harness, prompt: list[int], message: str) -> None:
    harness.add(make_request("a", prompt))
    assert message in (harness.finished["a"].error or "")


def test_an_id_in_use_is_refused_and_the_first_request_goes_on(harness: Harness) -> None:
    request = make_request("a", [1, 2, 3])
    harness.add(request)
    (chunk,) = harness.core.add(request)  # type: ignore[misc]
    assert "already running" in (chunk.error or "")
    harness.run()
    assert harness.tokens["a"] == expected_tokens(request)


def test_stop_tokens_wait_for_min_tokens(harness: Harness) -> None:
    request = make_request("a", [5, 6], max_tokens=30)
    free = expected_tokens(request)
    sampling = SamplingParams(
        seed=request.work.sampling.seed,
        max_tokens=30,
        min_tokens=3,
        stop_token_ids=(free[0], free[5]),
    )
    request = msgspec.structs.replace(request, work=Work(sampling))
    harness.add(request)
    harness.run()
    output = expected_tokens(request)
    assert harness.tokens["a"] == output
    assert len(output) >= 3
    if harness.finished["a"].finish_reason is FinishReason.STOP:
        assert harness.finished["a"].stop_reason == output[-1]


def test_answers_end_at_the_context(harness: Harness) -> None:
    request = make_request("a", list(range(60)), max_tokens=50)
    harness.add(request)
    harness.run()
    assert len(harness.tokens["a"]) == 4
    assert harness.finished["a"].finish_reason is FinishReason.LENGTH


def test_a_result_out_of_order_is_refused() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", [1, 2, 3]))
    plan = plan_of(scheduler)
    with pytest.raises(RuntimeError, match="not the next one"):
        scheduler.update(StepResult(plan.step + 1, [], []))


@pytest.mark.parametrize("field", ["", "allowed_token_ids"])
def test_an_error_in_one_slot_fails_that_request_alone(field: str) -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", [1, 2, 3]))
    scheduler.add(make_request("b", [4, 5, 6]))
    plan = plan_of(scheduler)
    bad, good = plan.slots
    blamed = {bad: field} if field else {}
    result = StepResult(plan.step, [good], [[9]], errors={bad: "NaN"}, blamed_fields=blamed)
    chunks = scheduler.update(result)
    assert [(c.request_id, c.finish_reason, c.error, c.blamed_field) for c in chunks] == [
        ("a", FinishReason.ERROR, "NaN", field),
        ("b", None, None, ""),
    ]


def test_several_tokens_of_a_step_end_with_the_answer() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", [1, 2, 3], max_tokens=3))
    scheduler.add(make_request("b", [4, 5, 6], max_tokens=9))
    plan = plan_of(scheduler)
    chunks = scheduler.update(StepResult(plan.step, plan.slots, [[7, 8, 9, 10], [11, 12]]))
    assert [(c.request_id, c.token_ids, c.finish_reason) for c in chunks] == [
        ("a", [7, 8, 9], FinishReason.LENGTH),
        ("b", [11, 12], None),
    ]
    with pytest.raises(RuntimeError, match="lacks slot"):
        scheduler.update(StepResult((plan := plan_of(scheduler)).step, plan.slots, [[]]))


@pytest.mark.parametrize("deadly_chunk", [0, 1, 2])
def test_a_request_that_kills_workers_is_isolated_then_failed(deadly_chunk: int) -> None:
    scheduler = make_scheduler(max_num_batched_tokens=10)
    names = ("good", "poison", "better")
    for name in names:
        scheduler.add(make_request(name, [ord(name[0]), *range(24)], max_tokens=3))
    chunks, num_deaths = [], 0
    for _ in range(200):
        plan = scheduler.schedule()
        if plan is None:
            break
        shares = scheduler.in_flight[-1].scheduled
        if any(
            share.request.request_id == "poison"
            and share.request.num_scheduled_tokens > 10 * deadly_chunk
            for share in shares
        ):
            num_deaths += 1
            chunks += scheduler.recover()
        else:
            chunks += scheduler.update(answer(plan, [s.slot for s in shares if s.samples]))
    ends = {c.request_id: c.finish_reason for c in chunks if c.finish_reason is not None}
    assert ends == {
        "poison": FinishReason.ERROR,
        "good": FinishReason.LENGTH,
        "better": FinishReason.LENGTH,
    }
    assert num_deaths <= MAX_CRASHES
    assert not scheduler.requests
    assert not scheduler.quarantine.requests


def test_crash_counts_start_anew_once_a_request_gets_further() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=64)
    scheduler.add(make_request("a", list(range(8)), max_tokens=50))
    for _ in range(3 * MAX_CRASHES):
        plan_of(scheduler)
        assert scheduler.recover() == []
        for _ in range(2):
            plan = plan_of(scheduler)
            (chunk,) = scheduler.update(answer(plan, plan.slots))
            assert chunk.finish_reason is None


def decoding(num_requests: int, **limits: object) -> Scheduler:
    """Requests whose prompts are computed, and whose first token is known."""
    scheduler = make_scheduler(max_num_seqs=8, max_num_batched_tokens=64, **limits)
    for index in range(num_requests):
        scheduler.add(make_request(f"r{index}", [index, 1, 2], max_tokens=20))
    plan = plan_of(scheduler)
    scheduler.update(answer(plan, plan.slots))
    return scheduler


def test_decoding_requests_are_spread_over_the_stages() -> None:
    scheduler = decoding(7, num_stages=3)
    plans = [plan_of(scheduler) for _ in range(3)]
    assert [len(plan.slots) for plan in plans] == [3, 3, 1]
    assert scheduler.schedule() is None  # every request waits for its sample
    assert sorted(slot for plan in plans for slot in plan.slots) == list(range(7))


def test_stages_that_do_not_sample_are_told_what_was_sampled() -> None:
    scheduler = decoding(2, num_stages=2)
    first, second = plan_of(scheduler), plan_of(scheduler)
    assert (first.new_tokens, second.new_tokens) == ([(0, 7)], [(1, 7)])
    scheduler.update(answer(first, first.slots, token_id=9))
    assert plan_of(scheduler).new_tokens == [(0, 9)]


def test_a_single_stage_is_told_nothing_and_runs_ahead() -> None:
    scheduler = decoding(2)
    plans = [plan_of(scheduler) for _ in range(3)]
    assert [plan.slots for plan in plans] == [[0, 1]] * 3
    assert not any(plan.new_tokens for plan in plans)


def test_single_tokens_of_prompts_are_not_held_back_by_stages() -> None:
    scheduler = make_scheduler(num_stages=2)
    for index in range(4):
        scheduler.add(make_request(f"r{index}", [index]))
    assert plan_of(scheduler).num_tokens == [1, 1, 1, 1]


def test_a_preempted_request_comes_back_with_all_its_tokens() -> None:
    scheduler = decoding(1, num_stages=2)
    scheduler.preempt(next(iter(scheduler.requests.values())))
    plan = plan_of(scheduler)
    assert [start.token_ids for start in plan.starts] == [[0, 1, 2, 7]]
    assert plan.new_tokens == []


def test_stages_work_at_the_same_time() -> None:
    seconds = {}
    for num_stages in (1, 2, 4):
        harness = Harness(max_num_seqs=16, num_blocks=512, num_stages=num_stages)
        requests = [make_request(f"r{i}", [i, 1, 2], max_tokens=40) for i in range(16)]
        harness.serve(*requests)
        seconds[num_stages] = harness.clock.now()
    assert seconds[2] < 0.75 * seconds[1]
    assert seconds[4] < 0.6 * seconds[1]


def test_no_more_steps_hold_decoding_requests_than_there_are_stages() -> None:
    """A part left over would otherwise go round for ever, at the price of a whole step."""
    scheduler = decoding(1, num_stages=2)
    plan = plan_of(scheduler)
    for index in range(1, 7):
        scheduler.add(make_request(f"r{index}", [index, 1, 2], max_tokens=20))
    prompts = plan_of(scheduler)
    scheduler.update(answer(plan, plan.slots))
    assert plan_of(scheduler).slots == plan.slots
    scheduler.update(answer(prompts, prompts.slots))
    assert len(plan_of(scheduler).slots) == 4
    assert scheduler.schedule() is None


def test_the_first_chunk_with_tokens_says_how_long_the_request_waited() -> None:
    harness = Harness(max_num_seqs=1)
    for name in ("first", "second"):
        harness.add(make_request(name, [1, 2, 3], max_tokens=3))
    chunks: dict[str, list[float | None]] = {"first": [], "second": []}
    ended_at = 0.0
    while harness.scheduler.requests:
        harness.clock.advance_to(harness.core.next_wakeup() or 0.0)
        for chunk in harness.step():
            chunks[chunk.request_id].append(chunk.queue_time_s)
            if chunk.request_id == "first":
                ended_at = harness.clock.now()
    assert chunks["first"] == [0.0, None, None]
    assert chunks["second"] == [pytest.approx(ended_at), None, None]


def test_waiting_after_a_preemption_is_not_waiting_for_the_first_step() -> None:
    harness = Harness(num_blocks=16, max_model_len=64)
    requests = [make_request(f"r{i}", [i] * 16, max_tokens=40) for i in range(2)]
    told: dict[str, list[float]] = {request.request_id: [] for request in requests}
    for request in requests:
        harness.add(request)
    while harness.scheduler.requests:
        harness.clock.advance_to(harness.core.next_wakeup() or 0.0)
        for chunk in harness.step():
            told[chunk.request_id] += [] if chunk.queue_time_s is None else [chunk.queue_time_s]
    assert harness.scheduler.counters.num_preemptions > 0
    assert [len(times) for times in told.values()] == [1, 1]


def test_only_requests_of_the_steps_in_flight_are_in_quarantine() -> None:
    """A request that waits while the worker crashes again and again is not tried alone."""
    scheduler = make_scheduler(max_num_seqs=2)
    for name in ("a", "b", "waits", "waits too"):
        scheduler.add(make_request(name, [ord(name[0]), len(name)]))
    for _ in range(2):
        plan_of(scheduler)
        assert scheduler.recover() == []
    counts = {name: request.crash_count for name, request in scheduler.requests.items()}
    assert counts == {"a": 2, "b": 2, "waits": 0, "waits too": 0}
    assert {request.request_id for request in scheduler.quarantine.requests} == {"a", "b"}
    alone = [plan_of(scheduler) for _ in range(2)]
    assert [start.request_id for plan in alone for start in plan.starts] == ["a"]


@pytest.mark.parametrize("num_stages", [1, 2])
@pytest.mark.parametrize("budget", [8, 512])
def test_several_answers_to_one_prompt_compute_it_once(budget: int, num_stages: int) -> None:
    """Each answer computes what is left of the last block; all find the blocks in front of it."""
    harness = Harness(
        num_blocks=128, max_num_batched_tokens=budget, num_stages=num_stages, max_num_seqs=8
    )
    prompt = list(range(42))
    requests = [make_request(f"n{i}", prompt, max_tokens=4) for i in range(6)]
    harness.serve(*requests)
    # The last token of an answer is not computed.
    computed = harness.core.load().steps.num_tokens - 6 * 3
    assert computed == 42 + 5 * 2
    assert harness.core.load().num_prefix_hit_tokens == 5 * 40


def test_a_request_does_not_wait_for_a_small_part_of_its_prompt() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=64)
    scheduler.add(make_request("a", [0] * 8 + [1] * 20))
    scheduler.add(make_request("b", [0] * 8 + [2] * 20))
    scheduler.add(make_request("c", [0] * 8 + [1] * 10))
    plan = scheduler.schedule()
    assert plan is not None
    assert plan.num_tokens == [28, 28]  # c shares 8 of 18 tokens with b, and 16 with a
    assert [request.request_id for request in scheduler.waiting] == ["c"]


def test_followers_go_on_when_their_leader_is_aborted() -> None:
    harness = Harness(num_blocks=128, max_num_batched_tokens=8)
    requests = [make_request(f"n{i}", list(range(40)), max_tokens=4) for i in range(3)]
    for request in requests:
        harness.add(request)
    harness.ticks(2)
    harness.core.abort("n0")
    harness.run()
    assert_complete(harness, requests[1:], 64)


def test_urgent_requests_do_not_wait_for_others() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=64)
    scheduler.add(make_request("slow", [0] * 24, priority=1))
    first = scheduler.schedule()
    scheduler.add(make_request("urgent", [0] * 24))
    second = scheduler.schedule()
    assert first is not None
    assert second is not None
    assert second.num_tokens[0] == 24


def test_without_hidden_states_there_are_no_embeddings() -> None:
    scheduler = make_scheduler(gives_hidden=False)
    wanted = make_request("a", [1, 2, 3], pooling=Pooling.LAST)
    (chunk,) = scheduler.add(wanted)
    assert chunk.finish_reason is FinishReason.ERROR
    assert chunk.error == (
        "The server's backend gives tokens alone, and no embeddings; choose another --backend."
    )
    assert scheduler.add(make_request("b", [1, 2, 3])) == []
