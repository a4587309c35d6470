"""An engine process as a `Replica`: started, watched, and started again when it dies.

Requests that were in an engine when it died fail with EngineLostError; the `Dispatcher` holds their values.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from pagoda.engine.config import EngineConfig
from pagoda.errors import ConfigError, EngineDeadError, EngineLostError, OverloadedError
from pagoda.frontend.endpoint import CacheListener, Health, ReplicaState, StepListener
from pagoda.frontend.engine_session import EngineSession
from pagoda.ipc.codec import Codec
from pagoda.ipc.lifeline import ChildProcess
from pagoda.ipc.rundir import ENGINE_SOCKET, RuntimeDirectory, socket_address
from pagoda.messages.frontend import (
    EngineFailed,
    EngineMessage,
    EngineReady,
    FrontendMessage,
    GenerateRequest,
    Hello,
    PrefixCacheUpdate,
    RequestRefused,
    Shutdown,
    StepStatistics,
    TokenChunk,
    TokenChunks,
)
from pagoda.messages.load import LoadReport
from pagoda.messages.tracing import ClockPing, ClockPong, StartTrace, StopTrace, TraceStopped
from pagoda.telemetry.tracer import Tracer

STABLE_S = 30.0
"""An engine that lived this long starts a new count of deaths."""
MAX_DEATHS_IN_ROW = 5
"""Short-lived engines in a row after which the frontend gives up."""
_LAST_WORDS_MS = 50
"""How long the last messages of an engine that has ended may still be on their way through the socket."""
STALL_LIMIT_S = 60.0
"""An engine with work that finishes no step for this long is not ready."""
_LEASES_POLL_S = 0.1
_TRACE_END_S = 15.0
"""How long an engine may take to close its fragment, after its workers theirs: they wait for a slow disk for 5 s
each, and a step may be long."""

_log = logging.getLogger(__name__)


class EngineClient:
    """Starts one engine process and keeps it running until `close`.

    Must be used from one event loop, whose thread lives as long as the engine may.
    """

    def __init__(self, config: EngineConfig, tracer: Tracer | None = None) -> None:
        """`tracer` is that of this process, and has the clock that engines compare theirs with."""
        self._config = config
        self._tracer = tracer or Tracer("frontend")
        self._num_traces = 0
        self._trace_end: asyncio.Future[list[str]] | None = None
        """Of the last trace: why the engine's fragments lack something."""
        self._messages: set[asyncio.Future[Any]] = set()
        """On their way to an engine."""
        self._directory = RuntimeDirectory()
        self._context = zmq.asyncio.Context()
        self._encode = Codec[FrontendMessage](FrontendMessage).encode
        self._decode = Codec[EngineMessage](EngineMessage).decode
        self._state = ReplicaState.STARTING
        self._listeners: list[Callable[[], None]] = []
        self._session = EngineSession(self._send, self._check_open, self._tracer.clock_ns)
        self._limits: EngineReady | None = None
        self._engine: _Engine | None = None
        self._supervisor: asyncio.Task[None] | None = None
        self._started: asyncio.Future[None] | None = None
        self._failure: EngineDeadError | None = None
        self._failed = asyncio.Event()
        self._draining = False
        self._deaths_in_row = 0
        self._ready_at: float | None = None
        self._name = _name(config)

    @property
    def name(self) -> str:
        return ""

    @property
    def limits(self) -> EngineReady:
        if self._limits is None:
            raise RuntimeError("The engine has not started.")
        return self._limits

    @property
    def state(self) -> ReplicaState:
        return self._state

    def watch(self, listener: Callable[[], None]) -> Callable[[], None]:
        self._listeners.append(listener)
        return partial(self._listeners.remove, listener)

    @property
    def engine_pid(self) -> int | None:
        return self._engine.child.pid if self._engine else None

    async def start(self) -> None:
        self._started = asyncio.get_running_loop().create_future()
        self._supervisor = asyncio.create_task(self._supervise())
        try:
            await self._started
        except BaseException:
            await self.close()
            raise

    async def wait_failed(self) -> EngineDeadError:
        await self._failed.wait()
        return self._failure or EngineDeadError("The engine was closed.")

    # ---- Endpoint

    def generate(self, request: GenerateRequest) -> AsyncIterator[TokenChunk]:
        return self._session.generate(request)

    def _check_open(self) -> None:
        if self._failure is not None:
            raise self._failure
        if self._draining:
            raise OverloadedError("The server is shutting down.", retry_after_s=10)
        if not self._takes_requests:
            raise EngineLostError("The engine is not running.")

    async def abort(self, request_id: str) -> None:
        await self._session.abort(request_id)

    async def load(self) -> LoadReport:
        if self._failure is not None:
            raise self._failure
        if not self._takes_requests:
            raise EngineLostError("The engine is not running.")
        return await self._session.load()

    def subscribe_cache(self, listener: CacheListener) -> Callable[[], None]:
        return self._session.subscribe_cache(listener)

    def subscribe_steps(self, listener: StepListener) -> Callable[[], None]:
        return self._session.subscribe_steps(listener)

    async def health(self) -> Health:
        if self._failure is not None:
            return Health(False, str(self._failure))
        if self._draining:
            return Health(False, "the server is shutting down")
        if self._limits is None:
            return Health(False, "the model is loading")
        if not self._takes_requests:
            return Health(False, "the engine is restarting")
        try:
            async with asyncio.timeout(2.0):
                report = await self.load()
        except (TimeoutError, EngineDeadError, EngineLostError):
            return Health(False, "the engine does not answer")
        if not report.is_worker_ready:
            return Health(False, "the worker is restarting")
        if report.stalled_for_s > STALL_LIMIT_S:
            return Health(False, f"no step has finished for {report.stalled_for_s:.0f} s")
        return Health(True)

    async def drain(self, timeout_s: float) -> None:
        self._draining = True
        end = asyncio.get_running_loop().time() + timeout_s
        await self._session.finish(timeout_s)
        with contextlib.suppress(TimeoutError, EngineDeadError, EngineLostError):
            async with asyncio.timeout_at(end):
                while (await self.load()).num_wanted_leases:  # another host is reading KV of these
                    await asyncio.sleep(_LEASES_POLL_S)

    # ---- Traced

    def start_trace(self, order: StartTrace) -> None:
        """This engine traces from now on, and so do those after it."""
        self._num_traces += 1
        order = msgspec.structs.replace(order, number=self._num_traces)
        self._config = msgspec.structs.replace(self._config, trace=order)
        self._trace_end = asyncio.get_running_loop().create_future()
        if self._engine is not None:
            self._tell(self._engine, order)

    async def stop_trace(self) -> list[str]:
        end = self._trace_end
        if end is None:
            return []
        self._config = msgspec.structs.replace(self._config, trace=None)
        if self._engine is None:
            self._end_trace([])
        elif not end.done():
            self._tell(self._engine, StopTrace())
        try:
            async with asyncio.timeout(_TRACE_END_S):
                return await asyncio.shield(end)
        except TimeoutError:
            return [f"{self._name} has not closed its fragment within {_TRACE_END_S:g} s."]

    async def trace_ended(self) -> None:
        if self._trace_end is not None:
            await asyncio.shield(self._trace_end)

    def _end_trace(self, problems: list[str]) -> None:
        self._config = msgspec.structs.replace(self._config, trace=None)
        if self._trace_end is not None and not self._trace_end.done():
            self._trace_end.set_result(problems)

    def _tell(self, engine: _Engine, message: FrontendMessage) -> None:
        """Also an engine that is not ready yet; one that is gone need not know. Sends at once."""
        with contextlib.suppress(zmq.ZMQError):
            sending = asyncio.ensure_future(engine.socket.send(self._encode(message)))
            self._messages.add(sending)
            sending.add_done_callback(self._told)

    def _told(self, sending: asyncio.Future[Any]) -> None:
        self._messages.discard(sending)
        if not sending.cancelled():
            sending.exception()

    async def close(self) -> None:
        if self._supervisor is not None:
            self._supervisor.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._supervisor
            self._supervisor = None
        if self._engine is not None:
            await self._engine.stop(self._encode(Shutdown()))
            self._engine = None
        self._fail(EngineDeadError("The engine was closed."))
        self._context.term()
        self._directory.close()

    # ---- supervision

    async def _supervise(self) -> None:
        """Runs one engine after another until one says that it cannot start, or too many die."""
        try:
            loop = asyncio.get_running_loop()
            while True:
                self._ready_at = None
                reason = await self._run_engine()
                if self._ready_at is not None and loop.time() - self._ready_at >= STABLE_S:
                    self._deaths_in_row = 0
                self._deaths_in_row += 1
                if self._deaths_in_row > MAX_DEATHS_IN_ROW:
                    raise EngineDeadError(
                        f"The engine {reason}, {self._deaths_in_row} times in a row."
                    )
                _log.error("%s %s; starting it again", self._name, reason)
                await asyncio.sleep(
                    0.25 * 2 ** (self._deaths_in_row - 1) if self._deaths_in_row > 1 else 0
                )
        except EngineDeadError as error:
            self._fail(error)
        except Exception as error:
            _log.exception("the engine's messages cannot be served any more")
            self._fail(EngineDeadError(f"The engine cannot be reached: {error}"))

    async def _run_engine(self) -> str:
        """Starts an engine and serves it until it ends; returns how it ended."""
        try:
            engine = self._engine = _Engine(self._config, self._directory, self._context)
        except OSError as error:
            return f"could not be started ({error.strerror})"
        try:
            await engine.send(self._encode(Hello()))
            await self._receive_until_death(engine)
            end = engine.child.describe_end()
        except asyncio.CancelledError:
            raise  # by `close`, which asks the engine to end
        except msgspec.DecodeError as error:
            end = f"sent what is not a message ({error})"
        except _EngineGaveUpError as error:
            end = f"gave up ({str(error).removesuffix('.')})"
        except BaseException:
            self._drop(engine)
            raise
        self._drop(engine)
        return end

    def _drop(self, engine: _Engine) -> None:
        engine.drop()
        self._engine = None
        self._tracer.instant("engine lost", {"engine": self._config.worker.place.dp})
        if self._config.trace is None:
            self._end_trace([])
        self._enter(ReplicaState.STARTING)
        self._lose_requests()

    async def _receive_until_death(self, engine: _Engine) -> None:
        died = asyncio.ensure_future(engine.died.wait())
        try:
            while True:
                received = asyncio.ensure_future(engine.socket.recv())
                await asyncio.wait((received, died), return_when=asyncio.FIRST_COMPLETED)
                if not received.done():
                    received.cancel()
                    break
                self._take(engine, received.result())
            while await engine.socket.poll(_LAST_WORDS_MS):
                self._take(engine, await engine.socket.recv())
        finally:
            died.cancel()

    def _take(self, engine: _Engine, payload: bytes) -> None:
        began = self._tracer.e2e()
        message = self._decode(payload)
        match message:
            case TokenChunks():
                self._session.take(message)
                if began:
                    self._tracer.span("chunks", began, {"chunks": len(message.chunks)})
            case EngineReady():
                self._be_ready(engine, message)
            case LoadReport(query_id=None):
                ready = message.is_worker_ready
                self._enter(ReplicaState.READY if ready else ReplicaState.DEGRADED)
                self._session.take(message)
            case LoadReport() | RequestRefused() | PrefixCacheUpdate() | StepStatistics():
                self._session.take(message)
            case ClockPing(number):
                tracer = self._tracer
                self._tell(engine, ClockPong(number, tracer.process.uid, tracer.clock_ns()))
            case TraceStopped():
                if message.number == self._num_traces:
                    self._end_trace(message.problems)
            case EngineFailed():
                self._refuse_start(message)

    def _be_ready(self, engine: _Engine, ready: EngineReady) -> None:
        self._limits = ready
        self._config = _with_num_blocks(self._config, ready.num_blocks)
        engine.ready = True
        self._ready_at = asyncio.get_running_loop().time()
        self._enter(ReplicaState.READY)
        self._session.begin()
        if self._started is not None and not self._started.done():
            self._started.set_result(None)

    @property
    def _takes_requests(self) -> bool:
        return self._state in (ReplicaState.READY, ReplicaState.DEGRADED)

    def _enter(self, state: ReplicaState) -> None:
        if state is not self._state:
            self._state = state
            for listener in list(self._listeners):
                listener()

    def _lose_requests(self) -> None:
        """The engine has ended: what was in it may go on elsewhere."""
        self._session.fail(EngineLostError("The engine ended."))

    def _refuse_start(self, failure: EngineFailed) -> None:
        """At the first start the reason is the user's to know; later, an engine that gave up is one more death."""
        if self._started is None or self._started.done():
            raise _EngineGaveUpError(failure.error)
        if failure.is_user_error:
            self._started.set_exception(ConfigError(failure.error))
        raise EngineDeadError(failure.error)

    def _fail(self, error: EngineDeadError) -> None:
        if self._failure is not None:
            return
        self._failure = error
        self._failed.set()
        self._end_trace([])
        self._enter(ReplicaState.FAILED)
        self._lose_requests()
        if self._started is not None and not self._started.done():
            self._started.set_exception(error)

    async def _send(self, message: FrontendMessage) -> None:
        """Sends to a ready engine; one that is not has nothing to be told."""
        if self._engine is not None and self._engine.ready:
            await self._engine.send(self._encode(message))


class _EngineGaveUpError(Exception):
    """An engine ended after saying why."""


def _name(config: EngineConfig) -> str:
    """For the log."""
    worker = config.worker
    if worker.parallel.data_parallel_size == 1:
        return "the engine"
    return f"the engine of replica {worker.place.dp}"


def _with_num_blocks(config: EngineConfig, num_blocks: int) -> EngineConfig:
    """For the next engine: its limits must be those that running requests were checked against."""
    worker = msgspec.structs.replace(config.worker, num_blocks=num_blocks)
    return msgspec.structs.replace(config, worker=worker)


class _Engine:
    """One incarnation of the engine process."""

    def __init__(
        self, config: EngineConfig, directory: RuntimeDirectory, context: zmq.asyncio.Context
    ) -> None:
        self.ready = False
        self.died = asyncio.Event()
        self.child = ChildProcess(
            "pagoda.engine.main", [str(directory.path)], config=msgspec.msgpack.encode(config)
        )
        self._loop = asyncio.get_running_loop()
        self._watched = True
        self._loop.add_reader(self.child.fileno(), self._on_hangup)
        self.socket = context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.SNDHWM, 0)
        self.socket.setsockopt(zmq.RCVHWM, 0)
        self.socket.connect(socket_address(directory.path, ENGINE_SOCKET))

    def _on_hangup(self) -> None:
        self._stop_watching()
        self.died.set()

    def _stop_watching(self) -> None:
        if self._watched:
            self._loop.remove_reader(self.child.fileno())
            self._watched = False

    async def send(self, payload: bytes) -> None:
        await self.socket.send(payload)

    async def stop(self, shutdown: bytes) -> None:
        """Asks the engine to end, and ends it if it does not."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(5.0):
                await self.send(shutdown)
                await self.died.wait()
        self.drop()

    def drop(self) -> None:
        """Ends the engine and lets go of everything. May be called twice."""
        self._stop_watching()
        self.socket.close()
        self.child.kill()
