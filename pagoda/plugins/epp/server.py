# SPDX-License-Identifier: Apache-2.0
"""The endpoint picker over gRPC: Envoy's external processing, and health."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pagoda.api.service import Service
from pagoda.concurrency.async_utils import cancel_all
from pagoda.errors import ConfigError
from pagoda.ipc.tls import TlsFiles
from pagoda.plugins.epp.messages import (
    FULL_DUPLEX,
    Part,
    Processing,
    body_replies,
    decode_health_check,
    decode_processing,
    empty_reply,
    health_reply,
    picked_reply,
    refusal_reply,
)
from pagoda.plugins.epp.picker import Picker

if TYPE_CHECKING:
    import grpc

    from pagoda.api.plugin import ApiPlugin
    from pagoda.fleet.placement import Counted

PROCESSOR, HEALTH = "envoy.service.ext_proc.v3.ExternalProcessor", "grpc.health.v1.Health"
_MOST_STREAMS = 16_384
_END_S = 5.0
_MOST_HELD_BYTES = 2**28
"""Bytes of bodies of all requests together that have not come as a whole."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class PickerOptions:
    """The flags of an endpoint picker."""

    listen: str | None
    """`HOST:PORT`; None for no picker."""
    target_port: int
    tls: TlsFiles


class PickerState:
    """The picker of a server, which gateways may ask as soon as the router has a host."""

    def __init__(self, service: Service, _: Mapping[str, ApiPlugin]) -> None:
        self._service = service
        self._options = service.config.option(PickerOptions)
        self._starting: asyncio.Task[None] | None = None
        self._server: grpc.aio.Server | None = None
        self.port = 0
        """The port that was taken; 0 before."""

    def start(self) -> None:
        """Raises ConfigError: the server is no router, or the address cannot be listened on."""
        options = self._options
        if options is None or options.listen is None:
            return
        if not self._service.is_router:
            raise ConfigError(
                "--epp-listen is for pagoda route, which knows the hosts to pick from."
            )
        import grpc  # with --epp-listen alone

        picker = Picker(self._service, options.target_port)
        # Another process may not listen at the same port, and get some of the requests.
        limits = (("grpc.so_reuseport", 0),)
        self._server = grpc.aio.server(options=limits, maximum_concurrent_rpcs=_MOST_STREAMS)
        handlers = _handlers(picker, self._service.config.max_body_bytes)
        self._server.add_generic_rpc_handlers(handlers)
        try:
            if options.tls.certificate is None:
                self.port = self._server.add_insecure_port(options.listen)
            else:
                certificate = options.tls.certificate.read_bytes()
                key = (options.tls.key or options.tls.certificate).read_bytes()
                credentials = grpc.ssl_server_credentials([(key, certificate)])
                self.port = self._server.add_secure_port(options.listen, credentials)
        except RuntimeError:
            raise ConfigError(
                f"--epp-listen: {options.listen} cannot be listened on; name an address of this "
                "machine with a port that is free."
            ) from None
        self._starting = asyncio.create_task(self._server.start())
        _log.info("gateways ask for hosts at %s", options.listen)

    async def stop(self) -> None:
        """Health is told by `Picker.is_ready`; requests that come meanwhile get a host."""

    async def close(self) -> None:
        if self._starting is not None:
            await cancel_all([self._starting])
        if self._server is not None:
            await self._server.stop(_END_S)


def _handlers(picker: Picker, most_bytes: int) -> tuple[Any, ...]:
    import grpc

    room = BodyRoom(most_bytes)

    async def process(messages: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        with ExitStack() as stack:
            exchange = Exchange(picker, stack, room)
            async for data in messages:
                try:
                    replies = await exchange.take(decode_processing(data))
                except ValueError as error:
                    await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"{error}.")
                    raise
                for reply in replies:
                    yield reply
                if exchange.is_over:
                    return

    async def check(data: bytes, context: Any) -> bytes:
        try:
            service = decode_health_check(data)
        except ValueError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"{error}.")
            raise
        if service == "liveness":
            return health_reply(is_serving=True)
        if service in ("", "readiness", PROCESSOR):
            return health_reply(is_serving=picker.is_ready)
        await context.abort(grpc.StatusCode.NOT_FOUND, "unknown service")
        raise AssertionError

    return (
        grpc.method_handlers_generic_handler(
            PROCESSOR, {"Process": grpc.stream_stream_rpc_method_handler(process)}
        ),
        grpc.method_handlers_generic_handler(
            HEALTH, {"Check": grpc.unary_unary_rpc_method_handler(check)}
        ),
    )


class BodyRoom:
    """Memory for bodies that have not come as a whole."""

    def __init__(self, most_bytes: int, most_of_all: int = _MOST_HELD_BYTES) -> None:
        """A body may have `most_bytes`, all of them together `most_of_all`."""
        self.most_bytes = most_bytes
        self._most_of_all = most_of_all
        self._held = 0

    def take(self, num_bytes: int) -> bool:
        """Takes memory; False if there is none."""
        self._held += num_bytes
        return self._held <= self._most_of_all

    def release(self, num_bytes: int) -> None:
        self._held -= num_bytes


class Exchange:
    """One HTTP request of a gateway, from its headers to the end of its answer."""

    def __init__(self, picker: Picker, stack: ExitStack, room: BodyRoom) -> None:
        """The request counts at its host, and its body in `room`, until `stack` ends."""
        self._picker = picker
        self._stack = stack
        self._room = room
        stack.callback(self._drop_body)
        self._headers: dict[str, str] = {}
        self._body = bytearray()
        self._modes = FULL_DUPLEX, FULL_DUPLEX
        self._counted: list[Counted] = []
        self._is_whole = False
        self.is_over = False
        """The gateway needs nothing more."""

    async def take(self, message: Processing) -> list[bytes]:
        """The replies to a message, in their order. Raises ValueError: the request has come as a whole already."""
        if message.request_mode is not None and message.response_mode is not None:
            self._modes = message.request_mode, message.response_mode
        replies = await self._replies(message)
        return [] if message.is_observed_only else replies

    async def _replies(self, message: Processing) -> list[bytes]:
        match message.part:
            case Part.REQUEST_HEADERS | Part.REQUEST_BODY if self._is_whole:
                raise ValueError("a request goes on behind its end")
            case Part.REQUEST_HEADERS:
                self._headers = dict(message.headers)
                if message.is_end:
                    return await self._pick(message, Part.REQUEST_HEADERS)
                # The host depends on the body; headers wait for it where the gateway allows that.
                return [] if self._modes[0] == FULL_DUPLEX else [empty_reply(message.part)]
            case Part.REQUEST_BODY:
                self._body += message.body
                has_room = self._room.take(len(message.body))
                if len(self._body) > self._room.most_bytes:
                    reason = f"The body must have at most {self._room.most_bytes} bytes."
                    return self._refused(413, reason)
                if not has_room:
                    return self._refused(429, "Too many bodies come at once.")
                if message.is_end:
                    is_whole = self._modes[0] == FULL_DUPLEX
                    part = Part.REQUEST_HEADERS if is_whole else Part.REQUEST_BODY
                    return await self._pick(message, part)
                return [] if self._modes[0] == FULL_DUPLEX else [empty_reply(message.part)]
            case Part.RESPONSE_HEADERS:
                for counted in self._counted:
                    counted.began()
                return [self._ended(message)]
            case Part.RESPONSE_BODY:
                reply = self._ended(message)
                if self._modes[1] != FULL_DUPLEX:
                    return [reply]
                return body_replies(message.part, message.body, is_end=message.is_end)
            case _:
                return [empty_reply(message.part)]

    def _ended(self, message: Processing) -> bytes:
        if message.is_end:
            self._stack.close()
        return empty_reply(message.part)

    async def _pick(self, message: Processing, part: Part) -> list[bytes]:
        body = bytes(self._body)
        self._is_whole = True
        self._drop_body()
        request, pool = await self._picker.request(self._headers, body)
        picked = self._stack.enter_context(self._picker.picked(request, pool, message.subset))
        if picked is None:
            return self._refused(503, "No host takes requests.")
        self._counted = [it for it in (picked.counted, picked.computing) if it is not None]
        replies = [picked_reply(part, picked.endpoint, picked.prefill)]
        if part is Part.REQUEST_HEADERS and message.part is Part.REQUEST_BODY:
            replies += body_replies(Part.REQUEST_BODY, body, is_end=True)
        return replies

    def _drop_body(self) -> None:
        self._room.release(len(self._body))
        self._body.clear()

    def _refused(self, status: int, reason: str) -> list[bytes]:
        self.is_over = True
        return [refusal_reply(status, reason)]
