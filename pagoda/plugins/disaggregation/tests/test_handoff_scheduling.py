# SPDX-License-Identifier: Apache-2.0
"""First tokens, handshakes, limits and room in a handoff, where other systems went wrong."""

from __future__ import annotations

import msgspec
import pytest
from harness import assert_complete, expected_tokens, make_request, reworked
from pair import CHUNKS, PROMPT, Pair, documents, is_loading, requests_of, resampled

from benchmarks.simulation.books import in_state
from pagoda.engine.request import RequestState
from pagoda.executor.base import WorkerLost
from pagoda.messages.frontend import FinishReason
from pagoda.plugins.disaggregation.messages import (
    KVBlocks,
    KVCheck,
    KVHello,
    KVRefused,
    KVRelease,
    KVSubscribe,
    KVWelcome,
)
from pagoda.plugins.sim.executor import TransferFate

# ---- D samples the first token again; P's was thrown away (ATOM #253, reversed in #690)


def test_the_first_token_is_told_once_and_not_sampled_again() -> None:
    """Another seed at the decode engine would sample another one."""
    pair = Pair(decode={"transfer_fate": lambda _: TransferFate(delay_s=5.0)})
    request = make_request("r", PROMPT)
    held = resampled(request, seed=1234)
    firsts = expected_tokens(held)[0], expected_tokens(request)[0]
    assert firsts[0] != firsts[1]
    pair.fetch(request, pair.hold(held))
    pair.run_until(lambda: pair.decode.tokens["r"] != [])
    assert is_loading(pair), "it is told while KV still travels"
    assert pair.decode.tokens["r"] == [firsts[0]]
    pair.run()
    assert len(pair.decode.tokens["r"]) == 8
    assert pair.decode.tokens["r"][0] == firsts[0]
    continued = msgspec.structs.replace(request, request_id="c", output_token_ids=[firsts[0]])
    pair.decode.add(continued)
    pair.run()
    assert pair.decode.tokens["c"] == pair.decode.tokens["r"]


@pytest.mark.parametrize("end", ["stop", "length"])
def test_a_first_token_that_ends_the_answer_ends_it(end: str) -> None:
    pair = Pair(decode={"transfer_fate": lambda _: TransferFate(delay_s=5.0)})
    request = make_request("r", PROMPT, max_tokens=1 if end == "length" else 8)
    if end == "stop":
        request = reworked(request, eos_token_ids=(expected_tokens(request)[0],))
    pair.submit(request)
    pair.run_until(lambda: "r" in pair.decode.finished)
    assert pair.clock.now() < 5
    assert pair.decode.finished["r"].finish_reason is FinishReason(end)
    assert pair.prefill.finished["r"].finish_reason is FinishReason(end)
    pair.finish(request)


# ---- busy-wait for the handshake; a handshake for every request (ATOM #253)


def test_one_handshake_is_enough_and_nobody_is_asked_twice() -> None:
    pair = Pair()
    requests = requests_of(6)
    pair.submit(*requests)
    pair.run()
    assert len(pair.told(KVHello)) == len(pair.told(KVWelcome)) == 1
    assert len(pair.told(KVSubscribe)) == len(pair.told(KVCheck)) == len(pair.told(KVRelease)) == 6


def test_who_says_hello_before_there_are_workers_is_asked_for_his_model_too() -> None:
    pair = Pair()
    exporter = pair.prefill.exporter
    for _ in range(2):  # after the second, the next one waits
        pair.prefill.core.lose_worker(WorkerLost("it was killed"))
    peers = pair.network.peers()
    peers.send(pair.prefill.address, KVHello(digest="of another model"))
    pair.run_until(lambda: bool(exporter.early))
    assert peers.next_event_at() is None
    pair.run()
    answers = []
    while (at := peers.next_event_at()) is not None:
        pair.clock.advance_to(at)
        answers += [message for _, message in peers.receive()]
    assert [type(answer) for answer in answers] == [KVRefused]
    assert not exporter.early


def test_waiting_for_the_handshake_costs_nothing() -> None:
    pair = Pair(fate=lambda it: (0.9,) if isinstance(it, KVWelcome) else (0.001,))
    pair.submit(make_request("r", PROMPT))
    pair.run_until(lambda: not pair.prefill.scheduler.requests)
    steps = 0
    while not pair.told(KVCheck):
        assert pair.tick()
        steps += 1
    assert steps < 10


# ---- max_tokens -= 1 on null (ATOM #253)


def test_a_prompt_is_computed_for_others_whatever_max_tokens_is() -> None:
    pair = Pair()
    for number, max_tokens in enumerate((None, 1, 2, 1000)):
        pair.hold(resampled(make_request(f"r{number}", PROMPT), max_tokens=max_tokens))
    pair.run()
    for number in range(4):
        assert len(pair.prefill.tokens[f"r{number}"]) == 1
        assert pair.prefill.finished[f"r{number}"].finish_reason is FinishReason.LENGTH


def test_a_request_that_has_tokens_gets_one_more() -> None:
    pair = Pair()
    request = make_request("r", PROMPT)
    so_far = expected_tokens(request)[:3]
    request = msgspec.structs.replace(request, output_token_ids=so_far)
    pair.submit(request)
    pair.finish(request)
    assert pair.prefill.tokens["r"] == expected_tokens(request)[:4]
    assert pair.num_loaded == 11


# ---- running and parked requests exceed the sequence limit (ATOM #1647)


def test_requests_whose_kv_is_on_its_way_count_as_running() -> None:
    pair = Pair(
        prefill=CHUNKS,
        decode={"max_num_seqs": 2, "transfer_fate": lambda _: TransferFate(delay_s=0.3)},
    )
    requests = requests_of(8)
    pair.submit(*requests)
    scheduler = pair.decode.scheduler
    most_loading = 0
    while pair.tick():
        loading = len(in_state(scheduler, RequestState.LOADING))
        most_loading = max(most_loading, loading)
        assert loading + len(scheduler.running) <= 2
        pair.decode.check_books()
    assert most_loading == 2
    pair.finish(*requests)


def test_engines_that_wait_for_each_others_room_get_on() -> None:
    """The first request at the decode engine waits for the prefill engine, whose room is all held for requests in
    line behind the second one, which may not ask yet. So KV that no engine has asked for gives way."""
    pair = Pair(prefill={"num_blocks": 22}, decode={"max_num_seqs": 1})
    requests = requests_of(4, max_tokens=4)
    first = requests[:2]
    behind = [msgspec.structs.replace(request, priority=1) for request in requests[2:]]
    sources = [pair.hold(request) for request in behind]
    pair.run_until(lambda: not pair.prefill.scheduler.requests)
    pair.submit(*first)
    for request, source in zip(behind, sources, strict=True):
        pair.fetch(request, source)
    pair.finish(*first, *behind)
    assert pair.told(KVRefused) == []
    assert pair.clock.now() < 5


# ---- what nobody asks for takes the room of what somebody waits for, and is computed for nobody


def test_a_prompt_that_nobody_needs_any_more_is_not_computed_on() -> None:
    pair = Pair(prefill={"max_num_batched_tokens": 4})
    pair.submit(make_request("r", PROMPT))
    pair.run_until(lambda: bool(pair.told(KVBlocks)))
    pair.decode.core.abort("r")
    pair.run()
    assert pair.prefill.finished["r"].finish_reason is FinishReason.ABORT
    assert pair.prefill.scheduler.counters.num_steps < len(PROMPT) // 4 // 2
    pair.check_nothing_left()


@pytest.mark.parametrize("loses_workers", [False, True])
def test_a_prompt_whose_kv_is_lost_is_computed_once_more_only(loses_workers: bool) -> None:
    pair = Pair(prefill=CHUNKS)
    requests = [make_request("r", PROMPT), make_request("held", documents(1)[0])]
    pair.submit(requests[0])
    pair.hold(requests[1])
    core, scheduler = pair.prefill.core, pair.prefill.scheduler
    pair.run_until(lambda: bool(pair.told(KVBlocks)))
    if loses_workers:
        core.lose_worker(WorkerLost("it was killed"))
    else:
        scheduler.preempt(scheduler.requests["r"])
    pair.run()
    assert pair.prefill.finished["r"].finish_reason is FinishReason.ABORT
    assert pair.prefill.finished["held"].finish_reason is FinishReason.LENGTH
    assert_complete(pair.decode, requests[:1])
    pair.check_nothing_left()


def test_kv_that_nobody_has_asked_for_gives_way_the_oldest_first() -> None:
    pair = Pair(
        prefill={"num_blocks": 34}, decode={"transfer_fate": lambda _: TransferFate(delay_s=10.0)}
    )
    held = requests_of(3)
    wanted, oldest, newest = (pair.hold(request) for request in held)
    pair.fetch(held[0], wanted)
    pair.run_until(lambda: not pair.prefill.scheduler.requests)
    asked_at = pair.clock.now()
    pair.prefill.add(make_request("next", PROMPT, max_tokens=2))
    pair.run_until(lambda: "next" in pair.prefill.finished)
    assert pair.clock.now() - asked_at < 1
    leases = pair.prefill.exporter.leases
    assert leases.keys() == {wanted.transfer_id, newest.transfer_id}
    assert pair.prefill.core.load().num_leases_expired == 1
    pair.fetch(held[1], oldest)
    pair.fetch(held[2], newest)
    pair.finish(*held)


def test_a_request_that_waits_for_its_turn_takes_no_kv_away() -> None:
    pair = Pair(prefill={"max_num_seqs": 1})
    source = pair.hold(make_request("held", PROMPT))
    pair.run_until(lambda: "held" in pair.prefill.finished)
    for number, document in enumerate(documents(3)):
        pair.prefill.add(make_request(f"r{number}", document))
    pair.run_until(lambda: not pair.prefill.scheduler.requests)
    assert source.transfer_id in pair.prefill.exporter.leases


def test_who_may_not_ask_yet_stops_nobody_who_need_not_ask() -> None:
    pair = Pair(prefill={"max_num_seqs": 1}, decode={"max_num_seqs": 2})
    fetched = requests_of(6)
    pair.submit(*fetched)
    plain = make_request("plain", PROMPT[:9], max_tokens=2)
    pair.decode.add(plain)
    pair.run_until(lambda: bool(pair.decode.finished))
    assert list(pair.decode.finished) == ["plain"]
    pair.finish(*fetched, plain)
    assert pair.num_loaded == 60


def test_who_may_not_ask_yet_takes_no_slot_from_lower_priorities() -> None:
    pair = Pair(prefill={"max_num_seqs": 1}, decode={"max_num_seqs": 1})
    low = make_request("low", PROMPT[:9], max_tokens=40, priority=1)
    pair.decode.add(low)
    pair.run_until(lambda: len(pair.decode.tokens["low"]) > 2)
    fetched = requests_of(3)
    pair.submit(*fetched)
    pair.finish(*fetched, low)
    assert pair.decode.scheduler.counters.num_preemptions <= 3
