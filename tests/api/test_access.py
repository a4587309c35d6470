# SPDX-License-Identifier: Apache-2.0
"""Web pages of others: names that were made to point here, origins, and types of bodies that need no question."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from pagoda.api.http.allowed_hosts import ANY_HOST, hosts_for
from pagoda.api.http.cors import CorsOrigins
from pagoda.api.routes import ROUTES
from pagoda.plugins.batches.state import BatchState

LOCAL = ("127.0.0.1:8000", "localhost", "LocalHost:1", "[::1]:8000", "[::1]")
MALFORMED = (
    *("", "localhost:80@evil.example", "[::1]evil.example", "[::1", "::1", "localhost:evil"),
    *("evil.example localhost", "localhost,evil.example", "localhost:123456", "localhost/", "a\tb"),
    *("localhost:", "[localhost]:1", "[evil.example]", "\u006cocalho\u017ft"),
)


@pytest.mark.parametrize(
    "bind", ["127.0.0.1", "localhost", "::1", "[::1]", "127.8.8.8", "::ffff:127.0.0.1"]
)
def test_a_server_for_this_machine_answers_for_its_names(bind: str) -> None:
    hosts = hosts_for(bind, ("Proxy.example",))
    for own in (*LOCAL, "proxy.example:443"):
        assert hosts.allows(own), own
    others = ("evil.example:8000", "127.0.0.1.evil.example", "localhost.evil.example", "10.0.0.1")
    for other in (*others, *MALFORMED):
        assert not hosts.allows(other), other


def test_servers_that_others_can_reach_answer_for_any_name_unless_some_are_named() -> None:
    for bind in ("0.0.0.0", "192.168.0.7", "::", "myhost", "::ffff:10.0.0.1"):
        assert hosts_for(bind) is ANY_HOST
        named = hosts_for(bind, ("llm.example",))
        for own in (*LOCAL, "llm.example", "192.168.0.7:8000", "[2001:db8::1]:80"):
            assert named.allows(own), own
        for other in ("evil.example", *MALFORMED):
            assert not named.allows(other), other
    assert ANY_HOST.allows("llm:8000")
    for malformed in MALFORMED:
        assert not ANY_HOST.allows(malformed), malformed


async def test_no_malformed_host_skips_the_check(serve_api) -> None:
    api = await serve_api(allowed_hosts=hosts_for("127.0.0.1"))
    for lines, status in (
        ("Host: localhost", 200),
        ("Host:\tlocalhost ", 200),
        ("Host: evil.example", 403),
        ("Host: localhost:80@evil.example", 403),
        ("Host: ", 403),
        ("X: y", 400),
        ("Host: localhost\r\nHost: evil.example", 400),
        ("Host: evil.example\r\nHost: localhost", 400),
        ("Host : localhost", 400),
    ):
        found, _ = await api.raw(f"GET /v1/models HTTP/1.1\r\n{lines}\r\n\r\n".encode())
        assert found == status, lines
    found, _ = await api.raw(
        b"GET http://evil.example/v1/models HTTP/1.1\r\nHost: evil.example\r\n\r\n"
    )
    assert found in (400, 403)
    found, _ = await api.raw(b"GET /v1/models HTTP/1.0\r\n\r\n")  # of no browser
    assert found == 200


def json_routes() -> list[str]:
    return [
        path.replace("*", "x")
        for path, methods in ROUTES.items()
        if "POST" in methods and not methods["POST"].takes_form
    ]


OF_ANY_PAGE = (
    *("text/plain", "text/plain;charset=UTF-8", "TEXT/PLAIN", "multipart/form-data; boundary=x"),
    *("application/x-www-form-urlencoded", " text/plain ; application/json", "", None),
)


def posted(path: str, lines: str, body: str) -> bytes:
    length = f"Content-Length: {len(body)}\r\n"
    return f"POST {path} HTTP/1.1\r\nHost: localhost\r\n{lines}{length}\r\n{body}".encode()


@pytest.mark.parametrize("given", OF_ANY_PAGE)
@pytest.mark.parametrize("mark", ["cross-site", "same-site", "none", "same-origin, cross-site"])
async def test_no_route_takes_a_body_that_any_page_may_send(
    api, given: str | None, mark: str
) -> None:
    line = "" if given is None else f"Content-Type: {given}\r\n"
    for path in json_routes():
        status, body = await api.raw(posted(path, f"{line}Sec-Fetch-Site: {mark}\r\n", "{}"))
        assert status == 415, path
        assert b"Content-Type: application/json" in body


@pytest.mark.parametrize("given", OF_ANY_PAGE)
@pytest.mark.parametrize(
    "origin", ["http://evil.example", "null", "http://[", "http://localhost:1"]
)
async def test_a_body_of_a_page_of_another_origin_is_refused_by_its_origin(
    serve_api, given: str | None, origin: str
) -> None:
    line = "" if given is None else f"Content-Type: {given}\r\n"
    api = await serve_api()
    request = posted("/v1/completions", f"{line}Origin: {origin}\r\n", '{"prompt": "hi"}')
    assert (await api.raw(request))[0] == 403
    api = await serve_api(cors_origins=CorsOrigins(["*"]))
    assert (await api.raw(request))[0] == 415


async def test_a_page_that_does_not_tell_its_origin_changes_nothing_without_a_body(api) -> None:
    for mark, expected in (("cross-site", 403), ("same-site", 403), ("same-origin", 404)):
        line = f"Sec-Fetch-Site: {mark}\r\n"
        status, _ = await api.raw(posted("/v1/batches/none/cancel", line, ""))
        assert status == expected, mark
        request = f"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n{line}\r\n"
        assert (await api.raw(request.encode()))[0] == 200


@pytest.mark.parametrize("given", OF_ANY_PAGE)
async def test_programs_may_leave_the_type_of_json_out(api, given: str | None) -> None:
    line = "" if given is None else f"Content-Type: {given}\r\n"
    for own in ("", "Origin: http://localhost\r\n", "Sec-Fetch-Site: same-origin\r\n"):
        request = posted("/v1/completions", line + own, '{"prompt": "hi", "max_tokens": 1}')
        status, body = await api.raw(request)
        assert status == 200, body
    status, body = await api.raw(posted("/v1/completions", line, "prompt=hi"))
    assert status == 400
    assert b"not valid JSON" in body


async def test_a_body_without_a_type_reaches_no_host_of_others(serve_api) -> None:
    api = await serve_api(allowed_hosts=hosts_for("127.0.0.1"))
    request = posted("/v1/completions", "", '{"prompt": "hi"}')
    status, _ = await api.raw(request.replace(b"Host: localhost", b"Host: evil.example"))
    assert status == 403


async def test_types_that_pages_must_ask_for_are_taken(api) -> None:
    body = {"prompt": "hi"}
    for given in ("application/json", "application/json; charset=utf-8", "Application/JSON"):
        answer = await api.post("/v1/completions", body, headers={"Content-Type": given})
        assert answer.status == 200, given


async def test_a_route_without_a_body_needs_no_type(api) -> None:
    status, _ = await api.raw(b"POST /ping HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert status == 200
    head = b"POST /ping HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\n\r\n"
    assert (await api.raw(head))[0] == 200


async def test_uploads_are_forms_of_pages_of_our_own(api, tmp_path: Path) -> None:
    api.service.state(BatchState).open(tmp_path)
    form = b"--x\r\nContent-Disposition: form-data; name=file; filename=f\r\n\r\nhi\r\n--x--\r\n"
    kind = {"Content-Type": "multipart/form-data; boundary=x"}

    async def upload(**headers: str) -> Any:
        return await api.request("POST", "/v1/files", data=form, headers={**kind, **headers})

    for origin in ("http://evil.example", "null", "http://127.0.0.1:1"):
        assert (await upload(Origin=origin)).status == 403
    assert (await upload(Origin=api.url)).status == 400  # it lacks the purpose
    for other in ("application/json", "text/plain", "multipart/mixed; boundary=x", ""):
        assert (await upload(**{"Content-Type": other})).status == 415, other
    await asyncio.sleep(0)
    assert [path.name for path in tmp_path.iterdir()] == ["files.lock"]
