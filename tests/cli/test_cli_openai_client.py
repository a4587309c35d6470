# SPDX-License-Identifier: Apache-2.0
"""The client against small servers that say exactly what a test wants."""

from __future__ import annotations

import asyncio
import json
import statistics
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from itertools import pairwise

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from pagoda.cli.answer import AnswerPrinter, RequestTimes, ask
from pagoda.cli.openai_client import PATHS, OpenAIClient, ServerError
from pagoda.plugins.bench.datasets import Sample
from pagoda.plugins.bench.load import LoadOptions, arrival_times, run_load

HELLO = b'data: {"choices":[{"index":0,"text":"hello"}]}\n\n'
EMPTY = b'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}\n\n'
USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":2}}\n\n'
DONE = b"data: [DONE]\n\n"
ERROR = b'event: error\ndata: {"error":{"message":"the worker broke"}}\n\n'


@asynccontextmanager
async def streaming(*pieces: bytes) -> AsyncIterator[OpenAIClient]:
    """A client of a server that writes `pieces` one by one and then ends the stream."""

    async def handle(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        assert body["stream"] is True
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for piece in pieces:
            await response.write(piece)
            await asyncio.sleep(0)
        return response

    async with client_of(handle) as client:
        yield client


@asynccontextmanager
async def client_of(handle: object, api_key: str | None = None) -> AsyncIterator[OpenAIClient]:
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handle)  # type: ignore[arg-type]
    async with (
        TestServer(app) as server,
        OpenAIClient(str(server.make_url("/v1/")), api_key) as client,
    ):
        yield client


async def texts(client: OpenAIClient) -> list[str | None]:
    found = []
    async for _, answers in client.stream("/v1/completions", {"stream": True}):
        found += [choice.text for answer in answers for choice in answer.choices]
    return found


async def test_events_are_found_however_they_are_cut() -> None:
    whole = HELLO * 3 + b": keep-alive\n\n" + HELLO.replace(b"\n", b"\r\n") + DONE
    for size in (1, 7, 50, len(whole)):
        pieces = [whole[start : start + size] for start in range(0, len(whole), size)]
        async with streaming(*pieces) as client:
            assert await texts(client) == ["hello"] * 4


@pytest.mark.parametrize(
    ("pieces", "sentence"),
    [
        ([HELLO], r"without \[DONE\]"),
        ([HELLO, ERROR, DONE], "the worker broke"),
        ([b"data: <html>\n\n"], "not in the OpenAI format"),
    ],
)
async def test_a_stream_that_breaks_off_is_an_error(pieces: list[bytes], sentence: str) -> None:
    async with streaming(*pieces) as client:
        with pytest.raises(ServerError, match=sentence):
            await texts(client)


async def test_a_refusal_carries_status_and_message() -> None:
    async def handle(_: web.Request) -> web.Response:
        return web.json_response({"error": {"message": "no such model"}}, status=404)

    async with client_of(handle) as client:
        with pytest.raises(ServerError, match="status 404: no such model"):
            await client.post("/v1/chat/completions", {})
        with pytest.raises(ServerError, match="status 404"):
            await client.first_model()


async def test_the_api_key_is_sent_and_v1_is_not_doubled() -> None:
    seen = []

    async def handle(request: web.Request) -> web.Response:
        seen.append((request.path, request.headers.get("Authorization")))
        return web.json_response({"data": [{"id": "m"}]})

    async with client_of(handle, "secret") as client:
        assert await client.first_model() == "m"
    assert seen == [("/v1/models", "Bearer secret")]


async def test_an_outcome_counts_tokens_by_usage_and_times_events_with_output() -> None:
    async with streaming(EMPTY, HELLO, HELLO, USAGE, DONE) as client:
        outcome = await ask(client, PATHS["completions"], {"model": "m", "prompt": "x"})
    assert outcome.error is None
    assert len(outcome.event_times_s) == 2
    assert (outcome.prompt_tokens, outcome.output_tokens) == (3, 2)
    assert outcome.sent_s < outcome.event_times_s[0] <= outcome.ended_s


async def test_load_keeps_to_its_concurrency_and_reports_failures() -> None:
    running = peak = served = 0

    async def handle(_: web.Request) -> web.StreamResponse:
        nonlocal running, peak, served
        running += 1
        served += 1
        number = served
        peak = max(peak, running)
        await asyncio.sleep(0)
        running -= 1
        if number == 5:
            return web.json_response({"error": {"message": "boom"}}, status=500)
        return web.Response(body=HELLO + DONE, content_type="text/event-stream")

    done = []
    schedule = LoadOptions(max_concurrency=3)
    async with client_of(handle) as client:
        samples = [Sample("completions", {})] * 10
        outcomes, _ = await run_load(client, samples, {}, schedule, lambda: done.append(1))
    assert len(outcomes) == len(done) == 10
    assert peak <= 3
    assert [outcome.error for outcome in outcomes].count(None) == 9


async def test_a_request_that_cannot_be_sent_counts_as_failed_in_a_load() -> None:
    async with OpenAIClient("http://127.0.0.1:1") as client:
        outcomes, _ = await run_load(client, [Sample("completions", {})] * 2, {}, LoadOptions())
    assert [str(outcome.error)[:12] for outcome in outcomes] == ["Cannot reach"] * 2


def _arrivals(count: int, rate: float, burstiness: float = 1.0) -> list[float]:
    schedule = LoadOptions(request_rate=rate, burstiness=burstiness, seed=3)
    return arrival_times(count, schedule)


def test_arrivals_are_a_poisson_process_of_the_rate() -> None:
    times = _arrivals(20_000, 50.0)
    assert times[0] == 0.0
    assert times == sorted(times)
    assert times[-1] == pytest.approx(400, rel=0.05)
    assert _variation(times) == pytest.approx(1.0, rel=0.05)
    assert times == _arrivals(20_000, 50.0)
    assert _arrivals(3, float("inf")) == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("burstiness", [0.25, 4.0])
def test_burstiness_changes_the_spread_of_arrivals_but_not_the_rate(burstiness: float) -> None:
    times = _arrivals(20_000, 50.0, burstiness)
    assert times[-1] == pytest.approx(400, rel=0.05)
    assert _variation(times) == pytest.approx(burstiness**-0.5, rel=0.05)


def _variation(times: Sequence[float]) -> float:
    """Standard deviation of the times between arrivals over their mean."""
    gaps = [later - earlier for earlier, later in pairwise(times)]
    return statistics.pstdev(gaps) / statistics.fmean(gaps)


# ---- a chat answer, put together


def event(usage: dict[str, int] | None = None, **delta: object) -> bytes:
    choices = [] if usage else [{"index": 0, "delta": delta}]
    return b"data: " + json.dumps({"choices": choices, "usage": usage}).encode() + b"\n\n"


async def test_content_reasoning_and_tool_calls_are_joined(
    capsys: pytest.CaptureFixture[str],
) -> None:
    call = {"index": 0, "function": {"name": "add", "arguments": '{"a"'}}
    rest = {"index": 0, "function": {"arguments": ": 1}"}}
    other = {"index": 1, "function": {"name": "sub", "arguments": "{}"}}
    printer = AnswerPrinter()
    async with streaming(
        event(role="assistant", content=""),
        event(reasoning_content="let me "),
        event(reasoning_content="see"),
        event(content="a"),
        event(content="b"),
        event(tool_calls=[call]),
        event(tool_calls=[rest, other]),
        event(usage={"prompt_tokens": 3, "completion_tokens": 9}),
        DONE,
    ) as client:
        outcome = await ask(client, PATHS["chat"], {"model": "m"}, printer)
    message = printer.message()
    assert (message.content, message.reasoning_content) == ("ab", "let me see")
    calls = [(c.function.name, c.function.arguments) for c in message.tool_calls or ()]
    assert calls == [("add", '{"a": 1}'), ("sub", "{}")]
    assert (outcome.output_tokens, len(outcome.event_times_s)) == (9, 6)
    assert 0 < (outcome.ttft_s or 0) <= outcome.e2e_s
    assert capsys.readouterr().out == "let me see\nab"


@pytest.mark.parametrize("contents", [["a", "b"], [""]])
async def test_events_count_where_the_server_reports_no_usage(contents: list[str]) -> None:
    async with streaming(*(event(content=content) for content in contents), DONE) as client:
        outcome = await ask(client, PATHS["chat"], {"model": "m"})
    assert outcome.output_tokens == len("".join(contents))
    assert (outcome.tokens_per_s > 0) == (outcome.output_tokens > 0)


def test_the_rate_is_that_after_the_first_token() -> None:
    outcome = RequestTimes(0.0, 3.0, event_times_s=[1.0, 3.0], output_tokens=11)
    assert outcome.tokens_per_s == pytest.approx(5.0)
    assert outcome.figures() == "11 tokens, first after 1000 ms, 5 tokens/s"
