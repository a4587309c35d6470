# SPDX-License-Identifier: Apache-2.0
"""The engine process: `python -m pagoda.engine.main DIRECTORY`, with an `EngineConfig` on standard input.

One synchronous loop, which sleeps in one poll over all its sockets, its workers and the next deadline.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import sys
from collections import defaultdict
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import msgspec
import zmq

from pagoda.engine.assembly import open_grammars
from pagoda.engine.core import EngineCore
from pagoda.engine.peer_hooks import OpenLinks
from pagoda.errors import ConfigError, PagodaError
from pagoda.executor.base import Executor
from pagoda.executor.group import GroupExecutor
from pagoda.executor.launcher import Launcher, LocalLauncher
from pagoda.executor.plugin import ExecutorPlugin
from pagoda.faults.injector import Faults
from pagoda.ipc.clock import Clock, MonotonicClock
from pagoda.ipc.codec import Codec
from pagoda.ipc.heap import settle_heap
from pagoda.ipc.lifeline import hold_lifeline
from pagoda.ipc.machine import memory_of
from pagoda.ipc.numbered import Incoming, LostMessageError, Outgoing
from pagoda.ipc.rundir import ENGINE_SOCKET, WORKER_SOCKET, socket_address
from pagoda.kv.connector_plugin import find_connector
from pagoda.kv.publishing import find_publisher
from pagoda.messages.adapters import LoadAdapter, UnloadAdapter
from pagoda.messages.engine_config import EngineConfig
from pagoda.messages.frontend import (
    PROTOCOL_VERSION,
    AbortRequests,
    EngineFailed,
    EngineMessage,
    FrontendMessage,
    GenerateRequest,
    Hello,
    LoadQuery,
    PrefixCacheUpdate,
    RequestRefused,
    Shutdown,
    StepStatistics,
    SubscribeCache,
    SubscribeSteps,
    TokenChunk,
    TokenChunks,
    UnsubscribeCache,
    UnsubscribeSteps,
)
from pagoda.messages.tracing import StartTrace, StopTrace
from pagoda.registry import EXECUTORS, load
from pagoda.telemetry.logging import configure_logging
from pagoda.telemetry.tracer import Tracer

_log = logging.getLogger(__name__)

MAX_TURN_BYTES = 32 << 10
"""Bytes of messages that are taken in one turn: keys of the blocks of many long prompts at once would keep answers
under way waiting."""


class RequestRoutes:
    """Maps wire ids of frontends to the engine's own: `GenerateRequest.request_id`, changed where it is taken."""

    def __init__(self) -> None:
        self._origins: dict[str, tuple[bytes, str]] = {}
        """Frontend and wire id, by the engine's id."""
        self._engine_ids: dict[tuple[bytes, str], str] = {}
        self._num_renamed = 0

    def add(self, frontend: bytes, request: GenerateRequest) -> GenerateRequest | None:
        """The request under the engine's id; None if the frontend has a running request with this wire id."""
        origin = frontend, request.wire_id or request.request_id
        if origin in self._engine_ids:
            return None
        engine_id = request.request_id
        while engine_id in self._origins:
            self._num_renamed += 1
            engine_id = f"{request.request_id}#{self._num_renamed}"
        self._origins[engine_id], self._engine_ids[origin] = origin, engine_id
        if engine_id == request.request_id:
            return request
        return msgspec.structs.replace(request, request_id=engine_id)

    def remove(self, frontend: bytes, wire_id: str) -> str | None:
        """Forgets a request; returns the engine's id of it, or None if the frontend has no such request."""
        engine_id = self._engine_ids.pop((frontend, wire_id), None)
        if engine_id is not None:
            del self._origins[engine_id]
        return engine_id

    def forget(self, engine_id: str) -> tuple[bytes, str]:
        """Forgets a request by the engine's id; returns its frontend and wire id."""
        origin = self._origins.pop(engine_id)
        del self._engine_ids[origin]
        return origin

    def sort(self, chunks: Iterable[TokenChunk]) -> dict[bytes, list[TokenChunk]]:
        """The chunks by frontend, under wire ids. Forgets requests that have ended."""
        by_frontend: dict[bytes, list[TokenChunk]] = {}
        for chunk in chunks:
            frontend, wire_id = self._origins[chunk.request_id]
            if chunk.finish_reason is not None:
                self.remove(frontend, wire_id)
            msgspec.structs.force_setattr(chunk, "request_id", wire_id)
            by_frontend.setdefault(frontend, []).append(chunk)
        return by_frontend


class EngineProcess:
    """Joins an `EngineCore` to the frontends that talk to it."""

    def __init__(
        self, config: EngineConfig, directory: Path, context: zmq.Context[zmq.Socket[bytes]]
    ) -> None:
        self._config = config
        self._directory = directory
        self._faults = Faults(config.faults)
        self._clock = self._faults.clock("engine.clock", MonotonicClock())
        self._socket = context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.LINGER, 2000)
        self._context = context
        self._socket.bind(socket_address(directory, ENGINE_SOCKET))
        self._codec_in = Codec[FrontendMessage](FrontendMessage)
        self._codec_out = Codec[EngineMessage](EngineMessage)
        self._frontends: list[bytes] = []
        self._incoming: defaultdict[bytes, Incoming] = defaultdict(Incoming)
        self._outgoing: defaultdict[bytes, Outgoing] = defaultdict(Outgoing)
        self._newcomers: list[bytes] = []
        """Frontends that have not been told yet that the engine is ready."""
        self._routes = RequestRoutes()
        self._followers: defaultdict[type, set[bytes]] = defaultdict(set)
        """Frontends that subscribed to a kind of updates."""
        self._tracer = Tracer(f"engine dp{config.worker.place.dp}")
        self._stopping = False

    def run(self) -> None:
        """Serves until a frontend says `Shutdown` or the workers cannot be kept alive."""
        try:
            self._serve()
        except PagodaError as error:
            self._wait_for_a_frontend()
            self._send_all(EngineFailed(str(error), isinstance(error, ConfigError)))
        except LostMessageError as error:
            _log.error(
                "the frontend %s; this engine ends, and its requests go on in another", error
            )
            sys.exit(1)
        finally:
            self._socket.close()

    def _serve(self) -> None:
        config, replica = self._config, self._config.worker.place.dp
        with contextlib.ExitStack() as stack:
            self._publisher, links = None, None
            if config.kv_events is not None:
                num_replicas = config.worker.parallel.data_parallel_size
                self._publisher = find_publisher().open(
                    config.kv_events, replica, num_replicas, self._context
                )
                stack.callback(self._publisher.close)
            if config.handoff is not None:
                open_links: OpenLinks = resolve_name(find_connector().engine)
                links = open_links(config, self._faults)
                stack.callback(links.close)
            self._executor = _make_executor(
                config, self._directory, self._clock, self._tracer, self._faults
            )
            self._core = EngineCore(
                config,
                self._executor,
                self._clock,
                handoff=links,
                tracer=self._tracer,
                open_grammars=partial(open_grammars, faults=self._faults),
            )
            step = self._faults.before("engine.turn", self._core.step)
            stack.callback(self._core.close)
            while not self._stopping:
                self._sleep()
                self._receive()
                self._send_chunks(step())
                for refusal in self._core.drain_refusals():
                    self._refuse(refusal)
                self._greet()
                # Frontends avoid an engine whose worker is being replaced, and keep the counters of a killed one.
                self._send_all(self._core.drain_load_report())
                for update in self._core.drain_updates():
                    for frontend in self._followers[type(update)]:
                        self._send(frontend, update)
                self._send_all(self._core.drain_trace_end())
                for loaded in self._core.adapters.drain_news():
                    self._send_all(loaded)
                if self._publisher is not None:
                    self._publisher.publish(self._core.drain_kv_events())
                    self._publisher.replay()

    def _sleep(self) -> None:
        wakeup = self._core.next_wakeup()
        timeout_ms = -1
        if wakeup is not None:
            timeout_ms = max(0, math.ceil((wakeup - self._clock.now()) * 1000))
        sources: list[Any] = [self._socket, *self._core.pollables()]
        if self._publisher is not None:
            sources.append(self._publisher.replay_socket)
            if self._publisher.is_replaying:
                timeout_ms = 0
        zmq.zmq_poll([(source, zmq.POLLIN) for source in sources], timeout_ms)

    def _receive(self) -> None:
        """Takes messages that have come; what is left after `MAX_TURN_BYTES` wakes the loop for its next turn."""
        num_bytes = 0
        with contextlib.suppress(zmq.Again):
            while num_bytes < MAX_TURN_BYTES:
                frontend, *frames = self._socket.recv_multipart(zmq.NOBLOCK)
                num_bytes += sum(map(len, frames))
                payload = self._incoming[frontend].payload(frames)
                try:
                    message = self._codec_in.decode(payload)
                except msgspec.DecodeError as error:
                    if self._incoming[frontend].are_numbered:
                        raise LostMessageError("sent what is no message") from error
                    _log.warning("a frontend sent what is not a message: %s", error)
                    continue
                self._handle(frontend, message)

    def _handle(self, frontend: bytes, message: FrontendMessage) -> None:
        match message:
            case GenerateRequest():
                self._admit(frontend, message)
            case AbortRequests():
                for wire_id in message.request_ids:
                    engine_id = self._routes.remove(frontend, wire_id)
                    if engine_id is not None:
                        self._core.abort(engine_id)
            case LoadQuery():
                report = msgspec.structs.replace(
                    self._core.load(),
                    query_id=message.query_id,
                    processes=memory_of({self._tracer.role: os.getpid(), **self._executor.pids()}),
                )
                self._send(frontend, report)
            case SubscribeCache():
                self._followers[PrefixCacheUpdate].add(frontend)
                self._core.follow_cache()
            case UnsubscribeCache():
                self._followers[PrefixCacheUpdate].discard(frontend)
                if not self._followers[PrefixCacheUpdate]:
                    self._core.unfollow_cache()
            case SubscribeSteps():
                self._followers[StepStatistics].add(frontend)
                self._core.steps.follow()
            case UnsubscribeSteps():
                self._followers[StepStatistics].discard(frontend)
                if not self._followers[StepStatistics]:
                    self._core.steps.unfollow()
            case Hello():
                self._welcome(frontend, message)
            case StartTrace():
                self._core.start_trace(message)
            case StopTrace():
                self._core.stop_trace()
            case LoadAdapter(adapter):
                self._core.adapters.load(adapter)
            case UnloadAdapter(digest):
                self._core.unload_adapter(digest)
            case Shutdown():
                self._stopping = True

    def _welcome(self, frontend: bytes, hello: Hello) -> None:
        if hello.protocol_version != PROTOCOL_VERSION:
            problem = f"The frontend speaks protocol {hello.protocol_version}, this engine {PROTOCOL_VERSION}."
            self._send(frontend, EngineFailed(problem, is_user_error=True))
            return
        self._frontends.append(frontend)
        self._newcomers.append(frontend)

    def _greet(self) -> None:
        ready = self._core.ready
        if ready is None or not self._newcomers:
            return
        for frontend in self._newcomers:
            self._send(frontend, ready)
        self._newcomers.clear()
        settle_heap()

    def _admit(self, frontend: bytes, request: GenerateRequest) -> None:
        routed = self._routes.add(frontend, request)
        if routed is None:
            # Any answer would reach the stream of the first request, which goes on untouched.
            error = "a frontend sent a second request with this wire id, which is ignored"
            _log.error(error, extra={"request_id": request.request_id})
            return
        answer = self._core.add(routed)
        if isinstance(answer, RequestRefused):
            self._refuse(answer)
            return
        self._send_chunks(answer)

    def _refuse(self, refusal: RequestRefused) -> None:
        """Sends a refusal to the frontend of its request, which is named by the engine's id."""
        frontend, wire_id = self._routes.forget(refusal.request_id)
        self._send(frontend, msgspec.structs.replace(refusal, request_id=wire_id))

    def _send_chunks(self, chunks: list[TokenChunk]) -> None:
        by_frontend = self._routes.sort(chunks)
        began = self._tracer.e2e()
        for frontend, batch in by_frontend.items():
            self._send(frontend, TokenChunks(batch))
        if began and by_frontend:
            self._tracer.span("send", began)

    def _send_all(self, message: EngineMessage | None) -> None:
        if message is not None:
            for frontend in self._frontends:
                self._send(frontend, message)

    def _send(self, frontend: bytes, message: EngineMessage) -> None:
        payload = self._codec_out.encode(message)
        are_numbered = self._incoming[frontend].are_numbered
        frames = self._outgoing[frontend].frames(payload) if are_numbered else [payload]
        self._socket.send_multipart([frontend, *frames])

    def _wait_for_a_frontend(self) -> None:
        """A start that fails at once must still be told to the frontend that is just connecting."""
        if not self._frontends and self._socket.poll(5000):
            self._receive()


def _make_executor(
    config: EngineConfig, directory: Path, clock: Clock, tracer: Tracer, faults: Faults
) -> Executor:
    def open_group(launcher: Launcher, address: str) -> Executor:
        return GroupExecutor(
            config.worker,
            launcher,
            address=address,
            step_timeout_s=config.step_timeout_s,
            start_timeout_s=config.worker_start_timeout_s,
            worker_timeout_s=config.worker_timeout_s,
            clock=clock,
            tracer=tracer,
            faults=faults,
        )

    if config.executor == "local":
        return open_group(LocalLauncher(), socket_address(directory, WORKER_SOCKET))
    return load(EXECUTORS, config.executor, ExecutorPlugin).open(config, clock, open_group)


def main() -> None:
    hold_lifeline()
    directory = Path(sys.argv[1])
    config = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=EngineConfig)
    worker = config.worker
    is_one_of_several = worker.parallel.data_parallel_size > 1
    configure_logging(place=f"dp{worker.place.dp}" if is_one_of_several else None)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    process = EngineProcess(config, directory, context)
    process.run()
    context.term()


if __name__ == "__main__":
    main()
