# SPDX-License-Identifier: Apache-2.0
"""Servers for trials: all that they leave on the machine is known, and streams tell how they ended."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import aiohttp
import psutil

from pagoda.cli.server_process import READY_PREFIX
from pagoda.errors import ConfigError

SHARED_MEMORY = Path("/dev/shm")


@dataclass(frozen=True)
class Server:
    """A server that has begun to serve."""

    url: str
    process: subprocess.Popen[str]
    directory: Path
    """Place of its temporary files, and of nothing else."""
    shared_before: frozenset[str]
    """Names in the shared memory of the machine before it began."""

    def family(self) -> list[psutil.Process]:
        """All its processes."""
        root = psutil.Process(self.process.pid)
        return [root, *root.children(recursive=True)]

    def child(self, module: str) -> psutil.Process:
        """The first process that runs a module, such as `pagoda.engine.main`."""
        return next(process for process in self.family() if module in process.cmdline())

    def left(self, processes: Sequence[psutil.Process]) -> list[str]:
        """Names of what is left of a server that has ended, and of `processes`."""
        files = [path.name for path in self.directory.rglob("*")]
        # Other programs of the machine make names there, too; those of a server's processes have their numbers.
        numbers = {str(process.pid) for process in processes}
        new = _names(SHARED_MEMORY) - self.shared_before
        shared = [name for name in new if not numbers.isdisjoint(re.findall(r"\d+", name))]
        return [*map(str, filter(_lives, processes)), *files, *shared]


@contextlib.contextmanager
def server(
    arguments: Sequence[str],
    command: Literal["serve", "route"] = "serve",
    environment: Mapping[str, str] | None = None,
    stderr: int | None = None,
) -> Iterator[Server]:
    """Runs `pagoda COMMAND --port 0 ARGUMENTS`, which whoever asks for it may end; else it is killed at the end.
    `stderr` is a file descriptor for its log, by default that of this process.

    Raises ConfigError if it does not start.
    """
    with tempfile.TemporaryDirectory(prefix="chaos", dir="/tmp") as directory:
        before = frozenset(_names(SHARED_MEMORY))
        process = subprocess.Popen(
            [sys.executable, "-m", "pagoda", command, "--port", "0", *arguments],
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            env={**os.environ, "TMPDIR": directory, **(environment or {})},
        )
        try:
            lines = process.stdout or ()
            ready = next((line for line in lines if line.startswith(READY_PREFIX)), None)
            if ready is None:
                raise ConfigError(f"the server did not start; it exited with {process.wait()}.")
            url = ready.removeprefix(READY_PREFIX).split()[0]
            yield Server(url, process, Path(directory), before)
        finally:
            process.kill()
            process.wait()


def _names(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()} if directory.exists() else set()


def _lives(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def seconds_until_gone(
    server: Server, processes: Sequence[psutil.Process], limit_s: float
) -> float:
    """Seconds until nothing is left of a server that was killed; infinite if something is after `limit_s`."""
    began = time.monotonic()
    while server.left(processes):
        if time.monotonic() - began > limit_s:
            return float("inf")
        time.sleep(0.01)
    return time.monotonic() - began


@dataclass
class Stream:
    """A streamed completion, as its client saw it."""

    text: str = ""
    finish_reason: str | None = None
    error: str = ""
    longest_pause_s: float = 0.0
    num_events: int = 0

    @property
    def is_complete(self) -> bool:
        return self.finish_reason == "length" and not self.error


async def read_stream(
    session: aiohttp.ClientSession, url: str, stream: Stream, **fields: object
) -> Stream:
    """Asks for a completion of exactly `max_tokens` tokens, and notes all events in `stream`."""
    body = _body(fields)
    last = time.monotonic()
    try:
        async with session.post(f"{url}/v1/completions", json=body | {"stream": True}) as answer:
            if answer.status != 200:
                stream.error = await answer.text()
                return stream
            async for line in answer.content:
                now = time.monotonic()
                if not line.startswith(b"data: {"):
                    continue
                stream.longest_pause_s = max(stream.longest_pause_s, now - last)
                last = now
                _take(stream, json.loads(line[6:]))
    except (aiohttp.ClientError, TimeoutError) as error:
        stream.error = f"{type(error).__name__}: {error}"
    return stream


async def ask_whole(session: aiohttp.ClientSession, url: str, **fields: object) -> str:
    """Asks for a completion of exactly `max_tokens` tokens in one piece. Returns its fault, or nothing."""
    body = _body(fields)
    try:
        async with session.post(f"{url}/v1/completions", json=body) as answer:
            if answer.status != 200:
                return f"status {answer.status}: {(await answer.text())[:80]}"
            told = await answer.json()
    except (aiohttp.ClientError, TimeoutError) as error:
        return f"{type(error).__name__}: {error}"
    reasons = {choice["finish_reason"] for choice in told["choices"]}
    return "" if reasons == {"length"} else f"finish reasons {sorted(reasons)}"


def _body(fields: Mapping[str, object]) -> dict[str, object]:
    return {"prompt": "Once", "max_tokens": 100, "temperature": 0, "ignore_eos": True, **fields}


def _take(stream: Stream, event: dict[str, object]) -> None:
    if "error" in event:
        stream.error = str(event["error"])
        return
    choices = event.get("choices")
    if isinstance(choices, list) and choices:
        stream.num_events += 1
        stream.text += choices[0]["text"]
        stream.finish_reason = choices[0]["finish_reason"]
