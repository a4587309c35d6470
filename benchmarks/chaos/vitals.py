# SPDX-License-Identifier: Apache-2.0
"""Memory, descriptors, threads and CPU time of all processes of a server."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

_PSS = re.compile(r"^Pss:\s+(\d+) kB", re.MULTILINE)
_MODULE = re.compile(r"pagoda\.(\w+)\.main")


@dataclass(frozen=True)
class Vitals:
    """One process at one time."""

    memory_bytes: int
    """Memory of the process; a page that several processes share counts in parts (PSS)."""
    num_descriptors: int
    num_threads: int
    cpu_s: float
    """CPU seconds since its start."""


def vitals(pid: int) -> dict[str, Vitals]:
    """Each process of the server `pid` by its name, such as `frontend`, `engine 0` or `worker 1`."""
    return {name: _measure(process) for name, process in server_processes(pid)}


def server_processes(pid: int) -> Iterator[tuple[str, psutil.Process]]:
    """The processes of the server `pid`, oldest first, with their names; helpers that come and go are left out."""
    frontend = psutil.Process(pid)
    yield "frontend", frontend
    seen: Counter[str] = Counter()
    children = frontend.children(recursive=True)
    for process in sorted(children, key=lambda child: (child.create_time(), child.pid)):
        found = _MODULE.search(" ".join(process.cmdline()))
        if found is not None:
            yield f"{found[1]} {seen[found[1]]}", process
            seen[found[1]] += 1


def _measure(process: psutil.Process) -> Vitals:
    times = process.cpu_times()
    found = _PSS.search(Path(f"/proc/{process.pid}/smaps_rollup").read_text(encoding="utf-8"))
    return Vitals(
        memory_bytes=1024 * int(found[1]) if found else process.memory_info().rss,
        num_descriptors=process.num_fds(),
        num_threads=process.num_threads(),
        cpu_s=times.user + times.system,
    )
