# SPDX-License-Identifier: Apache-2.0
"""Server-sent events (WHATWG HTML, section 9.2) over one HTTP response."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, cast

import msgspec
from aiohttp import web

if TYPE_CHECKING:
    from pagoda.api.http.app import HttpConnection

DONE = b"data: [DONE]\n\n"

encode_json = msgspec.json.Encoder().encode


PART = 256
"""Elements of a list that are encoded at once."""


def encode_in_parts(value: object) -> bytes:
    """JSON of a large value, as of `encode_json`, which lets no other thread run; this one does between parts."""
    if isinstance(value, dict):
        fields = (b"%b:%b" % (encode_json(key), encode_in_parts(one)) for key, one in value.items())
        return b"{%b}" % b",".join(fields)
    if isinstance(value, list) and len(value) > PART:
        starts = range(0, len(value), PART)
        return b"[%b]" % b",".join(encode_json(value[i : i + PART])[1:-1] for i in starts)
    if isinstance(value, list):
        return b"[%b]" % b",".join(map(encode_in_parts, value))
    return encode_json(value)


def event(value: object) -> bytes:
    return b"data: %b\n\n" % encode_json(value)


class EventTemplate:
    """An event that is encoded once, for a stream of events that differ in one string."""

    PLACE = "\x00"

    def __init__(self, encoded: bytes) -> None:
        self._parts = encoded.split(encode_json(self.PLACE))

    def fill(self, text: str) -> bytes:
        return encode_json(text).join(self._parts)


class EventStream:
    """Writes events to one client, and watches the client.

    One timer looks at the stream every `tick_s` seconds, so that an event itself costs no timer. If nothing was
    sent since the last look, an idle stream gets `keep_alive`, which keeps proxies from closing it. If the client
    reads nothing of a full buffer for `stall_s` seconds, the connection is cut, which cancels its handler.
    The buffer for a slow client is bounded: `write` returns False when it is full, and `flush` waits.
    """

    def __init__(
        self,
        request: web.BaseRequest,
        headers: Mapping[str, str],
        *,
        keep_alive: bytes,
        tick_s: float,
        stall_s: float,
    ) -> None:
        """`headers` name the type of the content; `keep_alive` may be empty."""
        self._request = request
        self._connection = cast("HttpConnection", request.protocol)
        self._response = web.StreamResponse(
            headers={
                "Cache-Control": "no-cache",
                "X-Accel-Buffering": "no",
                **headers,
            }
        )
        self._transport: asyncio.Transport | None = None
        """Set once events go straight to the socket; until then `_pending` holds them."""
        self._is_chunked = False
        self._pending = b""
        self._opening = asyncio.Lock()
        self._keep_alive = keep_alive
        self._tick_s = tick_s
        self._stall_s = stall_s
        self._num_sent = 0
        self._num_seen = 0
        self._stalled_for_s = 0.0
        self._num_buffered = 0
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(tick_s, self._look)
        self._sending: asyncio.Task[None] | None = None

    @property
    def is_open(self) -> bool:
        """The status has gone out; an error can only be an event now."""
        return self._response.prepared

    def write(self, events: bytes) -> bool:
        """Writes one event, several or none. Returns False if `flush` must be awaited before the next call.
        Raises ConnectionError: the connection is lost."""
        transport = self._transport
        if transport is None:
            self._pending += events
            return not self._pending
        if events:
            if transport.is_closing():
                raise ConnectionResetError("The connection is closed.")
            self._num_sent += 1
            # One chunk of the chunked transfer coding (RFC 9112, 7.1).
            transport.write(b"%x\r\n%b\r\n" % (len(events), events) if self._is_chunked else events)
        return not self._connection.writing_paused

    async def flush(self) -> None:
        """Sends the headers with the first events; later waits until the client has read."""
        async with self._opening:
            if self._transport is None:
                await self._open()
        await self._connection.wait_writable()

    async def _open(self) -> None:
        response = self._response
        await response.prepare(self._request)
        while self._pending:  # several answers of one request may write meanwhile
            pending, self._pending = self._pending, b""
            self._num_sent += 1
            await response.write(pending)
        self._is_chunked = response.headers.get("Transfer-Encoding") == "chunked"
        self._transport = self._request.transport

    async def send(self, events: bytes) -> None:
        if not self.write(events):
            await self.flush()

    async def close(self) -> web.StreamResponse:
        self.stop()
        await self._response.write_eof()
        return self._response

    def stop(self) -> None:
        self._timer.cancel()
        if self._sending is not None:
            self._sending.cancel()

    def _look(self) -> None:
        self._timer = self._loop.call_later(self._tick_s, self._look)
        transport = self._request.transport
        if transport is None or transport.is_closing():
            return
        buffered = transport.get_write_buffer_size() if self.is_open else 0
        progress = self._num_sent != self._num_seen or buffered < self._num_buffered
        self._num_seen, self._num_buffered = self._num_sent, buffered
        if buffered == 0 and not progress and self._keep_alive:
            self._sending = asyncio.ensure_future(self._send_keep_alive())
        is_stalled = buffered and not progress
        self._stalled_for_s = self._stalled_for_s + self._tick_s if is_stalled else 0.0
        if self._stalled_for_s >= self._stall_s:
            transport.abort()

    async def _send_keep_alive(self) -> None:
        with contextlib.suppress(ConnectionError):
            await self.send(self._keep_alive)
