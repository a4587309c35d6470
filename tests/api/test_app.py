# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import asyncio
import gzip

import pytest

from pagoda.api.auth.keys import ApiKeys
from pagoda.api.dialect import OPENAI
from pagoda.api.routes import OPEN_PATHS, ROUTES
from pagoda.errors import OverloadedError
from pagoda.fleet.endpoint import Health
from pagoda.version import __version__

# ---- routes


async def test_models(api) -> None:
    [model] = (await api.get("/v1/models")).json()["data"]
    assert (model["id"], model["object"], model["max_model_len"]) == ("tiny", "model", 256)
    assert model["owned_by"] == "pagoda"
    assert (await api.get("/v1/models/tiny")).json() == model
    answer = await api.get("/v1/models/other/name")
    assert (answer.status, answer.error()["code"]) == (404, "model_not_found")


async def test_version_and_load(api) -> None:
    assert (await api.get("/version")).json() == {"version": __version__}
    load = (await api.get("/v1/load")).json()
    assert (load["num_running"], load["draining"]) == (0, False)


async def test_tokenize_and_detokenize(api) -> None:
    answer = (await api.post("/tokenize", {"prompt": "hé", "return_token_strs": True})).json()
    assert answer["tokens"] == [104, 0xC3, 0xA9]
    assert (answer["count"], answer["max_model_len"]) == (3, 256)
    assert answer["token_strs"] == ["h", "Ã", "©"]
    back = (await api.post("/detokenize", {"tokens": [*answer["tokens"], 257]})).json()
    assert back == {"prompt": "hé<|im_end|>", "content": "hé<|im_end|>"}


async def test_tokenize_a_conversation(api) -> None:
    messages = [{"role": "user", "content": "hi"}]
    tokens = (await api.post("/tokenize", {"messages": messages})).json()["tokens"]
    await api.chat()
    assert tokens == api.endpoint.requests[0].prompt_token_ids


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "x", "messages": []}, "prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens[0]"),
        ("/detokenize", {"tokens": [512]}, "tokens"),
        ("/detokenize", {"tokens": "x"}, "tokens"),
        ("/detokenize", {"tokens": [1] * 550_000}, "tokens"),
    ],
)
async def test_bad_bodies_of_the_tokenizer(api, path: str, body: dict, param: str) -> None:
    answer = await api.post(path, body)
    assert (answer.status, answer.error()["param"]) == (400, param)


@pytest.mark.parametrize(
    ("method", "path", "status", "allowed"),
    [
        ("GET", "/v1/nothing", 404, None),
        ("GET", "/v1/models/*", 404, None),
        ("GET", "/v1/completions", 405, "POST"),
        ("OPTIONS", "/v1/completions", 405, "POST"),
    ],
)
async def test_no_such_route(api, method: str, path: str, status: int, allowed: str | None) -> None:
    answer = await api.request(method, path)
    assert (answer.status, answer.headers.get("Allow")) == (status, allowed)
    assert answer.error()["type"] == {404: "not_found_error", 405: "invalid_request_error"}[status]


# ---- health


async def test_health_is_told_without_a_key_and_its_reason_with_one(serve_api) -> None:
    api = await serve_api(api_keys=ApiKeys(["secret"]))
    for path in ("/health", "/health/ready"):
        assert (await api.get(path)).status == 200
    assert (await api.get("/health/live")).status == 200
    api.endpoint.healthy = Health(False, "the host at 10.0.0.1 hung up")
    for headers, reason in (
        ({}, "The server is not ready."),
        ({"Authorization": "Bearer wrong"}, "The server is not ready."),
        ({"Authorization": "Bearer secret"}, "The host at 10.0.0.1 hung up."),
    ):
        for path in ("/health", "/health/ready"):
            answer = await api.get(path, headers=headers)
            assert (answer.status, answer.error()["message"]) == (503, reason)
            assert answer.headers["Retry-After"]


async def test_loading(serve_api) -> None:
    api = await serve_api(loading=True)
    assert (await api.get("/health/live")).status == 200
    for answer in (await api.get("/health"), await api.get("/v1/models"), await api.complete()):
        assert (answer.status, answer.error()["message"]) == (503, "The model is loading.")


async def test_draining(api) -> None:
    def drain(_: object) -> str:
        api.service.draining = True
        raise OverloadedError("The server is shutting down.")

    api.endpoint.answer = drain
    refused_by_the_endpoint = await api.complete()
    for answer in (
        refused_by_the_endpoint,
        await api.get("/health/ready"),
        await api.complete(),
        await api.chat(),
    ):
        assert (answer.status, answer.error()["message"]) == (503, "The server is shutting down.")
        assert answer.headers["Retry-After"]
    assert (await api.get("/health/live")).status == 200


# ---- who may ask


@pytest.mark.parametrize("given", [None, "Bearer wrong", "Bearer ", "secret", "Basic secret", "é"])
async def test_every_route_but_health_and_the_page_asks_for_the_key(
    serve_api, given: str | None
) -> None:
    api = await serve_api(api_keys=ApiKeys(["secret"]))
    headers = {"Authorization": given} if given else {}
    closed = {path.replace("*", "tiny"): ROUTES[path] for path in ROUTES.keys() - OPEN_PATHS}
    for path in sorted(closed.keys() | {"/nothing", "/health/live/x", "/ui", "/ui/"}):
        for method in ("GET", "POST", "OPTIONS"):
            answer = await api.request(method, path, headers=headers)
            assert answer.status == 401
            assert "API key" in answer.body.decode()
            if path not in closed or next(iter(closed[path].values())).dialect is OPENAI:
                assert answer.error()["code"] == "invalid_api_key"
    assert (await api.get("/health/live")).status == 200


@pytest.mark.parametrize("path", ["//health/live", "/health/live?x", "/health/live#/v1/models"])
async def test_a_path_cannot_pretend_to_be_open(serve_api, path: str) -> None:
    api = await serve_api(api_keys=ApiKeys(["secret"]))
    for host in ("/health/live", "x"):
        status, body = await api.raw(f"GET {path} HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
        assert status in (200, 400, 401) if host == "x" else status in (400, 403)
        assert b'"data"' not in body


async def test_only_its_own_pages_may_ask(api) -> None:
    for origin in ("http://evil.example", "null", "http://127.0.0.1:1", "https://[", "x"):
        answer = await api.get("/v1/models", headers={"Origin": origin})
        assert (answer.status, answer.error()["type"]) == (403, "permission_error")
        assert "Access-Control-Allow-Origin" not in answer.headers
    headers = {"Origin": api.url}
    assert (await api.get("/v1/models", headers=headers)).status == 200


# ---- request ids


async def test_request_ids_are_cleaned_or_made(api) -> None:
    cleaned = {"my-id_1.2:3": "my-id_1.2:3", "a b;c": "abc", "<script>": "script"}
    for given, expected in {**cleaned, "x" * 1000: "x" * 128}.items():
        answer = await api.get("/v1/models", headers={"X-Request-Id": given})
        assert answer.headers["X-Request-Id"] == expected
    for headers in ({}, {"X-Request-Id": "äöü"}):
        assert len((await api.get("/nothing", headers=headers)).headers["X-Request-Id"]) == 32


async def test_the_same_id_twice_is_two_requests(api) -> None:
    api.endpoint.pause_after = 1
    headers = {"X-Request-Id": "x"}
    body = {"prompt": "hi"}
    first = asyncio.create_task(api.post("/v1/completions", body, headers=headers))
    await api.endpoint.paused.wait()
    api.endpoint.paused.clear()
    second = asyncio.create_task(api.post("/v1/completions", body, headers=headers))
    await api.endpoint.paused.wait()
    second.cancel()
    await api.endpoint.any_aborted.wait()
    api.endpoint.go_on.set()
    assert (await first).json()["choices"][0]["text"] == "ok"
    assert api.endpoint.aborted == [api.endpoint.requests[1].request_id]


# ---- transport


async def test_a_body_over_the_limit(serve_api) -> None:
    api = await serve_api(max_body_bytes=1000)
    answer = await api.complete(prompt="x" * 2000)
    assert (answer.status, "1000 bytes" in answer.error()["message"]) == (413, True)

    async def chunks():
        for _ in range(20):
            yield b"x" * 100

    assert (await api.request("POST", "/v1/completions", data=chunks())).status == 413


async def test_a_body_that_grows_when_unpacked(serve_api) -> None:
    api = await serve_api(max_body_bytes=10_000)
    packed = gzip.compress(b"x" * 5_000_000)
    assert len(packed) < 10_000
    answer = await api.post("/v1/completions", packed, headers={"Content-Encoding": "gzip"})
    assert answer.status in (400, 413)
    assert answer.error()["message"]


async def test_a_body_that_is_not_packed_as_it_says_is_refused_without_an_error_in_the_log(
    api, caplog: pytest.LogCaptureFixture
) -> None:
    head = b"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    head += b"Content-Encoding: gzip\r\nContent-Length: 5\r\n\r\n"
    status, body = await api.raw(head + b"abcde")
    assert status == 400
    assert b"The body cannot be read" in body
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []


async def test_a_body_that_does_not_come(serve_api) -> None:
    api = await serve_api(body_timeout_s=0.05)
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    status, body = await api.raw(head + b"Content-Length: 100\r\n\r\n{")
    assert status == 408
    assert b"did not arrive" in body


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (b"GET / HTTP/1.1\r\nA: " + b"a" * 20_000 + b"\r\n\r\n", 431),
        (b"GET /" + b"a" * 20_000 + b" HTTP/1.1\r\n\r\n", 431),
        (b"GET / HTTP/1.1\r\n" + b"".join(b"A%d: 1\r\n" % i for i in range(500)) + b"\r\n", 431),
        (b"nonsense\r\n\r\n", 400),
        (b"\x16\x03\x01\x00\xa5\x01\x00\x00\xa1\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nA b: c\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nContent-Length: -5\r\n\r\n", 400),
    ],
)
async def test_what_is_no_request_gets_an_error_object(
    api, request_bytes: bytes, status: int
) -> None:
    answered, body = await api.raw(request_bytes)
    assert answered == status
    assert body.startswith(b'{"error":{"message":')
    assert b"Traceback" not in body


@pytest.mark.parametrize("begin", [b"", b"GET / HTTP/1.1\r\nHo"])
async def test_a_connection_that_sends_no_request_is_closed(
    serve_api, monkeypatch: pytest.MonkeyPatch, begin: bytes
) -> None:
    monkeypatch.setattr("pagoda.api.http.app.CONNECTION_IDLE_S", 0.1)
    api = await serve_api()
    reader, writer = await asyncio.open_connection("127.0.0.1", api.port)
    writer.write(begin)
    assert await asyncio.wait_for(reader.read(), 10) == b""
    writer.close()


async def test_log_lines_hold_no_line_breaks(api, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="pagoda.api")
    await api.get("/nothing%0AERROR%20fake")
    assert [record.getMessage().count("\n") for record in caplog.records] == [0]


async def test_a_large_answer_comes_in_pieces_and_says_its_length(serve_api) -> None:
    api = await serve_api(max_model_len=1 << 20)
    ids = [97] * 500_000
    answer = await api.post("/tokenize", {"content": "a" * len(ids), "with_pieces": True})
    assert answer.headers["Content-Length"] == str(len(answer.body))
    assert "Transfer-Encoding" not in answer.headers
    assert answer.json() == {"tokens": [{"id": 97, "piece": "a"}] * len(ids)}
