"""Streamed answers are put together whole."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from pagoda.cli.answer import AnswerPrinter, StreamedAnswer, stream_answer
from pagoda.cli.openai_client import Message, OpenAIClient


def _event(usage: dict[str, int] | None = None, **delta: object) -> bytes:
    choices = [] if usage else [{"index": 0, "delta": delta}]
    return b"data: " + json.dumps({"choices": choices, "usage": usage}).encode() + b"\n\n"


@asynccontextmanager
async def _client(*events: bytes) -> AsyncIterator[OpenAIClient]:
    async def handle(request: web.Request) -> web.Response:
        body = await request.json()
        assert body["stream"] is True
        assert body["stream_options"] == {"include_usage": True}
        return web.Response(body=b"".join([*events, b"data: [DONE]\n\n"]))

    app = web.Application()
    app.router.add_post("/v1/chat/completions", handle)
    async with TestServer(app) as server, OpenAIClient(str(server.make_url("/"))) as client:
        yield client


async def test_content_reasoning_and_tool_calls_are_joined() -> None:
    call = {"index": 0, "function": {"name": "add", "arguments": '{"a"'}}
    rest = {"index": 0, "function": {"arguments": ": 1}"}}
    other = {"index": 1, "function": {"name": "sub", "arguments": "{}"}}
    seen: list[Message] = []
    async with _client(
        _event(role="assistant", content=""),
        _event(reasoning_content="let me "),
        _event(reasoning_content="see"),
        _event(content="a"),
        _event(content="b"),
        _event(tool_calls=[call]),
        _event(tool_calls=[rest, other]),
        _event(usage={"prompt_tokens": 3, "completion_tokens": 9}),
    ) as client:
        answer = await stream_answer(client, {"model": "m"}, seen.append)
    message = answer.message
    assert (message.content, message.reasoning_content) == ("ab", "let me see")
    calls = [(c.function.name, c.function.arguments) for c in message.tool_calls or ()]
    assert calls == [("add", '{"a": 1}'), ("sub", "{}")]
    assert answer.output_tokens == 9
    assert len(seen) == 6
    assert 0 < answer.ttft_s <= answer.duration_s


async def test_events_count_where_the_server_reports_no_usage() -> None:
    async with _client(_event(content="a"), _event(content="b")) as client:
        answer = await stream_answer(client, {"model": "m"})
    assert answer.output_tokens == 2


async def test_an_empty_answer_has_figures_too() -> None:
    async with _client(_event(role="assistant", content="")) as client:
        answer = await stream_answer(client, {"model": "m"})
    assert answer.message == Message("")
    assert answer.output_tokens == 0
    assert answer.tokens_per_s == 0


def test_the_rate_is_that_behind_the_first_token() -> None:
    answer = StreamedAnswer(Message("x"), output_tokens=11, ttft_s=1.0, duration_s=3.0)
    assert answer.tokens_per_s == pytest.approx(5.0)
    assert answer.figures() == "11 tokens, first after 1000 ms, 5 tokens/s"


def test_reasoning_and_answer_are_printed_on_lines_of_their_own(
    capsys: pytest.CaptureFixture[str],
) -> None:
    show = AnswerPrinter()
    for delta in (
        Message(None, "1 + 2 ="),
        Message(None, " 3"),
        Message("3", None),
        Message(" it is", None),
    ):
        show(delta)
    assert capsys.readouterr().out == "1 + 2 = 3\n3 it is"
