# SPDX-License-Identifier: Apache-2.0
"""Limits of API keys over HTTP, and the clock behind them."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable
from typing import Any

import pytest
from template_texts import QWEN

from pagoda.api.auth.key_limits import KeyLimits
from pagoda.api.auth.keys import EVERY_ROUTE, ApiKey, ApiKeys
from pagoda.api.errors import ApiError
from pagoda.concurrency.async_utils import LongWork, cancel_all
from pagoda.errors import OverloadedError
from pagoda.messages.encoder_input import EncoderInput, encoder_input, text_input
from pagoda.messages.frontend import GenerateRequest, Work
from pagoda.messages.sampling_params import SamplingParams
from pagoda.telemetry.request_tracker import ClientRequest, RequestTracker


def key(name: str = "k", **limits: int) -> ApiKey:
    digest = hashlib.sha256(name.encode()).hexdigest()
    return ApiKey(name=name, sha256=digest, scopes=EVERY_ROUTE, **limits)


async def serve_with(serve_api: Any, *keys: ApiKey) -> Any:
    return await serve_api(api_keys=ApiKeys(in_file=keys))


def sent_with(name: str) -> dict[str, dict[str, str]]:
    return {"headers": {"Authorization": f"Bearer {name}"}}


BODY = {"prompt": "hi", "max_tokens": 2}


async def test_requests_beyond_the_rate_are_refused_and_others_go_on(serve_api: Any) -> None:
    api = await serve_with(serve_api, key(requests_per_minute=2), key("free", weight=3))
    answers = [await api.post("/v1/completions", BODY, **sent_with("k")) for _ in range(3)]
    assert [answer.status for answer in answers] == [200, 200, 429]
    assert int(answers[2].headers["Retry-After"]) in range(25, 31)
    assert answers[2].error()["code"] == "rate_limit_exceeded"
    told = [answer.headers["x-ratelimit-remaining-requests"] for answer in answers]
    assert told == ["1", "0", "0"]
    assert answers[0].headers["x-ratelimit-limit-requests"] == "2"
    assert (await api.get("/v1/models", **sent_with("k"))).status == 200
    free = await api.post("/v1/completions", BODY, **sent_with("free"))
    assert free.status == 200
    assert "x-ratelimit-limit-requests" not in free.headers
    assert (api.endpoint.requests[-1].tenant, api.endpoint.requests[-1].weight) == ("free", 3.0)
    metrics = (await api.get("/metrics", **sent_with("k"))).body.decode()
    assert 'code="requests_per_minute"' in metrics


async def test_requests_at_a_time_are_bounded(serve_api: Any) -> None:
    api = await serve_with(serve_api, key(max_concurrent_requests=1))
    api.endpoint.pause_after = 1
    first = asyncio.create_task(api.post("/v1/completions", BODY, **sent_with("k")))
    await api.endpoint.paused.wait()
    second = await api.post("/v1/completions", BODY, **sent_with("k"))
    assert (second.status, second.headers["Retry-After"]) == (429, "1")
    api.endpoint.go_on.set()
    assert (await first).status == 200
    assert (await api.post("/v1/completions", BODY, **sent_with("k"))).status == 200


async def test_a_request_that_the_queue_refuses_does_not_count(serve_api: Any) -> None:
    api = await serve_with(serve_api, key(requests_per_minute=1))
    api.endpoint.raises = OverloadedError("The queue is full.")
    for _ in range(3):
        refused = await api.post("/v1/completions", BODY, **sent_with("k"))
        assert refused.error()["message"] == "The queue is full."
        assert refused.headers["x-ratelimit-remaining-requests"] == "1"
    api.endpoint.raises = None
    statuses = [
        (await api.post("/v1/completions", BODY, **sent_with("k"))).status for _ in range(2)
    ]
    assert statuses == [200, 429]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("leaves", [False, True])
async def test_a_response_in_the_background_counts_until_it_has_ended(
    serve_api: Any, stream: bool, leaves: bool
) -> None:
    keys = ApiKeys(in_file=[key(max_concurrent_requests=2)])
    api = await serve_api("ok", text=QWEN, api_keys=keys)
    api.endpoint.pause_after = 1
    body = {"input": "hi", "background": True, "stream": stream}
    asking = [
        asyncio.create_task(api.post("/v1/responses", body, **sent_with("k"))) for _ in range(2)
    ]
    while len(api.endpoint.requests) < 2:
        await asyncio.sleep(0)
    if leaves:
        await cancel_all(asking)
    third = await api.post("/v1/responses", body, **sent_with("k"))
    assert (third.status, third.error()["code"]) == (429, "rate_limit_exceeded")
    api.endpoint.pause_after = None
    api.endpoint.go_on.set()
    if not leaves:
        assert [answer.status for answer in await asyncio.gather(*asking)] == [200, 200]
    while api.service.tracker.running:
        await asyncio.sleep(0)
    for _ in range(2):
        assert (await api.post("/v1/responses", body, **sent_with("k"))).status == 200


async def test_tokens_are_counted_as_they_come(serve_api: Any) -> None:
    api = await serve_with(serve_api, key(tokens_per_minute=3))
    statuses = [
        (await api.post("/v1/completions", BODY, **sent_with("k"))).status for _ in range(2)
    ]
    assert statuses == [200, 429]


def test_a_bucket_fills_with_time_and_debt_is_paid_first() -> None:
    now, tracker, waits = [0.0], RequestTracker(), list[str]()
    limits, one = KeyLimits(tracker, lambda: now[0]), key(tokens_per_minute=60)

    def admits() -> bool:
        try:
            with limits.admit(one):
                return True
        except ApiError as refusal:
            waits.append(refusal.headers["Retry-After"])
            return False

    assert admits()
    client_request = ClientRequest(id="r", arrived_ns=0, key_name="k")
    record = tracker.start(
        "r", client_request, num_prompt_tokens=10, num_encoded_positions=30, max_tokens=60
    )
    tracker.add_tokens(record, 60)
    assert limits.headers(one)["x-ratelimit-remaining-tokens"] == "0"
    assert not admits()
    assert waits == ["41"]
    now[0] = 40.5
    assert admits()


@pytest.mark.parametrize(
    ("beside", "told", "charged"),
    [
        (None, 2, 2),
        (text_input(range(20)), 20, 20),
        (encoder_input(bytes(4 * 80 * 30), positions=15), 2, 17),
    ],
)
def test_a_prompt_has_the_tokens_that_its_usage_tells(
    beside: EncoderInput | None, told: int, charged: int
) -> None:
    tracker, one = RequestTracker(), key(tokens_per_minute=60)
    limits = KeyLimits(tracker, lambda: 0.0)
    work = Work(SamplingParams(seed=0, max_tokens=1), encoder_input=beside)
    request = GenerateRequest(request_id="r", prompt_token_ids=[0, 5], work=work)
    client_request = ClientRequest(id="r", arrived_ns=0, key_name="k")
    with limits.admit(one), tracker.answering(request, client_request) as record:
        assert record.num_prompt_tokens == told
        assert limits.headers(one)["x-ratelimit-remaining-tokens"] == str(60 - charged)


@pytest.mark.parametrize("name", ["", "k"])
def test_keys_without_limits_cost_nothing(name: str) -> None:
    limits = KeyLimits(RequestTracker())
    one = key(name) if name else None
    assert limits.headers(one) == {}


async def test_large_bodies_and_long_conversations_wait_in_the_line_of_their_key(
    serve_api: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    api = await serve_with(serve_api, key("alice"))
    run, lines = LongWork.run, list[str]()

    async def noted(threads: LongWork, work: Callable[[], object], tenant: str = "") -> object:
        lines.append(tenant)
        return await run(threads, work, tenant)

    monkeypatch.setattr(LongWork, "run", noted)
    messages = [{"role": "user", "content": "x" * 150}] * 490
    await api.post("/v1/chat/completions", {"messages": messages}, **sent_with("alice"))
    assert len(lines) >= 2
    assert set(lines) == {"alice"}
