"""One HTTP request: its body, its client, and the ways to answer it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import msgspec
from aiohttp import web

from pagoda.api.errors import ApiError, as_api_error
from pagoda.api.protocol import parse_body
from pagoda.api.service import Service
from pagoda.api.sse import EventStream, event
from pagoda.frontend.request_tracker import ClientRequest

_LARGE_BODY_BYTES = 256 * 2**10
"""Longer bodies are decoded in a thread, so that other streams go on meanwhile."""

T = TypeVar("T")


@dataclass(frozen=True)
class RequestContext:
    """An HTTP request, the state of the server, and the client."""

    http: web.BaseRequest
    service: Service
    key_name: str | None
    """Name of the client's API key; empty if no key is needed, None if the key is missing or wrong."""
    client_request: ClientRequest
    path_argument: str = ""
    """The part of the path that the `*` of the route stands for."""

    @property
    def request_id(self) -> str:
        return self.client_request.id

    @property
    def has_key(self) -> bool:
        """True if the client may use the server: its API key is known, or no key is needed."""
        return self.key_name is not None

    async def body(self) -> bytes:
        """The whole body. Raises ApiError: 413 if it is too long, 408 if it does not arrive in time."""
        config = self.service.config
        too_long = ApiError(413, f"The body is longer than {config.max_body_bytes} bytes.")
        if (self.http.content_length or 0) > config.max_body_bytes:
            raise too_long
        try:
            async with asyncio.timeout(config.body_timeout_s):
                return await self.http.read()
        except web.HTTPRequestEntityTooLarge:
            raise too_long from None
        except web.RequestPayloadError as error:
            message = f"The body cannot be read: {error}."
            raise ApiError(400, message, word="invalid_body") from None
        except TimeoutError:
            raise ApiError(
                408, f"The body did not arrive within {config.body_timeout_s:.0f} s."
            ) from None

    async def parse(self, kind: type[T]) -> T:
        """The body, decoded and checked.
        Raises ApiError: as `body`; InvalidRequestError: the body does not fit `kind`; names the field."""
        body = await self.body()
        generator = self.service.generator
        if len(body) <= _LARGE_BODY_BYTES or generator is None:
            return parse_body(body, kind)
        return await generator.long_texts.run(lambda: parse_body(body, kind))

    def json(self, value: object) -> web.Response:
        return self._response(msgspec.json.encode(value), "application/json")

    def text(self, text: str, content_type: str) -> web.Response:
        """An answer in one piece, of a type with its parameters such as `text/plain; version=0.0.4`."""
        return self._response(text.encode(), content_type)

    def error(self, error: ApiError) -> web.Response:
        return self._response(error.encode(), "application/json", error.status, error.headers)

    def _response(
        self,
        body: bytes,
        content_type: str,
        status: int = 200,
        headers: Mapping[str, str] | None = None,
    ) -> web.Response:
        own = {"Content-Type": content_type, "X-Request-Id": self.request_id}
        return web.Response(body=body, status=status, headers={**own, **(headers or {})})

    async def stream(self, produce: Callable[[EventStream], Awaitable[None]]) -> web.StreamResponse:
        """An answer as events. Errors before the first event are raised; later errors become an `error` event."""
        config = self.service.config
        stream = EventStream(
            self.http,
            {"X-Request-Id": self.request_id},
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
                await stream.send(b"event: error\n" + event(answer.body()))
            return await stream.close()
        finally:
            stream.stop()
