# SPDX-License-Identifier: Apache-2.0
"""One HTTP request: its body, its client, and the ways to answer it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from aiohttp import web

from pagoda.api.auth.keys import NOBODY, ApiKey, Scope
from pagoda.api.bodies.body import parse_beside
from pagoda.api.bodies.ignored_fields import Ignored
from pagoda.api.dialect import Dialect
from pagoda.api.errors import ApiError, as_api_error
from pagoda.api.http.request_body import inflated, whole_body
from pagoda.api.http.sse import EventStream, encode_in_parts, encode_json
from pagoda.api.service import Service
from pagoda.telemetry.request_tracker import ClientRequest, RequestStatistics

T = TypeVar("T")


_PIECE_BYTES = 2**20
"""Bytes of an answer that are copied in one turn of the event loop."""


async def _pieces(body: bytes) -> AsyncIterator[bytes]:
    for start in range(0, len(body), _PIECE_BYTES):
        yield body[start : start + _PIECE_BYTES]


def take_timeout(client_request: ClientRequest, body: object) -> None:
    """Gives the request the time that the field `timeout` of its body says, if there is one."""
    timeout_s: float | None = getattr(body, "timeout", None)
    if timeout_s is not None:
        client_request.timeout_s = timeout_s


@dataclass(frozen=True)
class Caller:
    """Client of a generation: what a generation needs to know of an HTTP request, or of what stands for one."""

    service: Service
    client_request: ClientRequest
    key: ApiKey
    """The client's API key, with its limits."""
    session: str | None = None
    """The header `X-Session-ID`."""
    authorization: str = ""
    """The header `Authorization`, for a server that is asked on the client's behalf."""
    ignored: Ignored = field(default_factory=Ignored)
    """Fields of the request that have no effect."""

    async def translate(self, work: Callable[[], T], more: int = 0) -> T:
        """The result of work that takes as long as reading the body, and `more` characters, once more: in a thread
        if that is long."""
        client = self.client_request
        size = client.num_body_bytes + more
        return await self.service.body_threads.run_sized(work, size, client.budget, client.key_name)


@dataclass(frozen=True)
class RequestContext:
    """An HTTP request, the state of the server, and the client."""

    http: web.BaseRequest
    service: Service
    key: ApiKey | None
    """The client's API key; `ANYBODY` if no key is needed, None if the key is missing or wrong."""
    client_request: ClientRequest
    dialect: Dialect
    path_argument: str = ""
    """The part of the path that the `*` of the route stands for."""
    ignored: Ignored = field(default_factory=Ignored)
    """Fields of the body that have no effect, which the answer's header names."""

    @property
    def request_id(self) -> str:
        return self.client_request.id

    @property
    def caller(self) -> Caller:
        headers = self.http.headers
        return Caller(
            self.service,
            self.client_request,
            self.key or NOBODY,
            headers.get("X-Session-ID"),
            headers.get("Authorization", ""),
            self.ignored,
        )

    @property
    def has_key(self) -> bool:
        """True if the client may use the server: its API key is known, or no key is needed."""
        return self.key is not None

    @property
    def scopes(self) -> frozenset[Scope]:
        """Rights of the client; none without a key where one is needed."""
        return frozenset() if self.key is None else self.key.scopes

    @property
    def running(self) -> Mapping[str, RequestStatistics]:
        """Running answers that the client may list and end, by id, oldest first."""
        tracker = self.service.tracker
        return tracker.running if Scope.OTHERS in self.scopes else tracker.running_of(self.key_name)

    @property
    def key_name(self) -> str:
        """Name of the client's API key; empty if none is needed."""
        return self.client_request.key_name

    @property
    def headers(self) -> dict[str, str]:
        """Headers of every answer: its id, the milliseconds until it began, what was ignored, and what browsers
        ask for."""
        took_ns = self.service.tracker.clock_ns() - self.client_request.arrived_ns
        return {
            "X-Request-Id": self.request_id,
            "openai-processing-ms": str(took_ns // 10**6),
            **self.ignored.headers,
            **self.service.key_limits.headers(self.key),
            **self.service.config.cors_origins.headers(self.http.headers.get("Origin")),
        }

    async def body(self) -> bytes:
        """The whole body. Raises ApiError: 413 if it is too long, 408 if it does not arrive in time, 400 if it is
        damaged, 415 if its encoding is not known, 417 if the client expects what is not known."""
        config, client = self.service.config, self.client_request
        raw = await whole_body(self.http, config.max_body_bytes, config.body_timeout_s)
        threads = self.service.body_threads
        body = await inflated(self.http, raw, config.max_body_bytes, threads, self.key_name)
        client.num_body_bytes = len(body)
        return body

    async def parse(self, kind: type[T]) -> T:
        """The body, decoded and checked.
        Raises ApiError: as `body`; InvalidRequestError: the body does not fit `kind`; names the field."""
        body = await self.body()
        threads = self.service.body_threads
        parsed = await parse_beside(body, kind, threads, self.ignored, tenant=self.key_name)
        take_timeout(self.client_request, parsed)
        return parsed

    async def sized_json(self, value: object, size: int) -> web.Response:
        """The answer in one piece, whose encoding takes as long as a text of `size` characters: in a thread if
        that is long."""
        client, threads = self.client_request, self.service.body_threads
        work = partial(encode_in_parts, value)
        return self.encoded_json(
            await threads.run_sized(work, size, client.budget, client.key_name)
        )

    def json(self, value: object) -> web.Response:
        return self.encoded_json(encode_json(value))

    def encoded_json(self, body: bytes) -> web.Response:
        return self._response(body, "application/json")

    def text(self, text: str, content_type: str) -> web.Response:
        """An answer in one piece, of a type with its parameters such as `text/plain; version=0.0.4`."""
        return self._response(text.encode(), content_type)

    def empty(self, headers: Mapping[str, str]) -> web.Response:
        """An answer without a body, with further headers."""
        return self._response(b"", "text/plain", headers=headers)

    def error(self, error: ApiError) -> web.Response:
        return self._response(
            encode_json(self.dialect.error_body(error)),
            "application/json",
            error.status,
            error.headers,
        )

    def _response(
        self,
        body: bytes,
        content_type: str,
        status: int = 200,
        headers: Mapping[str, str] | None = None,
    ) -> web.Response:
        own = {"Content-Type": content_type, **self.headers, **(headers or {})}
        if len(body) <= _PIECE_BYTES:
            return web.Response(body=body, status=status, headers=own)
        own["Content-Length"] = str(len(body))
        return web.Response(body=_pieces(body), status=status, headers=own)

    async def stream(self, produce: Callable[[EventStream], Awaitable[None]]) -> web.StreamResponse:
        """An answer as events. Errors before the first event are raised; later errors become an `error` event."""
        config = self.service.config
        stream = EventStream(
            self.http,
            {"Content-Type": self.dialect.content_type, **self.headers},
            keep_alive=self.dialect.keep_alive,
            tick_s=config.keep_alive_s,
            stall_s=config.stall_timeout_s,
        )
        try:
            try:
                await produce(stream)
            except ConnectionError:
                raise
            except Exception as error:
                if not stream.is_open:
                    raise
                answer = as_api_error(error, self.request_id)
                await stream.send(self.dialect.error_event(answer))
            return await stream.close()
        finally:
            stream.stop()
