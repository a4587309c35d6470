# SPDX-License-Identifier: Apache-2.0
"""Hosts with a core each behind a router, and streams that note when each token came."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import secrets
import socket
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import aiohttp

from benchmarks.cpu.random_model import write_text_side
from benchmarks.kv_tiers.client import open_session
from pagoda.checkpoints.presets import PRESETS
from pagoda.cli.server_process import server_process

BLOCK_SIZE = 16
_VOCABULARY = range(3, 256)
_PATIENCE_S = 60.0


class Pod:
    """Starts hosts of one model, and routers; all of them end with `stack`."""

    def __init__(self, stack: ExitStack, model: str, max_model_len: int, dtype: str) -> None:
        self._stack = stack
        directory = Path(stack.enter_context(TemporaryDirectory()))
        self._model: list[str] = []
        self._flags = ["--dtype", dtype, "--max-model-len", str(max_model_len)]
        self._flags += ["--block-size", str(BLOCK_SIZE), "--log-level", "warning"]
        self._flags += ["--num-kv-blocks", str(16 * max_model_len // BLOCK_SIZE)]
        if model != "pagoda-tiny":
            self._flags += ["--load-format", "dummy"]
            # A router needs a tokenizer, which a preset has not.
            write_text_side(directory / "model", PRESETS[model])
            self._model = [str(directory / "model")]
        self._key = write_key(directory)

    def host(
        self,
        role: str = "none",
        *,
        cores: Sequence[int],
        join: Sequence[str] = (),
        transports: str = "",
    ) -> str:
        """The URL of a host that has just these cores, and joins routers at these addresses."""
        flags = [*self._model, *self._flags, "--threads", str(len(cores))]
        if role != "none":
            flags += ["--role", role, "--cluster-key-file", str(self._key)]
        if join:
            flags += ["--join", ",".join(join)]
        if transports:
            flags += ["--kv-transports", transports]
        with on_cores(cores):
            return self._stack.enter_context(server_process(flags)).base_url

    def route(self, address: str, min_tokens: int) -> str:
        """The URL of a router that hosts join at `address`; any prompt this long is computed elsewhere."""
        flags = [*self._model, "--join-listen", address, "--cluster-key-file", str(self._key)]
        flags += ["--remote-prefill-min-tokens", str(min_tokens), "--log-level", "warning"]
        return self._stack.enter_context(server_process(flags, "route")).base_url


@contextlib.contextmanager
def on_cores(cores: Sequence[int]) -> Iterator[None]:
    """Processes that are started meanwhile run there."""
    own = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, own)


def write_key(directory: Path) -> Path:
    """A file with the secret of a cluster."""
    path = directory / "key"
    path.write_text(secrets.token_hex())
    return path


def two_cores() -> tuple[int, int]:
    """
    Raises:
        RuntimeError: this process may use only one.
    """
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise RuntimeError("Two hosts with a core each need two cores.")
    return cores[0], cores[1]


def free_address() -> str:
    """Returns an address at which a router can listen."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{free.getsockname()[1]}"


async def until_hosts(session: aiohttp.ClientSession, count: int) -> None:
    give_up = time.monotonic() + _PATIENCE_S
    while True:
        async with session.get("/v1/load") as response:
            replicas = (await response.json())["replicas"]
        if sum(replica["state"] == "ready" for replica in replicas) == count:
            return
        if time.monotonic() > give_up:
            raise RuntimeError(f"{count} hosts have not joined in {_PATIENCE_S:.0f} s.")
        await asyncio.sleep(0.05)


def random_prompt(chance: random.Random, length: int) -> list[int]:
    return chance.choices(_VOCABULARY, k=length)


async def token_times(
    session: aiohttp.ClientSession, prompt: Sequence[int], max_tokens: int
) -> AsyncIterator[float]:
    """Yields the arrival of each token, in seconds since the request was sent.

    Raises:
        RuntimeError: the server refused the request, or broke off.
    """
    body = {
        "prompt": list(prompt),
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
    }
    sent = time.perf_counter()
    async with session.post("/v1/completions", json=body) as response:
        if response.status != 200:
            raise RuntimeError(await response.text())
        async for line in response.content:
            if not line.startswith(b"data: {"):
                continue
            now = time.perf_counter() - sent
            event = json.loads(line[6:])
            if "error" in event:
                raise RuntimeError(str(event["error"]))
            for _ in event["choices"][0]["token_ids"]:
                yield now


async def all_times(
    session: aiohttp.ClientSession, prompt: Sequence[int], max_tokens: int
) -> list[float]:
    return [instant async for instant in token_times(session, prompt, max_tokens)]


class Pause(NamedTuple):
    """Pause between two tokens of a stream."""

    start: float
    end: float

    @property
    def seconds(self) -> float:
        return self.end - self.start


class Streams:
    """Answers that run until they are stopped, and the pauses between their tokens."""

    def __init__(self, url: str, chance: random.Random, count: int, max_tokens: int) -> None:
        self._url = url
        self._prompts = [random_prompt(chance, 8) for _ in range(count)]
        self._max_tokens = max_tokens
        self._tasks: list[asyncio.Task[None]] = []
        self.pauses: list[Pause] = []
        """Pauses since the list was last cleared."""

    async def __aenter__(self) -> Streams:
        """Returns when all of them run."""
        begun = [asyncio.Event() for _ in self._prompts]
        self._tasks = [
            asyncio.create_task(self._run(prompt, event))
            for prompt, event in zip(self._prompts, begun, strict=True)
        ]
        await asyncio.gather(*(event.wait() for event in begun))
        self.pauses.clear()
        return self

    async def __aexit__(self, *_: object) -> None:
        """
        Raises:
            RuntimeError: one of them ended by itself, so that fewer ran than there should.
        """
        ended = [task for task in self._tasks if task.done()]
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if ended:
            raise RuntimeError("A stream ended too early.") from ended[0].exception()

    async def _run(self, prompt: list[int], begun: asyncio.Event) -> None:
        async with open_session(self._url) as session:
            last: float | None = None
            async for _ in token_times(session, prompt, self._max_tokens):
                now = time.perf_counter()
                if last is not None:
                    self.pauses.append(Pause(last, now))
                    begun.set()
                last = now
