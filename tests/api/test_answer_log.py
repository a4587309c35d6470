# SPDX-License-Identifier: Apache-2.0
"""One line for each answer, or one for a request that got none."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from linked_hosts import until

from pagoda.api.answers.answer_log import log_answer
from pagoda.api.auth.keys import ApiKeys
from pagoda.errors import OverloadedError
from pagoda.telemetry.request_tracker import ClientRequest, RequestTracker

PROMPT = "a secret question"


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, logger="pagoda")
    return caplog


def lines(log: pytest.LogCaptureFixture) -> list[Any]:
    return [record for record in log.records if record.name.startswith("pagoda.api")]


async def test_an_answer_has_one_line(serve_api, log) -> None:
    api = await serve_api("hello", api_keys=ApiKeys(["alice:=a"]))
    api.endpoint.num_cached_tokens = 3
    headers = {"Authorization": "Bearer a", "X-Request-Id": "req-1"}
    await api.post("/v1/completions", {"prompt": PROMPT, "max_tokens": 3}, headers=headers)
    [line] = lines(log)
    assert line.levelname == "INFO"
    assert line.request_id.startswith("req-1-")
    figures = {name: line.fields[name] for name in ("finish_reason", "output_tokens", "key")}
    assert figures == {"finish_reason": "length", "output_tokens": 3, "key": "alice"}
    assert (line.fields["prompt_tokens"], line.fields["cached_tokens"]) == (len(PROMPT), 3)


def test_the_line_has_the_times_of_the_tracker(log) -> None:
    now_ns = [2 * 10**9]
    tracker = RequestTracker(lambda: now_ns[0])
    tracker.subscribe(on_finish=log_answer)
    client_request = ClientRequest(id="a", arrived_ns=10**9, key_name="alice")
    record = tracker.start("a-1", client_request, num_prompt_tokens=17, max_tokens=9)
    record.queue_time_s, record.num_cached_tokens = 0.0015, 3
    for seconds in (3, 4, 2000):
        now_ns[0] = seconds * 10**9
        tracker.add_tokens(record, 1)
    tracker.finish(record, "stop")
    [line] = lines(log)
    assert line.fields == {
        "finish_reason": "stop",
        "prompt_tokens": 17,
        "cached_tokens": 3,
        "output_tokens": 3,
        "queue_ms": 1.5,
        "ttft_ms": 2000,
        "itl_ms": 998500,
        "duration_ms": 1999000,
        "key": "alice",
        "error": None,
    }
    assert line.getMessage() == (
        "stop: 17 prompt tokens (3 cached), 3 output tokens, queued 1.5 ms, first token after "
        "2000 ms, then one every 998500 ms, all in 1999000 ms, key alice"
    )


async def test_what_gets_no_answer_has_the_line_of_http(api, log) -> None:
    await api.complete(model="other")
    await api.get("/v1/models")
    first, second = lines(log)
    assert first.getMessage().startswith("POST /v1/completions 404 ")
    assert first.getMessage().endswith(" s, code model_not_found, param model")
    assert first.fields["code"] == "model_not_found"
    assert first.fields["param"] == "model"
    assert second.fields.pop("duration_ms") >= 0
    assert {name: value for name, value in second.fields.items() if value is not None} == {
        "method": "GET",
        "path": "/v1/models",
        "status": 200,
    }


async def test_what_programs_ask_for_again_and_again_is_said_when_it_fails(serve_api, log) -> None:
    api = await serve_api(loading=True)
    for path in ("/health/live", "/metrics", "/ui/main.js", "/v1/live", "/health/ready"):
        await api.get(path)
    assert [line.fields["path"] for line in lines(log)] == ["/v1/live", "/health/ready"]


async def test_a_page_that_closes_is_well(api, caplog) -> None:
    caplog.set_level(logging.DEBUG, logger="pagoda.api")
    async with api.session.get(f"{api.url}/v1/live") as response:
        await response.content.readline()
    await until(lambda: lines(caplog) != [])
    [line] = lines(caplog)
    assert (line.levelname, line.fields["status"]) == ("DEBUG", 200)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", b'{"prompt": "x", "secret": 1}'),
        ("/v1/completions", b'{"secret": 1, "secret": 2}'),
        ("/v1/models?key=sk-secret&prompt=secret#secret", None),
    ],
)
async def test_words_of_clients_are_not_logged(api, log, path: str, body: bytes | None) -> None:
    answer = await (api.get(path) if body is None else api.post(path, body))
    assert answer.status == (200 if body is None else 400)
    [line] = lines(log)
    assert line.fields["path"] == path.partition("?")[0]
    assert "secret" not in f"{line.getMessage()} {line.fields}"


async def test_each_answer_of_several_and_each_refusal_has_a_line(api, log) -> None:
    await api.complete(n=3)
    api.endpoint.raises = OverloadedError("The waiting queue is full.")
    assert (await api.complete()).status == 429
    *answers, refusal = [line.getMessage() for line in lines(log)]
    assert [answer.partition(":")[0] for answer in answers] == ["stop"] * 3
    assert refusal.startswith("refused: ")
    assert refusal.endswith("error The waiting queue is full.")


async def test_neither_prompts_nor_answers_are_logged(serve_api, caplog) -> None:
    caplog.set_level(logging.DEBUG)
    api = await serve_api("a secret answer")
    await api.post("/v1/completions", {"prompt": PROMPT})
    await api.chat(stream=True)
    await api.post("/v1/completions", {"prompt": PROMPT, "max_tokens": 10**9})
    assert caplog.records
    assert "secret" not in caplog.text
