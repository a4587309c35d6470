# SPDX-License-Identifier: Apache-2.0
"""Bodies as they come: asked for, inflated, refused unread, and in pieces of any size."""

from __future__ import annotations

import asyncio
import gzip
import json
import zlib
from typing import Any

import pytest

from pagoda.api.auth.keys import ApiKeys
from pagoda.api.http import app, request_body

BODY = json.dumps({"prompt": "hi", "max_tokens": 1}).encode()


def head(*lines: str, path: str = "/v1/completions", length: int | None = len(BODY)) -> bytes:
    """The head of a request; without a `length` its body comes in chunks."""
    framing = "Transfer-Encoding: chunked" if length is None else f"Content-Length: {length}"
    return "\r\n".join(
        (f"POST {path} HTTP/1.1", "Host: localhost", framing, *lines, "", "")
    ).encode()


async def opened(api: Any, *sent: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", api.port)
    for part in sent:
        writer.write(part)
    return reader, writer


async def answer_of(reader: asyncio.StreamReader) -> tuple[int, bytes, dict[str, Any]]:
    """Status, head and body of an answer."""
    top = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 60)
    length = int(top.lower().partition(b"content-length:")[2].split()[0])
    return int(top.split()[1]), top, json.loads(await reader.readexactly(length))


# ---- Expect: 100-continue


async def test_a_client_that_waits_to_be_asked_for_the_body_is_asked_at_once(api: Any) -> None:
    for first, body in (
        (head("Expect: 100-continue"), BODY),
        (head("expect: 100-Continue", length=None), b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY)),
    ):
        reader, writer = await opened(api, first)
        asked = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 60)
        assert asked == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(body + head() + BODY)  # the connection goes on
        assert (await answer_of(reader))[0] == 200
        assert (await answer_of(reader))[0] == 200
        writer.close()


async def test_a_refusal_comes_in_the_place_of_the_question(serve_api: Any) -> None:
    api = await serve_api(api_keys=ApiKeys(["secret"]), max_body_bytes=1000)
    key = "Authorization: Bearer secret"
    for first, status in (
        (head("Expect: 100-continue"), 401),
        (head("Expect: 100-continue", key, path="/v1/nothing"), 404),
        (head("Expect: 100-continue", key, length=1001), 413),
        (head("Expect: a miracle", key), 417),
    ):
        reader, writer = await opened(api, first)
        found, top, _ = await answer_of(reader)
        assert found == status
        assert b"connection: close" in top.lower()
        assert await asyncio.wait_for(reader.read(), 60) == b""
        writer.close()


# ---- inflated where it is read


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "raw deflate"])
async def test_compressed_bodies_are_read(api: Any, encoding: str) -> None:
    raw = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    body = {
        "gzip": gzip.compress(BODY),
        "deflate": zlib.compress(BODY),
        "raw deflate": raw.compress(BODY) + raw.flush(),
    }[encoding]
    headers = {"Content-Encoding": encoding.removeprefix("raw ")}
    answer = await api.post("/v1/completions", body, headers=headers)
    assert (answer.status, answer.choices()[0]["text"]) == (200, "o")


async def test_bad_encodings_are_refused_in_a_sentence(serve_api: Any) -> None:
    api = await serve_api(max_body_bytes=10_000)
    whole = gzip.compress(BODY)
    for body, encoding, status, reason in (
        (BODY, "gzip", 400, "it is no gzip data"),
        (whole[:-4], "gzip", 400, "its gzip data end too early"),
        (whole + b"more", "gzip", 400, "goes on behind the end"),
        (gzip.compress(bytes(10_001)), "gzip", 413, "longer than 10000 bytes"),
        (whole, "br", 415, "Content-Encoding must be gzip, deflate or identity."),
        (gzip.compress(whole), "gzip, gzip", 415, "must be gzip, deflate or identity."),
    ):
        # As Python's and curl's clients do not check what they send.
        request = head(f"Content-Encoding: {encoding}", length=len(body)) + body
        reader, writer = await opened(api, request)
        found, _, answer = await answer_of(reader)
        assert (found, reason in answer["error"]["message"]) == (status, True), answer
        writer.close()


async def test_nothing_is_inflated_for_who_is_refused(
    serve_api: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    api = await serve_api(api_keys=ApiKeys(["secret"]))
    fed: list[bytes] = []
    feed = request_body.Inflater.feed

    def noting(self: Any, data: bytes, most: int) -> bytes:
        fed.append(data)
        return feed(self, data, most)

    monkeypatch.setattr(request_body.Inflater, "feed", noting)
    packed = gzip.compress(bytes(10**6))
    for path, key, status in (
        ("/v1/completions", "wrong", 401),
        ("/nothing", "secret", 404),
        ("/v1/models", "secret", 405),
        ("/health", "", 405),
        ("/v1/completions", "secret", 400),
    ):
        assert fed == []
        headers = {"Content-Encoding": "gzip", "Authorization": f"Bearer {key}"}
        assert (await api.post(path, packed, headers=headers)).status == status
    assert len(fed) == 1


# ---- bodies that nobody reads, and small chunks


async def test_what_a_refused_client_goes_on_sending_is_not_parsed(
    serve_api: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    api = await serve_api(api_keys=ApiKeys(["secret"]))
    parsed = 0
    parse = app.HttpConnection.parse

    def counting(self: app.HttpConnection, data: bytes) -> None:
        nonlocal parsed
        parsed += len(data)
        parse(self, data)

    monkeypatch.setattr(app.HttpConnection, "parse", counting)
    monkeypatch.setattr(app, "_MOST_SKIPPED_BYTES", 2**20)
    reader, writer = await opened(api, head(length=None))
    status, top, _ = await answer_of(reader)
    assert (status, b"connection: close" in top.lower()) == (401, True)
    assert await asyncio.wait_for(reader.read(), 60) == b""
    before = parsed
    async with asyncio.timeout(60):
        while not writer.transport.is_closing():  # cut off by the server
            writer.write(b"1\r\n \r\n" * 2**14)
            await asyncio.sleep(0)
    assert parsed == before
    writer.close()


async def test_an_answer_reaches_a_client_that_is_still_sending(serve_api: Any) -> None:
    api = await serve_api(max_body_bytes=1000)
    reader, writer = await opened(api, head(length=10**7), bytes(10**7))
    status, _, answer = await answer_of(reader)
    assert (status, answer["error"]["code"]) == (413, None)
    writer.close()


async def test_a_small_body_that_nobody_reads_leaves_the_connection_open(api: Any) -> None:
    reader, writer = await opened(api, head(path="/nothing"))
    assert (await answer_of(reader))[0] == 404
    writer.write(BODY + head() + BODY)
    assert (await answer_of(reader))[0] == 200
    writer.close()


async def test_bodies_in_small_chunks_are_read_or_refused(api: Any) -> None:
    blank = json.dumps({"prompt": "a" * 5000, "max_tokens": 1}).encode()
    small = b"".join(b"1\r\n%c\r\n" % byte for byte in blank)
    reader, writer = await opened(api, head(length=None), small, b"0\r\n\r\n", head(), BODY)
    assert (await answer_of(reader))[0] == 400  # longer than the context: it was read
    assert (await answer_of(reader))[0] == 200
    writer.close()
    reader, writer = await opened(api, head(length=None), b"1\r\n \r\n" * 100_000)
    status, _, answer = await answer_of(reader)
    assert (status, "chunks are too small" in answer["error"]["message"]) == (400, True)
    writer.close()


async def test_lines_are_parsed_a_few_in_a_turn(api: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    parse = app.HttpConnection.parse

    def counting(self: app.HttpConnection, data: bytes) -> None:
        sizes.append(len(data))
        parse(self, data)

    monkeypatch.setattr(app.HttpConnection, "parse", counting)
    lines = b'{"prompt": "hi", "max_tokens": 1' + b"\n" * 200_000 + b"}"
    reader, writer = await opened(api, head(length=len(lines)), lines)
    assert (await answer_of(reader))[0] == 200
    writer.close()
    assert sum(sizes) == len(head(length=len(lines)) + lines)
    assert max(sizes) <= 2**12
