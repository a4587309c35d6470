# SPDX-License-Identifier: Apache-2.0
"""An engine process, the `ReplicaTransport` of a replica: started, watched, and replaced when it dies or hangs.

Requests that were in an engine when it ended fail with EngineLostError; the `Dispatcher` holds their values.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import msgspec
import zmq

from pagoda.concurrency.async_utils import cancel_all
from pagoda.concurrency.watchdog import Watchdog
from pagoda.errors import ConfigError, EngineDeadError
from pagoda.faults.injector import Faults, instance
from pagoda.fleet import engine_restarts
from pagoda.fleet.answer_check import PeerError
from pagoda.fleet.endpoint import ReplicaState
from pagoda.fleet.engine_restarts import EngineRestarts
from pagoda.fleet.replica import PROBE, Replica
from pagoda.ipc.clock import LoopClock
from pagoda.ipc.codec import Codec
from pagoda.ipc.event_socket import EventSocket
from pagoda.ipc.lifeline import ChildProcess
from pagoda.ipc.numbered import Incoming, LostMessageError, Outgoing
from pagoda.ipc.rundir import ENGINE_SOCKET, RuntimeDirectory, socket_address
from pagoda.messages.adapters import Adapter, AdapterLoaded, LoadAdapter, UnloadAdapter
from pagoda.messages.engine_config import EngineConfig
from pagoda.messages.frontend import (
    EngineFailed,
    EngineMessage,
    EngineReady,
    FrontendMessage,
    Hello,
    LoadQuery,
    Shutdown,
    TokenChunks,
)
from pagoda.messages.tracing import StartTrace, StopTrace, TraceStopped
from pagoda.telemetry.tracer import Tracer

START_TIMEOUT_S = 60.0
"""Seconds of silence after which an engine that starts is replaced. An engine answers while its workers load."""
REMOTE_START_TIMEOUT_S = 300.0
"""The same of an engine whose workers are elsewhere, as on a Ray cluster, which takes its time to join."""
_LAST_WORDS_S = 0.05
"""Seconds without a message after which nothing more is expected from an engine that has ended."""
_STOP_S = 5.0
_TRACE_END_S = 15.0
"""Seconds that an engine may take to close its fragment. Its workers close theirs first: each waits up to 5 s for
a slow disk, and a step may be long."""

_log = logging.getLogger(__name__)


class EngineClient:
    """Starts one engine process and keeps it running until `close`.

    Must be used from one event loop, whose thread lives as long as the engine may.
    """

    def __init__(
        self,
        config: EngineConfig,
        tracer: Tracer | None = None,
        *,
        start_timeout_s: float | None = None,
    ) -> None:
        """`tracer` is that of this process. An engine is replaced when it is silent for `start_timeout_s` while it
        starts; None takes `START_TIMEOUT_S`, or `REMOTE_START_TIMEOUT_S`.

        Raises ConfigError if there is no place for the engine's sockets.
        """
        if start_timeout_s is None:
            is_near = config.executor in ("local", "sim")
            start_timeout_s = START_TIMEOUT_S if is_near else REMOTE_START_TIMEOUT_S
        self._config = config
        self._tracer = tracer or Tracer("frontend")
        self._num_traces = 0
        self._trace_end: asyncio.Future[list[str]] | None = None
        self._loads: dict[Adapter, asyncio.Future[None]] = {}
        """Adapters that the engine is to load, and has not."""
        self._directory = RuntimeDirectory()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._encode = Codec[FrontendMessage](FrontendMessage).encode
        self._decode = Codec[EngineMessage](EngineMessage).decode
        self._engine: _Engine | None = None
        self._num_engines = 0
        self._faults = Faults(config.faults)
        self._transmit = self._faults.messages("frontend.send", self._send_frames)
        self._receive = self._faults.messages("frontend.receive", self._take)
        self._supervisor: asyncio.Task[None] | None = None
        self._ready_at: float | None = None
        self._heard_at = 0.0
        """Time of the last message of the engine."""
        self._has_given_tokens = False
        """The engine that runs has computed part of an answer."""
        self.restarts = EngineRestarts(LoopClock())
        self.replica = replica = Replica(
            self,
            "the engine",
            self._tracer,
            hang_timeout_s=config.engine_timeout_s,
            on_hang=lambda: self._on_hang(config.engine_timeout_s),
            probes_idle=True,
        )
        self._start_watchdog = Watchdog(
            start_timeout_s,
            is_owed=lambda: self._engine is not None and not replica.is_open,
            probe=lambda: self.send(LoadQuery(PROBE)),
            on_silence=lambda: self._on_hang(start_timeout_s),
        )

    @property
    def _is_given_up(self) -> bool:
        return self.replica.state is ReplicaState.FAILED

    @property
    def engine_pid(self) -> int | None:
        return self._engine.child.pid if self._engine else None

    async def start(self) -> None:
        self._supervisor = asyncio.create_task(self._supervise())
        try:
            await self.replica.wait_open()
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """Ends the engine. When cancelled, kills the engine instead of waiting for it."""
        try:
            if self._supervisor is not None:
                await cancel_all([self._supervisor])
            if self._engine is not None:
                await self._engine.stop(self._encode(Shutdown()))
        finally:
            if self._engine is not None:
                self._engine.drop()
                self._engine = None
            self._start_watchdog.stop()
            self._fail(EngineDeadError("The engine was closed."))
            self._context.term()
            self._directory.close()

    # ---- Traced

    def start_trace(self, order: StartTrace) -> None:
        """This engine traces from now on, and so do those after it."""
        self._num_traces += 1
        session = self._tracer.session_for_children(order.session)
        order = msgspec.structs.replace(order, session=session, number=self._num_traces)
        self._config = msgspec.structs.replace(self._config, trace=order)
        self._trace_end = asyncio.get_running_loop().create_future()
        self.send(order)
        if self._is_given_up:
            self._end_trace([])

    async def stop_trace(self) -> list[str]:
        end = self._trace_end
        if end is None:
            return []
        self._config = msgspec.structs.replace(self._config, trace=None)
        if self._engine is None:
            self._end_trace([])
        elif not end.done():
            self.send(StopTrace())
        try:
            async with asyncio.timeout(_TRACE_END_S):
                return await asyncio.shield(end)
        except TimeoutError:
            return [f"{_name(self._config)} has not closed its fragment within {_TRACE_END_S:g} s."]

    async def trace_ended(self) -> None:
        if self._trace_end is not None:
            await asyncio.shield(self._trace_end)

    def _end_trace(self, problems: list[str]) -> None:
        self._config = msgspec.structs.replace(self._config, trace=None)
        if self._trace_end is not None and not self._trace_end.done():
            self._trace_end.set_result(problems)

    # ---- adapters

    async def load_adapter(self, adapter: Adapter) -> None:
        """This engine has the adapter when the call returns, and those after it from their start.
        Raises ConfigError: the adapter cannot be loaded; EngineDeadError: the engine was given up."""
        if self._is_given_up:
            raise EngineDeadError("The engine was given up.")
        if adapter not in self._loads:
            self._loads[adapter] = asyncio.get_running_loop().create_future()
            self.send(LoadAdapter(adapter))
        await asyncio.shield(self._loads[adapter])

    def unload_adapter(self, digest: str) -> None:
        self._set_adapters(a for a in self._config.worker.adapters if a.digest != digest)
        self.send(UnloadAdapter(digest))

    def _on_loaded(self, message: AdapterLoaded) -> None:
        for adapter in [adapter for adapter in self._loads if adapter.digest == message.digest]:
            loaded = self._loads.pop(adapter)
            if message.error:
                loaded.set_exception(ConfigError(message.error))
            else:
                self._set_adapters([*self._config.worker.adapters, adapter])
                loaded.set_result(None)

    def _set_adapters(self, adapters: Iterable[Adapter]) -> None:
        by_digest = {adapter.digest: adapter for adapter in adapters}
        worker = msgspec.structs.replace(self._config.worker, adapters=tuple(by_digest.values()))
        self._config = msgspec.structs.replace(self._config, worker=worker)

    # ---- supervision

    async def _supervise(self) -> None:
        """Runs one engine after another until one says that it cannot start, or too many die."""
        try:
            while True:
                self._ready_at, self._has_given_tokens = None, False
                reason = (await self._run_engine()).reason
                if self._is_given_up:
                    return
                # One that hung was no good since it was heard last.
                answered_s = 0.0 if self._ready_at is None else self._heard_at - self._ready_at
                was_good = self._has_given_tokens or answered_s >= engine_restarts.STABLE_S
                pause_s = self.restarts.on_loss(reason, was_good=was_good)
                _log.error("%s %s; starting it again", _name(self._config), reason)
                if pause_s:
                    await asyncio.sleep(pause_s)
        except EngineDeadError as error:
            self._fail(error)
        except Exception as error:
            _log.exception("the engine cannot be supervised any more")
            self._fail(EngineDeadError(f"The engine cannot be reached: {error}"))

    async def _run_engine(self) -> _EngineEnd:
        """Starts an engine, serves it until it ends, and returns how it ended. When cancelled, lets it run."""
        try:
            self._num_engines += 1
            faults = instance(self._config.faults, self._num_engines)
            config = msgspec.structs.replace(self._config, faults=faults)
            engine = self._engine = _Engine(config, self._directory, self._context, self._receive)
        except (OSError, zmq.ZMQError) as error:
            return _EngineEnd(f"could not be started ({error.strerror})")
        self.send(Hello())
        self._start_watchdog.expect()
        await asyncio.wait([engine.ended])
        engine.drop()
        self._engine = None
        self._start_watchdog.stop()
        self._tracer.instant("engine lost", {"engine": self._config.worker.place.dp})
        if self._config.trace is None:
            self._end_trace([])
        end = engine.ended.result()
        self.replica.lose("The engine ended.", blames_requests=end.blames_requests)
        return end

    def _on_hang(self, timeout_s: float) -> None:
        engine = self._engine
        if engine is not None:
            is_stopped = engine.child.is_stopped()
            because = " (it was stopped)" if is_stopped else ""
            engine.end(
                f"did not answer for {timeout_s:g} s{because}", blames_requests=not is_stopped
            )

    def send(self, message: FrontendMessage) -> None:
        if self._engine is not None:
            self._transmit(self._engine.outgoing.frames(self._encode(message)))

    def _send_frames(self, frames: list[bytes]) -> None:
        if self._engine is not None:
            self._engine.socket.send(*frames)

    def _take(self, engine: _Engine, frames: list[bytes]) -> None:
        if engine.ended.done():  # what comes behind a message that was no good may lack a piece
            return
        self._start_watchdog.heard()
        self._heard_at = asyncio.get_running_loop().time()
        try:
            message = self._decode(engine.incoming.payload(frames))
        except LostMessageError as error:
            engine.end(str(error), blames_requests=False)
            return
        except msgspec.DecodeError as error:
            engine.end(f"sent what is not a message ({error})", blames_requests=False)
            return
        try:
            self._apply(engine, message)
        except PeerError as error:
            engine.end(str(error))

    def _apply(self, engine: _Engine, message: EngineMessage) -> None:
        match message:
            case TokenChunks() if not self._has_given_tokens:
                self._has_given_tokens = any(chunk.token_ids for chunk in message.chunks)
                self.replica.receive(message)
            case TraceStopped():
                if message.number == self._num_traces:
                    self._end_trace(message.problems)
            case EngineFailed():
                self._on_failed(engine, message)
            case EngineReady():
                # The next engine gets as many KV blocks: running requests were checked against these limits.
                worker = msgspec.structs.replace(
                    self._config.worker, kept_blocks=message.num_blocks
                )
                self._config = msgspec.structs.replace(self._config, worker=worker)
                self._ready_at = self._heard_at
                self.replica.receive(message)
                for adapter in self._loads:  # what the engine before was told is lost with it
                    self.send(LoadAdapter(adapter))
            case AdapterLoaded():
                self._on_loaded(message)
            case _:
                self.replica.receive(message)

    def _on_failed(self, engine: _Engine, failure: EngineFailed) -> None:
        """The engine cannot start, or cannot keep its workers alive. Another one could not either, unless one
        was ready before and this one lost its first worker: that counts as a death."""
        has_started = self.replica.has_started
        if has_started and self._ready_at is None:
            engine.end(f"could not start ({failure.error.removesuffix('.')})")
            return
        error = ConfigError if failure.is_user_error and not has_started else EngineDeadError
        self._fail(error(failure.error))
        engine.end(failure.error)

    def _fail(self, error: ConfigError | EngineDeadError) -> None:
        self._end_trace([])
        for loaded in self._loads.values():
            loaded.set_exception(error)
        self._loads.clear()
        self.replica.fail(error)


def _name(config: EngineConfig) -> str:
    worker = config.worker
    if worker.parallel.data_parallel_size == 1:
        return "the engine"
    return f"the engine of replica {worker.place.dp}"


@dataclass(frozen=True, slots=True)
class _EngineEnd:
    reason: str
    """A clause: `was killed by SIGSEGV`."""
    blames_requests: bool = True
    """A request may have caused the end: neither was the engine killed or stopped from outside, nor did a message
    get lost."""


class _Engine:
    def __init__(
        self,
        config: EngineConfig,
        directory: RuntimeDirectory,
        context: zmq.Context[zmq.Socket[bytes]],
        on_message: Callable[[_Engine, list[bytes]], None],
    ) -> None:
        """Raises OSError or zmq.ZMQError if no process or socket can be made; nothing is left behind."""
        self._loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[_EngineEnd] = self._loop.create_future()
        self._num_messages = 0
        self.outgoing, self.incoming = Outgoing(), Incoming()
        self._on_message = on_message
        socket = context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.setsockopt(zmq.RCVHWM, 0)
        self.socket = EventSocket(socket, self._receive)
        try:
            self.socket.connect(socket_address(directory.path, ENGINE_SOCKET))
            self.child = ChildProcess(
                "pagoda.engine.main", [str(directory.path)], config=msgspec.msgpack.encode(config)
            )
        except BaseException:
            self.socket.close()
            raise
        self._loop.add_reader(self.child.fileno(), self._on_hangup)

    def end(self, reason: str, *, blames_requests: bool = True) -> None:
        """Counts the engine as ended; the first reason holds."""
        if not self.ended.done():
            self.ended.set_result(_EngineEnd(reason, blames_requests))

    async def stop(self, shutdown: bytes) -> None:
        """Asks the engine to end, and returns when it has, or after `_STOP_S`."""
        self.socket.send(*self.outgoing.frames(shutdown))
        await asyncio.wait([self.ended], timeout=_STOP_S)

    def drop(self) -> None:
        """Kills the engine if it still runs, and releases everything."""
        self._loop.remove_reader(self.child.fileno())
        self.socket.close()
        self.child.kill()

    def _receive(self, frames: list[bytes]) -> None:
        self._num_messages += 1
        self._on_message(self, frames)

    def _on_hangup(self) -> None:
        self._loop.remove_reader(self.child.fileno())
        self._await_last_words()

    def _await_last_words(self) -> None:
        """Messages of an engine that has ended may still be in the socket."""
        self._loop.call_later(_LAST_WORDS_S, self._check_last_words, self._num_messages)

    def _check_last_words(self, num_messages: int) -> None:
        if self._num_messages != num_messages:
            self._await_last_words()
        else:
            how = self.child.describe_end()
            self.end(how, blames_requests=not self.child.was_ended_from_outside())
