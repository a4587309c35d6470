# SPDX-License-Identifier: Apache-2.0
"""Requests that come while the model loads wait for it, for a while."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from pagoda.api.auth.keys import ApiKeys
from pagoda.api.routes import ROUTES
from pagoda.api.service import Service

CHAT = {"messages": [{"role": "user", "content": "hi"}]}
TOLD_AT_ONCE = {
    *("/health", "/health/ready", "/v1/health", "/ping", "/health_generate"),
    *("/v1/live", "/v1/load", "/load", "/server_info", "/get_server_info", "/slots"),
    *("/v1/requests/*", "/v1/hosts", "/v1/hosts/*", "/v1/role"),
}
"""Routes about the server, for what watches it."""


async def held(service: Service, count: int) -> None:
    """Returns when so many requests wait for the model."""
    async with asyncio.timeout(60):
        while service.num_waiting_for_model != count:
            await asyncio.sleep(0.001)


def settle(api: Any, other: Any) -> None:
    """The model of a server is loaded: that of another one."""
    api.service.fleet, api.service.generator = other.service.fleet, other.service.generator
    api.service.has_settled.set()


async def test_requests_wait_for_the_model_and_health_does_not(serve_api) -> None:
    api, other = await serve_api(loading=True, hold_while_loading_s=3600), await serve_api("ok")
    asked = (
        api.get("/v1/models"),
        api.chat(),
        api.complete(stream=True),
        api.post("/tokenize", {"prompt": "hi"}),
        api.post("/api/chat", {"model": "tiny", **CHAT}),
        api.post("/v1/messages", {"model": "tiny", "max_tokens": 5, **CHAT}),
    )
    waiting = [asyncio.ensure_future(it) for it in asked]
    await held(api.service, len(waiting))
    for path in ("/health", "/health/ready", "/v1/load", "/v1/live"):
        answer = await api.get(path)
        assert (answer.status, answer.error()["message"]) == (503, "The model is loading.")
        assert int(answer.headers["Retry-After"]) > 0
    assert (await api.get("/metrics")).status == 200
    settle(api, other)
    assert [answer.status for answer in await asyncio.gather(*waiting)] == [200] * len(asked)
    assert api.service.num_waiting_for_model == 0


@pytest.mark.parametrize(
    ("config", "headers"),
    [
        ({}, {}),
        ({"hold_while_loading_s": 0.01}, {}),
        ({"hold_while_loading_s": 3600}, {"X-Request-Timeout": "0.01"}),
    ],
)
async def test_what_waits_too_long_is_told_to_come_again(serve_api, config, headers) -> None:
    api = await serve_api(loading=True, **config)
    answer = await api.post("/v1/chat/completions", CHAT, headers=headers)
    assert (answer.status, answer.error()["message"]) == (503, "The model is loading.")
    assert int(answer.headers["Retry-After"]) > 0
    assert api.service.num_waiting_for_model == 0


async def test_bodies_are_not_read_meanwhile_and_few_are_held(serve_api, monkeypatch) -> None:
    """A request waits as soon as its head is there; beyond a number they are told to come again."""
    monkeypatch.setattr("pagoda.api.service._MAX_WAITING_FOR_MODEL", 1)
    api, other = await serve_api(loading=True, hold_while_loading_s=3600), await serve_api("ok")
    body = json.dumps({"prompt": "hi"}).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", api.port)
    writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n")
    writer.write(b"Content-Length: %d\r\nConnection: close\r\n\r\n" % len(body))
    await held(api.service, 1)
    assert (await api.complete()).status == 503
    settle(api, other)
    await held(api.service, 0)
    writer.write(body)
    assert (await reader.read()).startswith(b"HTTP/1.1 200 ")
    writer.close()


async def test_the_end_of_the_server_ends_the_waiting(serve_api) -> None:
    api = await serve_api(loading=True, hold_while_loading_s=3600)
    waiting = asyncio.ensure_future(api.complete())
    await held(api.service, 1)
    api.service.draining = True
    api.service.has_settled.set()
    answer = await waiting
    assert (answer.status, answer.error()["message"]) == (503, "The server is shutting down.")


async def test_a_client_that_goes_away_is_held_no_longer(serve_api) -> None:
    api = await serve_api(loading=True, hold_while_loading_s=3600)
    waiting = asyncio.ensure_future(api.complete())
    await held(api.service, 1)
    waiting.cancel()
    await held(api.service, 0)


async def test_only_those_with_a_key_wait(serve_api) -> None:
    api = await serve_api(loading=True, hold_while_loading_s=3600, api_keys=ApiKeys(["secret"]))
    assert (await api.complete()).status == 401


async def test_the_name_of_an_adapter_is_not_unknown_yet(serve_api) -> None:
    api = await serve_api(loading=True)
    for answer in (await api.complete(model="style"), await api.get("/v1/models/style")):
        assert (answer.status, answer.error()["message"]) == (503, "The model is loading.")


async def test_every_route_that_needs_the_model_waits_for_it(serve_api) -> None:
    api = await serve_api(loading=True)
    bodies: dict[str, Any] = {
        "/detokenize": {"tokens": [1]},
        "/api/show": {"model": "tiny"},
        "/v1/load_lora_adapter": {"lora_name": "a", "lora_path": "/a"},
        "/v1/unload_lora_adapter": {"lora_name": "a"},
        "/v1/completions/render": {"prompt": "hi"},
        "/tokenize": {"prompt": "hi"},
        "/v1/responses/input_tokens": {"input": "hi"},
    }
    checked = set()
    for path, methods in ROUTES.items():
        for method, route in methods.items():
            body = json.dumps(bodies.get(path, CHAT)).encode() if method == "POST" else None
            answer = await api.request(method, path.replace("*", "tiny"), data=body)
            if answer.status == 503 and path not in TOLD_AT_ONCE:
                assert route.is_queued or route.needs_model, (method, path)
                checked.add(path)
            if route.needs_model:
                assert answer.status in (503, 403), (method, path, answer.body)
    assert {"/v1/models", "/tokenize", "/api/tags", "/props", "/v1/chat/completions"} <= checked
