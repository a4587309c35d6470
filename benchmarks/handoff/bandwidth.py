# SPDX-License-Identifier: Apache-2.0
"""KV between two processes of this host over every transport, beside plain copies of as many bytes.

One process holds the memory, this one reads it: in one piece, and in pieces of a block, as they come when blocks
lie anywhere. The plain copies are a socket that one side sends all into and the other receives from, and memory
that both have mapped. All take turns, so that what else the machine does falls on all alike.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from cyclopts import App

from benchmarks.handoff.bandwidth_exporter import HOST, SECRET
from pagoda.cli import output
from pagoda.ipc.machine import format_bytes
from pagoda.kv.memory import OwnMemory, Region
from pagoda.plugins.disaggregation.transport.base import Access, MemoryLink, MemorySpan
from pagoda.plugins.disaggregation.transport.choose import TRANSPORTS

_SOCKET, _MAPPED = "plain socket", "plain mapped memory"
_BESIDE = {"shm": _MAPPED}
"""Baseline of each transport; the others are compared with the socket."""
_PATIENCE_S = 60.0


def bandwidth(
    *,
    transports: str = "shm,tcp,nixl,mooncake",
    num_bytes: int = 2**26,
    block_bytes: int = 2**15,
    repeats: int = 15,
) -> None:
    """Measure how fast KV goes from one process to another, beside plain copies.

    Args:
        transports: Those to be measured.
        num_bytes: Read in a round.
        block_bytes: Of one piece, where not all is one; by default K or V of a layer of Qwen3-0.6B, 16 tokens.
        repeats: Rounds; medians are shown.
    """
    names = [name for one in transports.split(",") for name in _variants(one)]
    exporter, told = _start_exporter(num_bytes, names)
    try:
        target = _Target(num_bytes)
        links = {
            name: _connect(name, target, bytes.fromhex(descriptor))
            for name, descriptor in told["descriptors"].items()
        }
        whole, pieces = target.spans(num_bytes), target.spans(block_bytes)
        ways: dict[tuple[str, str], Callable[[], None]] = {
            (_SOCKET, "whole"): _plain_socket(told["port"], target),
            (_MAPPED, "whole"): _plain_mapping(told["file"], target),
        }
        for name, link in links.items():
            ways[name, "whole"] = _read(link, whole)
            ways[name, "pieces"] = _read(link, pieces)
        times: dict[tuple[str, str], list[float]] = {way: [] for way in ways}
        for _ in range(repeats):
            for way, move in ways.items():
                began = time.perf_counter()
                move()
                times[way].append(time.perf_counter() - began)
        _report(
            {way: num_bytes / statistics.median(s) / 1e9 for way, s in times.items()}, num_bytes
        )
        for name, problem in told["problems"].items():
            output.stdout().print(f"{name}: {problem}")
        for link in links.values():
            link.close()
    finally:
        exporter.kill()
        exporter.wait()


def _variants(name: str) -> tuple[str, ...]:
    return (name, "tcp, encrypted") if name == "tcp" else (name,)


def _start_exporter(
    num_bytes: int, names: list[str]
) -> tuple[subprocess.Popen[str], dict[str, Any]]:
    command = [
        sys.executable,
        "-m",
        "benchmarks.handoff.bandwidth_exporter",
        str(num_bytes),
        *names,
    ]
    pipe = subprocess.PIPE
    exporter = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)
    if exporter.stdout is not None:
        for line in exporter.stdout:  # libraries may say something before
            if line.startswith("HOLDS "):
                told: dict[str, Any] = json.loads(line.removeprefix("HOLDS "))
                return exporter, told
    raise RuntimeError("The process that holds the memory has ended.")


class _Target:
    """Memory to read into, in large pages as a KV cache has them, and written to once before."""

    def __init__(self, num_bytes: int) -> None:
        self._memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._memory.madvise(mmap.MADV_HUGEPAGE)
        self.view = memoryview(self._memory)
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        ctypes.memset(address, 1, num_bytes)
        self.region = Region(address, num_bytes)

    def spans(self, size: int) -> list[MemorySpan]:
        end = self.region.num_bytes
        return [
            MemorySpan(0, start, min(size, end - start), self.region.address + start)
            for start in range(0, end, size)
        ]


def _connect(name: str, target: _Target, descriptor: bytes) -> MemoryLink:
    kind, _, _ = name.partition(", ")
    transport = TRANSPORTS[kind](OwnMemory((target.region,)), Access(HOST, SECRET))
    return transport.connect(descriptor, time.monotonic() + _PATIENCE_S)


def _read(link: MemoryLink, spans: list[MemorySpan]) -> Callable[[], None]:
    return lambda: link.read(spans, time.monotonic() + _PATIENCE_S)


def _plain_socket(port: int, target: _Target) -> Callable[[], None]:
    stream = socket.create_connection((HOST, port))

    def copy() -> None:
        stream.sendall(b"x")
        left = target.view
        while left:
            left = left[stream.recv_into(left) :]

    return copy


def _plain_mapping(path: str, target: _Target) -> Callable[[], None]:
    descriptor = os.open(path, os.O_RDWR)
    # Shared by nobody who writes to it, as the file does not allow that; reading is the same.
    mapped = mmap.mmap(descriptor, target.region.num_bytes, flags=mmap.MAP_PRIVATE)
    os.close(descriptor)
    source = ctypes.addressof(ctypes.c_char.from_buffer(mapped))

    def copy() -> None:
        ctypes.memmove(target.region.address, source, mapped.size())

    return copy


def _report(speeds: dict[tuple[str, str], float], num_bytes: int) -> None:
    rows = []
    for name in dict.fromkeys(name for name, _ in speeds):
        whole, pieces = speeds[name, "whole"], speeds.get((name, "pieces"))
        beside = _BESIDE.get(name, _SOCKET)
        share = "" if pieces is None else f"{whole / speeds[beside, 'whole']:.0%} of {beside}"
        shown = "" if pieces is None else f"{pieces:.2f} GB/s"
        rows.append([name, f"{whole:.2f} GB/s", share, shown])
    columns = (format_bytes(num_bytes), "in one piece", "", "in blocks")
    output.stdout().print(output.table("", columns, rows))


if __name__ == "__main__":
    App(default_command=bandwidth, result_action="return_value")()
    sys.stdout.flush()
    os._exit(0)  # not all that NIXL brings survives being taken down
