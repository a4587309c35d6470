# SPDX-License-Identifier: Apache-2.0
"""Cores of a worker's threads: a part of the host's, and each OpenMP thread on a core of its own.

The OpenMP library reads where its threads belong when it is loaded, and puts each there when it starts it; so this
comes before torch, which brings the library along.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, MutableMapping
from pathlib import Path

import msgspec

from pagoda.devices import HOST_KIND, num_cpu_devices
from pagoda.ipc.cores import SYSTEM, choose_cores, memory_nodes
from pagoda.ipc.machine import available_cores
from pagoda.messages.worker_config import WorkerConfig

SPIN_COUNT = "2000"
"""Some fifty microseconds: the threads of one step wait for each other awake, those of an idle worker sleep."""
_TOPOLOGY = SYSTEM / "system/cpu"
_CPUINFO = Path("/proc/cpuinfo")


def set_library_options(environ: MutableMapping[str, str]) -> None:
    """Sets options of the libraries that torch brings along, unless the operator did; they read them when loaded.

    OpenMP threads wait for each other awake for a while: between two operations of a step a wait is shorter than
    falling asleep and waking up. Spinning on for longer would take the cores from engine and frontend.
    """
    set_order_of_sums(environ)
    environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)


def set_order_of_sums(environ: MutableMapping[str, str]) -> None:
    """Sets one order of MKL's sums for any number of threads, which changes it on Xeons with AMX.

    See "Conditional numerical reproducibility" in Intel's guide. On processors of others it does so already, and
    might take this for a wish for its slowest code.
    """
    with contextlib.suppress(OSError):
        if "GenuineIntel" in _CPUINFO.read_text(encoding="ascii", errors="replace"):
            environ.setdefault("MKL_CBWR", "AUTO,STRICT")


def bind(config: WorkerConfig, system: Path = SYSTEM) -> tuple[WorkerConfig, set[int]]:
    """Binds this process, and its threads with `pin_threads`, to its cores.

    Returns the configuration with the number of threads, and the cores.

    One of several workers keeps to its part of the cores where devices were named or threads are pinned.
    Slow cores are left out unless a number of threads was named.
    """
    cores = os.sched_getaffinity(0)
    choice = choose_cores(cores, system)
    if config.num_threads is None and choice.slow:
        cores = set(choice.cores)
        os.sched_setaffinity(0, cores)
    # Counted now: a process that is bound to a part sees the cores of that part only.
    num_threads = config.num_threads or max(1, available_cores() // config.workers_on_host)
    devices = config.parallel.devices_of(config.place)
    is_named = len(config.parallel.devices) > 0 and devices.kind == HOST_KIND
    if is_named or (config.pin_threads and config.workers_on_host > 1):
        count = num_cpu_devices(len(cores), config.workers_on_host, config.num_threads)
        cores = part_of_cores(cores, devices.numbers[0] % count, count, system)
        os.sched_setaffinity(0, cores)
    if config.pin_threads:
        _pin_threads(places(cores))
    return msgspec.structs.replace(config, num_threads=num_threads), cores


@contextlib.contextmanager
def free_threads(cores: set[int]) -> Iterator[None]:
    """Threads that are started within may use all of `cores`, also when this one, whose binding they inherit, is
    bound to one of them: it computes there, and the others of its team would wait for it."""
    bound = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, bound)


def part_of_cores(
    allowed: Iterable[int], index: int, count: int, system: Path = SYSTEM
) -> set[int]:
    """The `index`-th of `count` equal parts of the cores.

    Cores of one memory node, and hyper-threads of one core, lie in one part where possible; with fewer cores than
    parts, parts share them.
    """
    topology = system / "system/cpu"
    cores: list[int] = []
    for node in memory_nodes(allowed, system):
        first_of_core: dict[str, int] = {}
        for core in sorted(node):
            first_of_core.setdefault(_siblings(core, topology), core)
        order = [(first_of_core[_siblings(core, topology)], core) for core in node]
        cores += [core for _, core in sorted(order)]
    size = len(cores) // count
    if size == 0:
        return {cores[index % len(cores)]}
    return set(cores[index * size : (index + 1) * size])


def _pin_threads(cores: list[int]) -> None:
    bind_threads(cores, os.environ)
    import torch  # noqa: F401 - loaded while all cores are allowed still

    # The thread that calls is the first of every team; alone, it would never be bound.
    os.sched_setaffinity(0, {cores[0]})


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
