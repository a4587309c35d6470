"""What went wrong in other systems, one test each, as far as the two engines can get it wrong.

What transports, routers and the HTTP API can is tested with them.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence

import msgspec
import pytest
from harness import assert_complete, expected_tokens, in_state, make_request
from pair import LEASE_S, NO_KEYS, Engine, Message, Pair

from pagoda.engine.request import RequestState
from pagoda.executor.base import WorkerLost
from pagoda.executor.sim import TransferFate
from pagoda.ipc.codec import Codec
from pagoda.messages.frontend import FinishReason, KVSource
from pagoda.messages.transfers import RemoteBlocks, Transfer, TransferEnd
from pagoda.messages.worker_config import Role
from pagoda.pd.connector import Failed
from pagoda.pd.messages import (
    DecodeMessage,
    KVBlocks,
    KVCheck,
    KVCheckResult,
    KVDropped,
    KVHello,
    KVPrefilled,
    KVRefused,
    KVRelease,
    KVRenewed,
    KVSubscribe,
    KVWelcome,
)
from pagoda.pd.prefill_peers import SILENCE_S
from pagoda.pd.transfer_tokens import TransferTokens

PROMPT = [token % 50 for token in range(3, 45)]
CHUNKS = {"max_num_batched_tokens": 12}
"""The prompt is computed in four steps."""


def documents(count: int) -> list[list[int]]:
    return [
        [(token * (number + 2) + number) % 50 for token in range(40)] for number in range(count)
    ]


def is_loading(pair: Pair) -> bool:
    return bool(in_state(pair.decode.harness.scheduler, RequestState.LOADING))


def is_awaiting(pair: Pair) -> bool:
    return bool(in_state(pair.decode.harness.scheduler, RequestState.AWAITING_KV))


def has_leases(pair: Pair) -> bool:
    return pair.prefill.exporter.leases.num_leases > 0


# ---- D aborts, P holds blocks for ever (vllm#46283, #41269)


@pytest.mark.parametrize("state", [is_awaiting, is_loading])
def test_decode_aborts_and_prefill_lets_go_at_once(state) -> None:  # type: ignore[no-untyped-def]
    pair = Pair(prefill=CHUNKS)
    pair.submit(make_request("r", PROMPT))
    pair.run_until(lambda: state(pair))
    pair.decode.harness.core.abort("r")
    aborted_at = pair.clock.now()
    pair.run_until(lambda: not has_leases(pair))
    assert pair.clock.now() - aborted_at < 0.1
    pair.run()
    pair.check_nothing_left()


@pytest.mark.parametrize("why", ["too long", "already complete", "no room", "twice"])
def test_decode_refuses_a_request_and_prefill_lets_go_at_once(why: str) -> None:
    pair = Pair()
    pair.submit(make_request("before", documents(1)[0]))
    pair.run()
    request = make_request("r", PROMPT)
    source = pair.hold(request)
    pair.run_until(lambda: not pair.prefill.harness.scheduler.has_requests())
    core = pair.decode.harness.core
    refused = msgspec.structs.replace(request, kv_source=source)
    match why:
        case "too long":
            refused = msgspec.structs.replace(refused, prompt_token_ids=[1] * 64)
        case "already complete":
            whole = expected_tokens(request)
            refused = msgspec.structs.replace(refused, output_token_ids=whole)
        case "no room":
            core._config = msgspec.structs.replace(core._config, max_num_waiting=-8)
        case "twice":
            pair.decode.add(request)
    core.add(refused)
    refused_at = pair.clock.now()
    pair.run_until(lambda: not has_leases(pair))
    assert pair.clock.now() - refused_at < 0.1
    pair.run()
    pair.check_nothing_left()


def test_decode_needs_nothing_and_prefill_lets_go_at_once() -> None:
    pair = Pair()
    pair.submit(make_request("before", PROMPT))
    pair.run()
    pair.submit(make_request("again", PROMPT))
    pair.run_until(lambda: not has_leases(pair))
    assert pair.clock.now() < 5
    pair.run()
    assert len(pair.told(KVSubscribe)) == len(pair.told(KVRelease)) == 2
    assert pair.decode.harness.core.load().tiers[0].num_loaded == 10, "those of the first"
    assert pair.decode.harness.tokens["again"] == expected_tokens(make_request("again", PROMPT))


def test_nobody_fetches_and_the_lease_runs_out() -> None:
    pair = Pair()
    pair.hold(make_request("r", PROMPT))
    pair.run_until(lambda: not pair.prefill.harness.scheduler.has_requests())
    finished_at = pair.clock.now()
    pair.run_until(lambda: not has_leases(pair))
    assert pair.clock.now() - finished_at == pytest.approx(LEASE_S)
    pair.check_nothing_left()


# ---- P frees at once, the transfer in flight then corrupts the next request (sglang#35049)


def test_what_is_freed_while_it_is_read_is_not_used() -> None:
    """The lease ends behind the reader's back, and its blocks are written again; all he has is the verdict."""
    pair = Pair(
        fate=lambda message: () if isinstance(message, KVDropped) else (0.001,),
        prefill={"num_blocks": 16},
        decode={"transfer_fate": lambda _: TransferFate(delay_s=1.0)},
    )
    request = make_request("r", PROMPT)
    source = pair.submit(request)
    pair.run_until(lambda: bool(pair.decode.remote.reads) and bool(pair.told(KVPrefilled)))
    pair.prefill.exporter.drop(source.transfer_id, "somebody made a mistake")
    for number, document in enumerate(documents(2)):
        pair.prefill.add(make_request(f"next{number}", document))
    pair.run()
    assert [verdict.is_valid for verdict in pair.told(KVCheckResult)] == [False]
    assert_complete(pair.decode.harness, [request])
    assert pair.decode.harness.core.load().tiers[0].num_loaded == 0
    pair.check_nothing_left()


# ---- late or duplicate "done" trips an assertion; one disconnect kills the engine (vllm#46240, #43226, #49089)


def test_done_may_come_late_and_twice() -> None:
    pair = Pair(fate=lambda it: (0.5, 3.0, 40.0) if isinstance(it, KVRelease) else (0.001,))
    requests = [make_request(f"r{n}", document) for n, document in enumerate(documents(3))]
    for request in requests:
        pair.submit(request)
    pair.run()
    assert_complete(pair.decode.harness, requests)
    pair.check_nothing_left()


def test_ends_of_transfers_may_come_late_and_twice() -> None:
    pair = Pair()
    request = make_request("r", PROMPT)
    pair.submit(request)
    pair.run_until(lambda: bool(pair.told(KVCheckResult)))
    for number in range(20):
        pair.decode.harness.tiers.transfer_ended(TransferEnd(number, 0))
    pair.run()
    assert_complete(pair.decode.harness, [request])
    pair.check_nothing_left()


def test_a_lost_connection_costs_no_answer() -> None:
    pair = Pair(prefill=CHUNKS)
    requests = [make_request(f"r{n}", document) for n, document in enumerate(documents(4))]
    for request in requests:
        pair.submit(request)
        pair.tick()
        pair.network.cut(pair.prefill.address)
    pair.run()
    assert_complete(pair.decode.harness, requests)
    pair.check_nothing_left()


# ---- P dies during the handshake, D waits for ever (vllm#26171, #40364)


@pytest.mark.parametrize("is_silent", [False, True])
def test_prefill_dies_during_the_handshake(is_silent: bool) -> None:
    def fate(message: Message) -> Sequence[float]:
        return () if is_silent and isinstance(message, KVWelcome | KVRenewed) else (0.001,)

    pair = Pair(fate=fate, prefill=CHUNKS)
    request = make_request("r", PROMPT)
    source = pair.hold(request)
    pair.fetch(request, source)
    assert isinstance(pair.sent[0], KVHello)
    if is_silent:
        pair.prefill.kill()
        pair.network.listener(pair.prefill.address)  # somebody takes all, and says nothing
    else:
        pair.prefill.kill()
    begun_at = pair.clock.now()
    pair.run_until(lambda: "r" in pair.decode.harness.finished)
    assert pair.clock.now() - begun_at < SILENCE_S + 2.5
    assert_complete(pair.decode.harness, [request])


# ---- a failed receive answers with corrupt tokens (vllm#52234)


@pytest.mark.parametrize("fails", [False, True])
def test_what_is_not_read_whole_is_not_used(fails: bool) -> None:
    def fate(transfer: Transfer) -> TransferFate:
        is_remote = isinstance(transfer.source, RemoteBlocks)
        return TransferFate(failed=(1,) if is_remote else ())

    pair = Pair(decode={"transfer_fate": fate}, fails=fails)
    request = make_request("r", PROMPT)
    pair.submit(request)
    pair.run()
    last = pair.decode.harness.finished["r"]
    if fails:
        assert last.finish_reason is FinishReason.ERROR
        assert last.error == (
            "KV that was found for this request could not be loaded: it could not be read (it was not to be)."
        )
    else:
        assert_complete(pair.decode.harness, [request])
    assert pair.decode.harness.core.load().tiers[0].num_failed == 10
    pair.check_nothing_left()


def test_what_cannot_be_asked_for_fails_the_request_where_it_is_to() -> None:
    pair = Pair(fails=True)
    request = make_request("r", PROMPT)
    address = "tcp://nobody:1"
    transfer_id = TransferTokens(NO_KEYS).new_id(address, "e")
    pair.fetch(request, KVSource(address=address, engine_id="e", transfer_id=transfer_id))
    pair.run()
    error = pair.decode.harness.finished["r"].error
    assert error == "KV of this request could not be fetched: nobody is there."


# ---- P restarts, D crashes on the stale connection (vllm#49238)


def test_a_prefill_engine_started_anew_serves_the_next_request() -> None:
    pair = Pair()
    first, lost, next_one = (
        make_request(f"r{n}", document) for n, document in enumerate(documents(3))
    )
    pair.submit(first)
    pair.run()
    source = pair.hold(lost)
    pair.prefill.kill()
    pair.prefill = Engine(pair, Role.PREFILL, pair.prefill.address)
    pair.step()
    pair.fetch(lost, source)
    pair.submit(next_one)
    pair.run()
    assert_complete(pair.decode.harness, [first, lost, next_one])
    assert len(pair.told(KVPrefilled)) == 2, "of the first and the last"
    pair.check_nothing_left()


def test_workers_started_anew_are_other_peers() -> None:
    pair = Pair(prefill=CHUNKS)
    first, second = (make_request(f"r{n}", document) for n, document in enumerate(documents(2)))
    pair.submit(first)
    pair.run()
    exporter = pair.prefill.exporter
    before = exporter.peer
    pair.prefill.harness.core.lose_worker(WorkerLost("it was killed"))
    pair.run()
    assert exporter.peer not in (None, before)
    pair.submit(second)
    pair.run()
    assert_complete(pair.decode.harness, [first, second])
    assert {blocks.peer_id for blocks in pair.told(KVBlocks)} == {
        f"{exporter.engine_id}-1",
        f"{exporter.engine_id}-2",
    }
    assert pair.decode.harness.core.load().tiers[0].num_failed == 0


# ---- P rejects an over-long prompt, D generates garbage (sglang#30233)


def test_a_prompt_that_prefill_refuses_has_no_source() -> None:
    pair = Pair()
    request = make_request("r", [1] * 64, holds_kv=True)
    (answer,) = pair.prefill.add(request)
    assert answer.kv_source is None
    assert answer.finish_reason is FinishReason.ERROR
    assert "the context holds 64" in (answer.error or "")
    assert not has_leases(pair)


def test_a_request_that_prefill_fails_is_computed_by_decode() -> None:
    pair = Pair(prefill=CHUNKS)
    request = make_request("r", PROMPT)
    pair.submit(request)
    pair.run_until(lambda: is_loading(pair))
    pair.prefill.harness.scheduler.apply_kv_events([Failed("r", "it breaks here")])
    pair.run()
    assert_complete(pair.decode.harness, [request])
    assert [gone.reason for gone in pair.told(KVDropped)] == ["its request failed or was aborted"]
    pair.check_nothing_left()


def test_kv_of_another_prompt_is_not_used() -> None:
    pair = Pair()
    request = make_request("r", PROMPT)
    other = pair.hold(make_request("other", PROMPT[:20] + [0] * 22))
    pair.fetch(request, other)
    pair.run()
    assert_complete(pair.decode.harness, [request])
    assert pair.decode.harness.core.load().tiers[0].num_loaded == 0


def test_the_token_of_another_prompt_is_not_used() -> None:
    """Its full blocks are the same, what is behind them is not."""
    pair = Pair()
    request = make_request("r", PROMPT)
    source = pair.hold(make_request("other", [*PROMPT[:-1], 0]))
    pair.fetch(request, source)
    pair.run()
    assert pair.decode.harness.core.load().tiers[0].num_loaded == 10
    assert_complete(pair.decode.harness, [request])
    pair.check_nothing_left()


# ---- the hash seed differs per process, and nothing is ever found (LMCache#1139, #2136)


def test_keys_are_the_same_in_every_process() -> None:
    program = (
        "from pagoda.kv.manager import KVManager; kv = KVManager(8, 4);"
        "print(kv.sequence_key(kv.new_table('salt'), list(range(10))).hex())"
    )
    keys = {
        subprocess.run(
            [sys.executable, "-c", program],
            env=os.environ | {"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("0", "1")
    }
    assert len(keys) == 1


# ---- D samples the first token again; P's was thrown away (ATOM #253, reversed in #690)


def test_the_first_token_is_told_once_and_not_sampled_again() -> None:
    """Another seed at the decode engine would sample another one."""
    pair = Pair(decode={"transfer_fate": lambda _: TransferFate(delay_s=5.0)})
    request = make_request("r", PROMPT)
    held = msgspec.structs.replace(
        request, sampling=msgspec.structs.replace(request.sampling, seed=1234)
    )
    firsts = expected_tokens(held)[0], expected_tokens(request)[0]
    assert firsts[0] != firsts[1]
    pair.fetch(request, pair.hold(held))
    pair.run_until(lambda: pair.decode.harness.tokens["r"] != [])
    assert is_loading(pair), "it is told while KV still travels"
    assert pair.decode.harness.tokens["r"] == [firsts[0]]
    pair.run()
    assert len(pair.decode.harness.tokens["r"]) == 8
    assert pair.decode.harness.tokens["r"][0] == firsts[0]
    continued = msgspec.structs.replace(request, request_id="c", output_token_ids=[firsts[0]])
    pair.decode.add(continued)
    pair.run()
    assert pair.decode.harness.tokens["c"] == pair.decode.harness.tokens["r"]


@pytest.mark.parametrize("end", ["stop", "length"])
def test_a_first_token_that_ends_the_answer_ends_it(end: str) -> None:
    pair = Pair(decode={"transfer_fate": lambda _: TransferFate(delay_s=5.0)})
    request = make_request("r", PROMPT, max_tokens=1 if end == "length" else 8)
    if end == "stop":
        request = msgspec.structs.replace(request, eos_token_ids=(expected_tokens(request)[0],))
    pair.submit(request)
    pair.run_until(lambda: "r" in pair.decode.harness.finished)
    assert pair.clock.now() < 5
    assert pair.decode.harness.finished["r"].finish_reason is FinishReason(end)
    assert pair.prefill.harness.finished["r"].finish_reason is FinishReason(end)
    pair.run()
    assert_complete(pair.decode.harness, [request])
    pair.check_nothing_left()


# ---- ids are strings on one side, integers on the other (ATOM #253)


def test_an_id_that_is_no_string_is_no_message() -> None:
    wrong = msgspec.msgpack.encode({"type": "kv_subscribe", "transfer_id": 7, "start": 0, "end": 1})
    with pytest.raises(msgspec.ValidationError, match="Expected `str`, got `int`"):
        Codec[DecodeMessage](DecodeMessage).decode(wrong)


# ---- the flag "first decode after remote prefill" is reset before the batch is built (ATOM #253)


def test_a_request_that_is_preempted_after_its_kv_came_goes_on_rightly() -> None:
    """There is no such flag: with the token, the request is a value like any other."""
    pair = Pair(decode={"num_blocks": 17, "max_num_seqs": 4})
    requests = [
        make_request(f"r{n}", document, max_tokens=20, priority=-n)
        for n, document in enumerate(documents(3))
    ]
    for request in requests:
        pair.submit(request)
        for _ in range(12):
            pair.tick()
    pair.run()
    assert pair.decode.harness.scheduler.counters.num_preemptions > 0
    assert pair.decode.harness.core.load().tiers[0].num_loaded > 0
    assert_complete(pair.decode.harness, requests)
    pair.check_nothing_left()


# ---- busy-wait for the handshake; a handshake for every request (ATOM #253)


def test_one_handshake_is_enough_and_nobody_is_asked_twice() -> None:
    pair = Pair()
    requests = [make_request(f"r{n}", document) for n, document in enumerate(documents(6))]
    for request in requests:
        pair.submit(request)
    pair.run()
    assert len(pair.told(KVHello)) == len(pair.told(KVWelcome)) == 1
    assert len(pair.told(KVSubscribe)) == len(pair.told(KVCheck)) == len(pair.told(KVRelease)) == 6


def test_who_says_hello_before_there_are_workers_is_asked_for_his_model_too() -> None:
    pair = Pair()
    exporter = pair.prefill.exporter
    for _ in range(2):  # after the second, the next one waits
        pair.prefill.harness.core.lose_worker(WorkerLost("it was killed"))
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
    pair.run_until(lambda: not pair.prefill.harness.scheduler.has_requests())
    steps = 0
    while not pair.told(KVCheck):
        assert pair.tick()
        steps += 1
    assert steps < 10


# ---- max_tokens -= 1 on null (ATOM #253)


def test_a_prompt_is_computed_for_others_whatever_max_tokens_is() -> None:
    pair = Pair()
    for number, max_tokens in enumerate((None, 1, 2, 1000)):
        request = make_request(f"r{number}", PROMPT)
        sampling = msgspec.structs.replace(request.sampling, max_tokens=max_tokens)
        pair.hold(msgspec.structs.replace(request, sampling=sampling))
    pair.run()
    for number in range(4):
        assert len(pair.prefill.harness.tokens[f"r{number}"]) == 1
        assert pair.prefill.harness.finished[f"r{number}"].finish_reason is FinishReason.LENGTH


def test_a_request_that_has_tokens_gets_one_more() -> None:
    pair = Pair()
    request = make_request("r", PROMPT)
    so_far = expected_tokens(request)[:3]
    request = msgspec.structs.replace(request, output_token_ids=so_far)
    pair.submit(request)
    pair.run()
    assert pair.prefill.harness.tokens["r"] == expected_tokens(request)[:4]
    assert_complete(pair.decode.harness, [request])
    assert pair.decode.harness.core.load().tiers[0].num_loaded == 11
    pair.check_nothing_left()


# ---- dead instances never leave the list; no time-outs (ATOM #253)


def test_an_engine_that_falls_silent_is_given_up_and_found_again() -> None:
    is_silent = False

    def fate(_: Message) -> Sequence[float]:
        return () if is_silent else (0.001,)

    pair = Pair(fate=fate, prefill=CHUNKS)
    first, second = (make_request(f"r{n}", document) for n, document in enumerate(documents(2)))
    pair.submit(first)
    pair.run_until(lambda: is_loading(pair))
    is_silent = True
    pair.run_until(lambda: "r0" in pair.decode.harness.finished)
    assert pair.clock.now() < SILENCE_S + 2.5
    assert pair.decode.remote.peers.by_address == {}
    is_silent = False
    pair.submit(second)
    pair.run()
    assert_complete(pair.decode.harness, [first, second])
    assert pair.decode.harness.core.load().tiers[0].num_loaded == 10
    pair.check_nothing_left()


# ---- zip() cuts lists of unequal length (ATOM #253)


def test_fewer_blocks_than_were_said_are_not_all() -> None:
    shortened = []

    def fate(message: Message) -> Sequence[float]:
        if isinstance(message, KVBlocks) and not shortened:
            shortened.append(message)
            del message.block_ids[-1:]  # the key is that of the last one still
        return (0.001,)

    pair = Pair(fate=fate)
    request = make_request("r", PROMPT)
    pair.submit(request)
    pair.run()
    assert shortened
    assert_complete(pair.decode.harness, [request])
    assert pair.decode.harness.core.load().tiers[0].num_loaded == 0
    pair.check_nothing_left()


# ---- running and parked requests exceed the sequence limit (ATOM #1647)


def test_requests_whose_kv_is_on_its_way_count_as_running() -> None:
    pair = Pair(
        prefill=CHUNKS,
        decode={"max_num_seqs": 2, "transfer_fate": lambda _: TransferFate(delay_s=0.3)},
    )
    requests = [make_request(f"r{n}", document) for n, document in enumerate(documents(8))]
    for request in requests:
        pair.submit(request)
    scheduler = pair.decode.harness.scheduler
    most_loading = 0
    while pair.tick():
        loading = len(in_state(scheduler, RequestState.LOADING))
        most_loading = max(most_loading, loading)
        assert loading + scheduler.num_running <= 2
        pair.decode.check_books()
    assert most_loading == 2
    assert_complete(pair.decode.harness, requests)
    pair.check_nothing_left()


def test_engines_that_wait_for_each_others_room_get_on() -> None:
    """Of those that are first in line at the decode engine, one waits for the prefill engine, which has no room
    for it: all of that is held for those in line behind the second, which may not ask yet. So it gives way."""
    pair = Pair(prefill={"num_blocks": 22}, decode={"max_num_seqs": 1})
    *first, third, fourth = (
        make_request(f"r{n}", document, max_tokens=4, priority=n > 1)
        for n, document in enumerate(documents(4))
    )
    behind = [third, fourth]
    sources = [pair.hold(request) for request in behind]
    pair.run_until(lambda: not pair.prefill.harness.scheduler.has_requests())
    for request in first:
        pair.submit(request)
    for request, source in zip(behind, sources, strict=True):
        pair.fetch(request, source)
    pair.run()
    assert pair.told(KVRefused) == []
    assert pair.clock.now() < 5
    assert_complete(pair.decode.harness, [*first, *behind])
    pair.check_nothing_left()


# ---- what nobody asks for takes the room of what somebody waits for, and is computed for nobody


def test_a_prompt_that_nobody_needs_any_more_is_not_computed_on() -> None:
    pair = Pair(prefill={"max_num_batched_tokens": 4})
    pair.submit(make_request("r", PROMPT))
    pair.run_until(lambda: bool(pair.told(KVBlocks)))
    pair.decode.harness.core.abort("r")
    pair.run()
    assert pair.prefill.harness.finished["r"].finish_reason is FinishReason.ABORT
    assert pair.prefill.harness.scheduler.counters.num_steps < len(PROMPT) // 4 // 2
    pair.check_nothing_left()


@pytest.mark.parametrize("loses_workers", [False, True])
def test_a_prompt_whose_kv_is_lost_is_computed_once_more_only(loses_workers: bool) -> None:
    pair = Pair(prefill=CHUNKS)
    requests = [make_request("r", PROMPT), make_request("held", documents(1)[0])]
    pair.submit(requests[0])
    pair.hold(requests[1])
    core, scheduler = pair.prefill.harness.core, pair.prefill.harness.scheduler
    pair.run_until(lambda: bool(pair.told(KVBlocks)))
    if loses_workers:
        core.lose_worker(WorkerLost("it was killed"))
    else:
        scheduler.preempt(scheduler.requests["r"])
    pair.run()
    assert pair.prefill.harness.finished["r"].finish_reason is FinishReason.ABORT
    assert pair.prefill.harness.finished["held"].finish_reason is FinishReason.LENGTH
    assert_complete(pair.decode.harness, requests[:1])
    pair.check_nothing_left()


def test_kv_that_nobody_has_asked_for_gives_way_the_oldest_first() -> None:
    pair = Pair(
        prefill={"num_blocks": 34},
        decode={"transfer_fate": lambda _: TransferFate(delay_s=10.0)},
    )
    held = [make_request(f"r{n}", document) for n, document in enumerate(documents(3))]
    wanted, oldest, newest = (pair.hold(request) for request in held)
    pair.fetch(held[0], wanted)
    pair.run_until(lambda: not pair.prefill.harness.scheduler.has_requests())
    asked_at = pair.clock.now()
    pair.prefill.add(make_request("next", PROMPT, max_tokens=2))
    pair.run_until(lambda: "next" in pair.prefill.harness.finished)
    assert pair.clock.now() - asked_at < 1
    leases = pair.prefill.exporter.leases
    assert [source.transfer_id in leases for source in (wanted, oldest, newest)] == [
        True,
        False,
        True,
    ]
    assert pair.prefill.harness.core.load().num_leases_expired == 1
    pair.fetch(held[1], oldest)
    pair.fetch(held[2], newest)
    pair.run()
    assert_complete(pair.decode.harness, held)
    pair.check_nothing_left()


def test_a_request_that_waits_for_its_turn_takes_no_kv_away() -> None:
    pair = Pair(prefill={"max_num_seqs": 1})
    source = pair.hold(make_request("held", PROMPT))
    pair.run_until(lambda: "held" in pair.prefill.harness.finished)
    for number, document in enumerate(documents(3)):
        pair.prefill.add(make_request(f"r{number}", document))
    pair.run_until(lambda: not pair.prefill.harness.scheduler.has_requests())
    assert source.transfer_id in pair.prefill.exporter.leases


def test_who_may_not_ask_yet_stops_nobody_who_need_not_ask() -> None:
    pair = Pair(prefill={"max_num_seqs": 1}, decode={"max_num_seqs": 2})
    fetched = [make_request(f"r{n}", document) for n, document in enumerate(documents(6))]
    for request in fetched:
        pair.submit(request)
    plain = make_request("plain", PROMPT[:9], max_tokens=2)
    pair.decode.add(plain)
    pair.run_until(lambda: bool(pair.decode.harness.finished))
    assert list(pair.decode.harness.finished) == ["plain"]
    pair.run()
    assert_complete(pair.decode.harness, [*fetched, plain])
    assert pair.decode.harness.core.load().tiers[0].num_loaded == 60
    pair.check_nothing_left()


def test_who_may_not_ask_yet_takes_no_slot_from_lower_priorities() -> None:
    pair = Pair(prefill={"max_num_seqs": 1}, decode={"max_num_seqs": 1})
    low = make_request("low", PROMPT[:9], max_tokens=40, priority=1)
    pair.decode.add(low)
    pair.run_until(lambda: len(pair.decode.harness.tokens["low"]) > 2)
    fetched = [make_request(f"r{n}", document) for n, document in enumerate(documents(3))]
    for request in fetched:
        pair.submit(request)
    pair.run()
    assert_complete(pair.decode.harness, [*fetched, low])
    assert pair.decode.harness.scheduler.counters.num_preemptions <= 3
