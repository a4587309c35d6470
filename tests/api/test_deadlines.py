# SPDX-License-Identifier: Apache-2.0
"""Deadlines of requests: the field `timeout`, the header `X-Request-Timeout` and the server's default."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pagoda.errors import DeadlineError

WAYS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": "hi"}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
    ("/v1/responses", {"input": "hi"}),
    ("/v1/messages", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}),
    ("/completion", {"prompt": "hi"}),
    ("/api/generate", {"model": "tiny", "prompt": "hi", "stream": False}),
    ("/generate", {"text": "hi"}),
    ("/inference/v1/generate", {"token_ids": [1], "sampling_params": {"max_tokens": 2}}),
    ("/v1/embeddings", {"input": "hi"}),
    ("/v1/score", {"text_1": "hi", "text_2": "ho"}),
    ("/v1/rerank", {"query": "hi", "documents": ["ho"]}),
]


@pytest.mark.parametrize(("path", "body"), WAYS)
async def test_every_dialect_takes_a_timeout(api: Any, path: str, body: dict[str, Any]) -> None:
    answer = await api.post(path, {**body, "timeout": 50})
    assert answer.status == 200, answer.body
    left = [request.timeout_s for request in api.endpoint.requests]
    assert left
    assert all(one is not None and 0 < one < 50 for one in left)


@pytest.mark.parametrize("timeout", [0, -1, "soon", 1e9, [1]])
async def test_a_bad_timeout_is_refused_by_name(api: Any, timeout: object) -> None:
    for path, body in WAYS[:2]:
        answer = await api.post(path, {**body, "timeout": timeout})
        assert (answer.status, answer.error()["param"]) == (400, "timeout")
    answer = await api.post("/v1/completions", WAYS[0][1], headers={"X-Request-Timeout": "nan"})
    assert (answer.status, answer.error()["param"]) == (400, "X-Request-Timeout")


async def test_the_body_goes_before_the_header_and_the_header_before_the_default(
    serve_api: Any,
) -> None:
    api = await serve_api(request_timeout_s=30.0)
    header = {"X-Request-Timeout": "20", "x-stainless-timeout": "1"}
    await api.complete()
    await api.post("/v1/completions", {"prompt": "hi"}, headers=header)
    await api.post("/v1/completions", {"prompt": "hi", "timeout": 10}, headers=header)
    left = [request.timeout_s or 0 for request in api.endpoint.requests]
    assert [10 * round(one / 10 + 0.4) for one in left] == [30, 20, 10]


async def test_all_answers_to_a_request_have_its_deadline(api: Any) -> None:
    await api.complete(n=3, timeout=40)
    assert [request.timeout_s is not None for request in api.endpoint.requests] == 3 * [True]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_that_is_late_before_its_first_token_ends_with_408(
    api: Any, stream: bool
) -> None:
    api.endpoint.raises = DeadlineError()
    answer = await api.complete(timeout=5, stream=stream)
    assert (answer.status, answer.error()["code"]) == (408, "request_timeout")
    assert answer.headers["x-should-retry"] == "false"
    metrics = (await api.get("/metrics")).body.decode()
    assert 'code="request_timeout"' in metrics
    assert 'finished_reason="timeout"' in metrics or 'reason="timeout"' in metrics


async def test_a_stream_that_is_late_ends_with_an_error_event(api: Any) -> None:
    api.endpoint.late_after = 1
    answer = await api.complete(timeout=5, stream=True)
    assert answer.status == 200
    *_, last, rest = answer.body.decode().split("\n\n")
    assert rest == ""
    kind, data = last.split("\n")
    assert kind == "event: error"
    assert json.loads(data.removeprefix("data: "))["error"]["code"] == "request_timeout"
