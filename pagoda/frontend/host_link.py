"""The two ends of the connection between a router and a host: the host is an engine to the router.

What a frontend says to an engine, a router says to a host, in the same messages; only the sockets are on TCP, and
encrypted. So a request is tokenized once, at the router, and goes on at another host, with the tokens so far, when
its own is lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine
from contextlib import aclosing
from functools import partial
from typing import cast

import msgspec
import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from pagoda.engine.messages import (
    PROTOCOL_VERSION,
    AbortRequests,
    CacheNews,
    CurveKeys,
    EngineFailed,
    EngineMessage,
    EngineReady,
    FinishReason,
    FollowCache,
    FrontendMessage,
    GenerateRequest,
    Hello,
    LoadQuery,
    LoadReport,
    RequestRefused,
    TokenChunk,
    TokenChunks,
)
from pagoda.errors import (
    ConfigError,
    EngineDeadError,
    EngineLostError,
    InvalidRequestError,
    OverloadedError,
)
from pagoda.frontend.endpoint import CacheListener, Endpoint, Health, ReplicaState
from pagoda.frontend.engine_session import EngineSession
from pagoda.frontend.merge import cancel_all
from pagoda.ipc.codec import Codec
from pagoda.ipc.curve import encrypt_client, encrypt_server

_HELLO_TIMEOUT_S = 10.0
_MAX_MESSAGE_BYTES = 64 * 2**20

_log = logging.getLogger(__name__)


class HostDoor:
    """The host's end: serves requests of routers with `endpoint`, as an engine serves those of frontends."""

    def __init__(
        self,
        endpoint: Endpoint,
        context: zmq.asyncio.Context,
        address: str,
        keys: CurveKeys,
    ) -> None:
        """Binds `address`, whose port may be `*`. `context` must have a doorkeeper."""
        self._endpoint = endpoint
        self._socket = context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, _MAX_MESSAGE_BYTES)
        # A router that is gone is known when something is sent to it, instead of served in silence.
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        encrypt_server(self._socket, keys)
        try:
            self._socket.bind(address)
        except zmq.ZMQError as error:
            self._socket.close()
            raise ConfigError(
                f"cannot listen for routers on {address} ({error.strerror})."
            ) from None
        self.port = int(self._socket.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])
        self._encode = Codec[EngineMessage](EngineMessage).encode
        self._decode = Codec[FrontendMessage](FrontendMessage).decode
        self._requests: dict[tuple[bytes, str], asyncio.Task[None]] = {}
        self._outbox: dict[bytes, list[TokenChunk]] = {}
        self._answers: set[asyncio.Task[None]] = set()
        self._followed: dict[bytes, Callable[[], None]] = {}
        """What ends the news for each router that asked for them."""
        self._serving = asyncio.create_task(self._serve())

    async def close(self) -> None:
        for router in list(self._followed):
            self._unfollow(router)
        await cancel_all([self._serving, *self._requests.values(), *self._answers])
        self._socket.close()

    async def _serve(self) -> None:
        while True:
            router, payload = await self._socket.recv_multipart()
            try:
                self._handle(router, self._decode(payload))
            except msgspec.DecodeError as error:
                _log.warning("a router sent what is not a message: %s", error)

    def _handle(self, router: bytes, message: FrontendMessage) -> None:
        match message:
            case Hello():
                self._answer(self._welcome(router, message))
            case GenerateRequest():
                key = (router, message.request_id)
                if key not in self._requests:
                    self._requests[key] = asyncio.create_task(self._generate(router, message))
            case AbortRequests():
                for request_id in message.request_ids:
                    task = self._requests.get((router, request_id))
                    if task is not None:
                        task.cancel()
            case FollowCache():
                self._unfollow(router)
                self._followed[router] = self._endpoint.follow_cache(partial(self._tell, router))
            case LoadQuery():
                self._answer(self._report(router, message.query_id))

    def _tell(self, router: bytes, news: CacheNews) -> None:
        self._answer(self._send(router, news))

    def _unfollow(self, router: bytes) -> None:
        unfollow = self._followed.pop(router, None)
        if unfollow is not None:
            unfollow()

    def _answer(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._answers.add(task)
        task.add_done_callback(self._answers.discard)

    async def _welcome(self, router: bytes, hello: Hello) -> None:
        if hello.protocol_version != PROTOCOL_VERSION:
            problem = f"The router speaks protocol {hello.protocol_version}, this host {PROTOCOL_VERSION}."
            await self._send(router, EngineFailed(problem, is_user_error=True))
            return
        await self._send(router, self._endpoint.limits)

    async def _report(self, router: bytes, query_id: int) -> None:
        with contextlib.suppress(EngineDeadError):  # this host ends, and the router will see that
            report = msgspec.structs.replace(await self._endpoint.load(), query_id=query_id)
            await self._send(router, report)

    async def _generate(self, router: bytes, request: GenerateRequest) -> None:
        chunks = cast(AsyncGenerator[TokenChunk, None], self._endpoint.generate(request))
        try:
            async with aclosing(chunks):
                async for chunk in chunks:
                    self._put(router, chunk)
        except OverloadedError as error:
            await self._send(router, RequestRefused(request.request_id, error.retry_after_s))
        except InvalidRequestError as error:
            self._put(
                router, TokenChunk(request.request_id, [], FinishReason.ERROR, error=str(error))
            )
        except EngineDeadError:
            pass  # this host ends; when it has hung up, the request goes on elsewhere
        finally:
            self._requests.pop((router, request.request_id), None)

    def _put(self, router: bytes, chunk: TokenChunk) -> None:
        """What comes in one turn of the loop is one message."""
        if not self._outbox:
            asyncio.get_running_loop().call_soon(self._flush)
        self._outbox.setdefault(router, []).append(chunk)

    def _flush(self) -> None:
        outbox, self._outbox = self._outbox, {}
        for router, chunks in outbox.items():
            self._answer(self._send(router, TokenChunks(chunks)))

    async def _send(self, router: bytes, message: EngineMessage) -> None:
        try:
            await self._socket.send_multipart([router, self._encode(message)])
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            self._unfollow(router)
            for (asker, _), task in list(self._requests.items()):
                if asker == router:
                    task.cancel()


class RemoteHost:
    """The router's end: a host as a `Replica`. It is lost once and for good; what comes back is another one."""

    def __init__(self, context: zmq.asyncio.Context, address: str, keys: CurveKeys) -> None:
        self.address = address
        self._socket = context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, _MAX_MESSAGE_BYTES)
        encrypt_client(self._socket, keys)
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._encode = Codec[FrontendMessage](FrontendMessage).encode
        self._decode = Codec[EngineMessage](EngineMessage).decode
        self._session = EngineSession(self._send, self._check_open)
        self._state = ReplicaState.STARTING
        self._listeners: list[Callable[[], None]] = []
        self._limits: EngineReady | None = None
        self._started: asyncio.Future[None] | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._loss: EngineLostError | None = None
        self._lost = asyncio.Event()
        self._draining = False

    @property
    def limits(self) -> EngineReady:
        if self._limits is None:
            raise RuntimeError("The host has not answered.")
        return self._limits

    @property
    def state(self) -> ReplicaState:
        return self._state

    def watch(self, listener: Callable[[], None]) -> None:
        self._listeners.append(listener)

    async def start(self) -> None:
        """Returns when the host has said what it can do.

        Raises:
            EngineDeadError: it does not answer.
            ConfigError: it does not speak with this router; says why.
        """
        self._started = asyncio.get_running_loop().create_future()
        self._socket.connect(self.address)
        self._tasks = [
            asyncio.create_task(self._receive()),
            asyncio.create_task(self._watch_connection()),
        ]
        try:
            async with asyncio.timeout(_HELLO_TIMEOUT_S):
                await self._send(Hello())
                await self._started
        except TimeoutError:
            raise EngineDeadError(f"The host at {self.address} does not answer.") from None

    async def wait_failed(self) -> EngineDeadError:
        await self._lost.wait()
        return EngineDeadError(str(self._loss))

    # ---- Endpoint

    def generate(self, request: GenerateRequest) -> AsyncIterator[TokenChunk]:
        return self._session.generate(request)

    def _check_open(self) -> None:
        if self._draining:
            raise OverloadedError("The server is shutting down.", retry_after_s=10)
        if self._loss is not None:
            raise self._loss

    async def abort(self, request_id: str) -> None:
        await self._session.abort(request_id)

    async def load(self) -> LoadReport:
        if self._loss is not None:
            raise self._loss
        return await self._session.load()

    def follow_cache(self, listener: CacheListener) -> Callable[[], None]:
        return self._session.follow_cache(listener)

    async def health(self) -> Health:
        if self._loss is not None:
            return Health(False, str(self._loss).removesuffix("."))
        try:
            async with asyncio.timeout(2.0):
                report = await self.load()
        except (TimeoutError, EngineLostError):
            return Health(False, f"the host at {self.address} does not answer")
        if not report.is_worker_ready:
            return Health(False, "the worker is restarting")
        return Health(True)

    async def drain(self, timeout_s: float) -> None:
        self._draining = True
        await self._session.finish(timeout_s)

    async def close(self) -> None:
        self.lose("was let go")
        await cancel_all(self._tasks)
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close()

    def lose(self, reason: str) -> None:
        """The host is gone: what was there goes on elsewhere. May be called twice."""
        if self._loss is not None:
            return
        self._loss = EngineLostError(f"The host at {self.address} {reason}.")
        self._lost.set()
        self._enter(ReplicaState.FAILED)
        self._session.fail(self._loss)
        if self._started is not None and not self._started.done():
            self._started.set_exception(EngineDeadError(str(self._loss)))

    # ---- messages

    async def _receive(self) -> None:
        while True:
            payload = await self._socket.recv()
            try:
                self._take(self._decode(payload))
            except msgspec.DecodeError as error:
                self.lose(f"sent what is not a message ({error})")

    def _take(self, message: EngineMessage) -> None:
        match message:
            case TokenChunks() | RequestRefused() | CacheNews():
                self._session.take(message)
            case LoadReport():
                self._enter(
                    ReplicaState.READY if message.is_worker_ready else ReplicaState.DEGRADED
                )
                self._session.take(message)
            case EngineReady():
                self._limits = message
                self._enter(ReplicaState.READY)
                self._session.begin()
                if self._started is not None and not self._started.done():
                    self._started.set_result(None)
            case EngineFailed():
                if self._started is not None and not self._started.done():
                    self._started.set_exception(ConfigError(message.error))

    async def _watch_connection(self) -> None:
        """The system notices at once when a process is gone; a cut line shows when it is silent for too long."""
        await recv_monitor_message(self._monitor)
        self.lose("hung up")

    def _enter(self, state: ReplicaState) -> None:
        if state is self._state or self._state is ReplicaState.FAILED:
            return
        self._state = state
        for listener in self._listeners:
            listener()

    async def _send(self, message: FrontendMessage) -> None:
        if self._loss is None:
            with contextlib.suppress(zmq.ZMQError):
                await self._socket.send(self._encode(message))
