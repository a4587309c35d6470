# SPDX-License-Identifier: Apache-2.0
"""The body of a request as it comes: asked for, read within bounds, and inflated in a thread."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from functools import partial
from typing import Any

from aiohttp import HttpVersion11, web

from pagoda.api.errors import ApiError
from pagoda.concurrency.async_utils import LongWork

INFLATED_PIECE_BYTES = 2**20
"""Bytes that an upload is inflated to at a time."""
_WINDOWS = {"gzip": zlib.MAX_WBITS | 16, "x-gzip": zlib.MAX_WBITS | 16, "deflate": zlib.MAX_WBITS}
_NO_ENCODING = frozenset(("", "identity"))
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


def is_continue_expected(http: web.BaseRequest) -> bool:
    """True if the client sends the body only when it is asked for it (RFC 9110, 10.1.1).
    Raises ApiError: 417, the client expects something else."""
    expected = http.headers.get("Expect")
    if expected is None or http.version < HttpVersion11:
        return False
    if expected.strip().lower() != "100-continue":
        raise ApiError(417, "Expect must be 100-continue or left out.")
    return True


def ask_for_body(http: web.BaseRequest) -> None:
    """Lets a client send the body that waits to be asked. Raises ApiError: as `is_continue_expected`."""
    is_here = http.content.is_eof() or http.content.total_bytes
    if is_continue_expected(http) and not is_here and http.transport is not None:
        http.transport.write(_CONTINUE)


def unreadable(error: object) -> ApiError:
    return ApiError(400, f"The body cannot be read: {error}.", word="invalid_body")


async def inflated(
    http: web.BaseRequest, body: bytes, max_bytes: int, threads: LongWork, tenant: str
) -> bytes:
    """The whole body without its `Content-Encoding`.
    Raises ApiError: 413, it is longer than `max_bytes`; 400, it is damaged; 415, the encoding is not known."""
    inflater = _inflater(http)
    if inflater is None or not body:
        return body
    whole = await threads.run(partial(inflater.feed, body, max_bytes + 1), tenant)
    if len(whole) > max_bytes:
        raise ApiError(413, f"The body is longer than {max_bytes} bytes.")
    inflater.check_end()
    return whole


async def inflated_pieces(
    http: web.BaseRequest, pieces: AsyncIterator[bytes], threads: LongWork, tenant: str
) -> AsyncIterator[bytes]:
    """The pieces of a body without its `Content-Encoding`. Raises ApiError: as `inflated`."""
    inflater = _inflater(http)
    async for piece in pieces:
        if inflater is None:
            yield piece
            continue
        while True:
            found = await threads.run(partial(inflater.feed, piece, INFLATED_PIECE_BYTES), tenant)
            if not found:
                break
            yield found
            piece = b""
    if inflater is not None:
        inflater.check_end()


def _inflater(http: web.BaseRequest) -> Inflater | None:
    encoding = http.headers.get("Content-Encoding", "").strip().lower()
    if encoding in _NO_ENCODING:
        return None
    if encoding not in _WINDOWS:
        raise ApiError(415, "Content-Encoding must be gzip, deflate or identity.")
    return Inflater(encoding)


class Inflater:
    """One compressed stream, fed in pieces of any size."""

    def __init__(self, encoding: str) -> None:
        self._encoding = encoding
        self._stream = zlib.decompressobj(_WINDOWS[encoding])
        self._has_begun = False
        self._rest = b""

    def feed(self, data: bytes, most: int) -> bytes:
        """The next bytes, at most `most`; more may come of empty data, until there are none.
        Raises ApiError: 400, the data are damaged, or go on behind their end."""
        data = self._rest + data
        if not self._has_begun and data:
            self._has_begun = True
            if self._encoding == "deflate" and data[0] & 15 != zlib.DEFLATED:
                # Without the header of zlib, as some clients understand `deflate`.
                self._stream = zlib.decompressobj(-zlib.MAX_WBITS)
        try:
            found = self._stream.decompress(data, most)
        except zlib.error:
            raise unreadable(f"it is no {self._encoding} data") from None
        self._rest = self._stream.unconsumed_tail
        if self._stream.unused_data:
            raise unreadable(f"it goes on behind the end of its {self._encoding} data")
        return found

    def check_end(self) -> None:
        """Raises ApiError: 400, the data end too early."""
        if not self._stream.eof:
            raise unreadable(f"its {self._encoding} data end too early")


async def raw_pieces(
    http: web.BaseRequest, wait: Callable[[Coroutine[Any, Any, bytes]], Awaitable[bytes]]
) -> AsyncIterator[bytes]:
    """The bytes of a body as they come; `wait` waits for each piece, and may bound the time.
    Raises ApiError: 400, they are not framed as HTTP says."""
    try:
        while piece := await wait(http.content.readany()):
            yield piece
    except web.RequestPayloadError as error:
        raise unreadable(error) from None


async def whole_body(http: web.BaseRequest, max_bytes: int, timeout_s: float) -> bytes:
    """The bytes of a body, asked for if the client waits for that.
    Raises ApiError: 413, it is longer than `max_bytes`; 408, it does not arrive in time; 400, as `raw_pieces`."""
    too_long = ApiError(413, f"The body is longer than {max_bytes} bytes.")
    if (http.content_length or 0) > max_bytes:
        raise too_long
    ask_for_body(http)
    try:
        if http.content.is_eof():  # mostly the body came with the headers
            return await http.read()
        async with asyncio.timeout(timeout_s):
            return await http.read()
    except web.HTTPRequestEntityTooLarge:
        raise too_long from None
    except web.RequestPayloadError as error:
        raise unreadable(error) from None
    except TimeoutError:
        raise ApiError(408, f"The body did not arrive within {timeout_s:.0f} s.") from None
