# SPDX-License-Identifier: Apache-2.0
"""CPU time of all processes of an idle server."""

from __future__ import annotations

import asyncio
import time

import psutil

from benchmarks.figure import Figure
from benchmarks.start_up import ask_once
from pagoda.cli.server_process import server_process

_SECONDS = 30
_SETTLING_S = 2
_CPUCLOCK_SCHED = 2
"""The time for which the scheduler let a process run, of the kernel's three clocks of it."""


def measure_idle() -> list[Figure]:
    """CPU used over 30 s by frontend, engine and worker, after one request."""
    with server_process([]) as server:
        asyncio.run(ask_once(server))
        share = cpu_share(server.pid, _SECONDS)
    return [
        Figure(
            what="CPU while idle, all processes",
            measured=f"{100 * share:.2f} % of a core over {_SECONDS} s",
            target="0 %",
            command="python -m benchmarks.main_job idle",
        )
    ]


def cpu_share(pid: int, seconds: float) -> float:
    """CPU seconds per second of a process and its descendants, of one core, over `seconds` from 2 s on."""
    root = psutil.Process(pid)
    pids = [process.pid for process in (root, *root.children(recursive=True))]
    time.sleep(_SETTLING_S)
    before = sum(map(cpu_seconds, pids))
    time.sleep(seconds)
    return (sum(map(cpu_seconds, pids)) - before) / seconds


def cpu_seconds(pid: int) -> float:
    """CPU time of all threads of a process, in nanoseconds' steps. `/proc/PID/stat` counts hundredths of a second,
    which is as much as an idle process uses in half a minute. Source: clock_getcpuclockid(3) of Linux."""
    return time.clock_gettime((~pid << 3) | _CPUCLOCK_SCHED)
