# SPDX-License-Identifier: Apache-2.0
"""All-reduce between processes of this machine: shared memory beside gloo, in one sitting.

`python -m benchmarks.collectives`. Every rank is a process with one thread. A round measures one transport and
then the other; a figure is the median of the rounds, of what one all-reduce took.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import msgspec
import torch
import torch.distributed
from cyclopts import App
from torch import Tensor

from pagoda.backend.cpu.collectives import SharedMemory, SharedMemoryCollectives
from pagoda.cli import output
from pagoda.parallel.distributed import GroupStore
from pagoda.worker.pinning import set_library_options

_RANKS = (2, 4)
_SIZES = {"2 KB": 2**11, "8 KB": 2**13, "8 MB": 2**23}
_TARGETS = {"8 KB": 5.0, "8 MB": 2.0}
_ROUNDS = 15
_ROUND_S = 0.04
"""Approximate seconds of a round."""
_TIMEOUT_S = 300.0
_POLL_S = 0.5
"""Seldom enough not to disturb."""

_app = App()


@_app.default
def main() -> None:
    """Measures."""
    head = ("ranks", "message", "gloo", "shared memory", "times as fast", "target")
    rows = [row for ranks in _RANKS for row in _table(ranks)]
    output.stdout().print(output.table("All-reduce of float32", head, rows))


def _table(ranks: int) -> list[tuple[str, ...]]:
    memory, store = SharedMemory(ranks), GroupStore("127.0.0.1")
    environment = dict(os.environ)
    set_library_options(environment)
    with contextlib.ExitStack() as stack:
        stack.callback(memory.close)
        processes = []
        for rank in range(ranks):
            command = [sys.executable, "-m", __spec__.name, "rank"]
            command += [str(rank), str(ranks), memory.path, store.address]
            process = subprocess.Popen(command, stdout=subprocess.PIPE, env=environment)
            stack.enter_context(process)
            stack.callback(process.kill)
            processes.append(process)
        printed = _wait(processes)
    seconds = msgspec.json.decode(printed, type=dict[str, list[list[float]]])
    return [_row(ranks, size, *seconds[size]) for size in _SIZES]


def _wait(processes: list[subprocess.Popen[bytes]]) -> bytes:
    """Returns what rank 0 prints. If a rank breaks, all end: the others would wait for it for ever."""
    deadline = time.monotonic() + _TIMEOUT_S
    while any(process.poll() is None for process in processes):
        broken = [rank for rank, process in enumerate(processes) if process.poll()]
        if broken or time.monotonic() > deadline:
            break
        time.sleep(_POLL_S)
    codes = [process.poll() for process in processes]
    if any(code != 0 for code in codes):
        ends = ", ".join("running still" if code is None else str(code) for code in codes)
        raise SystemExit(f"The ranks did not all finish; their exit codes: {ends}.")
    return processes[0].communicate()[0]


def _row(ranks: int, size: str, gloo: list[float], shared: list[float]) -> tuple[str, ...]:
    times = statistics.median(gloo) / statistics.median(shared)
    target = f"≥ {_TARGETS[size]:g}" if size in _TARGETS else ""
    return str(ranks), size, _spread(gloo), _spread(shared), f"{times:.1f}", target


def _spread(seconds: list[float]) -> str:
    middle, low, high = (
        1e6 * value for value in (statistics.median(seconds), min(seconds), max(seconds))
    )
    return f"{middle:,.1f} µs ({low:,.1f}–{high:,.1f})"


@_app.command(name="rank", show=False)
def _rank(rank: int, ranks: int, path: str, address: str) -> None:
    """One rank; prints the seconds of each round, for each size those of gloo and those of shared memory."""
    torch.set_num_threads(1)
    host, _, port = address.partition(":")
    dist: Any = torch.distributed  # type checkers know too little of it
    store = dist.TCPStore(host, int(port), is_master=False, wait_for_workers=False)
    gloo = dist.ProcessGroupGloo(store, rank, ranks, timedelta(minutes=1))
    shared = SharedMemoryCollectives(path, rank, ranks)

    def reduce_by_gloo(x: Tensor) -> None:
        gloo.allreduce([x]).wait()

    operations: list[Callable[[Tensor], object]] = [reduce_by_gloo, shared.all_reduce]
    seconds: dict[str, list[list[float]]] = {}
    for size, num_bytes in _SIZES.items():
        x = torch.zeros(num_bytes // 4)
        counts = [_count(operation, x, shared) for operation in operations]
        seconds[size] = [[], []]
        for _ in range(_ROUNDS):
            for taken, operation, count in zip(seconds[size], operations, counts, strict=True):
                taken.append(_time(operation, x, count))
    if rank == 0:
        sys.stdout.buffer.write(msgspec.json.encode(seconds))


def _count(operation: Callable[[Tensor], object], x: Tensor, group: SharedMemoryCollectives) -> int:
    """Number of operations in a round: the same on all ranks."""
    _time(operation, x, 5)
    each = torch.tensor([_time(operation, x, 10)])
    return max(3, int(_ROUND_S / float(group.all_gather(each).max())))


def _time(operation: Callable[[Tensor], object], x: Tensor, count: int) -> float:
    """Seconds of one operation, where `count` come one after the other."""
    operation(x)
    start = time.perf_counter()
    for _ in range(count):
        operation(x)
    return (time.perf_counter() - start) / count


if __name__ == "__main__":
    _app()
