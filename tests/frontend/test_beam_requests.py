"""Beam search as a request of a client: it is accepted as a whole, and has one deadline."""

from __future__ import annotations

import asyncio

import pytest
from virtual_fleet import engine_config, start_fleet, virtual

from benchmarks.simulation.engine import SimEngine
from pagoda.errors import DeadlineError
from pagoda.frontend.beam_search import BeamSearchParams, beam_search
from pagoda.frontend.dispatcher import Dispatcher
from pagoda.frontend.model_text import synthetic_model_text
from pagoda.frontend.request_tracker import ClientRequest, RequestTracker
from pagoda.frontend.text_generator import TextGenerator
from pagoda.messages.sampling_params import SamplingParams

STEPS = 12


async def _search(dispatcher: Dispatcher, timeout_s: float | None = None) -> list[tuple[int, ...]]:
    loop = asyncio.get_running_loop()
    tracker = RequestTracker(lambda: int(1e9 * loop.time()))
    texts = TextGenerator(dispatcher, synthetic_model_text(), tracker)
    sampling = texts.check_sampling(SamplingParams(temperature=0, max_tokens=STEPS, logprobs=0))
    client = ClientRequest(id="beams", arrived_ns=tracker.clock_ns(), timeout_s=timeout_s)
    [wanted] = await texts.prepare("ab", sampling, client_request=client)
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
