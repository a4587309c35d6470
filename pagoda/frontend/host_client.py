"""The router's end of the connection to one host, which the router sees as a `Replica`."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from functools import partial

import msgspec
import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from pagoda.errors import (
    ConfigError,
    EngineDeadError,
    EngineLostError,
    OverloadedError,
)
from pagoda.frontend.async_utils import cancel_all
from pagoda.frontend.endpoint import CacheListener, Health, ReplicaState, StepListener
from pagoda.frontend.engine_session import EngineSession
from pagoda.ipc.codec import Codec
from pagoda.ipc.curve import encrypt_client
from pagoda.ipc.heartbeat import notice_silence
from pagoda.messages.frontend import (
    EngineFailed,
    EngineReady,
    FrontendMessage,
    GenerateRequest,
    Hello,
    PrefixCacheUpdate,
    RequestRefused,
    TokenChunk,
    TokenChunks,
)
from pagoda.messages.hosts import HostLeave, HostMessage
from pagoda.messages.load import LoadReport
from pagoda.messages.tracing import ClockPing, ClockPong
from pagoda.messages.worker_config import CurveKeys
from pagoda.telemetry.tracer import Tracer

_HELLO_TIMEOUT_S = 10.0
MAX_MESSAGE_BYTES = 64 * 2**20

_AWAY = "it is not there, or has another --cluster-key-file, or a firewall is in between"

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Identity:
    """Who is at one end of a connection."""

    id: str
    """New at each start."""
    model: str
    model_digest: str
    is_router: bool


class HostClient:
    """The router's end: a host as a `Replica`. It is lost once and for good; what comes back is another one."""

    def __init__(
        self,
        context: zmq.asyncio.Context,
        address: str,
        keys: CurveKeys,
        router: Identity,
        tracer: Tracer | None = None,
    ) -> None:
        """`router` is whose end this is, and `tracer` that of this process."""
        self.address = address
        self._tracer = tracer or Tracer("router")
        self._pongs: set[asyncio.Task[None]] = set()
        self._router = router
        self._socket = context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        notice_silence(self._socket)
        encrypt_client(self._socket, keys)
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._encode = Codec[FrontendMessage](FrontendMessage).encode
        self._decode = Codec[HostMessage](HostMessage).decode
        self._session = EngineSession(self._send, self._check_open, self._tracer.clock_ns)
        self._state = ReplicaState.STARTING
        self._listeners: list[Callable[[], None]] = []
        self._limits: EngineReady | None = None
        self._started: asyncio.Future[None] | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._loss: EngineLostError | None = None
        self._lost = asyncio.Event()
        self._draining = False
        self.is_leaving = False
        """The host has said that it takes no new requests."""

    @property
    def name(self) -> str:
        return self.address.removeprefix("tcp://")

    @property
    def limits(self) -> EngineReady:
        if self._limits is None:
            raise RuntimeError("The host has not answered.")
        return self._limits

    @property
    def state(self) -> ReplicaState:
        return self._state

    def watch(self, listener: Callable[[], None]) -> Callable[[], None]:
        self._listeners.append(listener)
        return partial(self._listeners.remove, listener)

    async def start(self) -> None:
        """Returns when the host has said what it can do.

        Raises:
            EngineDeadError: it does not answer.
            ConfigError: it does not speak with this router; says why.
        """
        self._started = asyncio.get_running_loop().create_future()
        try:
            self._socket.connect(self.address)
        except zmq.ZMQError:
            raise ConfigError(f"{self.address!r} is not an address like tcp://HOST:PORT.") from None
        self._tasks = [
            asyncio.create_task(self._receive()),
            asyncio.create_task(self._watch_connection()),
        ]
        try:
            async with asyncio.timeout(_HELLO_TIMEOUT_S):
                router = self._router
                await self._send(Hello(model=router.model, model_digest=router.model_digest))
                await self._started
        except TimeoutError:
            raise EngineDeadError(f"The host at {self.address} does not answer; {_AWAY}.") from None

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

    def subscribe_cache(self, listener: CacheListener) -> Callable[[], None]:
        return self._session.subscribe_cache(listener)

    def subscribe_steps(self, listener: StepListener) -> Callable[[], None]:
        """They are the host's own to tell: there may be thousands of hosts."""
        del listener
        return lambda: None

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
        try:
            await cancel_all(self._tasks)
        finally:
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
            self._started.set_exception(
                EngineDeadError(
                    f"The host at {self.address} {reason} before it said anything; it has another "
                    "--cluster-key-file, or is no host."
                )
            )

    # ---- messages

    async def _receive(self) -> None:
        try:
            while True:
                payload = await self._socket.recv()
                began = self._tracer.e2e()
                message = self._decode(payload)
                self._take(message)
                if began and isinstance(message, TokenChunks):
                    self._tracer.span("chunks", began, {"chunks": len(message.chunks)})
        except msgspec.DecodeError as error:
            self.lose(f"sent what is not a message ({error})")
        except Exception:
            _log.exception("the host at %s cannot be listened to any more", self.address)
            self.lose("cannot be listened to any more")

    def _take(self, message: HostMessage) -> None:
        match message:
            case TokenChunks() | RequestRefused() | PrefixCacheUpdate():
                self._session.take(message)
            case LoadReport():
                self._enter(
                    ReplicaState.READY if message.is_worker_ready else ReplicaState.DEGRADED
                )
                self._session.take(message)
            case EngineReady():
                self._take_limits(message)
            case HostLeave():
                self.is_leaving = True
                self._notify()
            case ClockPing(number):
                self._tell_time(number)
            case EngineFailed():
                if self._started is not None and not self._started.done():
                    self._started.set_exception(ConfigError(message.error))

    def _tell_time(self, number: int) -> None:
        tracer = self._tracer
        pong = ClockPong(number, tracer.process.uid, tracer.clock_ns())
        task = asyncio.create_task(self._send(pong))
        self._pongs.add(task)
        task.add_done_callback(self._pongs.discard)

    def _take_limits(self, limits: EngineReady) -> None:
        self._limits = limits
        if self._started is not None and not self._started.done():
            self._enter(ReplicaState.READY)
            self._session.begin()
            self._started.set_result(None)
        else:
            self._notify()

    async def _watch_connection(self) -> None:
        """The system notices at once when a process is gone; a cut line shows when it is silent for too long."""
        await recv_monitor_message(self._monitor)
        self.lose("hung up")

    def _enter(self, state: ReplicaState) -> None:
        if state is self._state or self._state is ReplicaState.FAILED:
            return
        self._state = state
        self._notify()

    def _notify(self) -> None:
        for listener in list(self._listeners):
            listener()

    async def _send(self, message: FrontendMessage) -> None:
        if self._loss is None:
            with contextlib.suppress(zmq.ZMQError):
                await self._socket.send(self._encode(message))
