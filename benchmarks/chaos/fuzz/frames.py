# SPDX-License-Identifier: Apache-2.0
"""Readers of what processes send each other: every union of messages, hosts and routers, etcd."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import zmq
from aiohttp import web

from benchmarks.chaos.fuzz.forms import JSON, MSGPACK
from benchmarks.chaos.fuzz.sockets import GOOD, fuzzed_config, has_ended
from benchmarks.chaos.fuzz.target import Feed, Form, Target
from benchmarks.simulation.workers import NobodyLaunched
from pagoda.errors import PagodaError
from pagoda.executor.base import ExecutorEvent, WorkerLost
from pagoda.executor.group import GroupExecutor
from pagoda.fleet.dispatcher import Dispatcher
from pagoda.fleet.policies import POLICIES
from pagoda.ipc.clock import MonotonicClock
from pagoda.ipc.codec import Codec
from pagoda.ipc.numbered import Incoming, LostMessageError
from pagoda.messages.frontend import (
    EngineMessage,
    FrontendMessage,
    Hello,
    PoolModel,
)
from pagoda.messages.transfers import TransferMessage, Transfers
from pagoda.messages.worker import StepPlan, WorkerMessage, WorkerOrder, WorkerReady
from pagoda.messages.worker_config import WorkerConfig
from pagoda.plugins.disaggregation.messages import DecodeMessage, PrefillMessage
from pagoda.plugins.router.discovery.etcd_client import EtcdClient, EtcdError
from pagoda.plugins.router.host_client import HostClient, Identity
from pagoda.plugins.router.host_server import HostServer
from pagoda.plugins.router.host_sockets import OnDisconnect, OnMessage
from pagoda.plugins.router.messages import HostJoin, HostMessage, JoinAnswer, RouterMessage
from pagoda.plugins.simulate.engine import SimEngine

UNIONS: tuple[Any, ...] = (
    *(FrontendMessage, EngineMessage, WorkerOrder, WorkerMessage, Transfers, TransferMessage),
    *(RouterMessage, HostMessage, HostJoin, JoinAnswer, DecodeMessage, PrefillMessage),
    WorkerConfig,
)
"""Types of all wires between processes, by their numbers in inputs."""
_TURNS = 20
"""Turns of the event loop in which what a message asks for is done."""


@contextmanager
def _open_messages(room: Path) -> Iterator[Feed]:
    """The first byte of the input says of which wire the rest is a message."""
    del room
    codecs = [Codec[Any](union) for union in UNIONS]

    def feed(data: bytes) -> None:
        codec = codecs[(data[0] if data else 0) % len(codecs)]
        with contextlib.suppress(msgspec.DecodeError):
            codec.encode(codec.decode(data[1:]))

    yield feed


def _read_message(data: bytes) -> Any:
    return [data[0], msgspec.msgpack.decode(data[1:])]


def _write_message(tree: Any) -> bytes:
    return bytes([int(tree[0]) % 256]) + msgspec.msgpack.encode(tree[1])


class _Socket:
    """An end of a connection whose messages the fuzzer makes up; what is sent is kept."""

    def __init__(self, on_message: OnMessage) -> None:
        self.take = on_message
        self.sent: list[tuple[bytes, ...]] = []
        self.closed = False
        self.port = 1

    def bind(self, address: str) -> None: ...

    def connect(self, address: str) -> None: ...

    def send(self, *frames: bytes) -> None:
        self.sent.append(frames)

    def close(self) -> None:
        self.closed = True


class _Sockets:
    """`HostSockets` of `_Socket`s."""

    def __init__(self) -> None:
        self.opened: list[_Socket] = []

    def server(self, on_message: OnMessage, on_disconnect: OnDisconnect) -> _Socket:
        del on_disconnect
        self.opened.append(_Socket(on_message))
        return self.opened[-1]

    def client(self, on_message: OnMessage, on_disconnect: OnDisconnect) -> _Socket:
        return self.server(on_message, on_disconnect)


@contextmanager
def _loop() -> Iterator[asyncio.AbstractEventLoop]:
    """An event loop, whose tasks end with it."""
    loop = asyncio.new_event_loop()
    try:
        yield loop
    finally:
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.run_until_complete(_turns())
        loop.close()


async def _turns() -> None:
    for _ in range(_TURNS):
        await asyncio.sleep(0)


def _items(data: bytes) -> list[bytes]:
    """The messages in a list; an input that is none is one message."""
    with contextlib.suppress(msgspec.DecodeError, ValueError, RecursionError, TypeError):
        items = msgspec.msgpack.decode(data)
        if isinstance(items, list):
            return [msgspec.msgpack.encode(item) for item in items]
    return [data]


@contextmanager
def _open_host_answers(room: Path) -> Iterator[Feed]:
    """The input is a list of messages of a host, and of an engine, to whom a request was sent."""
    del room
    with _loop() as loop:

        async def take(items: list[bytes]) -> None:
            sockets = _Sockets()
            router = Identity("router", "m", "1", is_router=True)
            client = HostClient(sockets, "tcp://h:1", router)
            socket, replica = sockets.opened[0], client.replica
            stream, incoming = None, Incoming()
            for item in items:
                socket.take([item])
                with contextlib.suppress(LostMessageError):
                    incoming.payload([item[:8], item])
                if stream is None and replica.is_open:
                    stream = replica.generate(GOOD)
            if stream is not None:
                with contextlib.suppress(PagodaError, TimeoutError, StopAsyncIteration):
                    async with asyncio.timeout(0):
                        await anext(stream)
                await stream.aclose()
            await client.close()

        yield lambda data: loop.run_until_complete(take(_items(data)))


@contextmanager
def _open_router_orders(room: Path) -> Iterator[Feed]:
    """The input is a list of messages of a router to a host; then a good request must be answered."""
    del room
    decode = Codec[HostMessage](HostMessage).decode
    with _loop() as loop:
        failures: list[BaseException] = []

        def remember(_: object, context: dict[str, Any]) -> None:
            failures.append(context.get("exception") or RuntimeError(context["message"]))

        loop.set_exception_handler(remember)

        async def take(items: list[bytes]) -> None:
            engine = SimEngine(fuzzed_config())
            dispatcher = Dispatcher([engine.replica], POLICIES["round-robin"])
            await dispatcher.start()
            sockets = _Sockets()
            identity = Identity("host", "m", "1", is_router=False)
            server = HostServer(dispatcher, sockets, "tcp://h:1", identity)
            [socket] = sockets.opened
            hello = Hello(pools=(PoolModel("", "m", "1"),))
            for item in (msgspec.msgpack.encode(hello), *items):
                socket.take([b"router", item])
            await _turns()
            socket.sent.clear()
            socket.take([b"other", msgspec.msgpack.encode(hello)])
            socket.take([b"other", msgspec.msgpack.encode(GOOD)])
            async with asyncio.timeout(5):
                while not any(has_ended(decode(frames[-1])) for frames in socket.sent):
                    await asyncio.sleep(0)
            await server.close()
            await dispatcher.close()

        def feed(data: bytes) -> None:
            loop.run_until_complete(take(_items(data)))
            if failures:
                raise failures.pop()

        yield feed


_PATIENCE_MS = 5000


@contextmanager
def _open_worker_messages(room: Path) -> Iterator[Feed]:
    """The input is a list of a worker's messages to its engine, in turn over its two connections."""
    launcher = NobodyLaunched()
    executor = GroupExecutor(
        WorkerConfig(model="m", kv_host_bytes=1),
        launcher,
        address=f"ipc://{room / 'w'}",
        step_timeout_s=30.0,
        clock=MonotonicClock(),
    )
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()

    def feed(data: bytes) -> None:
        executor.start()
        _, address = launcher.starts[-1]
        del launcher.starts[:]
        sockets = []
        for identity in ("0", "kv-0"):
            socket = context.socket(zmq.DEALER)
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt_string(zmq.IDENTITY, identity)
            socket.connect(address)
            sockets.append(socket)
        for number, item in enumerate((*_items(data), b"no message", b"no message")):
            sockets[number % 2].send(item)
        events: list[ExecutorEvent] = []
        while not any(isinstance(event, WorkerLost) for event in events):
            heard: Any = executor.pollables()[0]
            if not zmq.zmq_poll([(heard, zmq.POLLIN)], _PATIENCE_MS):
                raise TimeoutError("nothing came of a message that is none")
            events = executor.poll()
            if any(isinstance(event, WorkerReady) for event in events):
                executor.submit(StepPlan(0, [0], [1]))
        for socket in sockets:
            socket.close()

    try:
        yield feed
    finally:
        executor.close()
        context.destroy(linger=0)


@contextmanager
def _open_etcd(room: Path) -> Iterator[Feed]:
    """The input is what an etcd answers to everything."""
    del room
    with _loop() as loop:
        answer = b""

        async def handle(request: web.Request) -> web.Response:
            del request
            return web.Response(body=answer, content_type="application/json")

        async def start() -> web.AppRunner:
            app = web.Application()
            app.router.add_post("/{path:.*}", handle)
            runner = web.AppRunner(app)
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            return runner

        runner = loop.run_until_complete(start())
        client = EtcdClient([f"127.0.0.1:{runner.addresses[0][1]}"])

        async def ask() -> None:
            for question in (client.grant(1.0), client.keep_alive("1"), client.get("k")):
                with contextlib.suppress(EtcdError):
                    await question
            with contextlib.suppress(EtcdError):
                await client.read("k")
            with contextlib.suppress(EtcdError):
                async with contextlib.aclosing(client.watch("k", 1)) as events:
                    async for _ in events:
                        pass

        def feed(data: bytes) -> None:
            nonlocal answer
            answer = data
            loop.run_until_complete(ask())

        try:
            yield feed
        finally:
            loop.run_until_complete(client.close())
            loop.run_until_complete(runner.cleanup())


FRAMES = (
    Target("messages", _open_messages, Form(_read_message, _write_message)),
    Target("host_answers", _open_host_answers, MSGPACK),
    Target("router_orders", _open_router_orders, MSGPACK),
    Target("worker_messages", _open_worker_messages, MSGPACK),
    Target("etcd_answers", _open_etcd, JSON),
)
