# SPDX-License-Identifier: Apache-2.0
"""The HTTP server: access, routes and errors.

The server is aiohttp's low-level one with a table of routes. So every failure, also of a request that is not valid
HTTP, is answered with an OpenAI error object.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import re
import time
import uuid
from collections.abc import Mapping
from functools import partial
from typing import Any, cast

from aiohttp import StreamReader, web
from aiohttp.http_exceptions import LineTooLong

from pagoda.api.auth.access import check_content_type, check_origin, check_scope
from pagoda.api.auth.keys import ANYBODY
from pagoda.api.bodies.ignored_fields import Ignored
from pagoda.api.dialect import OPENAI
from pagoda.api.errors import CLIENTS_NAME, INTERNAL_ERROR, ApiError, as_api_error, unavailable
from pagoda.api.http.connections import Connections, bound_silence
from pagoda.api.http.request_body import is_continue_expected
from pagoda.api.http.request_context import RequestContext
from pagoda.api.http.sse import encode_json
from pagoda.api.monitoring.request_metrics import Refusal
from pagoda.api.route import Route
from pagoda.api.routes import OPEN_PATHS, PLUGINS, ROUTES, methods_of
from pagoda.api.service import Service
from pagoda.ipc.clock import MAX_TIMEOUT_S
from pagoda.telemetry.request_tracker import ClientRequest

CONNECTION_IDLE_S = 75.0
"""Seconds after which a connection without the complete headers of a request is closed."""

SMALL_BODY_BYTES = 1 << 16
"""A body that nobody has read is skipped if it is no longer, and else ends its connection."""
LINGER_S = 10.0
"""Seconds in which a client may see an answer before its connection is closed, though it goes on sending."""
_MOST_SKIPPED_BYTES = 1 << 26
"""Bytes that a client may send meanwhile; they are dropped."""
_PIECE_BYTES = 4096
"""Bytes that are parsed in one turn of the event loop, if they have many lines."""
_MOST_LINES = 256
"""Lines that are parsed at once. Each is a header, or begins or ends a chunk, and takes a microsecond."""
_SPARE_FRAMING_BYTES = 1 << 16
_FRAMING_SHARE = 8
"""A body may have one byte around its chunks for so many bytes of its own, beside the spare ones."""
TIMEOUT_HEADER = "X-Request-Timeout"
RANK_HEADER = "X-data-parallel-rank"
_MAX_REQUEST_ID_CHARS = 128
_MAX_LOGGED_PATH_CHARS = 200
_MAX_TRACEPARENT_CHARS = 128
"""Characters of a header that is kept with every answer; it has 55 so far."""
_MAX_TRACESTATE_CHARS = 2048
"""Longer headers would cost memory; W3C Trace Context asks for at least 512."""
_NOT_IN_REQUEST_ID = re.compile(r"[^A-Za-z0-9._:\-]")
_log = logging.getLogger("pagoda.api")


async def _answer(http: web.BaseRequest, service: Service) -> web.StreamResponse:
    connection = cast(HttpConnection, http.protocol)
    context, methods = _request_context(http, service, connection.begin(http))
    began = time.monotonic()
    is_endless = any(route.is_endless for route in methods.values())
    status = 200 if is_endless else 499  # until there is an answer: the client went away
    answer: ApiError | None = None
    try:
        response = await _dispatch(context, methods)
        status = response.status
        return response
    except ConnectionError:
        raise
    except Exception as error:
        answer = as_api_error(error, context.request_id)
        if answer.status == 429 and service.draining:
            answer = unavailable(answer.message)
        status = answer.status
        refusal = Refusal(context.client_request.route, status, answer.kind)
        service.request_metrics.refusals[refusal] += 1
        return context.error(answer)
    finally:
        connection.end(is_read=http.content.is_eof())
        if not context.client_request.num_answers:  # answers have a line of their own
            is_polled = any(route.is_polled for route in methods.values())
            _log_access(context, status, answer, time.monotonic() - began, is_polled=is_polled)


def _log_access(
    context: RequestContext,
    status: int,
    error: ApiError | None,
    duration_s: float,
    *,
    is_polled: bool,
) -> None:
    """Logs a request. Error texts and queries are left out: they may hold a prompt or a key of the client."""
    path = context.http.rel_url.raw_path[:_MAX_LOGGED_PATH_CHARS]
    is_open = context.client_request.route in OPEN_PATHS
    is_quiet = status < 400 and (is_open or is_polled)
    kind = error.kind if error else ""
    param = error.param if error and kind not in CLIENTS_NAME else None
    fields = {
        "method": context.http.method,
        "path": path,
        "status": status,
        "code": kind or None,
        "param": param,
        "key": context.client_request.key_name or None,
        "duration_ms": round(duration_s * 1e3, 2),
    }
    words = [
        f"{name} {fields[name]}" for name in ("code", "param", "key") if fields[name] is not None
    ]
    _log.log(
        logging.DEBUG if is_quiet else logging.INFO,
        "%s",
        ", ".join([f"{context.http.method} {path} {status} {duration_s:.3f} s", *words]),
        extra={"request_id": context.request_id, "fields": fields},
    )


def _request_context(
    http: web.BaseRequest, service: Service, arrived_ns: int
) -> tuple[RequestContext, Mapping[str, Route]]:
    """A request with the methods of its route; there are none where there is no such route."""
    headers = http.headers
    path = http.path
    root = service.config.root_path
    if root and (path == root or path.startswith(f"{root}/")):
        path = path.removeprefix(root) or "/"
    route, argument = _find(path)
    traceparent = headers.get("traceparent") or ""
    tracestate = ",".join(headers.getall("tracestate", ()))
    key = service.config.api_keys.find(headers.get("Authorization", ""), headers.get("x-api-key"))
    client_request = ClientRequest(
        id=_request_id(headers.get("X-Request-Id", "")),
        arrived_ns=arrived_ns,
        key_name="" if key is None else key.name,
        weight=1.0 if key is None else key.weight,
        least_priority=service.config.api_keys.least_priority(key),
        traceparent=traceparent if 0 < len(traceparent) <= _MAX_TRACEPARENT_CHARS else None,
        tracestate=tracestate if 0 < len(tracestate) <= _MAX_TRACESTATE_CHARS else None,
        route=route,
    )
    methods = methods_of(route, headers)
    dialect = next(iter(methods.values())).dialect if methods else OPENAI
    ignored = Ignored(service.config.ignored_names)
    context = RequestContext(http, service, key, client_request, dialect, argument, ignored)
    return context, methods


async def _dispatch(context: RequestContext, methods: Mapping[str, Route]) -> web.StreamResponse:
    path, route = context.http.path, context.client_request.route
    check_origin(context)
    cors = context.service.config.cors_origins
    if cors and context.http.method == "OPTIONS":
        return context.empty(cors.preflight(context.http.headers, tuple(methods)))
    if route not in OPEN_PATHS and not context.has_key:
        raise ApiError(
            401,
            "Send an API key of the server as `Authorization: Bearer KEY`.",
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )
    if not methods:
        raise ApiError(404, f"There is no route {path[:200]!r}.")
    method = context.http.method
    if method == "HEAD" and "GET" in methods and not methods["GET"].is_endless:
        method = "GET"
    if method not in methods:
        allowed = ", ".join(methods)
        raise ApiError(
            405, f"{path} answers {allowed}, not {context.http.method}.", headers={"Allow": allowed}
        )
    check_scope(context, methods[method])
    check_content_type(context, methods[method])
    is_continue_expected(context.http)
    if not methods[method].is_queued:
        if methods[method].needs_model:
            await context.service.hold_while_loading(None)
        return await methods[method].handler(context)
    timeout_s = context.client_request.timeout_s = _timeout_s(context)
    context.client_request.data_parallel_rank = _data_parallel_rank(context)
    with context.service.key_limits.admit(context.key or ANYBODY):
        await context.service.hold_while_loading(timeout_s)
        context.service.check_room(context.client_request)
        return await methods[method].handler(context)


def _timeout_s(context: RequestContext) -> float | None:
    """Seconds that the client gives the request, or the server's default; the body may say otherwise.

    `x-stainless-timeout` of OpenAI's SDKs is no such limit: it bounds each silence of a stream, not the answer,
    and a client that has waited so long hangs up, which ends the request. Raises ApiError: 400, no such number.
    """
    given = context.http.headers.get(TIMEOUT_HEADER)
    if given is None:
        return context.service.config.request_timeout_s
    try:
        timeout_s = float(given)
    except ValueError:
        timeout_s = math.nan
    if not 0 < timeout_s <= MAX_TIMEOUT_S:
        message = f"{TIMEOUT_HEADER} must be a number of seconds above 0, at most {MAX_TIMEOUT_S}."
        raise ApiError(400, message, TIMEOUT_HEADER)
    return timeout_s


def _data_parallel_rank(context: RequestContext) -> int | None:
    """The replica that the client names, as clients of vLLM do; None leaves the choice to the server.
    Raises ApiError: 400, there is no such replica."""
    given = context.http.headers.get(RANK_HEADER)
    if given is None:
        return None
    fleet = context.service.fleet
    if fleet is not None and fleet.is_router:
        message = f"{RANK_HEADER} is for servers with replicas of their own; a router chooses the host itself."
        raise ApiError(400, message, RANK_HEADER)
    count = 1 if fleet is None else len(fleet.dispatcher.slots)
    if not (given.isascii() and given.isdigit() and len(given) < 6 and int(given) < count):
        message = f"{RANK_HEADER} must be the number of a replica, from 0 to {count - 1}, got {given[:200]!r}."
        raise ApiError(400, message, RANK_HEADER)
    return int(given)


def _find(path: str) -> tuple[str, str]:
    """The route of a path and the part of the path that its `*` stands for; empty if there is no route."""
    if path in ROUTES and not path.endswith("*"):
        return path, ""
    for route in ROUTES:
        prefix = route.removesuffix("*")
        if prefix != route and path.startswith(prefix) and len(path) > len(prefix):
            return route, path[len(prefix) :]
    return "", ""


def _request_id(given: str) -> str:
    """The client's id without characters that could harm a log or a header; a new id if nothing is left."""
    return _NOT_IN_REQUEST_ID.sub("", given[:_MAX_REQUEST_ID_CHARS]) or uuid.uuid4().hex


def _is_cut(http: web.BaseRequest) -> bool:
    """True if what is left of a body is not to be read, or cannot be."""
    if http.content.exception() is not None:
        return True
    length = http.content_length
    is_small = length is not None and length <= SMALL_BODY_BYTES and "Expect" not in http.headers
    return not http.content.is_eof() and not is_small


class ApiServer(web.Server):
    """The server for `service`, to be run by `aiohttp.web.ServerRunner`. Needs a running event loop.

    Raises ConfigError: a plugin cannot use what its flags name."""

    def __init__(self, service: Service) -> None:
        super().__init__(
            lambda http: _answer(http, service),
            request_factory=partial(
                web.BaseRequest,
                loop=asyncio.get_running_loop(),
                client_max_size=service.config.max_body_bytes,
            ),
            handler_cancellation=True,
            access_log=None,
            auto_decompress=False,  # bodies are inflated where they are read, beside the event loop
            keepalive_timeout=CONNECTION_IDLE_S,
        )
        self._service = service
        self._bound = Connections(service.config.max_connections)
        for plugin in PLUGINS.values():
            if plugin.state is not None:
                state = plugin.state(service, PLUGINS)
                service.states[type(state)] = state

    def __call__(self) -> web.RequestHandler:
        return HttpConnection(self, self._service, self._bound, loop=self._loop, **self._kwargs)


class HttpConnection(web.RequestHandler):
    """A connection that knows when each request arrived, and lets event streams wait for a slow client.

    Bytes with many lines are parsed piece by piece, in turns of the event loop. A request that is answered before
    its body was read ends the connection, unless the body is small: the rest of it is dropped unparsed.
    """

    __slots__ = (
        *("_arrived_ns", "_connections", "_is_idle", "_is_open", "_service", "_writable"),
        *("_body", "_gone", "_is_held", "_num_received", "_num_skipped", "_skips", "_unparsed"),
    )

    def __init__(
        self, server: ApiServer, service: Service, connections: Connections, **options: Any
    ) -> None:
        super().__init__(server, **options)
        self._service = service
        self._connections = connections
        self._is_open = False
        self._is_idle = True
        self._arrived_ns = 0
        self._writable = asyncio.Event()
        self._writable.set()
        self._gone = asyncio.Event()
        self._unparsed = bytearray()
        """Bytes that wait for their turn; meanwhile the socket is not read."""
        self._is_held = False
        """True while the body that is parsed has no room for more."""
        self._body: StreamReader | None = None
        """The body of the request that is being answered."""
        self._num_received = 0
        """Bytes that came behind the head of the request that is being answered."""
        self._skips = False
        """True from when on bytes are dropped."""
        self._num_skipped = 0

    def pause_writing(self) -> None:
        super().pause_writing()
        self._writable.clear()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._writable.set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        bound_silence(transport.get_extra_info("socket"), self._service.config.stall_timeout_s)
        self._is_open = True
        self._connections.add(self)

    def connection_lost(self, exc: BaseException | None) -> None:
        super().connection_lost(exc)
        self._unparsed.clear()
        self._writable.set()
        self._gone.set()
        if self._is_open:
            self._is_open = False
            self._connections.remove(self)

    async def wait_writable(self) -> None:
        """Returns when the buffer of the socket has room, or the connection is lost."""
        await self._writable.wait()

    def data_received(self, data: bytes) -> None:
        """Takes what came; no data let the parser go on with what it has."""
        if self._skips:
            self._num_skipped += len(data)
            if self._num_skipped > _MOST_SKIPPED_BYTES:
                self.force_close()
            return
        # The task of a request may begin much later, behind the tasks of all requests that arrived with it.
        # An empty line before a request does not belong to the request (RFC 9112, 2.2).
        if self._is_idle and not self._arrived_ns and data.lstrip(b"\r\n"):
            self._arrived_ns = self._service.tracker.clock_ns()
        if data and (
            self._unparsed or (len(data) > _PIECE_BYTES and data.count(b"\n") > _MOST_LINES)
        ):
            if not self._unparsed:
                self._loop.call_soon(self._parse_piece)
            self._unparsed += data
            self._stop_reading()
            return
        self.parse(data)

    def parse(self, data: bytes) -> None:
        super().data_received(data)
        body = self._body
        if body is None or body.is_eof() or not data:
            return
        self._num_received += len(data)
        framing = self._num_received - body.total_bytes
        if framing > _SPARE_FRAMING_BYTES + body.total_bytes // _FRAMING_SHARE:
            self._skips = True
            body.set_exception(
                web.RequestPayloadError("its chunks are too small; send larger ones")
            )

    def _parse_piece(self) -> None:
        """Parses the next of the bytes that wait, and lets the rest wait for the next turn."""
        if self.transport is None or self._skips:
            self._unparsed.clear()
        elif not self._is_held:
            piece = bytes(self._unparsed[:_PIECE_BYTES])
            del self._unparsed[:_PIECE_BYTES]
            self.parse(piece)
            if self._unparsed:
                self._loop.call_soon(self._parse_piece)
            elif not self._is_held:
                super().resume_reading()

    def _stop_reading(self) -> None:
        if self.transport is not None:
            self.transport.pause_reading()

    def pause_reading(self) -> None:
        self._is_held = True
        super().pause_reading()

    def resume_reading(self, resume_parser: bool = True) -> None:
        was_held, self._is_held = self._is_held, False
        super().resume_reading(resume_parser)
        if self._unparsed:
            self._stop_reading()
            if was_held and not self._is_held:
                self._loop.call_soon(self._parse_piece)

    def begin(self, http: web.BaseRequest) -> int:
        """Time of the first bytes of the request that is answered next."""
        arrived_ns = self._arrived_ns or self._service.tracker.clock_ns()
        self._arrived_ns = 0
        self._is_idle = False
        self._body = http.content
        self._num_received = http.content.total_bytes
        self._connections.set_busy(self)
        return arrived_ns

    def end(self, *, is_read: bool) -> None:
        """Ends the request. The next bytes begin another request if this one was read to its end."""
        self._is_idle = is_read

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        is_cut = _is_cut(request)
        if is_cut:
            self._skips = True
            self._unparsed.clear()
            self.keep_alive(False)
            resp.force_close()
        finished = await super().finish_response(request, resp, start_time)
        if is_cut:
            await self._linger()
            self.force_close()
        elif self._is_open:
            self._connections.set_waiting(self)
        return finished

    async def _linger(self) -> None:
        """Waits until the client has seen the answer, which it might lose if the connection were closed while
        it sends (RFC 9112, 9.6)."""
        transport = self.transport
        if transport is None:
            return
        with contextlib.suppress(OSError, RuntimeError, TimeoutError):
            transport.resume_reading()
            if transport.can_write_eof():
                transport.write_eof()
            async with asyncio.timeout(LINGER_S):
                await self._gone.wait()

    def handle_error(
        self,
        request: web.BaseRequest,  # noqa: ARG002
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """The answer to a request that did not reach a route."""
        self.keep_alive(False)
        if isinstance(exc, LineTooLong):
            error = ApiError(431, "The request line or a header is too long.")
        elif status == 400 and "headers" in (message or "").lower():
            error = ApiError(431, "The request has too many headers.")
        elif status < 500:
            error = ApiError(status, "The request is not valid HTTP.", word="invalid_http")
        else:
            if not isinstance(exc, ConnectionError):  # the client went away
                _log.error("a connection failed", exc_info=exc)
            error = ApiError(status, INTERNAL_ERROR)
        self._service.request_metrics.refusals[Refusal("", error.status, error.kind)] += 1
        response = web.Response(
            body=encode_json(error.body()), status=error.status, content_type="application/json"
        )
        response.force_close()
        return response
