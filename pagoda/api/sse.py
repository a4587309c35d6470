"""Server-sent events (WHATWG HTML, section 9.2) over one HTTP response."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping

import msgspec
from aiohttp import web

DONE = b"data: [DONE]\n\n"
_COMMENT = b": keep-alive\n\n"
_MARK = "\x00"

encode_json = msgspec.json.encode


def event(value: object) -> bytes:
    """One event whose data is `value` as JSON."""
    return b"data: " + encode_json(value) + b"\n\n"


def error_event(body: Mapping[str, object]) -> bytes:
    """An error inside a running stream."""
    return b"event: error\n" + event(body)


class EventTemplate:
    """An event made once, for a stream of events that differ in one string."""

    __slots__ = ("_prefix", "_suffix")

    def __init__(self, value: object) -> None:
        """`value` holds `EventTemplate.PLACE` where the string goes."""
        self._prefix, _, self._suffix = event(value).partition(encode_json(_MARK))

    PLACE = _MARK

    def fill(self, text: str) -> bytes:
        return self._prefix + encode_json(text) + self._suffix


class EventStream:
    """Writes events to one client, and watches over it.

    One timer looks at the stream every `tick_s` seconds, so that an event itself costs no timer. Where nothing was
    sent since the last look, an idle stream gets a comment that keeps proxies from closing it, and a stream whose
    reader takes nothing out of a full buffer for `stall_s` seconds is cut off, which cancels its handler.
    What is buffered for a slow reader is bounded: `send` waits once the buffer is full.
    """

    def __init__(
        self, request: web.BaseRequest, headers: Mapping[str, str], *, tick_s: float, stall_s: float
    ) -> None:
        self._request = request
        self._response = web.StreamResponse(
            headers={
                "Content-Type": "text/event-stream; charset=utf-8",
                "Cache-Control": "no-cache",
                "X-Accel-Buffering": "no",
                **headers,
            }
        )
        self._tick_s = tick_s
        self._stall_s = stall_s
        self._num_sent = 0
        self._num_seen = 0
        self._stalled_for_s = 0.0
        self._num_buffered = 0
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(tick_s, self._look)
        self._comment: asyncio.Task[None] | None = None

    @property
    def is_open(self) -> bool:
        """The status has gone out; an error can only be an event now."""
        return self._response.prepared

    async def send(self, events: bytes) -> None:
        """Sends one event or several at once. The first call sends the headers."""
        response = self._response
        if not response.prepared:
            await response.prepare(self._request)
        self._num_sent += 1
        await response.write(events)

    async def close(self) -> web.StreamResponse:
        """Ends the response in good order."""
        self.stop()
        await self._response.write_eof()
        return self._response

    def stop(self) -> None:
        """Stops watching."""
        self._timer.cancel()
        if self._comment is not None:
            self._comment.cancel()

    def _look(self) -> None:
        self._timer = self._loop.call_later(self._tick_s, self._look)
        transport = self._request.transport
        if transport is None or transport.is_closing():
            return
        buffered = transport.get_write_buffer_size() if self.is_open else 0
        progress = self._num_sent != self._num_seen or buffered < self._num_buffered
        self._num_seen, self._num_buffered = self._num_sent, buffered
        if buffered == 0 and not progress:
            self._comment = asyncio.ensure_future(self._send_comment())
        self._stalled_for_s = (
            0.0 if progress or not buffered else self._stalled_for_s + self._tick_s
        )
        if self._stalled_for_s >= self._stall_s:
            transport.abort()

    async def _send_comment(self) -> None:
        with contextlib.suppress(ConnectionError):
            await self.send(_COMMENT)
