# SPDX-License-Identifier: Apache-2.0
"""Cores and memory that this process may use, container limits included.

Affinity masks and control groups (versions 1 and 2) are read where the kernel keeps them. A limit may be set on
any ancestor of the process's own group, so the tightest on the way up counts.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import psutil

from pagoda.messages.load import ProcessMemory

_ROOT = Path("/")


def available_cores() -> int:
    """Cores that this process may keep busy: affinity and CPU quota, rounded down, at least 1."""
    cores = float(_affinity())
    quota = cgroup_cores(_ROOT)
    return max(1, int(cores if quota is None else min(cores, quota)))


def available_memory_bytes() -> int:
    """Memory that can still be taken without swapping: the machine's, or what the container has left."""
    free: int = psutil.virtual_memory().available
    left = cgroup_memory_left_bytes(_ROOT)
    return free if left is None else min(free, left)


def process_memory_bytes(pid: int) -> int | None:
    """Resident bytes of a process, shared pages included; None if they are not known, or it has ended."""
    try:
        return int(psutil.Process(pid).memory_info().rss)
    except psutil.Error:
        return None


def memory_of(pids: Mapping[str, int]) -> tuple[ProcessMemory, ...]:
    """Memory of processes, by their roles, as far as it is known."""
    return tuple(
        ProcessMemory(role, pid, resident_bytes)
        for role, pid in pids.items()
        if (resident_bytes := process_memory_bytes(pid)) is not None
    )


def cgroup_cores(root: Path) -> float | None:
    """The CPU quota in cores of the control groups under `root`; None where none is set."""
    quotas = []
    for group in _groups(root, "cpu"):
        values = _words(group / "cpu.max") or [
            *_words(group / "cpu.cfs_quota_us"),
            *_words(group / "cpu.cfs_period_us"),
        ]
        if len(values) == 2 and values[0].isdecimal() and int(values[1]) > 0:
            quotas.append(int(values[0]) / int(values[1]))
    return min(quotas, default=None)


def cgroup_memory_left_bytes(root: Path) -> int | None:
    """Memory limit less what is in use, of the control groups under `root`; None where no limit is set.

    File pages are given back under pressure, so they count as left, also those that were read twice, as several
    ranks read the weights of one file.
    """
    left = []
    for group in _groups(root, "memory"):
        for limit_file, usage_file, prefix in (
            ("memory.max", "memory.current", ""),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
        ):
            limit, usage = _number(group / limit_file), _number(group / usage_file)
            if limit is not None and usage is not None:
                reclaimable = sum(
                    _statistic(group / "memory.stat", f"{prefix}{kind}_file")
                    for kind in ("active", "inactive")
                )
                left.append(max(0, limit - usage + reclaimable))
    return min(left, default=None)


def _affinity() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _groups(root: Path, controller: str) -> Iterator[Path]:
    """The directories of this process's control group and its ancestors, for one controller."""
    base = root / "sys/fs/cgroup"
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        mount = base / controller if controllers else base
        group = mount / path.lstrip("/")
        while group.is_relative_to(mount):
            yield group
            group = group.parent


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except (OSError, UnicodeDecodeError):
        return []


def _words(path: Path) -> list[str]:
    return [word for line in _lines(path) for word in line.split()]


def _number(path: Path) -> int | None:
    words = _words(path)
    return int(words[0]) if len(words) == 1 and words[0].isdecimal() else None


def _statistic(path: Path, key: str) -> int:
    for line in _lines(path):
        name, _, value = line.partition(" ")
        if name == key and value.isdecimal():
            return int(value)
    return 0


def format_bytes(amount: float) -> str:
    """`amount` with a binary unit and about three digits: `1.11 GiB`."""
    power = min(3, max(0, math.frexp(amount)[1] - 1) // 10)
    value = amount / 2 ** (10 * power)
    digits = 0 if power == 0 or value >= 100 else 1 if value >= 10 else 2
    return f"{value:.{digits}f} {('B', 'KiB', 'MiB', 'GiB')[power]}"
