# SPDX-License-Identifier: Apache-2.0
"""The host's end of the connection to its routers, which send it what a frontend sends an engine."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from functools import partial
from typing import Any, cast

import msgspec
import zmq

from pagoda.concurrency.async_utils import cancel_all
from pagoda.errors import (
    ConfigError,
    DeadlineError,
    EngineDeadError,
    InvalidRequestError,
    OverloadedError,
)
from pagoda.fleet.endpoint import ReplicaState, SharedEndpoint, Unsubscribe
from pagoda.fleet.fleet import TraceOwner
from pagoda.ipc.codec import Codec
from pagoda.ipc.door import pieces
from pagoda.ipc.machine import memory_of
from pagoda.messages.frontend import (
    AbortRequests,
    EngineFailed,
    EngineReady,
    FinishReason,
    GenerateRequest,
    Hello,
    HostLeave,
    HostPool,
    HostWork,
    LoadQuery,
    RequestRefused,
    SubscribeCache,
    TokenChunk,
    TokenChunks,
    UnsubscribeCache,
)
from pagoda.messages.ranges import MAX_ITEMS, capped
from pagoda.messages.tracing import ClockPing, ClockPong, FetchFragment, StartTrace, StopTrace
from pagoda.messages.worker_config import Role
from pagoda.plugins.router.host_client import Identity
from pagoda.plugins.router.host_sockets import HostSockets
from pagoda.plugins.router.host_traces import HostTrace
from pagoda.plugins.router.messages import HostMessage, HostPing, HostPong, RouterMessage, SetRole
from pagoda.plugins.router.pools import pool_for
from pagoda.plugins.router.request_checks import check_request
from pagoda.telemetry.clocks import ClockComparison
from pagoda.telemetry.request_tracker import REFUSED, TIMED_OUT, RequestTracker
from pagoda.telemetry.tracer import Tracer

_PARTING_S = 0.1
"""Seconds from when a router has hung up until the socket refuses messages to it; with a wide margin."""

_TELL_S = 0.02
"""Seconds between two looks at the work that routers have here, while none brings more."""
_LEAST_TELL_S = 0.002
"""Seconds between two looks at least. Routers that hear late of a request send theirs to the same host."""
_TOLD_SHARE = 8
"""Routers are told of one another's work when it has changed by an eighth."""

_log = logging.getLogger(__name__)


class _Router:
    def __init__(self, identity: bytes, number: int) -> None:
        self.identity = identity
        self.via = str(number)
        """The router's name in requests here."""
        self.told_tokens = 0
        """The work of others that the router was last told of."""
        self.is_welcome = False
        """The router has said hello and fits this host."""
        self.requests: dict[str, asyncio.Task[None]] = {}
        """Requests that run, by their wire ids."""
        self.chunks: list[TokenChunk] = []
        self.clocks: ClockComparison | None = None
        """The measurement of the router's clock, while it lasts."""
        self.unsubscribe: Unsubscribe | None = None
        self.trace: HostTrace | None = None
        """The trace that the router has asked for."""


class HostServer:
    """Serves requests of routers with `endpoint`, as an engine serves those of frontends.

    Routers are told when `endpoint` has other limits, and when it stops or resumes computing.
    """

    def __init__(
        self,
        endpoint: SharedEndpoint,
        sockets: HostSockets,
        address: str,
        identity: Identity,
        tracer: Tracer | None = None,
        tracker: RequestTracker | None = None,
        tracing: TraceOwner | None = None,
        set_role: Callable[[Role], None] | None = None,
    ) -> None:
        """Binds `address`, whose port may be `*`. `tracer` is that of this process, `tracker` records each answer,
        by `tracing` routers trace this server, and by `set_role` they change its role; None lets them not.

        Raises ConfigError if `address` cannot be bound.
        """
        self._endpoint = endpoint
        self._identity = identity
        self._tracker = tracker or RequestTracker()
        self._tracer = tracer or Tracer("frontend")
        self._tracing = tracing
        self._set_role = set_role
        self._encode = Codec[HostMessage](HostMessage).encode
        self._decode = Codec[RouterMessage](RouterMessage).decode
        self._routers: dict[bytes, _Router] = {}
        self._request_ids: set[str] = set()
        """Ids of requests that run."""
        self._num_routers = 0
        """Routers so far."""
        self._telling: asyncio.TimerHandle | None = None
        """The next time that routers are told of one another's work; None while there is none."""
        self._tells_at = 0.0
        """Instant of `_telling`."""
        self._told_at = -math.inf
        """The last time."""
        self._num_renamed = 0
        self._leaves = False
        self._flushing: list[_Router] = []
        self._reports: set[asyncio.Task[object]] = set()
        self._parting: asyncio.TimerHandle | None = None
        self._socket = sockets.server(self._receive, self._on_disconnect)
        try:
            self._socket.bind(address)
        except zmq.ZMQError as error:
            self._socket.close()
            raise ConfigError(
                f"--advertise: this host cannot listen for routers on {address.removeprefix('tcp://')} "
                f"({error.strerror}); name an address of this host, with a port that is free or without one."
            ) from None
        self.port = self._socket.port
        self._sent_limits, self._sent_ready = self._limits, self._is_ready
        self._unwatch = endpoint.watch(self._on_change)

    @property
    def num_requests(self) -> int:
        return sum(len(router.requests) for router in self._routers.values())

    @property
    def num_subscriptions(self) -> int:
        return sum(router.unsubscribe is not None for router in self._routers.values())

    def leave(self) -> None:
        """Tells all routers to send nothing new to this host."""
        self._leaves = True
        for router in self._welcome_routers():
            self._send(router, HostLeave())

    def compare_clocks(self) -> None:
        """Measures how far the clocks of all routers are ahead, for the trace that has begun."""
        for router in self._welcome_routers():
            self._compare_clock(router)

    async def close(self) -> None:
        self._unwatch()
        for timer in (self._parting, self._telling):
            if timer is not None:
                timer.cancel()
        tasks = [task for router in self._routers.values() for task in router.requests.values()]
        for router in list(self._routers.values()):
            self._drop(router)
        await cancel_all([*tasks, *self._reports])
        self._socket.close()

    # ---- what routers are told

    @property
    def _limits(self) -> EngineReady:
        limits, identity = self._endpoint.limits, self._identity
        routers = (identity.id, *limits.routers) if identity.is_router else limits.routers
        roles = () if self._set_role is None else limits.roles
        host_id = identity.host_id
        return msgspec.structs.replace(limits, host_id=host_id, routers=routers, roles=roles)

    @property
    def _is_ready(self) -> bool:
        return self._endpoint.state is ReplicaState.READY

    def _welcome_routers(self) -> list[_Router]:
        return [router for router in self._routers.values() if router.is_welcome]

    def _on_change(self) -> None:
        limits, is_ready = self._limits, self._is_ready
        has_new_limits, was_ready = limits != self._sent_limits, self._sent_ready
        self._sent_limits, self._sent_ready = limits, is_ready
        if not has_new_limits and is_ready == was_ready:
            return
        for router in self._welcome_routers():
            if has_new_limits:
                self._send(router, limits)
            if is_ready != was_ready:
                self._report(router, None)

    def _on_disconnect(self) -> None:
        """The socket does not name the router that has gone, so all are sent something, once for many that go."""
        if self._parting is None:
            self._parting = asyncio.get_running_loop().call_later(_PARTING_S, self._find_gone)

    def _find_gone(self) -> None:
        self._parting = None
        limits = self._limits
        for router in list(self._routers.values()):
            self._send(router, limits)

    def _compare_clock(self, router: _Router) -> None:
        router.clocks = ClockComparison(self._tracer.clock_ns)
        self._ask_for_time(router, router.clocks)

    def _ask_for_time(self, router: _Router, clocks: ClockComparison) -> None:
        number = clocks.next_ping()
        if number is not None:
            self._send(router, ClockPing(number))
        else:
            clocks.note(self._tracer)
            router.clocks = None

    # ---- what routers ask for

    def _receive(self, frames: list[bytes]) -> None:
        identity, *parts = frames
        try:
            message = self._decode(b"".join(parts))
        except msgspec.DecodeError as error:
            _log.warning("a router sent what is not a message: %s", error)
            return
        router = self._routers.get(identity)
        if router is None:
            self._num_routers += 1
            router = self._routers[identity] = _Router(identity, self._num_routers)
        try:
            self._handle(router, message)
        except Exception:  # one router must not end the service of all
            _log.exception("what a router asks for cannot be done")

    def _handle(self, router: _Router, message: RouterMessage) -> None:
        match message:
            case Hello():
                self._welcome(router, message)
            case GenerateRequest():
                self._begin(router, message)
            case AbortRequests():
                for wire_id in message.request_ids:
                    task = router.requests.get(wire_id)
                    if task is not None:
                        task.cancel()
            case SubscribeCache():
                self._unsubscribe(router)
                router.unsubscribe = self._endpoint.subscribe_cache(partial(self._send, router))
            case UnsubscribeCache():
                self._unsubscribe(router)
            case HostPing(number):
                self._send(router, HostPong(number))
            case SetRole() if router.is_welcome:
                self._change_role(message.role)
            case LoadQuery():
                self._report(router, message.query_id)
            case StartTrace() | StopTrace() | FetchFragment() if router.is_welcome:
                router.trace = router.trace or HostTrace(self._tracing)
                self._later(self._trace(router, router.trace, message))
            case ClockPong():
                clocks = router.clocks
                if clocks and clocks.pong(message.number, message.uid, message.now_ns):
                    self._ask_for_time(router, clocks)

    def _change_role(self, role: Role) -> None:
        """Routers see the role among the limits; one that is impossible was asked for before they saw those."""
        if self._set_role is not None:
            with contextlib.suppress(InvalidRequestError):
                self._set_role(role)
                _log.info("a router's operator has given this host the role %s", role)

    @staticmethod
    def _unsubscribe(router: _Router) -> None:
        if router.unsubscribe is not None:
            router.unsubscribe()
            router.unsubscribe = None

    def _welcome(self, router: _Router, hello: Hello) -> None:
        try:
            pool = pool_for(self._identity, hello)
        except ConfigError as error:
            _log.warning("a router is refused: %s", error)
            self._send(router, EngineFailed(str(error), is_user_error=True))
            return
        router.is_welcome = True
        own = self._identity
        self._send(router, HostPool(pool.pool, own.region, own.price))
        self._send(router, self._limits)
        if self._tracer.session is not None:
            self._compare_clock(router)
        if not self._is_ready:
            self._report(router, None)
        if self._leaves:
            self._send(router, HostLeave())

    async def _trace(
        self, router: _Router, trace: HostTrace, message: StartTrace | StopTrace | FetchFragment
    ) -> None:
        answer = await trace.answer(message)
        if answer is not None:
            self._send(router, answer)

    def _report(self, router: _Router, query_id: int | None) -> None:
        self._later(self._send_report(router, query_id))

    def _later(self, work: Coroutine[Any, Any, object]) -> None:
        task = asyncio.create_task(work)
        self._reports.add(task)
        task.add_done_callback(self._reports.discard)

    async def _send_report(self, router: _Router, query_id: int | None) -> None:
        with contextlib.suppress(EngineDeadError):  # this host ends, and the router will see that
            report = await self._endpoint.load()
            role = "router" if self._identity.is_router else "frontend"
            report = msgspec.structs.replace(
                report,
                query_id=query_id,
                is_worker_ready=self._is_ready,
                processes=(*memory_of({role: os.getpid()}), *report.processes),
            )
            self._send(router, report)

    def _tell_at(self, instant: float) -> None:
        """Tells routers of one another's work then, or sooner where that is due already."""
        if self._telling is not None:
            if self._tells_at <= instant:
                return
            self._telling.cancel()
        # A handle of uvloop for an instant that has come does not tell which it was.
        self._tells_at = instant
        self._telling = asyncio.get_running_loop().call_at(instant, self._tell_work)

    def _tell_work(self) -> None:
        """Tells each router of the work of others, where that is another than it was told. Goes on until there is
        none."""
        self._telling, self._told_at = None, asyncio.get_running_loop().time()
        works = self._endpoint.works()
        all_tokens = sum(works.values())
        for router in self._welcome_routers():
            tokens = all_tokens - works.get(router.via, 0)
            if abs(tokens - router.told_tokens) > router.told_tokens // _TOLD_SHARE:
                router.told_tokens = tokens
                self._send(router, HostWork(capped(tokens)))
        if self._request_ids or any(router.told_tokens for router in self._routers.values()):
            self._tell_at(self._told_at + _TELL_S)

    def _begin(self, router: _Router, request: GenerateRequest) -> None:
        wire_id = request.wire_id or request.request_id
        if wire_id in router.requests:
            error = "a router sent a second request with this wire id, which is ignored"
            _log.error(error, extra={"request_id": request.request_id})
            return
        # Another router may have the same request, or the same one before it lost its connection.
        if request.request_id in self._request_ids:
            self._num_renamed += 1
            request_id = f"{request.request_id}#{self._num_renamed}"
            request = msgspec.structs.replace(request, request_id=request_id)
        request = msgspec.structs.replace(request, via=router.via)
        self._request_ids.add(request.request_id)
        task = asyncio.create_task(self._generate(router, wire_id, request))
        self._tell_at(max(asyncio.get_running_loop().time(), self._told_at + _LEAST_TELL_S))
        router.requests[wire_id] = task
        task.add_done_callback(partial(self._end, router, wire_id, request.request_id))

    def _end(self, router: _Router, wire_id: str, request_id: str, _: asyncio.Task[None]) -> None:
        del router.requests[wire_id]
        self._request_ids.remove(request_id)

    async def _generate(self, router: _Router, wire_id: str, request: GenerateRequest) -> None:
        with self._tracker.answering(request) as record:
            try:
                check_request(request, self._limits)
                value = record.with_span(request)
                chunks = cast(AsyncGenerator[TokenChunk, None], self._endpoint.generate(value))
                async with aclosing(chunks):
                    async for chunk in chunks:
                        self._tracker.on_chunk(record, chunk, len(chunk.token_ids))
                        if chunk.finish_reason is not None:
                            record.ending = chunk.finish_reason, chunk.error or ""
                        msgspec.structs.force_setattr(chunk, "request_id", wire_id)
                        self._put(router, chunk)
            except OverloadedError as error:
                record.ending = REFUSED, str(error)
                self._send(router, RequestRefused(wire_id, error.retry_after_s))
            except DeadlineError as error:
                record.ending = TIMED_OUT, str(error)
                reason = FinishReason.ERROR
                chunk = TokenChunk(wire_id, [], reason, error=str(error), timed_out=True)
                self._put(router, chunk)
            except InvalidRequestError as error:
                record.ending = str(FinishReason.ERROR), str(error)
                self._flush()  # a request that has moved may have chunks on the way
                self._send(router, RequestRefused(wire_id, error=str(error)))
            except EngineDeadError:
                pass  # this host ends; when it has hung up, the request goes on elsewhere
            except Exception:
                record.ending = str(FinishReason.ERROR), "The host failed with this request."
                _log.exception("request failed", extra={"request_id": request.request_id})
                error_there = "The host failed with this request; its log says why."
                self._put(router, TokenChunk(wire_id, [], FinishReason.ERROR, error=error_there))

    def _put(self, router: _Router, chunk: TokenChunk) -> None:
        """Chunks of one turn of the event loop become one message."""
        if not self._flushing:
            asyncio.get_running_loop().call_soon(self._flush)
        if not router.chunks:
            self._flushing.append(router)
        router.chunks.append(chunk)

    def _flush(self) -> None:
        routers, self._flushing = self._flushing, []
        for router in routers:
            chunks, router.chunks = router.chunks, []
            for start in range(0, len(chunks), MAX_ITEMS):
                self._send(router, TokenChunks(chunks[start : start + MAX_ITEMS]))

    def _send(self, router: _Router, message: HostMessage) -> None:
        if self._socket.closed:
            return
        try:
            self._socket.send(router.identity, *pieces(self._encode(message)))
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            self._drop(router)

    def _drop(self, router: _Router) -> None:
        """The router has gone: what it asked for ends. May be called twice."""
        self._routers.pop(router.identity, None)
        self._unsubscribe(router)
        if router.trace is not None:
            self._later(router.trace.answer(StopTrace()))
        for task in router.requests.values():
            task.cancel()
