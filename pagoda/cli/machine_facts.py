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
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import psutil

from pagoda.ipc.machine import available_cores, available_memory_bytes, cgroup_cores

_NOTABLE = (
    "avx2",
    "fma",
    "avx512f",
    "avx512_bf16",
    "avx512_vnni",
    "avx512_fp16",
    "amx_bf16",
    "amx_int8",
    "asimd",
    "asimddp",
    "bf16",
    "i8mm",
    "sve",
    "sve2",
)
"""Instruction sets that matter to matrix products, on x86-64 and on Arm."""

_QUERY_TIMEOUT_S = 10.0
_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")


@dataclass(frozen=True)
class Cores:
    """CPU cores of the machine, those that this process may run on, and those it may use in full."""

    machine: int
    allowed: int
    quota: float | None
    """Cores that the container may use; None without a limit."""
    usable: int
    """The whole cores within both: threads of a worker."""


def cores() -> Cores:
    machine = os.cpu_count() or 1
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else machine
    quota = cgroup_cores(Path("/"))
    return Cores(machine=machine, allowed=allowed, quota=quota, usable=available_cores())


def total_memory_bytes() -> int:
    total: int = psutil.virtual_memory().total
    return total


def last_level_cache_bytes() -> int:
    """The largest cache of the first core; 0 where Linux does not say."""
    sizes = [
        int(path.read_text(encoding="ascii").strip().removesuffix("K")) * 1024
        for path in _CACHES.glob("index*/size")
    ]
    return max(sizes, default=0)


def free_memory_bytes() -> int:
    """Bytes of memory that this process may still take, container limit included."""
    return available_memory_bytes()


def cpu_name(cpuinfo: str) -> str:
    match = re.search(r"^model name\s*:\s*(.+)$", cpuinfo, re.MULTILINE)
    return match.group(1).strip() if match else platform.machine()


def instruction_sets(cpuinfo: str) -> list[str]:
    """The notable instruction sets that the text of /proc/cpuinfo lists."""
    match = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", cpuinfo, re.MULTILINE)
    present = set(match.group(1).split()) if match else set()
    return [name for name in _NOTABLE if name in present]


def read_cpuinfo() -> str:
    path = Path("/proc/cpuinfo")
    return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""


def accelerators() -> list[str]:
    """One line for each NVIDIA GPU and Ascend NPU that the vendor's tool lists."""
    return [*_nvidia_gpus(), *_ascend_npus()]


def _nvidia_gpus() -> list[str]:
    query = "--query-gpu=name,memory.total"
    lines = _output("nvidia-smi", query, "--format=csv,noheader").splitlines()
    return [f"NVIDIA GPU: {line.strip()}" for line in lines if line.strip()]


def _ascend_npus() -> list[str]:
    listing = _output("npu-smi", "info", "-l")
    return [f"Ascend NPU {number}" for number in re.findall(r"NPU ID\s*:\s*(\d+)", listing)]


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

Scan = Callable[[int, int, int], int | None]


@dataclass(frozen=True)
class Bandwidth:
    bytes_per_s: float
    """The median pass: what can be kept up."""
    best_bytes_per_s: float
    threads: int
    passes: int
    buffer_bytes: int
    """Bytes of each thread's buffer."""


def measure_read_bandwidth(threads: int, memory_bytes: int) -> Bandwidth:
    """Reads with `threads` threads at once, over buffers that take a small part of `memory_bytes`."""
    size = min(_MAX_BUFFER_BYTES, max(_MIN_BUFFER_BYTES, memory_bytes // (8 * threads)))
    scan = _memchr()
    with ThreadPoolExecutor(threads) as pool:
        buffers = list(pool.map(_filled_buffer, [size] * threads))
        addresses = [_address(buffer) for buffer in buffers]
        seconds = [_time_pass(pool, scan, addresses, size) for _ in range(_PASSES)]
    return Bandwidth(
        bytes_per_s=size * threads / statistics.median(seconds),
        best_bytes_per_s=size * threads / min(seconds),
        threads=threads,
        passes=_PASSES,
        buffer_bytes=size,
    )


def _memchr() -> Scan:
    memchr = ctypes.CDLL(None).memchr
    memchr.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t)
    memchr.restype = ctypes.c_void_p
    scan: Scan = memchr
    return scan


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


def _time_pass(pool: ThreadPoolExecutor, scan: Scan, addresses: list[int], size: int) -> float:
    start = time.perf_counter()
    list(pool.map(lambda address: scan(address, _ABSENT, size), addresses))
    return time.perf_counter() - start
