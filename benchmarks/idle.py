"""CPU time of all processes of an idle server."""

from __future__ import annotations

import asyncio
import time

import psutil

from benchmarks.figure import Figure
from benchmarks.start_up import ask_once
from pagoda.cli.server_process import server_process

_SECONDS = 30


def measure_idle() -> list[Figure]:
    """CPU used over 30 s by frontend, engine and worker, after one request."""
    with server_process([]) as server:
        asyncio.run(ask_once(server))
        root = psutil.Process(server.pid)
        processes = [root, *root.children(recursive=True)]
        time.sleep(2)
        before = sum(map(_cpu_seconds, processes))
        time.sleep(_SECONDS)
        used = sum(map(_cpu_seconds, processes)) - before
    return [
        Figure(
            what=f"CPU while idle, {len(processes)} processes",
            measured=f"{100 * used / _SECONDS:.2f} % of a core over {_SECONDS} s",
            target="0 %",
            command="python -m benchmarks.main_job idle",
        )
    ]


def _cpu_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)
