# SPDX-License-Identifier: Apache-2.0
"""Forms with files (multipart/form-data, RFC 7578), read part by part as their bytes come."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from dataclasses import dataclass
from email.message import Message
from typing import Any, NoReturn

from aiohttp import content_disposition_filename, parse_content_disposition, web

from pagoda.api.http.request_body import ask_for_body, inflated_pieces, raw_pieces
from pagoda.concurrency.async_utils import LongWork
from pagoda.errors import InvalidRequestError, refuse

_MAX_BOUNDARY_CHARS = 70
_MAX_HEAD_BYTES = 8192
_MAX_AROUND_BYTES = 1024
"""Bytes before the first part, and as many behind the last one."""
_DISPOSITION = "content-disposition:"


@dataclass(frozen=True)
class PartHead:
    """The name of a part, and that of its file."""

    name: str
    filename: str | None


class FormReader:
    """Reads the parts in their order; each has to be read to its end before the next one. No error names what a
    form holds. Work and memory are linear in the bytes that come, which are held one piece at a time."""

    def __init__(self, content_type: str, pieces: AsyncIterator[bytes]) -> None:
        """Raises InvalidRequestError: `content_type` has no boundary."""
        message = Message()
        message["Content-Type"] = content_type
        boundary = message.get_boundary()
        if not boundary or len(boundary) > _MAX_BOUNDARY_CHARS:
            _malformed(f"its Content-Type must have a boundary of at most {_MAX_BOUNDARY_CHARS}")
        self._mark = b"\r\n--" + boundary.encode("utf-8", "surrogateescape")
        self._pieces = pieces
        self._held = bytearray(b"\r\n")  # the first boundary has no line before it
        self._has_begun = False

    async def next_part(self) -> PartHead | None:
        """The head of the next part; None behind the last one, when the form has been read to its end.
        Raises InvalidRequestError: the form is malformed."""
        if not self._has_begun:
            self._has_begun = True
            before = await self._until(self._mark, _MAX_AROUND_BYTES)
            if before is None:
                _malformed(f"it has no boundary within its first {_MAX_AROUND_BYTES} bytes")
        while len(self._held) < 2:
            await self._more()
        if self._held.startswith(b"--"):
            await self._end()
            return None
        head = await self._until(b"\r\n\r\n", _MAX_HEAD_BYTES)
        if head is None:
            _malformed(f"the head of a part is longer than {_MAX_HEAD_BYTES} bytes")
        return _head_of(head)

    async def chunks(self) -> AsyncIterator[bytes]:
        """The bytes of the part. Raises InvalidRequestError: the form ends within it."""
        mark = self._mark
        while (place := self._held.find(mark)) < 0:
            ready = len(self._held) - len(mark) + 1
            if ready > 0:
                yield self._take(ready)
            await self._more()
        if place:
            yield self._take(place)
        del self._held[: len(mark)]

    async def field(self, name: str, most: int) -> bytes:
        """The bytes of a part that is no file. Raises InvalidRequestError: they are more than `most`."""
        value = b""
        async for chunk in self.chunks():
            value += chunk
            if len(value) > most:
                refuse(name, f"is longer than {most} bytes")
        return value

    async def _until(self, mark: bytes, most: int) -> bytes | None:
        """Takes what is before a mark, and the mark; None if more than `most` bytes are."""
        while (place := self._held.find(mark)) < 0 and len(self._held) <= most + len(mark):
            await self._more()
        if not 0 <= place <= most:
            return None
        found = self._take(place)
        del self._held[: len(mark)]
        return found

    def _take(self, count: int) -> bytes:
        taken = bytes(self._held[:count])
        del self._held[:count]
        return taken

    async def _more(self) -> None:
        try:
            self._held += await anext(self._pieces)
        except StopAsyncIteration:
            _malformed("it ends early")

    async def _end(self) -> None:
        """Reads what is behind the last boundary, so that the connection may go on."""
        num_bytes = len(self._held)
        async for piece in self._pieces:
            num_bytes += len(piece)
            if num_bytes > _MAX_AROUND_BYTES:
                break
        if num_bytes > _MAX_AROUND_BYTES:
            _malformed(f"it goes on for more than {_MAX_AROUND_BYTES} bytes behind its last part")


def open_form(
    http: web.BaseRequest,
    wait: Callable[[Coroutine[Any, Any, bytes]], Awaitable[bytes]],
    threads: LongWork,
    tenant: str,
) -> FormReader:
    """The form that comes, asked for if the client waits for that; `wait` is as in `raw_pieces`.
    Raises InvalidRequestError: it has no boundary. ApiError: the client expects what is not known."""
    pieces = inflated_pieces(http, raw_pieces(http, wait), threads, tenant)
    form = FormReader(http.headers.get("Content-Type", ""), pieces)
    ask_for_body(http)
    return form


def _head_of(head: bytes) -> PartHead:
    try:
        lines = head.decode("utf-8").split("\r\n")
        given = [line for line in lines if line.lower().startswith(_DISPOSITION)]
        _, params = parse_content_disposition(given[0][len(_DISPOSITION) :] if given else None)
        name = content_disposition_filename(params, "name")
        filename = content_disposition_filename(params, "filename")
        for one in (name, filename):
            (one or "").encode()  # `filename*` may name any encoding of Python's
    except UnicodeError:
        refuse("file", "must have a head in UTF-8, with a name in UTF-8")
    if name is None:
        refuse("file", "must be a part with a name")
    return PartHead(name, filename)


def _malformed(reason: str) -> NoReturn:
    raise InvalidRequestError(f"the body is not valid multipart/form-data: {reason}.")
