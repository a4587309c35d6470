# SPDX-License-Identifier: Apache-2.0
"""Seconds from `pagoda serve` to ready, and the memory of the processes once they have served a request."""

from __future__ import annotations

import asyncio
import statistics
import time
from pathlib import Path

import psutil

from benchmarks.figure import Figure
from pagoda.cli.openai_client import OpenAIClient
from pagoda.cli.server_process import ServerProcess, server_process
from pagoda.ipc.machine import format_bytes

_STARTS = 5


def measure_start_up() -> list[Figure]:
    """Seconds from starting the process to its line `ready`, with the embedded model."""
    seconds = []
    for _ in range(_STARTS):
        start = time.perf_counter()
        with server_process([]):
            seconds.append(time.perf_counter() - start)
    spread = f"{min(seconds):.2f}–{max(seconds):.2f} s"
    return [
        Figure(
            what="pagoda serve to ready, embedded model",
            measured=f"{statistics.median(seconds):.2f} s (median of {_STARTS}, {spread})",
            target="≤ 3 s",
            command="python -m benchmarks.main_job start-up",
        )
    ]


def measure_memory() -> list[Figure]:
    """Resident memory of frontend and engine; pages that both map count twice."""
    with server_process([]) as server:
        asyncio.run(ask_once(server))
        frontend = psutil.Process(server.pid)
        engine = engine_of(server)
        resident = [process.memory_info().rss for process in (frontend, engine)]
        with_torch = [p.pid for p in (frontend, engine) if _maps_torch(p.pid)]
    return [
        Figure(
            what="memory of frontend + engine",
            measured=(
                f"{format_bytes(sum(resident))} ({' + '.join(map(format_bytes, resident))}), "
                f"torch {'imported' if with_torch else 'not imported'}"
            ),
            target="≤ 200 MB, torch not imported",
            command="python -m benchmarks.main_job memory",
        )
    ]


def engine_of(server: ServerProcess) -> psutil.Process:
    """The engine process of a server."""
    return next(
        child
        for child in psutil.Process(server.pid).children()
        if "pagoda.engine.main" in child.cmdline()
    )


async def ask_once(server: ServerProcess) -> None:
    """One short request, so that everything that is loaded lazily is loaded."""
    async with OpenAIClient(server.base_url) as client:
        model = await client.first_model()
        body = {"model": model, "prompt": "1 + 1", "max_tokens": 8, "ignore_eos": True}
        await client.post("/v1/completions", body)


def _maps_torch(pid: int) -> bool:
    return "libtorch" in Path(f"/proc/{pid}/maps").read_text(encoding="utf-8")
