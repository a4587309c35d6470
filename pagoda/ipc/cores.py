# SPDX-License-Identifier: Apache-2.0
"""Cores of this host by speed and by memory node, as Linux lists them under /sys/devices; nothing is measured."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TypeVar

_T = TypeVar("_T")

SYSTEM = Path("/sys/devices")
_NEARLY_AS_FAST = 0.75
"""Part of the highest speed from which a core counts as fast: cores of one kind differ by a few percent."""


@dataclass(frozen=True)
class CoreChoice:
    """Cores that a worker's threads run on unless the operator says otherwise."""

    cores: frozenset[int]
    slow: frozenset[int] = frozenset()
    """Cores that are left out."""
    evidence: str = ""
    """Source that tells slow cores; empty if none are slow."""


def choose_cores(allowed: Iterable[int], system: Path = SYSTEM) -> CoreChoice:
    """The fast ones of the cores `allowed`; all of them where the machine has more: somebody chose these.

    Threads of one step wait for each other, and slow cores take a share of the memory's bandwidth too.
    """
    cores = frozenset(allowed)
    if cores != _numbers(system / "system/cpu/online"):
        return CoreChoice(cores)
    fast = cores & _numbers(system / "cpu_core/cpus")
    slow = cores & _numbers(system / "cpu_atom/cpus")
    if fast and slow:
        return CoreChoice(cores - slow, slow, f"{system}/cpu_atom/cpus")
    for file in ("cpu_capacity", "cpufreq/cpuinfo_max_freq"):
        speeds = _speeds(cores, system, file)
        slow = frozenset(c for c in speeds if speeds[c] < _NEARLY_AS_FAST * max(speeds.values()))
        if slow:
            return CoreChoice(cores - slow, slow, f"{system}/system/cpu/cpu*/{file}")
    return CoreChoice(cores)


def memory_nodes(allowed: Iterable[int], system: Path = SYSTEM) -> tuple[frozenset[int], ...]:
    """The cores `allowed` by the memory that is near to them, in order of nodes, of those that have such cores.
    One set where Linux names no nodes."""
    cores = frozenset(allowed)
    paths = sorted(
        (system / "system/node").glob("node[0-9]*"),
        key=lambda path: int(path.name.removeprefix("node")),
    )
    found = tuple(own for path in paths if (own := cores & _numbers(path / "cpulist")))
    return found if frozenset().union(*found) == cores else (cores,)


def format_cores(cores: Iterable[int]) -> str:
    """Numbers as Linux writes them: `0-3,8`."""
    runs = [
        [core for _, core in run]
        for _, run in groupby(enumerate(sorted(cores)), lambda pair: pair[1] - pair[0])
    ]
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def _speeds(cores: frozenset[int], system: Path, file: str) -> Mapping[int, int]:
    """Number in a file of each core; empty unless all have one."""
    found = {core: _read(system / f"system/cpu/cpu{core}/{file}", int) for core in cores}
    speeds = {core: speed for core, speed in found.items() if speed is not None and speed > 0}
    return speeds if len(speeds) == len(cores) else {}


def _numbers(path: Path) -> frozenset[int]:
    return _read(path, _parse_cores) or frozenset()


def _parse_cores(text: str) -> frozenset[int]:
    cores: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cores.update(range(int(first), int(last or first) + 1))
    return frozenset(cores)


def _read(path: Path, parse: Callable[[str], _T]) -> _T | None:
    """Contents of a file; None where it is missing or holds something else."""
    try:
        return parse(path.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None
