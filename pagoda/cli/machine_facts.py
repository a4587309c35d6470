# SPDX-License-Identifier: Apache-2.0
"""Facts about this machine, as Linux reports them; nothing is changed and nothing heavy imported."""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import re
import shutil
import statistics
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from pagoda.ipc.cores import SYSTEM, choose_cores, format_cores, memory_nodes
from pagoda.ipc.machine import available_cores, available_memory_bytes, cgroup_cores

_X86 = "avx2 fma avx_vnni avx512f avx512_bf16 avx512_vnni avx512_fp16 amx_bf16 amx_int8"
_ARM = "asimd asimddp bf16 i8mm sve sve2"
"""Instruction sets that matter to matrix products, as /proc/cpuinfo names them."""

_QUERY_TIMEOUT_S = 10.0
_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")


def cores() -> str:
    """The cores of the machine, those that this process may run on, and the limit of its container."""
    quota = cgroup_cores(Path("/"))
    return (
        f"{len(os.sched_getaffinity(0))} of {os.cpu_count()} allowed by affinity, container quota "
        + ("none" if quota is None else f"{quota:g}")
    )


def worker_threads(system: Path = SYSTEM) -> tuple[int, str]:
    """Threads that a worker has by default, and a line that says on which cores and why."""
    choice = choose_cores(os.sched_getaffinity(0), system)
    threads = min(len(choice.cores), available_cores())
    if not choice.slow:
        return threads, f"{threads} for a worker; --threads chooses another number"
    return threads, (
        f"{threads} for a worker, on the fast cores {format_cores(choice.cores)}: "
        f"{choice.evidence} tells them from {format_cores(choice.slow)}; "
        "--threads takes another number, of all cores"
    )


def nodes(system: Path = SYSTEM) -> str:
    """Memory nodes of the cores that this process may run on, and how each rank keeps to its own."""
    found = memory_nodes(os.sched_getaffinity(0), system)
    if len(found) == 1:
        return "1"
    names = ",".join(f"cpu:{index}" for index in range(len(found)))
    return (
        f"{len(found)}, of the cores {'; '.join(map(format_cores, found))}: --tp {len(found)} --devices {names} "
        "keeps each rank, and the weights that it reads, on a node of its own"
    )


def last_level_cache_bytes() -> int:
    """The largest cache of the first core; 0 where Linux does not say."""
    sizes = [
        int(path.read_text(encoding="ascii").strip().removesuffix("K")) * 1024
        for path in _CACHES.glob("index*/size")
    ]
    return max(sizes, default=0)


def cpu_name(cpuinfo: str) -> str:
    match = re.search(r"^model name\s*:\s*(.+)$", cpuinfo, re.MULTILINE)
    return match.group(1).strip() if match else platform.machine()


def instruction_sets(cpuinfo: str) -> list[str]:
    """The notable instruction sets that the text of /proc/cpuinfo lists."""
    match = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", cpuinfo, re.MULTILINE)
    present = set(match.group(1).split()) if match else set()
    return [name for name in (*_X86.split(), *_ARM.split()) if name in present]


def accelerators() -> list[str]:
    """One line for each NVIDIA GPU and Ascend NPU that the vendor's tool lists."""
    gpus = _output("nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader")
    npus = re.findall(r"NPU ID\s*:\s*(\d+)", _output("npu-smi", "info", "-l"))
    return [
        *(f"NVIDIA GPU: {line.strip()}" for line in gpus.splitlines() if line.strip()),
        *(f"Ascend NPU {number}" for number in npus),
    ]


def _output(tool: str, *arguments: str) -> str:
    path = shutil.which(tool)
    if path is None:
        return ""
    try:
        done = subprocess.run(
            [path, *arguments], capture_output=True, text=True, timeout=_QUERY_TIMEOUT_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout


_PASSES = 32
_MIN_BUFFER_BYTES = 2**26
_MAX_BUFFER_BYTES = 2**28
_FILL, _ABSENT = 1, 255


@dataclass(frozen=True)
class Bandwidth:
    bytes_per_s: float
    """The median pass: what can be kept up."""
    best_bytes_per_s: float
    threads: int
    passes: int
    buffer_bytes: int
    """Bytes of each thread's buffer."""


def measure_read_bandwidth(threads: int, memory_bytes: int | None = None) -> Bandwidth:
    """Reads with `threads` threads at once, over buffers that take a small part of `memory_bytes`."""
    memory_bytes = memory_bytes or available_memory_bytes()
    size = min(_MAX_BUFFER_BYTES, max(_MIN_BUFFER_BYTES, memory_bytes // (8 * threads)))
    scan = ctypes.CDLL(None).memchr
    scan.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t)
    with ThreadPoolExecutor(threads) as pool:
        buffers = list(pool.map(_filled_buffer, [size] * threads))
        addresses = [_address(buffer) for buffer in buffers]
        seconds = []
        for _ in range(_PASSES):
            start = time.perf_counter()
            list(pool.map(lambda address: scan(address, _ABSENT, size), addresses))
            seconds.append(time.perf_counter() - start)
    return Bandwidth(
        bytes_per_s=size * threads / statistics.median(seconds),
        best_bytes_per_s=size * threads / min(seconds),
        threads=threads,
        passes=_PASSES,
        buffer_bytes=size,
    )


def _filled_buffer(size: int) -> mmap.mmap:
    # Pages that were never written are all one zero page, and pages that are alike may be merged;
    # either would be read from the cache. So every page begins with its own number, seven bits a byte.
    buffer = mmap.mmap(-1, size)
    ctypes.memset(_address(buffer), _FILL, size)
    for number, start in enumerate(range(0, size, mmap.PAGESIZE)):
        buffer[start : start + 4] = bytes((number >> shift) & 127 for shift in (0, 7, 14, 21))
    return buffer


def _address(buffer: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))
