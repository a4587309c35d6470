# SPDX-License-Identifier: Apache-2.0
"""Readers of sockets: HTTP, an engine's frames, and what engines that fetch KV ask for."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import zmq
from aiohttp import web

from benchmarks.chaos.fuzz.forms import JSON, MSGPACK
from benchmarks.chaos.fuzz.target import Feed, Target
from pagoda.api.http.app import ApiServer
from pagoda.api.service import ApiConfig, Service
from pagoda.engine.main import EngineProcess
from pagoda.engine.structured_output.grammar_threads import MAX_HUNG_THREADS, STACK_BYTES
from pagoda.fleet.dispatcher import Dispatcher
from pagoda.fleet.policies import POLICIES
from pagoda.ipc.clock import VirtualClock
from pagoda.ipc.codec import Codec
from pagoda.ipc.rundir import ENGINE_SOCKET, socket_address
from pagoda.kv.block_pool import BlockPool
from pagoda.kv.layout import KVLayout
from pagoda.messages.engine_config import EngineConfig, SimConfig
from pagoda.messages.frontend import (
    EngineMessage,
    GenerateRequest,
    Hello,
    Shutdown,
    SubscribeCache,
    TokenChunks,
    Work,
)
from pagoda.messages.sampling_params import SamplingParams
from pagoda.messages.worker_config import CurveKeys, WorkerConfig
from pagoda.plugins.disaggregation.exporter import KVExporter
from pagoda.plugins.disaggregation.messages import DecodeMessage
from pagoda.plugins.disaggregation.transfer_tokens import TransferTokens
from pagoda.plugins.simulate.engine import SimEngine
from pagoda.plugins.simulate.network import SimNetwork
from pagoda.text.model_text import synthetic_model_text
from pagoda.text.text_generator import TextGenerator

_VOCABULARY = 512
_ANSWER_MS = 10_000
_PATIENCE_S = 0.02
_FAILED = b"500"
"""The status that says that the server did not expect this."""
_OF_GRAMMARS = (MAX_HUNG_THREADS + 1) * (STACK_BYTES + (128 << 20))
"""Address space that threads which compile grammars of one tenant reserve: stacks, and heaps of the C library."""


def fuzzed_config() -> EngineConfig:
    """A simulated engine without delays, which ends every answer soon."""
    sim = SimConfig(vocab_size=_VOCABULARY, base_s=0.0, max_model_len=256)
    return EngineConfig(worker=WorkerConfig(model="sim"), executor="sim", sim=sim)


class _Http:
    """A server in this thread, which runs while an answer is awaited."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._loop.run_until_complete(self._start())

    async def _start(self) -> None:
        self._engine = SimEngine(fuzzed_config())
        dispatcher = Dispatcher([self._engine.replica], POLICIES["round-robin"])
        await dispatcher.start()
        self._waking = asyncio.create_task(self._wake())
        service = Service(ApiConfig(served_model_name="m", any_model_name=True))
        service.generator = TextGenerator(dispatcher, synthetic_model_text(), service.tracker)
        self._dispatcher = dispatcher
        self._runner = web.ServerRunner(ApiServer(service), shutdown_timeout=1.0)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self._port: int = self._runner.addresses[0][1]

    async def _wake(self) -> None:
        """Turns the engine's loop now and then: in virtual time nothing rings when a grammar is compiled."""
        while True:
            await asyncio.sleep(_PATIENCE_S)
            self._engine.send(SubscribeCache())

    def exchange(self, data: bytes, patience_s: float | None = None) -> bytes:
        """The first bytes of what comes until the server hangs up, or for so many seconds."""
        return self._loop.run_until_complete(self._exchange(data, patience_s))

    async def _exchange(self, data: bytes, patience_s: float | None) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        answer = b""
        with contextlib.suppress(OSError, TimeoutError):
            writer.write(data)
            async with asyncio.timeout(patience_s):
                while part := await reader.read(2**16):
                    answer = (answer + part)[:4096]
        writer.transport.abort()
        return answer

    def close(self) -> None:
        self._loop.run_until_complete(self._close())
        self._loop.close()

    async def _close(self) -> None:
        self._waking.cancel()
        await self._runner.cleanup()
        await self._dispatcher.close()


def _check(answer: bytes) -> None:
    """Raises RuntimeError: the server says that it failed."""
    head = answer.split(b"\r\n", 1)[0].split()
    if len(head) > 1 and head[1] == _FAILED:
        raise RuntimeError(f"status 500: {answer[-300:].decode(errors='replace')}")


@contextmanager
def _open_bodies(room: Path) -> Iterator[Feed]:
    """The input is an object of a path and a body."""
    del room
    server = _Http()

    def feed(data: bytes) -> None:
        try:
            asked = json.loads(data)
            path, body = str(asked["path"]), json.dumps(asked["body"]).encode()
        except (ValueError, KeyError, TypeError, RecursionError):
            path, body = "/v1/completions", data
        if not path.isascii() or not path.isprintable() or " " in path:
            path = "/v1/chat/completions"
        head = (
            f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            f"Connection: close\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        _check(server.exchange(head.encode() + body))

    try:
        yield feed
    finally:
        server.close()


@contextmanager
def _open_http(room: Path) -> Iterator[Feed]:
    """The input is what a client sends."""
    del room
    server = _Http()

    def feed(data: bytes) -> None:
        _check(server.exchange(data, _PATIENCE_S))

    try:
        yield feed
    finally:
        server.close()


GOOD = GenerateRequest(
    request_id="good",
    prompt_token_ids=[1, 2, 3],
    work=Work(SamplingParams(max_tokens=2, seed=1)),
    wire_id="good",
)
"""A request that is answered whatever came before it."""


@contextmanager
def _open_engine(room: Path) -> Iterator[Feed]:
    """The input is a frame to an engine's socket; then a good request must be answered."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    failures: list[BaseException] = []

    def serve() -> None:
        try:
            EngineProcess(fuzzed_config(), room, context).run()
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=serve, daemon=True)
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.RCVTIMEO, _ANSWER_MS)
    encode, decode = msgspec.msgpack.encode, Codec[EngineMessage](EngineMessage).decode

    def feed(data: bytes) -> None:
        if failures:
            raise failures[0]
        with contextlib.suppress(msgspec.DecodeError, ValueError, RecursionError):
            message = msgspec.msgpack.decode(data)
            if isinstance(message, dict) and message.get("type") in _ENDING:
                return
        socket.send(data)
        socket.send(encode(GOOD))
        while not has_ended(decode(socket.recv())):
            pass

    thread.start()
    socket.connect(socket_address(room, ENGINE_SOCKET))
    socket.send(encode(Hello()))
    socket.recv()
    try:
        yield feed
    finally:
        socket.send(encode(Shutdown()))
        thread.join(5)
        socket.close()
        context.destroy(linger=0)


_ENDING = ("shutdown", "start_trace")
"""Messages that do as they say: the engine ends, or writes files where it is told to."""


def has_ended(message: object) -> bool:
    """Returns True for the last chunk of the good request."""
    return isinstance(message, TokenChunks) and any(
        chunk.request_id == "good" and chunk.finish_reason is not None for chunk in message.chunks
    )


@contextmanager
def _open_exporter(room: Path) -> Iterator[Feed]:
    """The input is a list of messages to an engine that exports KV, after the one that greets it."""
    del room
    decode = Codec[DecodeMessage](DecodeMessage).decode

    def feed(data: bytes) -> None:
        clock, pool = VirtualClock(), BlockPool(16)
        network = SimNetwork(clock)
        tokens = TransferTokens(CurveKeys("", "", "", ""))
        listener = network.listener("tcp://p:1")
        exporter = KVExporter(listener, pool, KVLayout(4), clock, tokens, "e", 30.0)
        exporter.open("r", 4)
        peers = network.peers()
        with contextlib.suppress(msgspec.DecodeError, ValueError, RecursionError, TypeError):
            for item in msgspec.msgpack.decode(data):
                peers.send("tcp://p:1", decode(msgspec.msgpack.encode(item)))
        exporter.step()
        peers.receive()
        clock.advance_to(100.0)
        exporter.step()
        exporter.close()

    yield feed


SOCKETS = (
    Target("http_bodies", _open_bodies, JSON, reserved_bytes=_OF_GRAMMARS),
    Target(
        "http",
        _open_http,
        words=(
            "POST ",
            "GET ",
            " HTTP/1.1\r\n",
            "Content-Length: ",
            "Transfer-Encoding: chunked",
            "\r\n\r\n",
        ),
        reserved_bytes=_OF_GRAMMARS,
    ),
    Target("engine_frames", _open_engine, MSGPACK, reserved_bytes=_OF_GRAMMARS),
    Target("kv_requests", _open_exporter, MSGPACK),
)
