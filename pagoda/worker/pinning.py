"""Each OpenMP thread of a worker on a core of its own.

The OpenMP library reads where its threads belong when it is loaded, and puts each there when it starts it; so this
comes before torch, which brings the library along.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, MutableMapping
from pathlib import Path

_TOPOLOGY = Path("/sys/devices/system/cpu")


def places(allowed: Iterable[int], topology: Path = _TOPOLOGY) -> list[int]:
    """The cores `allowed`, in the order in which threads take them.

    Hyper-threads of one core share its arithmetic, so each core comes once before any comes twice.
    """
    cores = sorted(allowed)
    seen: dict[str, int] = {}
    turns = {}
    for core in cores:
        siblings = _siblings(core, topology)
        turns[core] = seen[siblings] = seen.get(siblings, -1) + 1
    return sorted(cores, key=lambda core: (turns[core], core))


def _siblings(core: int, topology: Path) -> str:
    try:
        return (topology / f"cpu{core}/topology/thread_siblings_list").read_text(encoding="ascii")
    except OSError:
        return str(core)


def bind_threads(cores: Iterable[int], environment: MutableMapping[str, str]) -> None:
    """Tells the OpenMP library that is loaded later to bind thread i to the i-th of `cores`."""
    environment["OMP_PROC_BIND"] = "close"
    environment["OMP_PLACES"] = ",".join(f"{{{core}}}" for core in cores)


def bind_this_thread(core: int) -> None:
    """The thread that calls is the first of every team; alone, it would never be bound."""
    os.sched_setaffinity(0, {core})
