# SPDX-License-Identifier: Apache-2.0
"""The scopes of API keys: which routes a key may use, and whose requests it sees and ends."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import aiohttp
import pytest

from pagoda.api.auth.keys import ApiKey, ApiKeys, Scope, digest_of
from pagoda.api.routes import ROUTES
from pagoda.plugins.batches.state import BatchState

OPEN = """
GET / | GET /ui/* | GET /health | GET /health/live | GET /health/ready | GET /v1/health
GET /ping | POST /ping | GET /health_generate | GET /openapi.json | GET /docs
"""
ANY_KEY = """
GET /version | GET /v1/models | GET /v1/models/* | GET /models | GET /api/tags | GET /api/ps | GET /api/version
"""
LOOK = "GET /metrics | GET /metrics/vllm | GET /v1/load | GET /load | GET /v1/live | GET /v1/hosts | GET /v1/role"
OPERATE = """
DELETE /v1/hosts/* | PATCH /v1/hosts/* | PATCH /v1/role | POST /v1/load_lora_adapter | POST /v1/unload_lora_adapter
POST /profile/start | POST /profile/stop | POST /start_profile | POST /stop_profile
POST /api/pull | POST /api/push | POST /api/create | POST /api/copy | DELETE /api/delete
POST /slots/* | POST /sleep | POST /wake_up | GET /is_sleeping | POST /collective_rpc
POST /reset_prefix_cache | GET /flush_cache | POST /flush_cache | POST /update_weights_from_disk
"""
RUNNING = "GET /v1/requests | DELETE /v1/requests/*"
ANSWER = """
GET /server_info | GET /get_server_info | GET /bootstrap/rooms/*
POST /v1/completions | POST /v1/fim/completions
POST /v1/chat/completions | POST /v1/chat/completions/input_tokens
POST /v1/audio/transcriptions | POST /v1/audio/translations
POST /v1/embeddings | POST /embeddings | POST /pooling | POST /classify | POST /generative_scoring
POST /v1/score | POST /score | POST /v1/rerank | POST /v2/rerank | POST /rerank | POST /reranking
POST /v1/reranking | POST /v1/messages | POST /v1/messages/count_tokens
POST /v1/responses | POST /v1/responses/input_tokens | GET /v1/responses/* | POST /v1/responses/*
DELETE /v1/responses/* | POST /v1/conversations | GET /v1/conversations/* | POST /v1/conversations/*
DELETE /v1/conversations/* | POST /tokenize | POST /detokenize | GET /v1/files | POST /v1/files
GET /v1/files/* | DELETE /v1/files/* | GET /v1/batches | POST /v1/batches | GET /v1/batches/*
POST /v1/batches/* | POST /api/chat | POST /api/generate | POST /api/embed | POST /api/embeddings
POST /api/show | POST /completion | POST /completions | POST /infill | POST /embedding
POST /apply-template | GET /props | GET /slots | GET /lora-adapters | GET /tokenizer_info
POST /invocations | POST /inference/v1/generate | POST /v1/completions/render
POST /v1/chat/completions/render | POST /v1/chat/completions/batch | POST /generate
POST /v1/fim/completions | GET /v1/chat/completions | GET /v1/chat/completions/*
POST /v1/chat/completions/* | DELETE /v1/chat/completions/*
GET /get_model_info | GET /model_info | POST /chat/completions | POST /chat/completions/input_tokens
"""
EXPECTED = {
    route: frozenset(map(Scope, scopes.split()))
    for listed, scopes in (
        (OPEN, ""),
        (ANY_KEY, "answer look operate"),
        (LOOK, "look"),
        (OPERATE, "operate"),
        (RUNNING, "answer others"),
        (ANSWER, "answer"),
    )
    for route in " | ".join(listed.strip().splitlines()).split(" | ")
}
"""Scopes of all routes, once more: who adds a route decides here, too."""


def key(name: str, *scopes: Scope) -> ApiKey:
    return ApiKey(name=name, sha256=digest_of(name), scopes=frozenset(scopes))


def sent(name: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {name}"}


def test_each_route_has_the_scopes_that_were_decided() -> None:
    found = {
        f"{method} {path}": route.scopes
        for path, its in ROUTES.items()
        for method, route in its.items()
    }
    assert found == EXPECTED


async def test_a_key_opens_routes_of_its_scopes_only(serve_api) -> None:
    keys = ApiKeys(in_file=[*(key(scope.value, scope) for scope in Scope), key("none")])
    api = await serve_api(api_keys=keys, loading=True)
    for route, scopes in EXPECTED.items():
        method, path = route.replace("*", "tiny").split()
        for name in ("", *keys.names):
            answer = await api.request(method, path, headers=sent(name))
            may = not scopes or name in scopes
            assert (answer.status in (401, 403)) is not may, (route, name)
            if not may:
                assert answer.status == (403 if name else 401), (route, name)
                text = answer.body.decode()
                assert ("needs the scope" if name else "Send an API key") in text, (route, name)


async def test_the_error_names_key_and_scope(serve_api) -> None:
    api = await serve_api(api_keys=ApiKeys(in_file=[key("alice", Scope.ANSWER)]))
    answer = await api.get("/metrics", headers=sent("alice"))
    error = answer.error()
    assert (answer.status, error["type"]) == (403, "permission_error")
    assert (
        error["message"] == "The API key alice is not for this route, which needs the scope look."
    )


async def test_only_the_scope_for_others_sees_and_ends_requests_of_others(serve_api) -> None:
    all_but_others = (Scope.ANSWER, Scope.LOOK, Scope.OPERATE)
    keys = [key("alice", Scope.ANSWER), key("bob", *all_but_others), key("boss", Scope.OTHERS)]
    api = await serve_api("abcdef", api_keys=ApiKeys(in_file=keys))
    api.endpoint.pause_after = 1
    asking = asyncio.create_task(
        api.post("/v1/completions", {"prompt": "hi"}, headers=sent("alice"))
    )
    await api.endpoint.paused.wait()
    [running] = api.service.tracker.running
    for name, num_seen in (("alice", 1), ("bob", 0), ("boss", 1)):
        listed = (await api.get("/v1/requests", headers=sent(name))).json()
        assert (listed["total"], len(listed["data"])) == (num_seen, num_seen), name
    told = api.session.get(f"{api.url}/v1/live", headers=sent("bob"))
    async with asyncio.timeout(20), told as response:
        async for line in response.content:
            if line.startswith(b"data: "):
                assert json.loads(line[6:])["answers"] == []
                break
    path = f"/v1/requests/{running}"
    assert (await api.request("DELETE", path, headers=sent("bob"))).status == 404
    ended = await api.request("DELETE", path, headers=sent("boss"))
    assert ended.json()["cancelled"] == [running]
    api.endpoint.go_on.set()
    await asking


async def test_nobody_sees_what_another_keeps(serve_api, tmp_path: Path) -> None:
    """No scope opens files, batches, responses and conversations of another key."""
    api = await serve_api(
        api_keys=ApiKeys(in_file=[key("alice", Scope.ANSWER), key("root", *Scope)])
    )
    api.service.state(BatchState).open(tmp_path)
    headers = sent("alice")
    form = aiohttp.FormData({"purpose": "batch"})
    form.add_field("file", b"{}", filename="f")
    file = (await api.request("POST", "/v1/files", data=form, headers=headers)).json()["id"]
    asked = {"input_file_id": file, "endpoint": "/v1/completions", "completion_window": "24h"}
    batch = (await api.post("/v1/batches", asked, headers=headers)).json()["id"]
    begun = await api.post("/v1/conversations", {"metadata": {"a": "b"}}, headers=headers)
    conversation = begun.json()["id"]
    made = await api.post("/v1/responses", {"input": "hi", "model": "tiny"}, headers=headers)
    response = made.json()["id"]
    kept = [
        ("GET", f"/v1/files/{file}"),
        ("GET", f"/v1/files/{file}/content"),
        ("GET", f"/v1/batches/{batch}"),
        ("GET", f"/v1/conversations/{conversation}"),
        ("GET", f"/v1/conversations/{conversation}/items"),
        ("GET", f"/v1/responses/{response}"),
        ("GET", f"/v1/responses/{response}/input_items"),
        ("POST", f"/v1/responses/{response}/cancel"),
        ("POST", f"/v1/batches/{batch}/cancel"),
        ("POST", f"/v1/conversations/{conversation}"),
        ("DELETE", f"/v1/responses/{response}"),
        ("DELETE", f"/v1/conversations/{conversation}"),
        ("DELETE", f"/v1/files/{file}"),
    ]
    for method, path in kept:
        data = b"{}" if method == "POST" else None
        answer = await api.request(method, path, headers=sent("root"), data=data)
        assert answer.status == 404, (method, path)
    for method, path in kept[:7]:
        assert (await api.request(method, path, headers=headers)).status == 200, path
    for listing in ("/v1/files", "/v1/batches"):
        assert (await api.get(listing, headers=sent("root"))).json()["data"] == []
    for name, place in (("previous_response_id", response), ("conversation", conversation)):
        body = {"input": "go on", "model": "tiny", name: place}
        answer = await api.post("/v1/responses", body, headers=sent("root"))
        assert answer.status in (400, 404), name
        assert (await api.post("/v1/responses", body, headers=headers)).status == 200
    body = {**asked, "input_file_id": file}
    assert (await api.post("/v1/batches", body, headers=sent("root"))).status == 400


@pytest.mark.parametrize("route", ["/v1/completions", "/v1/embeddings", "/v1/chat/completions"])
async def test_only_urgent_keys_go_before_others(serve_api, route: str) -> None:
    keys = [key("alice", Scope.ANSWER), key("boss", Scope.ANSWER, Scope.URGENT)]
    api = await serve_api(api_keys=ApiKeys(in_file=keys), max_model_len=512)
    asked = {"prompt": "hi", "input": "hi", "messages": [{"role": "user", "content": "hi"}]}
    [field] = {"completions": ["prompt"], "embeddings": ["input"]}.get(
        route.removeprefix("/v1/"), ["messages"]
    )
    for name, priority, status in (
        *(("alice", None, 200), ("alice", 0, 200), ("alice", 7, 200), ("alice", -1, 400)),
        *(("boss", -1, 200), ("boss", -(2**31) + 1, 200)),
    ):
        body = {field: asked[field], "priority": priority}
        answer = await api.post(route, body, headers=sent(name))
        assert answer.status == status, (name, priority)
        if status == 400:
            assert answer.error()["param"] == "priority"
            assert "the scope urgent" in answer.error()["message"]


async def test_the_only_key_orders_its_requests_as_it_likes(serve_api) -> None:
    for keys in (ApiKeys(), ApiKeys(["secret"]), ApiKeys(in_file=[key("alice", Scope.ANSWER)])):
        api = await serve_api(api_keys=keys)
        headers = sent("alice") if "alice" in keys.names else sent("secret")
        answer = await api.post(
            "/v1/completions", {"prompt": "hi", "priority": -5}, headers=headers
        )
        assert answer.status == 200
        assert api.endpoint.requests[0].priority == -5


@pytest.mark.parametrize("scope", Scope)
async def test_the_reason_of_ill_health_is_for_any_key(serve_api, scope: Scope) -> None:
    api = await serve_api(api_keys=ApiKeys(in_file=[key("k", scope)]), loading=True)
    assert (await api.get("/health", headers=sent("k"))).error()[
        "message"
    ] == "The model is loading."
