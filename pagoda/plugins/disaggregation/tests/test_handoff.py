# SPDX-License-Identifier: Apache-2.0
"""A prompt is computed by one engine, its answer goes on at another."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from harness import assert_complete, expected_tokens, make_request, reworked
from pair import CHUNKS, PROMPT, Engine, Pair, requests_of, resampled

from pagoda.messages.engine_config import KVTiersConfig
from pagoda.messages.frontend import FinishReason, TokenChunk
from pagoda.messages.spans import embedded_span
from pagoda.messages.transfers import HostSlots, Transfer
from pagoda.messages.worker_config import Role
from pagoda.plugins.disaggregation.connector import STALL_S
from pagoda.plugins.disaggregation.messages import KVBlocks, KVPrefilled, KVRelease
from pagoda.plugins.sim.executor import TransferFate

HOST_TIER = {"kv_host_slots": 64, "kv_tiers": KVTiersConfig(host_bytes=1)}


def forget_cache(engine: Engine) -> None:
    """The device has no cached block any more; the host tier has what it had."""
    pool = engine.scheduler.kv.pool
    for key in list(pool.keys()):
        pool.discard(key)


def test_the_answer_is_that_of_one_engine() -> None:
    pair = Pair()
    request = make_request("r", PROMPT)
    pair.submit(request)
    pair.finish(request)
    assert pair.prefill.tokens["r"] == pair.decode.tokens["r"][:1]
    assert pair.num_loaded == 10
    assert len(pair.told(KVRelease)) == len(pair.told(KVPrefilled)) == 1
    assert len(pair.told(KVBlocks)) == 2, "one for each chunk"


def test_chunks_travel_while_the_next_ones_are_computed() -> None:
    pair = Pair(prefill=CHUNKS)
    request = make_request("r", PROMPT)
    pair.submit(request)
    pair.run_until(lambda: bool(pair.decode.tiers.ledger.transfers))
    assert pair.prefill.scheduler.requests, "the prompt is still being computed"
    pair.finish(request)
    assert len(pair.told(KVBlocks)) == 4


def test_blocks_that_the_decode_sides_host_tier_has_are_not_fetched() -> None:
    pair = Pair(decode=HOST_TIER)
    pair.decode.add(make_request("before", PROMPT[:22]))
    pair.run()
    forget_cache(pair.decode)
    request = make_request("r", PROMPT)
    pair.submit(request)
    pair.finish(request)
    host, remote = pair.decode.core.load().tiers
    assert (host.num_loaded, remote.num_loaded) == (5, 5)
    pair.check_nothing_left()


def test_log_probabilities_come_with_the_token() -> None:
    pair = Pair(decode={"transfer_fate": lambda _: TransferFate(delay_s=1.0)})
    request = resampled(make_request("r", PROMPT), logprobs=1)
    pair.submit(request)
    chunks: list[TokenChunk] = []
    while pair.tick():
        chunks += pair.chunks
    first = next(chunk for chunk in chunks if chunk.token_ids)
    assert first.logprobs is not None
    assert first.logprobs[0].top_token_ids == first.token_ids
    assert sum(len(chunk.logprobs or []) for chunk in chunks) == 1 + 8, "of both engines"
    assert_complete(pair.decode, [request])


def test_a_token_without_the_log_probabilities_that_are_asked_for_is_not_taken() -> None:
    pair = Pair()
    request = make_request("r", PROMPT)
    pair.fetch(resampled(request, logprobs=1), pair.hold(request))
    pair.finish(request)
    assert pair.num_loaded == 10


def test_blocks_with_an_embedded_span_are_handed_off_to_the_same_span_alone() -> None:
    """Before the span, blocks are those of the tokens."""
    pair = Pair()
    request = make_request("r", PROMPT, spans=(embedded_span(9, 7, b"abcd" * 7),))
    pair.fetch(request, pair.hold(request))
    pair.finish(request)
    assert pair.num_loaded == 10
    pair = Pair()
    other = make_request("r", PROMPT, spans=(embedded_span(9, 7, b"abce" * 7),))
    pair.fetch(other, pair.hold(request))
    pair.finish(other)
    assert pair.num_loaded < 10


def test_a_token_that_was_forbidden_to_end_the_answer_is_not_taken() -> None:
    """Proxies of vLLM send `min_tokens: 1` to the prefill host alone."""
    pair = Pair()
    request = make_request("r", PROMPT, eos_token_ids=[])
    first = expected_tokens(request)[0]
    request = reworked(request, eos_token_ids=(first,))
    pair.fetch(request, pair.hold(resampled(request, min_tokens=1)))
    pair.finish(request)
    assert pair.prefill.tokens["r"] != [first]
    assert pair.decode.tokens["r"] == [first]
    assert pair.num_loaded == 10


@pytest.mark.parametrize("num_blocks", [18, 200])
def test_engines_that_do_both_hand_over_to_each_other(num_blocks: int) -> None:
    """Crosswise; with room for less than two prompts on either side, each needs what the other holds for it."""
    options = {"num_blocks": num_blocks, "max_num_batched_tokens": 12, "max_num_seqs": 3}
    pair = Pair(prefill=options, decode=options, roles=(Role.BOTH, Role.BOTH))
    requests = requests_of(8, max_tokens=5)
    for number, request in enumerate(requests):
        holds, answers = pair.engines if number % 2 else pair.engines[::-1]
        held = msgspec.structs.replace(request, request_id=f"p{number}", holds_kv=True)
        (news,) = holds.add(held)
        answers.add(msgspec.structs.replace(request, kv_source=news.kv_source))
    pair.run()
    for number, request in enumerate(requests):
        answers = pair.engines[number % 2]
        assert_complete(answers, [request])
    num_loaded = sum(engine.core.load().tiers[0].num_loaded for engine in pair.engines)
    assert num_loaded == (80 if num_blocks == 200 else 0)
    pair.check_nothing_left()


def test_an_engine_without_the_role_refuses_to_hold() -> None:
    pair = Pair()
    (answer,) = pair.decode.add(make_request("r", PROMPT, holds_kv=True))
    assert answer.error == (
        "This engine holds no KV for others; it was started without --role prefill or both."
    )
    assert answer.finish_reason is FinishReason.ERROR


def test_the_last_chunk_of_prefill_names_the_blocks() -> None:
    pair = Pair()
    source = pair.hold(make_request("r", PROMPT))
    pair.run_until(lambda: "r" in pair.prefill.finished)
    last = pair.prefill.finished["r"].kv_source
    assert last is not None
    assert msgspec.structs.replace(last, block_ids=()) == source
    leased = pair.prefill.exporter.leases[source.transfer_id].blocks()
    assert last.block_ids == tuple(block.block_id for block in leased)
    assert len(last.block_ids) == len(PROMPT) // 4
    load = pair.prefill.core.load()
    assert (load.num_leases, load.num_leased_blocks) == (1, 10)


def test_the_client_is_told_what_was_cached_where_the_prompt_was_computed() -> None:
    pair = Pair()
    pair.prefill.add(make_request("before", PROMPT[:22]))
    pair.run()
    pair.submit(make_request("r", PROMPT))
    pair.run_until(lambda: pair.decode.tokens["r"] != [])
    first = next(chunk for chunk in pair.chunks if chunk.request_id == "r")
    assert first.num_cached_tokens == 20


@pytest.mark.parametrize("num_tokens", [1, 3, 4, 8, 9, 40, 41])
@pytest.mark.parametrize("is_cached", [False, True])
def test_the_token_comes_even_where_no_block_does(num_tokens: int, is_cached: bool) -> None:
    """A proxy may leave out the seed: what each engine would sample is not the same."""
    pair = Pair()
    prompt = PROMPT[:num_tokens]
    if is_cached:
        pair.decode.add(make_request("before", [*prompt, 1]))
        pair.run()
    there = make_request("r", prompt, max_tokens=1)
    here = resampled(there, max_tokens=3, seed=there.work.sampling.seed + 1)
    assert expected_tokens(there)[0] != expected_tokens(here)[0]
    source = pair.hold(there)
    pair.run_until(lambda: "r" in pair.prefill.finished)
    pair.fetch(here, source)
    pair.run()
    assert pair.decode.tokens["r"][0] == expected_tokens(there)[0]
    assert len(pair.decode.tokens["r"]) == 3
    load = pair.decode.core.load()
    assert load.tiers[0].num_loaded == (0 if is_cached else num_tokens // 4)
    pair.check_nothing_left()


def test_what_was_fetched_was_not_cached() -> None:
    pair = Pair()
    pair.decode.add(make_request("before", PROMPT[:22]))
    pair.run()
    request = make_request("r", PROMPT)
    pair.submit(request)
    pair.finish(request)
    load = pair.decode.core.load()
    assert (load.tiers[0].num_loaded, load.num_prefix_hit_tokens) == (5, 20)
    pair.decode.add(make_request("again", PROMPT))
    pair.run()
    assert pair.decode.core.load().num_prefix_hit_tokens == 20 + 40
    assert pair.decode.finished["again"].num_cached_tokens == 40


def test_a_whole_prompt_that_has_no_room_does_not_stay_for_ever() -> None:
    """All of it is computed where it is held, and nothing of it is loaded where it is wanted."""
    options = {"num_blocks": 20, "max_model_len": 64}
    pair = Pair(prefill=options, decode=options, roles=(Role.BOTH, Role.BOTH))
    blocker = make_request("blocker", [1, 2, 3], max_tokens=60)
    pair.decode.add(blocker)
    request = make_request("r", PROMPT)
    source = pair.submit(request)
    fetch = pair.decode.remote.fetches["r"]
    pair.run_until(lambda: fetch.has_token and not fetch.is_incomplete)
    assert not fetch.loads
    pair.clock.advance_to(pair.clock.now() + STALL_S + 1)
    pair.decode.remote.step()
    assert "r" not in pair.decode.remote.fetches
    pair.finish(blocker, request)
    assert source.transfer_id not in pair.prefill.exporter.leases


# ---- a load that ends in the same turn as its request, with a host tier on that side


def loading_from_host(role: Role, **request_options: Any) -> tuple[Pair, Engine]:
    """A pair of which one engine loads the beginning of request `r` from its host tier, which takes a second."""

    def fate(transfer: Transfer) -> TransferFate:
        return TransferFate(delay_s=1.0 if isinstance(transfer.source, HostSlots) else 0.0)

    pair = Pair(**{role.value: {**HOST_TIER, "transfer_fate": fate}})
    engine = pair.prefill if role is Role.PREFILL else pair.decode
    engine.add(make_request("before", PROMPT[:22], holds_kv=role is Role.PREFILL))
    pair.run()
    forget_cache(engine)
    pair.submit(make_request("r", PROMPT, **request_options))
    pair.run_until(lambda: "r" in engine.tiers.loads)
    return pair, engine


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
def test_an_abort_meets_the_end_of_a_load(role: Role) -> None:
    pair, engine = loading_from_host(role)
    pair.clock.advance_to(pair.clock.now() + 2.0)
    engine.core.abort("r")
    pair.finish()


def test_a_release_meets_the_end_of_a_load() -> None:
    pair, _ = loading_from_host(Role.PREFILL)
    pair.decode.core.abort("r")
    pair.decode.step()
    pair.clock.advance_to(pair.clock.now() + 2.0)
    pair.prefill.step()
    assert not pair.prefill.scheduler.requests
    pair.finish()


def test_a_first_token_that_is_the_last_meets_the_end_of_a_load() -> None:
    pair, engine = loading_from_host(Role.DECODE, max_tokens=1)
    while pair.prefill.scheduler.requests:
        at = pair.prefill.next_event_at()
        assert at is not None
        pair.clock.advance_to(at)
        pair.prefill.step()
    pair.clock.advance_to(pair.clock.now() + 2.0)
    engine.step()
    assert engine.finished["r"].finish_reason is FinishReason.LENGTH
    pair.finish()
