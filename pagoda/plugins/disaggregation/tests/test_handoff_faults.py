# SPDX-License-Identifier: Apache-2.0
"""Engines, workers, connections and messages that fail in the middle of a handoff."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
import pytest
from harness import assert_complete, expected_tokens, make_request
from pair import (
    CHUNKS,
    NO_KEYS,
    PROMPT,
    Message,
    Pair,
    documents,
    has_leases,
    is_awaiting,
    is_loading,
    requests_of,
)

from pagoda.executor.base import WorkerLost
from pagoda.messages.frontend import FinishReason, KVSource
from pagoda.messages.transfers import RemoteBlocks, Transfer
from pagoda.plugins.disaggregation.connector import SILENCE_S, Failed
from pagoda.plugins.disaggregation.messages import (
    KVBlocks,
    KVCheck,
    KVCheckResult,
    KVDropped,
    KVHello,
    KVPrefilled,
    KVRelease,
    KVRenewed,
    KVSubscribe,
    KVWelcome,
)
from pagoda.plugins.disaggregation.transfer_tokens import TransferTokens
from pagoda.plugins.sim.executor import TransferFate

# ---- D aborts, P holds blocks for ever (vllm#46283, #41269)


@pytest.mark.parametrize("state", [is_awaiting, is_loading])
def test_decode_aborts_and_prefill_lets_go_at_once(state) -> None:  # type: ignore[no-untyped-def]
    pair = Pair(prefill=CHUNKS)
    pair.submit(make_request("r", PROMPT))
    pair.run_until(lambda: state(pair))
    pair.decode.core.abort("r")
    aborted_at = pair.clock.now()
    pair.run_until(lambda: not has_leases(pair))
    assert pair.clock.now() - aborted_at < 0.1
    pair.finish()


@pytest.mark.parametrize("why", ["too long", "already complete", "no room", "twice"])
def test_decode_refuses_a_request_and_prefill_lets_go_at_once(why: str) -> None:
    pair = Pair(decode={"max_num_seqs": 1, "max_num_waiting": 0} if why == "no room" else {})
    pair.submit(make_request("before", documents(1)[0]))
    pair.run()
    request = make_request("r", PROMPT)
    source = pair.hold(request)
    pair.run_until(lambda: not pair.prefill.scheduler.requests)
    core = pair.decode.core
    refused = msgspec.structs.replace(request, kv_source=source)
    match why:
        case "too long":
            refused = msgspec.structs.replace(refused, prompt_token_ids=[1] * 64)
        case "already complete":
            whole = expected_tokens(request)
            refused = msgspec.structs.replace(refused, output_token_ids=whole)
        case "no room":
            pair.decode.add(make_request("busy", documents(1)[0]))
        case "twice":
            pair.decode.add(request)
    core.add(refused)
    refused_at = pair.clock.now()
    pair.run_until(lambda: not has_leases(pair))
    assert pair.clock.now() - refused_at < 0.1
    pair.finish()


def test_decode_needs_nothing_and_prefill_lets_go_at_once() -> None:
    pair = Pair()
    pair.submit(make_request("before", PROMPT))
    pair.run()
    pair.submit(make_request("again", PROMPT))
    pair.run_until(lambda: not has_leases(pair))
    assert pair.clock.now() < 5
    pair.run()
    assert len(pair.told(KVSubscribe)) == len(pair.told(KVRelease)) == 2
    assert pair.num_loaded == 10, "those of the first"
    assert pair.decode.tokens["again"] == expected_tokens(make_request("again", PROMPT))


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
    reads = pair.decode.tiers.ledger
    pair.run_until(lambda: bool(reads.transfers) and bool(pair.told(KVPrefilled)))
    pair.prefill.exporter.drop(source.transfer_id, "somebody made a mistake")
    for number, document in enumerate(documents(2)):
        pair.prefill.add(make_request(f"next{number}", document))
    pair.finish(request)
    assert [verdict.is_valid for verdict in pair.told(KVCheckResult)] == [False]
    assert pair.num_loaded == 0


# ---- one disconnect kills the engine, or the answer (vllm#43226, #49089, #46240, #49238)

ANSWERED_S = SILENCE_S + 2.5
"""Seconds of virtual time in which requests are answered, whatever fails: silence, and a prompt computed anew."""
MOMENTS: dict[str, Callable[[Pair], bool]] = {
    "asked for": is_awaiting,
    "on its way": is_loading,
    "read": lambda pair: bool(pair.told(KVCheck)),
    "released": lambda pair: bool(pair.told(KVRelease)),
}
FAULTS: dict[str, Callable[[Pair], object]] = {
    "connection": lambda pair: pair.network.cut(pair.prefill.address),
    "prefill request": lambda pair: pair.prefill.hooks.apply_events(
        [Failed("r0", "it breaks here")]
    ),
    "prefill worker": lambda pair: pair.prefill.core.lose_worker(WorkerLost("killed")),
    "prefill engine": Pair.replace_prefill,
    "decode worker": lambda pair: pair.decode.core.lose_worker(WorkerLost("killed")),
    "decode engine": Pair.replace_decode,
}


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("lost", FAULTS)
def test_whatever_is_lost_changes_no_token_and_leaves_nothing(lost: str, moment: str) -> None:
    """Something is lost when the KV of the first request has got so far."""
    pair = Pair(prefill=CHUNKS)
    requests = requests_of(3)
    pair.submit(*requests)
    pair.run_until(lambda: MOMENTS[moment](pair))
    lost_at = pair.clock.now()
    FAULTS[lost](pair)
    pair.run_until(lambda: len(pair.decode.finished) == len(requests))
    assert pair.clock.now() - lost_at < ANSWERED_S
    pair.finish(*requests)
    if (lost, moment) == ("prefill request", "on its way"):
        [dropped] = pair.told(KVDropped)
        assert dropped.reason == "its request failed or was aborted"


@pytest.mark.parametrize("successor", ["nobody", "a silent one", "another engine"])
def test_prefill_dies_during_the_handshake(successor: str) -> None:
    """Decode, which waits for an answer to its hello, does so for a limited time (vllm#26171, #40364)."""

    def fate(message: Message) -> Sequence[float]:
        is_lost = successor == "a silent one" and isinstance(message, KVWelcome | KVRenewed)
        return () if is_lost else (0.001,)

    pair = Pair(fate=fate, prefill=CHUNKS)
    request = make_request("r", PROMPT)
    pair.submit(request)
    assert isinstance(pair.sent[0], KVHello)
    if successor == "another engine":
        pair.replace_prefill()
    else:
        pair.prefill.kill()
    if successor == "a silent one":
        pair.network.listener(pair.prefill.address)
    pair.run_until(lambda: "r" in pair.decode.finished)
    assert pair.clock.now() < ANSWERED_S
    assert_complete(pair.decode, [request])
    pair.decode.check_nothing_left()


@pytest.mark.parametrize("dies", ["prefill engine", "prefill worker"])
def test_what_is_started_anew_at_prefill_serves_the_next_request(dies: str) -> None:
    """What it held before is not taken for what it holds now (vllm#49238: decode crashed)."""
    pair = Pair()
    first, lost, following = requests_of(3)
    pair.submit(first)
    pair.run()
    source, before = pair.hold(lost), pair.prefill.exporter.peer
    FAULTS[dies](pair)
    pair.step()
    pair.fetch(lost, source)
    pair.submit(following)
    pair.finish(first, lost, following)
    assert pair.prefill.exporter.peer not in (None, before)
    assert len({blocks.peer_id for blocks in pair.told(KVBlocks)}) == 2
    assert len(pair.told(KVPrefilled)) == 2, "of the first and the last"
    assert pair.num_loaded == 20


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
    last = pair.decode.finished["r"]
    if fails:
        assert last.finish_reason is FinishReason.ERROR
        assert last.error == (
            "KV that was found for this request could not be loaded: it could not be read (it was not to be)."
        )
    else:
        assert_complete(pair.decode, [request])
    assert pair.decode.core.load().tiers[0].num_failed == 10
    pair.check_nothing_left()


def test_what_cannot_be_asked_for_fails_the_request_where_it_is_to() -> None:
    pair = Pair(fails=True)
    request = make_request("r", PROMPT)
    address = "tcp://nobody:1"
    transfer_id = TransferTokens(NO_KEYS).new_id(address, "e")
    pair.fetch(request, KVSource(address=address, engine_id="e", transfer_id=transfer_id))
    pair.run()
    error = pair.decode.finished["r"].error
    assert error == "KV of this request could not be fetched: nobody is there."


# ---- P rejects an over-long prompt, D generates garbage (sglang#30233)


def test_a_prompt_that_prefill_refuses_has_no_source() -> None:
    pair = Pair()
    request = make_request("r", [1] * 64, holds_kv=True)
    (answer,) = pair.prefill.add(request)
    assert answer.kv_source is None
    assert answer.finish_reason is FinishReason.ERROR
    assert "the context holds 64" in (answer.error or "")
    assert not has_leases(pair)


@pytest.mark.parametrize(
    ("other", "num_loaded"),
    [(PROMPT[:20] + [0] * 22, 0), ([*PROMPT[:-1], 0], 10)],
    ids=["other blocks", "the same blocks, and other tokens behind them"],
)
def test_kv_and_token_of_another_prompt_are_not_used(other: list[int], num_loaded: int) -> None:
    pair = Pair()
    request = make_request("r", PROMPT)
    pair.fetch(request, pair.hold(make_request("other", other)))
    pair.finish(request)
    assert pair.num_loaded == num_loaded
