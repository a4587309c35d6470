# SPDX-License-Identifier: Apache-2.0
"""Beam search as a request of a client: it is accepted as a whole, and has one deadline."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import msgspec
import pytest
from virtual_fleet import engine_config, start_fleet, virtual

from pagoda.errors import DeadlineError, InvalidRequestError
from pagoda.fleet.dispatcher import Dispatcher
from pagoda.messages.frontend import GenerateRequest, TokenChunk
from pagoda.messages.sampling_params import SamplingParams
from pagoda.plugins.simulate.engine import SimEngine
from pagoda.telemetry.request_tracker import ClientRequest, RequestTracker
from pagoda.text.beam_search import BeamSearchParams, beam_search
from pagoda.text.draft import Draft
from pagoda.text.model_text import synthetic_model_text
from pagoda.text.text_generator import TextGenerator

STEPS = 12


def _texts(dispatcher: Dispatcher) -> TextGenerator:
    loop = asyncio.get_running_loop()
    tracker = RequestTracker(lambda: int(1e9 * loop.time()))
    return TextGenerator(dispatcher, synthetic_model_text(), tracker)


async def _search(dispatcher: Dispatcher, timeout_s: float | None = None) -> list[tuple[int, ...]]:
    texts = _texts(dispatcher)
    tracker = texts.tracker
    sampling = texts.check_sampling(SamplingParams(temperature=0, max_tokens=STEPS, logprobs=0))
    client = ClientRequest(id="beams", arrived_ns=tracker.clock_ns(), timeout_s=timeout_s)
    [wanted] = await texts.prepare("ab", sampling, Draft(client_request=client))
    params = BeamSearchParams(beam_width=3, max_tokens=STEPS)
    return [beam.token_ids for beam, _ in await beam_search(texts, wanted, params)]


async def _fleet() -> Dispatcher:
    return await start_fleet([SimEngine(engine_config(vocab_size=512))], "round-robin")


@virtual
async def test_a_server_that_drains_finishes_a_search() -> None:
    dispatcher = await _fleet()
    expected = await _search(dispatcher)
    assert {len(beam) for beam in expected} == {STEPS}
    running = asyncio.create_task(_search(dispatcher))
    while not dispatcher.requests:
        await asyncio.sleep(0)
    draining = asyncio.create_task(dispatcher.drain(600))
    assert await running == expected
    await draining


@virtual
async def test_a_search_ends_at_its_deadline() -> None:
    dispatcher = await _fleet()
    with pytest.raises(DeadlineError):
        await _search(dispatcher, timeout_s=0.025)
    await asyncio.sleep(1)
    assert not dispatcher.requests


@virtual
@pytest.mark.parametrize("num_top", [1, 20])
async def test_as_many_likeliest_tokens_are_told_as_are_asked_for(num_top: int) -> None:
    texts = _texts(await _fleet())
    sampling = texts.check_sampling(SamplingParams(max_tokens=2, logprobs=num_top))
    [wanted] = await texts.prepare("ab", sampling)
    for _, delta in await beam_search(texts, wanted, BeamSearchParams(beam_width=1, max_tokens=2)):
        assert [len(entry.top_token_ids) for entry in delta.logprobs or ()] == [num_top] * 2


@virtual
async def test_likely_tokens_that_are_never_said_are_passed_over() -> None:
    texts = _texts(await _fleet())
    [wanted] = await texts.prepare("ab", texts.check_sampling(SamplingParams(max_tokens=1)))
    params = BeamSearchParams(beam_width=40, max_tokens=1)
    likeliest = [beam.token_ids for beam, _ in await beam_search(texts, wanted, params)]
    never = tuple(token_id for (token_id,) in likeliest[:30])
    work = msgspec.structs.replace(wanted.request.work, never=(*never, *range(480, 512)))
    wanted = replace(wanted, request=msgspec.structs.replace(wanted.request, work=work))
    params = BeamSearchParams(beam_width=2, max_tokens=1)
    left = [it for it in likeliest[30:] if it[0] < 480]
    assert [beam.token_ids for beam, _ in await beam_search(texts, wanted, params)] == left[:2]


@virtual
async def test_a_vocabulary_smaller_than_the_tokens_looked_at_will_do() -> None:
    texts = _texts(await start_fleet([SimEngine(engine_config(vocab_size=3))], "round-robin"))
    [wanted] = await texts.prepare([1], texts.check_sampling(SamplingParams(max_tokens=STEPS)))
    params = BeamSearchParams(beam_width=3, max_tokens=STEPS).checked(3)
    assert len(await beam_search(texts, wanted, params)) == 3
    with pytest.raises(InvalidRequestError, match="beam_width must be from 1 to 3, got 4"):
        BeamSearchParams(beam_width=4).checked(3)


@virtual
async def test_each_beam_says_what_ended_it() -> None:
    """Of three tokens, one is the end of a sequence and one was asked to stop at."""
    texts = _texts(await start_fleet([SimEngine(engine_config(vocab_size=3))], "round-robin"))
    sampling = texts.check_sampling(SamplingParams(max_tokens=1, stop_token_ids=[2]))
    [wanted] = await texts.prepare([1], sampling)
    work = msgspec.structs.replace(wanted.request.work, eos_token_ids=(0,))
    wanted = replace(wanted, request=msgspec.structs.replace(wanted.request, work=work))
    params = BeamSearchParams(beam_width=3, max_tokens=1)
    reasons = {0: ("stop", None), 1: ("length", None), 2: ("stop", 2)}
    ended = await beam_search(texts, wanted, params)
    for beam, delta in ended:
        assert (delta.finish_reason, delta.stop_reason) == reasons[beam.token_ids[-1]]
    assert {beam.token_ids[-1] for beam, _ in ended} == {0, 1, 2}


@virtual
async def test_beams_of_long_prompts_let_others_run_between_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    texts = _texts(await _fleet())
    [wanted] = await texts.prepare("a" * 100, texts.check_sampling(SamplingParams(max_tokens=3)))
    params = BeamSearchParams(beam_width=8, max_tokens=3)
    generate, loop = texts.endpoint.generate, asyncio.get_running_loop()
    num_asked = [0]
    """Tokens that were asked for in each turn of the loop."""

    def noting(value: GenerateRequest) -> AsyncIterator[TokenChunk]:
        if not num_asked[-1]:
            loop.call_soon(num_asked.append, 0)
        num_asked[-1] += 1
        return generate(value)

    monkeypatch.setattr(texts.endpoint, "generate", noting)
    together = [beam for beam, _ in await beam_search(texts, wanted, params)]
    assert num_asked == [1, 8, 8, 0]
    num_asked[:] = [0]
    monkeypatch.setattr("pagoda.text.beam_search.LONG_TEXT_CHARS", 50)
    assert [beam for beam, _ in await beam_search(texts, wanted, params)] == together
    assert num_asked == [*[1] * 17, 0]
