# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import asyncio
import gc
import json
import threading
from array import array
from collections.abc import AsyncIterator
from itertools import pairwise
from typing import Any

import pytest
from linked_hosts import until
from scripted_endpoint import TEXT
from tables import each_row

from pagoda.api.errors import INTERNAL_ERROR
from pagoda.api.openai.logprobs import (
    CompletionLogprobs,
    TokenSpelling,
    chat_logprobs,
    prompt_logprobs,
)
from pagoda.errors import EngineDeadError, OverloadedError
from pagoda.messages.frontend import (
    FinishReason,
    GenerateRequest,
    PromptLogprobs,
    TokenChunk,
    TokenLogprobs,
)
from pagoda.plugins.sim.model import sim_logprob

WHOLE_AND_STREAM = pytest.mark.parametrize("stream", [False, True])


@WHOLE_AND_STREAM
async def test_an_answer(serve_api, stream: bool) -> None:
    api = await serve_api("héllo")
    api.endpoint.num_cached_tokens = 1
    options = {"stream_options": {"include_usage": True}} if stream else {}
    answer = await api.complete(model="tiny", max_tokens=20, stream=stream, **options)
    *events, last = answer.events() if stream else [answer.json()]
    [choice] = answer.choices()
    assert last["object"] == "text_completion"
    assert last["id"].startswith("cmpl-")
    assert (last["model"], choice["index"], choice["text"]) == ("tiny", 0, "héllo")
    assert choice["finish_reason"] == "stop"
    assert choice["stop_reason"] is choice["logprobs"] is None
    assert last["usage"] == {
        "prompt_tokens": 2,
        "completion_tokens": 7,
        "total_tokens": 9,
        "prompt_tokens_details": {"cached_tokens": 1},
    }
    if stream:
        assert [event["choices"][0]["finish_reason"] for event in events] == [None] * 6 + ["stop"]
        assert last["choices"] == []
    assert all(event["usage"] is None for event in events)
    assert {event["id"] for event in events} <= {last["id"]}


async def test_usage_in_a_stream_only_where_it_is_asked_for(api) -> None:
    assert b"usage" not in (await api.complete(stream=True)).body
    options = {"continuous_usage_stats": True}
    assert b"usage" not in (await api.complete(stream=True, stream_options=options)).body
    options = {"continuous_usage_stats": True, "include_usage": True}
    events = (await api.complete(stream=True, stream_options=options)).events()
    assert [event["usage"]["completion_tokens"] for event in events] == [1, 2, 3, 3]


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("ab", [[97, 98]]),
        ([97, 98], [[97, 98]]),
        (["a", "b"], [[97], [98]]),
        ([[97], [98, 99]], [[97], [98, 99]]),
    ],
)
async def test_the_four_kinds_of_prompt(api, prompt: Any, expected: list[list[int]]) -> None:
    answer = (await api.post("/v1/completions", {"prompt": prompt})).json()
    assert [request.prompt_token_ids for request in api.endpoint.requests] == expected
    assert [choice["index"] for choice in answer["choices"]] == list(range(len(expected)))
    assert answer["usage"]["prompt_tokens"] == sum(map(len, expected))


async def test_answers_of_one_body_are_told_as_one_and_those_of_two_apart(serve_api) -> None:
    api = await serve_api()
    for _ in range(2):  # with the same id of the client
        body = {"prompt": ["a", "b"], "n": 3, "max_tokens": 1}
        answer = await api.post("/v1/completions", body, headers={"X-Request-Id": "one"})
        assert answer.status == 200
    bodies = [request.body for request in api.endpoint.requests]
    assert [len(set(part)) for part in (bodies[:6], bodies[6:], bodies)] == [1, 1, 2]


@WHOLE_AND_STREAM
async def test_several_prompts_with_several_answers(serve_api, stream: bool) -> None:
    api = await serve_api(lambda request: f"{bytes(request.prompt_token_ids).decode()}!")
    answer = await api.complete(prompt=["a", "b"], n=2, stream=stream)
    assert [choice["text"] for choice in answer.choices()] == ["a!", "a!", "b!", "b!"]
    assert stream or answer.json()["usage"]["prompt_tokens"] == 2


@WHOLE_AND_STREAM
@pytest.mark.parametrize(
    ("answer", "body", "expected"),
    [
        ("x" * 50, {}, {"text": "x" * 16, "finish_reason": "length"}),
        ("ok", {"echo": True}, {"text": "hiok"}),
        ("ok", {"echo": True, "prompt": [104, 105]}, {"text": "hiok"}),
        (
            "ok",
            {"return_token_ids": True},
            {"prompt_token_ids": [104, 105], "token_ids": [111, 107, 257]},
        ),
    ],
)
async def test_choices(
    serve_api, answer: str, body: dict[str, Any], expected: dict[str, Any], stream: bool
) -> None:
    api = await serve_api(answer)
    [choice] = (await api.complete(**body, stream=stream)).choices()
    assert expected.items() <= choice.items()


@WHOLE_AND_STREAM
async def test_logprobs(serve_api, stream: bool) -> None:
    api = await serve_api("aé")
    [choice] = (await api.complete(logprobs=2, stream=stream)).choices()
    logprobs = choice["logprobs"]
    assert logprobs["tokens"] == ["a", "bytes:\\xc3", "bytes:\\xa9", "<|im_end|>"]
    assert logprobs["token_logprobs"] == [-0.5] * 4
    assert logprobs["top_logprobs"][0] == {"a": -0.5, "b": -1.5}
    assert logprobs["text_offset"][:2] == [0, 1]


def _scores(prompt: str) -> list[float]:
    """Log-probabilities of a prompt's tokens but the first."""
    return [sim_logprob(one, other) for one, other in pairwise(prompt.encode())]


@WHOLE_AND_STREAM
@pytest.mark.parametrize("num_tokens", [0, 1])
async def test_echo_with_logprobs_scores_the_prompt(
    serve_api, stream: bool, num_tokens: int
) -> None:
    """The request that lm-eval's log-likelihood tasks send."""
    api = await serve_api("ok")
    prompts = [list(b"abc"), list(b"z"), list(b"defgh")]
    options = {"max_tokens": num_tokens, "temperature": 0, "seed": 1234}
    answer = await api.complete(
        prompt=prompts, echo=True, logprobs=1, n=2, stream=stream, **options
    )
    choices = answer.choices()
    assert len(choices) == 6
    for choice, text in zip(choices, ("abc", "abc", "z", "z", "defgh", "defgh"), strict=True):
        logprobs, said = choice["logprobs"], "o" * num_tokens
        assert (choice["text"], choice["finish_reason"]) == (text + said, "length")
        assert logprobs["tokens"] == list(text + said)
        assert logprobs["token_logprobs"] == [None, *_scores(text), *[-0.5] * num_tokens]
        assert logprobs["top_logprobs"][0] is None
        pairs = zip(text[1:], _scores(text), strict=True)
        assert logprobs["top_logprobs"][1 : len(text)] == [{token: value} for token, value in pairs]
        assert logprobs["text_offset"] == list(range(len(text) + num_tokens))
    if not stream:
        assert answer.json()["usage"]["completion_tokens"] == 6 * num_tokens
        scored = [r.work.sampling.prompt_logprobs for r in api.endpoint.requests]
        assert scored == [1, None] * 3  # a prompt is scored once


@WHOLE_AND_STREAM
@pytest.mark.parametrize("num_top", [0, 1])
async def test_log_probabilities_of_the_prompt(serve_api, stream: bool, num_top: int) -> None:
    api = await serve_api("ok")
    answer = await api.complete(
        prompt="abc", prompt_logprobs=num_top, n=2, logprobs=2, stream=stream
    )
    for choice in answer.choices():
        assert choice["text"] == "ok"
        first, *rest = choice["prompt_logprobs"]
        assert first is None
        expected = zip("bc", _scores("abc"), strict=True)
        assert rest == [
            {str(ord(token)): {"logprob": value, "rank": 1, "decoded_token": token}}
            for token, value in expected
        ]
        assert len(choice["logprobs"]["tokens"]) == 3
    alone = await api.complete(prompt="a", prompt_logprobs=0, max_tokens=0)
    [choice] = alone.choices()
    assert (choice["text"], choice["prompt_logprobs"]) == ("", [None])


@pytest.mark.parametrize("stream", [False, True])
async def test_many_log_probabilities_are_written_beside_the_event_loop(
    serve_api, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    api = await serve_api("ok")
    options = {"echo": True, "logprobs": 1, "prompt_logprobs": 1, "n": 2, "stream": stream}
    asked = {"prompt": list(b"abcdefghij"), **options}
    expected = (await api.complete(**asked)).choices()
    threads: set[str] = set()
    text = TokenSpelling.text

    def noting(self: TokenSpelling, token_id: int) -> str:
        if token_id == ord("j"):
            threads.add(threading.current_thread().name.partition("_")[0])
        return text(self, token_id)

    monkeypatch.setattr(TokenSpelling, "text", noting)
    monkeypatch.setattr("pagoda.concurrency.async_utils.LONG_TEXT_CHARS", 8)
    monkeypatch.setattr("pagoda.concurrency.async_utils._SHORT_TEXT_CHARS", -1)
    assert (await api.complete(**asked)).choices() == expected
    assert "long-work" in threads
    if not stream:
        assert threads == {"long-work"}


def test_log_probabilities_are_nothing_to_the_collector_of_garbage() -> None:
    """A full collection looks at all objects that it tracks, and stops all threads meanwhile."""
    count, num_top = 500, 20
    ids = list(range(256)) * 2
    columns = PromptLogprobs(
        1,
        num_top,
        array("i", [1] * count).tobytes(),
        array("i", (ids[:num_top]) * count).tobytes(),
        array("f", [-0.5] * (count * (1 + num_top))).tobytes(),
    )
    spelling = TokenSpelling(TEXT.tokenizer)
    prompt = ids[: count + 1]
    gc.collect()
    before = len(gc.get_objects())
    entries = columns.entries()
    kept = [
        entries,
        prompt_logprobs(TEXT.tokenizer, prompt, entries, num_top),
        chat_logprobs(spelling, prompt[1:], entries),
        CompletionLogprobs(spelling, num_top).format(prompt[1:], entries),
    ]
    gc.collect()
    assert len(gc.get_objects()) - before < count
    assert len(kept[1]) == count + 1


@each_row(
    ("body", "param"),
    [
        ({"prompt_logprobs": 1, "n": 8, "stream": True}, "prompt_logprobs"),
        ({"echo": True, "logprobs": 1, "n": 8}, "logprobs"),
        ({"logprobs": 1, "n": 8}, "logprobs"),
    ],
)
async def test_log_probabilities_that_would_fill_the_memory_are_refused(
    serve_api, body: dict[str, Any], param: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pagoda.api.answers.generation.MAX_KEPT_LOGPROBS", 100)
    api = await serve_api("x" * 9)
    answer = await api.complete(prompt="a" * 10, **body)
    assert (answer.status, answer.error()["param"]) == (400, param)
    assert "100" in answer.error()["message"]
    assert (await api.complete(prompt="a" * 10, **{**body, "n": 2})).status == 200
    assert (await api.complete(prompt="a" * 10, logprobs=1, n=8, stream=True)).status == 200


async def test_the_best_of_several_answers(serve_api) -> None:
    """Every token costs the same, so the shortest answers are the likeliest."""
    lengths = iter([3, 1, 4, 2, 2, 5, 1, 3])
    api = await serve_api(lambda _: "x" * next(lengths))
    answer = await api.complete(prompt=["a", "b"], n=2, best_of=4, echo=True)
    choices = answer.choices()
    assert [choice["text"] for choice in choices] == ["ax", "axx", "bx", "bxx"]
    assert [choice["index"] for choice in choices] == [0, 1, 2, 3]
    assert all(choice["logprobs"] is None for choice in choices)
    assert answer.json()["usage"]["completion_tokens"] == 21 + 8  # with the end tokens


async def _likeliest(request: GenerateRequest) -> AsyncIterator[TokenChunk]:
    """Behind each token the next letters are likely, the end is behind 'd'."""
    last = request.prompt_token_ids[-1]
    token_ids = [257] if last == ord("d") else [last + 1, last + 2]
    logprobs = [-0.1] if last == ord("d") else [-0.5, -1.0]
    entry = TokenLogprobs(logprobs[0], 1, token_ids, logprobs)
    yield TokenChunk(request.request_id, token_ids[:1], FinishReason.LENGTH, None, [entry])


async def test_beam_search(api) -> None:
    api.endpoint.generate = _likeliest
    beams = {"use_beam_search": True, "n": 2, "max_tokens": 8, "logprobs": 1}
    answer = await api.complete(prompt="a", length_penalty=0.0, **beams)
    choices = answer.choices()
    # a b d costs 0.5 + 1.0, a c d 1.0 + 0.5, a b c d 1.5; the end 0.1.
    assert {choice["text"] for choice in choices} < {"bd", "cd", "bcd"}
    assert [choice["finish_reason"] for choice in choices] == ["stop", "stop"]
    assert [len(choice["logprobs"]["top_logprobs"][0]) for choice in choices] <= [2, 2]
    [longest, _] = (await api.complete(prompt="a", length_penalty=2.0, **beams)).choices()
    assert (longest["text"], longest["finish_reason"]) == ("bcefghij", "length")
    chat = await api.chat(use_beam_search=True, best_of=2, max_tokens=3)
    assert len(chat.choices()) == 1


@each_row(
    ("body", "param"),
    [
        ({"best_of": 1, "n": 2}, "best_of"),
        ({"best_of": 2, "stream": True}, "best_of"),
        ({"length_penalty": 1.2}, "length_penalty"),
        ({"early_stopping": True}, "early_stopping"),
        ({"use_beam_search": True, "n": 65}, "n"),
        ({"use_beam_search": True, "best_of": 65}, "best_of"),
        ({"use_beam_search": True, "stream": True}, "stream"),
        ({"use_beam_search": True, "presence_penalty": 0.5}, "presence_penalty"),
        ({"use_beam_search": True, "stop": ["x"]}, "stop"),
        ({"use_beam_search": True, "length_penalty": 1e9}, "length_penalty"),
        ({"use_beam_search": True, "echo": True, "logprobs": 1}, "echo"),
    ],
)
async def test_what_does_not_go_together(api, body: dict[str, Any], param: str) -> None:
    answer = await api.complete(**body)
    assert (answer.status, answer.error()["param"]) == (400, param)


async def test_tokens_as_ids(serve_api) -> None:
    api = await serve_api("é")
    options = {"return_tokens_as_token_ids": True, "logprobs": 1, "echo": True}
    [choice] = (await api.complete(prompt="ab", **options)).choices()
    logprobs = choice["logprobs"]
    ids = [97, 98, 0xC3, 0xA9, 257]
    assert logprobs["tokens"] == [f"token_id:{i}" for i in ids]
    assert logprobs["top_logprobs"][1] == {"token_id:98": logprobs["token_logprobs"][1]}
    assert logprobs["text_offset"][:3] == [0, 1, 2]


@WHOLE_AND_STREAM
@pytest.mark.parametrize("stop", ["END", ["x", "END"]])
async def test_stop_strings(serve_api, stream: bool, stop: Any) -> None:
    api = await serve_api("one END two")
    [choice] = (await api.complete(stop=stop, max_tokens=50, stream=stream)).choices()
    assert (choice["text"], choice["finish_reason"]) == ("one ", "stop")
    assert choice["stop_reason"] == "END"
    assert len(api.endpoint.aborted) == 1


async def test_every_parameter_reaches_the_engine(api) -> None:
    given = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 5,
        "min_p": 0.1,
        "typical_p": 0.8,
        "seed": -3,
        "frequency_penalty": 0.1,
        "presence_penalty": 0.2,
        "repetition_penalty": 1.1,
        "min_tokens": 1,
        "stop_token_ids": [7],
        "allowed_token_ids": [111, 107],
        "ignore_eos": True,
    }
    status = (await api.complete(**given, logit_bias={"5": -1}, priority=3, cache_salt="s")).status
    assert status == 200
    [request] = api.endpoint.requests
    for name, value in given.items():
        expected = tuple(value) if isinstance(value, list) else value
        assert getattr(request.work.sampling, name) == expected
    assert request.work.sampling.logit_bias == {5: -1.0}
    assert (request.priority, request.cache_salt, request.work.eos_token_ids) == (3, "s", ())


async def test_fields_without_effect_and_neutral_values(api) -> None:
    neutral = {"best_of": 1, "bad_words": [], "suffix": "", "store": False}
    neutral |= {"response_format": {"type": "text"}, "service_tier": "auto"}
    nulls = dict.fromkeys(["temperature", "stop", "seed", "n", "logprobs", "max_tokens"])
    answer = await api.complete(user="me", metadata={"a": "b"}, **neutral, **nulls)
    assert answer.status == 200


@WHOLE_AND_STREAM
@pytest.mark.parametrize(
    ("error", "status", "kind", "wait_s"),
    [
        (OverloadedError("Full.", retry_after_s=7), 429, "rate_limit_error", "7"),
        (EngineDeadError("Gone."), 503, "service_unavailable_error", "5"),
    ],
)
async def test_a_refusal(
    api, stream: bool, error: Exception, status: int, kind: str, wait_s: str
) -> None:
    api.endpoint.raises = error
    answer = await api.complete(stream=stream)
    assert (answer.status, answer.headers["Retry-After"]) == (status, wait_s)
    assert (answer.error()["message"], answer.error()["type"]) == (str(error), kind)


@pytest.mark.parametrize("n", [1, 2])
async def test_a_request_that_breaks(api, n: int, caplog: pytest.LogCaptureFixture) -> None:
    """The client gets no details; the log has the engine's reason, but not the texts of other errors."""
    api.endpoint.breaks_after = 0
    answer = await api.complete(n=n)
    assert (answer.status, answer.error()["message"]) == (500, INTERNAL_ERROR)
    [record] = [r for r in caplog.records if r.levelname == "ERROR"]
    assert vars(record)["request_id"] == answer.headers["X-Request-Id"]
    assert str(record.exc_info[1]) == f"{api.endpoint.requests[0].request_id}: It broke."
    api.endpoint.raises = ZeroDivisionError("secret")
    for answer in (await api.complete(n=n), await api.complete(stream=True)):
        assert (answer.status, answer.error()["message"]) == (500, INTERNAL_ERROR)
    assert "ZeroDivisionError;" in caplog.text
    assert "secret" not in caplog.text


@WHOLE_AND_STREAM
@pytest.mark.parametrize("num_tokens", [0, 1])
async def test_a_grammar_that_takes_too_much_work_is_the_clients_mistake(
    api, stream: bool, num_tokens: int
) -> None:
    api.endpoint.breaks_after = num_tokens
    answer = await api.complete(stream=stream, structured_outputs={"regex": "ok"})
    text = answer.body.decode()
    if stream and num_tokens:
        text = text.partition("event: error\ndata: ")[2]
    else:
        assert answer.status == 400
    error = json.loads(text)["error"]
    assert (error["message"], error["param"]) == (
        "structured_outputs: It broke.",
        "structured_outputs",
    )


async def test_an_error_inside_a_stream_is_an_event_and_the_end(api) -> None:
    api.endpoint.breaks_after = 1
    body = (await api.complete(stream=True)).body.decode()
    first, error, rest = body.split("\n\n")
    assert '"text":"o"' in first
    name, data = error.split("\n")
    assert name == "event: error"
    assert json.loads(data.removeprefix("data: "))["error"]["message"] == INTERNAL_ERROR
    assert rest == ""


@WHOLE_AND_STREAM
@pytest.mark.parametrize("n", [1, 3])
async def test_a_client_that_goes_away_aborts(serve_api, stream: bool, n: int) -> None:
    api = await serve_api("a long answer")
    api.endpoint.pause_after = 2
    asking = asyncio.create_task(api.complete(stream=stream, n=n))
    await api.endpoint.paused.wait()
    asking.cancel()
    await until(lambda: len(api.endpoint.aborted) == n)
    assert sorted(api.endpoint.aborted) == sorted(r.request_id for r in api.endpoint.requests)


async def test_a_client_of_http_1_0_gets_the_events_without_chunks(api) -> None:
    body = b'{"prompt": "hi", "stream": true}'
    head = (
        b"POST /v1/completions HTTP/1.0\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
        % len(body)
    )
    _, events = await api.raw(head + body)
    *pieces, last, rest = events.split(b"\n\n")
    texts = [json.loads(piece[6:])["choices"][0]["text"] for piece in pieces]
    assert ("".join(texts), last, rest) == ("ok", b"data: [DONE]", b"")


@pytest.mark.parametrize("num_tokens", [0, 1])
async def test_an_idle_stream_gets_comments(serve_api, num_tokens: int) -> None:
    api = await serve_api("ok", keep_alive_s=0.02)
    api.endpoint.pause_after = num_tokens
    asking = api.session.post(f"{api.url}/v1/completions", json={"prompt": "hi", "stream": True})
    async with asking as response:
        while await response.content.readline() != b": keep-alive\n":
            pass
        api.endpoint.go_on.set()
        assert (await response.read()).endswith(b"data: [DONE]\n\n")


async def test_a_reader_that_stops_reading_is_cut_off(serve_api) -> None:
    api = await serve_api("x" * 250, max_model_len=1000, keep_alive_s=0.05, stall_timeout_s=0.2)
    reader, writer = await asyncio.open_connection("127.0.0.1", api.port, limit=2**10)
    body = {"prompt": ["hi"] * 100, "n": 10, "max_tokens": 250, "stream": True, "logprobs": 20}
    data = json.dumps(body).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    writer.write(head + b"Content-Length: %d\r\n\r\n%b" % (len(data), data))
    await asyncio.wait_for(api.endpoint.any_aborted.wait(), 30)
    writer.close()
    del reader
