"""Launchers start the worker processes of one replica, wherever they run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from pagoda.executor.base import WorkerLost
from pagoda.messages.worker_config import WorkerConfig


class WorkerSet(Protocol):
    """The workers of one start, until they are closed."""

    def pollables(self) -> list[object]:
        """Sockets or files that become readable when a worker has ended (as `zmq.Poller` takes them)."""
        ...

    @property
    def are_placed(self) -> bool:
        """All workers have a host to run on; False while a cluster has no room for them."""
        ...

    @property
    def pids(self) -> dict[str, int]:
        """Process ids of the workers on this host, by `worker_name`."""
        ...

    def lost(self) -> WorkerLost | None:
        """Returns how the first worker ended, or why workers cannot be started; None while all live."""
        ...

    def close(self) -> None:
        """Ends all workers and waits until they have ended. May be called twice."""
        ...


class Launcher(Protocol):
    def launch(self, configs: Sequence[WorkerConfig], address: str) -> WorkerSet:
        """Starts `python -m pagoda.worker.main ADDRESS` for each config, which it gives over standard input.

        `configs` are in the order of `ParallelConfig.places`. What depends on the host that a worker comes to
        (`bind_host`, `workers_on_host`, `host_memory_bytes`) is the launcher's to fill in. Does not wait.
        """
        ...


def worker_name(config: WorkerConfig) -> str:
    """Name of a worker in messages: `the worker`, or `worker pp1 tp0` for one of several."""
    if config.parallel.replica_size == 1:
        return "the worker"
    return f"worker pp{config.place.pp} tp{config.place.tp}"
