"""The host's end of the connection to its routers: the host is an engine to a router.

A router sends a host the same messages that a frontend sends an engine, over encrypted TCP sockets. So a request
is tokenized once, at the router, and continues at another host, with the tokens so far, when its host is lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator
from contextlib import aclosing
from functools import partial
from typing import cast

import msgspec
import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from pagoda.errors import (
    ConfigError,
    EngineDeadError,
    InvalidRequestError,
    OverloadedError,
)
from pagoda.frontend.async_utils import cancel_all, keep_going
from pagoda.frontend.endpoint import Endpoint, ReplicaState
from pagoda.frontend.host_client import MAX_MESSAGE_BYTES, Identity
from pagoda.frontend.request_tracker import ClientRequest, RequestStatistics, RequestTracker
from pagoda.ipc.codec import Codec
from pagoda.ipc.curve import encrypt_server
from pagoda.ipc.heartbeat import notice_silence
from pagoda.ipc.machine import process_memory_bytes
from pagoda.messages.frontend import (
    PROTOCOL_VERSION,
    AbortRequests,
    EngineFailed,
    EngineReady,
    FinishReason,
    FrontendMessage,
    GenerateRequest,
    Hello,
    LoadQuery,
    PrefixCacheUpdate,
    RequestRefused,
    SubscribeCache,
    TokenChunk,
    TokenChunks,
)
from pagoda.messages.hosts import HostLeave, HostMessage
from pagoda.messages.load import ProcessMemory
from pagoda.messages.tracing import ClockPing, ClockPong
from pagoda.messages.worker_config import CurveKeys
from pagoda.telemetry.clocks import ClockComparison
from pagoda.telemetry.tracer import Tracer

_PARTING_S = 0.1
"""From when a router has hung up until messages to it come back; far more than that takes."""


_log = logging.getLogger(__name__)


class HostServer:
    """The host's end: serves requests of routers with `endpoint`, as an engine serves those of frontends.

    Routers are told when `endpoint` has other limits, and when it does not compute or does so again.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        context: zmq.asyncio.Context,
        address: str,
        keys: CurveKeys,
        identity: Identity,
        tracer: Tracer | None = None,
        tracker: RequestTracker | None = None,
    ) -> None:
        """Binds `address`, whose port may be `*`. `context` must have an authenticator. `tracer` is that of this
        process, `tracker` records each answer.

        Raises:
            ConfigError: it cannot be bound.
        """
        self._endpoint = endpoint
        self._identity = identity
        self._tracker = tracker or RequestTracker()
        self._socket = context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        # A router that is gone is known when something is sent to it, instead of served in silence.
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        notice_silence(self._socket)
        encrypt_server(self._socket, keys)
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        try:
            self._socket.bind(address)
        except zmq.ZMQError as error:
            self._hang_up()
            raise ConfigError(
                f"--advertise: routers cannot be listened to on {address.removeprefix('tcp://')} "
                f"({error.strerror}); name an address of this host, with a port that is free or without one."
            ) from None
        self.port = int(self._socket.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])
        self._encode = Codec[HostMessage](HostMessage).encode
        self._decode = Codec[FrontendMessage](FrontendMessage).decode
        self._tracer = tracer or Tracer("frontend")
        self._clocks: dict[bytes, ClockComparison] = {}
        """With the routers whose clocks are being compared."""
        self._routers: set[bytes] = set()
        """That have said hello and are there, as far as is known."""
        self._leaves = False
        self._told_limits, self._told_ready = self._limits, self._is_ready
        endpoint.watch(self._on_change)
        self._requests: dict[tuple[bytes, str], asyncio.Task[None]] = {}
        self._outbox: dict[bytes, list[TokenChunk]] = {}
        self._answers: set[asyncio.Task[None]] = set()
        self._followed: dict[bytes, Callable[[], None]] = {}
        """What ends the news for each router that asked for them."""
        self._serving = asyncio.create_task(self._serve())
        self._watching = asyncio.create_task(
            keep_going(self._watch_connections, "the watch for routers that hang up")
        )

    async def leave(self) -> None:
        """Routers give this host nothing new from now on."""
        self._leaves = True
        await asyncio.gather(*(self._send(router, HostLeave()) for router in list(self._routers)))

    def compare_clocks(self) -> None:
        """Measures how far the clocks of all routers are ahead, for the trace that has begun."""
        for router in self._routers:
            self._compare_clock(router)

    def _compare_clock(self, router: bytes) -> None:
        self._clocks[router] = ClockComparison(self._tracer.clock_ns)
        self._ask_for_time(router)

    def _ask_for_time(self, router: bytes) -> None:
        number = self._clocks[router].next_ping()
        if number is not None:
            self._answer(self._send(router, ClockPing(number)))
        else:
            self._clocks.pop(router).note(self._tracer)

    async def close(self) -> None:
        for router in list(self._followed):
            self._unfollow(router)
        tasks = [self._serving, self._watching, *self._requests.values(), *self._answers]
        await cancel_all(tasks)
        self._routers.clear()
        self._hang_up()

    def _hang_up(self) -> None:
        if not self._socket.closed:
            self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close()

    @property
    def _limits(self) -> EngineReady:
        limits, identity = self._endpoint.limits, self._identity
        routers = (identity.id, *limits.routers) if identity.is_router else limits.routers
        return msgspec.structs.replace(limits, host_id=identity.id, routers=routers)

    @property
    def _is_ready(self) -> bool:
        return self._endpoint.state is ReplicaState.READY

    def _on_change(self) -> None:
        """Tells what routers do not know yet."""
        limits, is_ready = self._limits, self._is_ready
        for router in self._routers:
            if limits != self._told_limits:
                self._answer(self._send(router, limits))
            if is_ready != self._told_ready:
                self._answer(self._report(router, None))
        self._told_limits, self._told_ready = limits, is_ready

    async def _serve(self) -> None:
        try:
            while True:
                router, *parts = await self._socket.recv_multipart()
                self._take(router, b"".join(parts))
        except Exception:
            _log.exception("routers cannot be served any more")
            self._socket.close()  # so that they know

    async def _watch_connections(self) -> None:
        """A router that hangs up, or whose line is cut, does not want anything any more.

        That somebody is gone is told without a name: it is known when something is sent to all.
        """
        while True:
            await recv_monitor_message(self._monitor)
            await asyncio.sleep(_PARTING_S)
            askers = {router for router, _ in self._requests}
            for router in self._routers | self._followed.keys() | askers:
                self._answer(self._send(router, self._limits))

    def _take(self, router: bytes, payload: bytes) -> None:
        """What a router sent, whatever it is: one of them is not to end the service of all."""
        try:
            self._handle(router, self._decode(payload))
        except msgspec.DecodeError as error:
            _log.warning("a router sent what is not a message: %s", error)
        except Exception:
            _log.exception("what a router asks for cannot be done")

    def _handle(self, router: bytes, message: FrontendMessage) -> None:
        match message:
            case Hello():
                self._answer(self._welcome(router, message))
            case GenerateRequest():
                self._begin(router, message)
            case AbortRequests():
                for request_id in message.request_ids:
                    task = self._requests.get((router, request_id))
                    if task is not None:
                        task.cancel()
            case SubscribeCache():
                self._unfollow(router)
                self._followed[router] = self._endpoint.subscribe_cache(partial(self._tell, router))
            case LoadQuery():
                self._answer(self._report(router, message.query_id))
            case ClockPong():
                clocks = self._clocks.get(router)
                if clocks and clocks.pong(message.number, message.uid, message.now_ns):
                    self._ask_for_time(router)

    def _begin(self, router: bytes, request: GenerateRequest) -> None:
        before = self._requests.get((router, request.request_id))
        if before is not None and not before.cancelling():
            self._fail(router, request, "A request with this id is already running.")
            return
        task = asyncio.create_task(self._generate(router, request, before))
        self._requests[router, request.request_id] = task

    def _tell(self, router: bytes, news: PrefixCacheUpdate) -> None:
        self._answer(self._send(router, news))

    def _unfollow(self, router: bytes) -> None:
        unfollow = self._followed.pop(router, None)
        if unfollow is not None:
            unfollow()

    def _answer(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._answers.add(task)
        task.add_done_callback(self._answered)

    def _answered(self, task: asyncio.Task[None]) -> None:
        self._answers.discard(task)
        if not task.cancelled() and task.exception() is not None:
            _log.error("a router cannot be answered", exc_info=task.exception())

    async def _welcome(self, router: bytes, hello: Hello) -> None:
        problem = self._refusal_of(hello)
        if problem:
            _log.warning("a router is refused: %s", problem)
            await self._send(router, EngineFailed(problem, is_user_error=True))
            return
        self._routers.add(router)
        await self._send(router, self._limits)
        if self._tracer.session is not None:
            self._compare_clock(router)
        if not self._is_ready:
            await self._report(router, None)
        if self._leaves:
            await self._send(router, HostLeave())

    def _refusal_of(self, hello: Hello) -> str:
        own = self._identity
        if hello.protocol_version != PROTOCOL_VERSION:
            return (
                f"The router speaks protocol {hello.protocol_version}, the host {PROTOCOL_VERSION}; "
                "install the same version of Pagoda on both."
            )
        if hello.model_digest != own.model_digest:
            return (
                f"The router serves {hello.model}, and {own.model} at the host is another model or another "
                "version of it; serve the same files."
            )
        return ""

    async def _report(self, router: bytes, query_id: int | None) -> None:
        with contextlib.suppress(EngineDeadError):  # this host ends, and the router will see that
            report = await self._endpoint.load()
            report = msgspec.structs.replace(
                report,
                query_id=query_id,
                is_worker_ready=self._is_ready,
                processes=(*self._own_memory(), *report.processes),
            )
            await self._send(router, report)

    def _own_memory(self) -> Iterator[ProcessMemory]:
        resident_bytes = process_memory_bytes(os.getpid())
        if resident_bytes is not None:
            role = "router" if self._identity.is_router else "frontend"
            yield ProcessMemory(role, os.getpid(), resident_bytes)

    async def _generate(
        self, router: bytes, request: GenerateRequest, before: asyncio.Task[None] | None
    ) -> None:
        """`before` had the same id, and was aborted: two of them at once would not be known apart."""
        record = self._open(request)
        reason, problem = str(FinishReason.ABORT), ""
        try:
            if before is not None:
                await asyncio.wait([before])
            value = record.with_span(request)
            chunks = cast(AsyncGenerator[TokenChunk, None], self._endpoint.generate(value))
            async with aclosing(chunks):
                async for chunk in chunks:
                    self._tracker.on_chunk(record, chunk, len(chunk.token_ids))
                    if chunk.finish_reason is not None:
                        reason, problem = chunk.finish_reason, chunk.error or ""
                    self._put(router, chunk)
        except OverloadedError as error:
            reason, problem = "refused", str(error)
            await self._send(router, RequestRefused(request.request_id, error.retry_after_s))
        except InvalidRequestError as error:
            reason, problem = str(FinishReason.ERROR), str(error)
            self._fail(router, request, problem)
        except EngineDeadError:
            pass  # this host ends; when it has hung up, the request goes on elsewhere
        except Exception:
            reason, problem = str(FinishReason.ERROR), "The host failed with this request."
            _log.exception("request failed", extra={"request_id": request.request_id})
            self._fail(router, request, "The host failed with this request; its log says why.")
        finally:
            self._tracker.finish(record, reason, problem)
            if self._requests.get((router, request.request_id)) is asyncio.current_task():
                del self._requests[router, request.request_id]

    def _open(self, request: GenerateRequest) -> RequestStatistics:
        return self._tracker.start(
            request.request_id,
            ClientRequest(
                id=request.request_id,
                arrived_ns=self._tracker.clock_ns(),
                traceparent=request.traceparent,
                tracestate=request.tracestate,
            ),
            num_prompt_tokens=len(request.prompt_token_ids),
            max_tokens=request.sampling.max_tokens or 0,
        )

    def _fail(self, router: bytes, request: GenerateRequest, error: str) -> None:
        self._put(router, TokenChunk(request.request_id, [], FinishReason.ERROR, error=error))

    def _put(self, router: bytes, chunk: TokenChunk) -> None:
        """What comes in one turn of the loop is one message."""
        if not self._outbox:
            asyncio.get_running_loop().call_soon(self._flush)
        self._outbox.setdefault(router, []).append(chunk)

    def _flush(self) -> None:
        outbox, self._outbox = self._outbox, {}
        for router, chunks in outbox.items():
            self._answer(self._send(router, TokenChunks(chunks)))

    async def _send(self, router: bytes, message: HostMessage) -> None:
        try:
            await self._socket.send_multipart([router, self._encode(message)])
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            self._routers.discard(router)
            self._clocks.pop(router, None)
            self._unfollow(router)
            for (asker, _), task in list(self._requests.items()):
                if asker == router:
                    task.cancel()
