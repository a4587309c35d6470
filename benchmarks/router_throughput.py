# SPDX-License-Identifier: Apache-2.0
"""Tokens through one router process (`python -m benchmarks.router_throughput`).

The router is a process of its own, kept on one core. On another one are hosts, which cost next to nothing (a timer
says when each of their streams has its next token; a real `HostServer` sends it), and clients, which count tokens
and read no further. What the router itself can do is said by the processor time that it needs for a token: when
hosts and clients cannot follow, tokens a second say less.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import secrets
import socket
import tempfile
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import cast
from urllib.parse import urlsplit

import aiohttp
import psutil
import zmq

from benchmarks.figure import Figure
from pagoda.checkpoints.fingerprint import model_digest
from pagoda.checkpoints.resolve import resolve_model
from pagoda.cli import output
from pagoda.cli.server_process import ServerProcess, server_process
from pagoda.concurrency import event_loop
from pagoda.concurrency.async_utils import cancel_all
from pagoda.fleet.endpoint import CacheListener, Health, ReplicaState, StepListener
from pagoda.fleet.token_stream import TokenStream
from pagoda.ipc.curve import read_cluster_key, start_authenticator
from pagoda.messages.frontend import (
    EngineReady,
    FinishReason,
    GenerateRequest,
    PrefixCacheUpdate,
    TokenChunk,
)
from pagoda.messages.load import LoadReport
from pagoda.plugins.router.discovery.joins import Membership
from pagoda.plugins.router.host_client import Identity
from pagoda.plugins.router.host_server import HostServer
from pagoda.plugins.router.host_sockets import CurveSockets
from pagoda.plugins.router.messages import HostRecord
from pagoda.text.model_text import load_text

_WORD = " the"
"""Text of one token that occurs nowhere else in an event: its occurrences count the tokens."""
_OUTPUT_TOKENS = 400
_WARM_UP = 0.2
"""The share of the run's tokens that are not counted, at its beginning and at its end."""


@dataclass(frozen=True)
class Throughput:
    """Figures of one run."""

    tokens_per_s: float
    events_per_s: float
    router_cpu_s: float
    """Processor seconds for each 1,000 tokens."""


class Host:
    """An endpoint whose streams get a token each at every step, always the same."""

    def __init__(self, token_id: int) -> None:
        self._token_ids = [token_id]
        self.step_s = 0.01
        self._streams: dict[str, tuple[TokenStream, int]] = {}
        self._stepping: asyncio.Task[None] | None = None
        self.state = ReplicaState.READY
        self.limits = EngineReady(
            max_model_len=2**15,
            vocab_size=2**30,
            num_blocks=2**16,
            block_size=16,
            max_num_seqs=2**12,
            max_num_waiting=2**12,
            max_num_waiting_tokens=2**30,
            summary="a host of a benchmark",
        )

    def watch(self, listener: Callable[[], None]) -> Callable[[], None]:  # noqa: ARG002
        """Never calls `listener`: the replica is always ready."""
        return lambda: None

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
        stream = TokenStream()
        self._streams[request.request_id] = stream, request.work.sampling.max_tokens or 1
        if self._stepping is None or self._stepping.done():
            self._stepping = asyncio.create_task(self._step())
        async for chunk in stream:
            yield chunk

    async def _step(self) -> None:
        loop = asyncio.get_running_loop()
        at = loop.time()
        while self._streams:
            at += self.step_s
            await asyncio.sleep(max(0.0, at - loop.time()))
            for request_id, (stream, left) in list(self._streams.items()):
                if left == 1:
                    del self._streams[request_id]
                    stream.push(TokenChunk(request_id, self._token_ids, FinishReason.LENGTH))
                else:
                    self._streams[request_id] = stream, left - 1
                    stream.push(TokenChunk(request_id, self._token_ids))

    def works(self) -> dict[str, int]:
        return {}

    async def load(self) -> LoadReport:
        return LoadReport()

    def subscribe_cache(self, listener: CacheListener) -> Callable[[], None]:
        """Never calls `listener`: the replica has no cache."""
        listener(PrefixCacheUpdate(b"", b"", starts_anew=True))
        return lambda: None

    def subscribe_steps(self, listener: StepListener) -> Callable[[], None]:
        """Never calls `listener`: the replica has no steps."""
        del listener
        return lambda: None

    async def abort(self, request_id: str) -> None:
        self._streams.pop(request_id, None)

    async def health(self) -> Health:
        return Health(True)

    async def drain(self, timeout_s: float) -> None:
        """Nothing needs to be finished."""

    async def close(self) -> None:
        if self._stepping is not None:
            await cancel_all([self._stepping])


class Client(asyncio.Protocol):
    """One streaming request over a connection of its own."""

    def __init__(self, body: bytes, counts: Counts) -> None:
        self._body = body
        self._counts = counts
        self._tail = b""
        self.done = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(self._body)}\r\n"
        head += "Content-Type: application/json\r\n\r\n"
        self._transport = cast(asyncio.Transport, transport)
        self._transport.write(head.encode() + self._body)

    def data_received(self, data: bytes) -> None:
        self._counts.events += data.count(b"data: {")
        self._counts.tokens += data.count(_WORD.encode())
        self._tail = (self._tail + data)[-64:]
        if b"data: [DONE]" in self._tail:
            self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        if b"data: [DONE]" in self._tail:
            self.done.set_result(None)
        else:
            self.done.set_exception(
                exc or ConnectionError(f"the router hung up behind {self._tail!r}")
            )


class Counts:
    def __init__(self) -> None:
        self.events = 0
        self.tokens = 0


async def measure(options: argparse.Namespace, directory: Path) -> list[Throughput]:
    """One for each of the rates."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        join = f"127.0.0.1:{free.getsockname()[1]}"
    key_file = directory / "key"
    key_file.write_text(secrets.token_hex())
    flags = ["--join-listen", join, "--cluster-key-file", str(key_file), "--log-level", "warning"]
    cores = sorted(os.sched_getaffinity(0))
    throughputs = []
    async with _hosts(options.hosts, join, key_file) as (hosts, token_id):
        # It is ready when a host has joined, so hosts go on meanwhile.
        route = server_process(flags, "route")
        router = await asyncio.to_thread(route.__enter__)
        try:
            _keep_on(router.pid, cores[-1])
            _keep_on(os.getpid(), cores[0])
            await _until_hosts(router.base_url, len(hosts))
            for rate in options.rates:
                for host in hosts:
                    host.step_s = options.streams / rate
                throughputs.append(await _load(router, options.streams, [token_id] * 16))
        finally:
            await asyncio.to_thread(route.__exit__, None, None, None)
    return throughputs


@asynccontextmanager
async def _hosts(count: int, join: str, key_file: Path) -> AsyncIterator[tuple[list[Host], int]]:
    """Hosts that want to join, and the token that they answer with."""
    files = resolve_model(None)
    text = load_text(files, simulated=False, chat_template=None)
    [token_id] = text.tokenizer.encode(_WORD, add_special_tokens=False)
    keys = read_cluster_key(key_file)
    context = zmq.Context()
    start_authenticator(context, keys)
    hosts = [Host(token_id) for _ in range(count)]
    async with AsyncExitStack() as stack:
        stack.callback(context.term)
        for index, host in enumerate(hosts):
            stack.push_async_callback(host.close)
            identity = Identity(f"host-{index}", files.served_name, model_digest(files), False)
            door = HostServer(host, CurveSockets(context, keys), "tcp://127.0.0.1:*", identity)
            stack.push_async_callback(door.close)
            record = HostRecord(host_id=identity.id, address=f"tcp://127.0.0.1:{door.port}")
            stack.push_async_callback(Membership(context, join, keys, record).close)
        yield hosts, token_id


async def _until_hosts(url: str, count: int) -> None:
    async with aiohttp.ClientSession(url) as session:
        while True:
            async with session.get("/v1/load") as response:
                if response.ok and len((await response.json())["replicas"]) == count:
                    return
            await asyncio.sleep(0.1)


async def _load(router: ServerProcess, streams: int, prompt: list[int]) -> Throughput:
    counts = Counts()
    url = urlsplit(router.base_url)
    body = {"prompt": prompt, "max_tokens": _OUTPUT_TOKENS, "stream": True, "ignore_eos": True}
    encoded = json.dumps(body).encode()
    process = psutil.Process(router.pid)
    loop = asyncio.get_running_loop()
    total = streams * _OUTPUT_TOKENS

    clients = [
        (
            await loop.create_connection(
                lambda: Client(encoded, counts), url.hostname or "", url.port or 0
            )
        )[1]
        for _ in range(streams)
    ]
    done = asyncio.gather(*(client.done for client in clients))
    marks: list[tuple[float, int, int, float]] = []
    for share in (_WARM_UP, 1 - _WARM_UP):
        while counts.tokens < share * total and not done.done():
            await asyncio.sleep(0.01)
        times = process.cpu_times()
        cpu_s = times.user + times.system
        marks.append((time.perf_counter(), counts.tokens, counts.events, cpu_s))
    await done
    seconds, tokens, events, cpu_s = (b - a for a, b in zip(*marks, strict=True))
    return Throughput(tokens / seconds, events / seconds, 1000 * cpu_s / tokens)


def _figures(options: argparse.Namespace, throughputs: Sequence[Throughput]) -> list[Figure]:
    return [
        Figure(
            what=f"{options.streams} streams over {options.hosts} hosts, {rate:,.0f} tokens/s offered",
            measured=(
                f"{it.tokens_per_s:,.0f} tokens/s in {it.events_per_s:,.0f} events; "
                f"{1000 * it.router_cpu_s:.0f} ms of the router for 1,000 tokens: "
                f"{1000 / it.router_cpu_s:,.0f} tokens/s a core"
            ),
            target="≥ 12,000 tokens/s",
            command="python -m benchmarks.router_throughput",
        )
        for rate, it in zip(options.rates, throughputs, strict=True)
    ]


def _keep_on(pid: int, core: int) -> None:
    """All threads of a process."""
    for thread in os.listdir(f"/proc/{pid}/task"):
        os.sched_setaffinity(int(thread), {core})


def main() -> None:
    """Measures, with more and more tokens offered."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--rates", nargs="+", type=float, default=(6_000.0, 12_000.0, 24_000.0))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        throughputs = event_loop.run(measure(options, Path(directory)))
    rows = [(f.what, f.measured, f.target) for f in _figures(options, throughputs)]
    output.stdout().print(output.table("", ("what", "measured", "target"), rows))


if __name__ == "__main__":
    main()
