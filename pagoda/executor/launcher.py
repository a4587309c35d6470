# SPDX-License-Identifier: Apache-2.0
"""Launchers start the worker processes of one replica, wherever they run; here, as children of this process."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Protocol

import msgspec

from pagoda.executor.base import WorkerLost
from pagoda.ipc.clock import Clock, MonotonicClock
from pagoda.ipc.lifeline import ChildProcess, Reaper
from pagoda.messages.worker_config import WorkerConfig

WORKER_MODULE = "pagoda.worker.main"
WINDOW_S = 3600.0
"""Seconds for which a worker's end from outside counts."""
MAX_FREE_ENDS = 24
"""Ends from outside within `WINDOW_S` that no request is suspected of."""


class WorkerSet(Protocol):
    """The workers of one start, until they are closed."""

    def pollables(self) -> list[object]:
        """Sockets or files that become readable when a worker has ended (as `zmq.Poller` takes them)."""
        ...

    @property
    def are_placed(self) -> bool:
        """All workers have a host to run on; False while there is no room for them."""
        ...

    @property
    def pids(self) -> dict[str, int]:
        """Process ids of the workers on this host, by `worker_name`."""
        ...

    def lost(self) -> WorkerLost | None:
        """Returns how the first worker ended, or why workers cannot be started; None while all live."""
        ...

    def explained(self, loss: WorkerLost) -> WorkerLost:
        """The loss of workers that live and do not answer, with what is known of why they do not."""
        ...

    def close(self) -> None:
        """Ends all workers, and does not wait. May be called twice."""
        ...


class Launcher(Protocol):
    first_word_s: float
    """Seconds that the process of a worker that has a host may take to connect, before all large imports."""

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
    return f"worker {config.place.in_replica}"


class OutsideEnds:
    """Counts workers that a person or another program has ended or stopped, which is no fault of a request.

    A program that ends workers again and again may do so because of what a request makes of them (a daemon that
    guards memory, say). So requests are suspected of such ends, too, beyond `MAX_FREE_ENDS` within `WINDOW_S`.
    """

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or MonotonicClock()
        self._times: deque[float] = deque()
        """Times of the ends within the window, the earliest first."""

    def loss(self, reason: str, *, is_from_outside: bool) -> WorkerLost:
        """The loss of workers for `reason`, a clause; `is_from_outside` is what its `ChildProcess` says
        (`was_ended_from_outside`, `is_stopped`)."""
        if not is_from_outside:
            return WorkerLost(reason)
        now = self._clock.now()
        self._times.append(now)
        while now - self._times[0] > WINDOW_S:
            self._times.popleft()
        return WorkerLost(reason, suspicion=int(len(self._times) > MAX_FREE_ENDS))


class LocalLauncher:
    """Starts workers on this host, each set once the one before it is gone: their memory is needed."""

    first_word_s = 60.0

    def __init__(self, module: str = WORKER_MODULE, clock: Clock | None = None) -> None:
        self.module = module
        self.outside_ends = OutsideEnds(clock)
        self.reaper: Reaper | None = None
        """Waits for the last set that was ended."""

    def launch(self, configs: Sequence[WorkerConfig], address: str) -> LocalWorkers:
        return LocalWorkers(self, configs, address)


class LocalWorkers:
    def __init__(
        self, launcher: LocalLauncher, configs: Sequence[WorkerConfig], address: str
    ) -> None:
        self._launcher = launcher
        self._configs = configs
        self._address = address
        self._children: dict[str, ChildProcess] = {}
        self._start_if_alone()

    def _start_if_alone(self) -> None:
        reaper = self._launcher.reaper
        if self.are_placed or (reaper is not None and reaper.is_alive()):
            return
        if reaper is not None:
            reaper.close()
        for config in self._configs:
            self._children[worker_name(config)] = ChildProcess(
                self._launcher.module, [self._address], config=msgspec.msgpack.encode(config)
            )

    @property
    def are_placed(self) -> bool:
        return bool(self._children)

    @property
    def pids(self) -> dict[str, int]:
        return {name: child.pid for name, child in self._children.items()}

    def pollables(self) -> list[object]:
        return list(self._children.values()) if self.are_placed else [self._launcher.reaper]

    def lost(self) -> WorkerLost | None:
        self._start_if_alone()
        ended = {name: child for name, child in self._children.items() if not child.is_alive()}
        # Others that exit because of one that was killed are not the reason, nor are those that abort because of
        # one that was ended from outside.
        outside = [name for name, child in ended.items() if child.was_ended_from_outside()]
        killed = [name for name, child in ended.items() if child.was_killed()]
        names = outside or killed or list(ended)
        if not names:
            return None
        reason = f"{names[0]} {ended[names[0]].describe_end()}"
        return self._launcher.outside_ends.loss(reason, is_from_outside=bool(outside))

    def explained(self, loss: WorkerLost) -> WorkerLost:
        """No request is suspected of a worker that was stopped from outside."""
        stopped = next((name for name, child in self._children.items() if child.is_stopped()), None)
        if stopped is None:
            return loss
        reason = f"{loss.reason} ({stopped} was stopped)"
        return self._launcher.outside_ends.loss(reason, is_from_outside=True)

    def close(self) -> None:
        if self.are_placed:
            self._launcher.reaper = Reaper(self._children.values())
