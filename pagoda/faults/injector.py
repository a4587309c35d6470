# SPDX-License-Identifier: Apache-2.0
"""Faults of one process. Whoever joins its parts wraps functions at named points (`Faults.before`, `.messages`); a
point without faults leaves its function as it is, so that it costs nothing.

What comes at a pass depends on the schedule, the process (its kind, instance and rank), and the number of passes
before. So a run whose passes come in the same order, as on the simulated executor, meets the same faults.
"""

from __future__ import annotations

import errno
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any, TypeVar, cast

import msgspec

from pagoda.faults.schedule import FaultEntry, parse_schedule, schedule_of
from pagoda.ipc.clock import Clock

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])

_log = logging.getLogger(__name__)
_MESSAGE_ACTIONS = frozenset({"drop", "double", "reorder", "corrupt"})
_ERRNOS = {"enospc": errno.ENOSPC, "eio": errno.EIO, "erofs": errno.EROFS}


class FaultPlan(msgspec.Struct, frozen=True):
    """Faults as a process is told of them at its start."""

    schedule: str
    """A schedule that `parse_schedule` takes."""
    instance: int = 1
    """Number of the process among those of its kind that its parent has started."""


class InjectedFaultError(Exception):
    """An error that a schedule asks for."""


@dataclass(frozen=True)
class Fault:
    action: str
    value: float
    """Seconds, of actions that take time."""


class FaultPoint:
    """A point at which the schedule has faults. Passes may come from any thread."""

    def __init__(self, name: str, entries: Sequence[FaultEntry], seed: str) -> None:
        self._name = name
        self._entries = [(entry, entry.times(seed)) for entry in entries]
        self._lock = threading.Lock()
        self._held: list[tuple[Any, ...]] = []
        """Arguments of a message that comes behind the next one."""

    def due(self, subjects: Iterable[str] = ()) -> list[Fault]:
        """Counts a pass that concerns `subjects`; returns its faults, which are not done yet."""
        subjects = list(subjects)
        with self._lock:
            entries = [
                entry for entry, times in self._entries if entry.concerns(subjects) and next(times)
            ]
        for entry in entries:
            _log.warning("injects a fault: %s", entry.source)
        return [Fault(entry.action, entry.value) for entry in entries]

    def hit(self, subjects: Iterable[str] = ()) -> set[str]:
        """Counts a pass and does its faults; returns actions that are the caller's to do.

        Raises InjectedFaultError, MemoryError or OSError where the schedule asks for them.
        """
        return self._do(self.due(subjects))

    def _do(self, faults: list[Fault]) -> set[str]:
        left = set()
        for fault in faults:
            match fault.action:
                case "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                case "crash":
                    os.kill(os.getpid(), signal.SIGSEGV)
                case "stop":
                    os.kill(os.getpid(), signal.SIGSTOP)
                case "slow":
                    time.sleep(fault.value)
                case "hang":
                    threading.Event().wait()
                case "raise":
                    raise InjectedFaultError(f"injected at {self._name}")
                case "oom":
                    raise MemoryError(f"injected at {self._name}")
                case "enospc" | "eio" | "erofs":
                    number = _ERRNOS[fault.action]
                    raise OSError(number, os.strerror(number))
                case _:
                    left.add(fault.action)
        return left

    def before(
        self, function: FunctionT, subjects: Callable[..., Iterable[str]] | None = None
    ) -> FunctionT:
        """`function`, each call of which is a pass; `subjects` takes its arguments too."""

        @wraps(function)
        def passing(*args: Any, **kwargs: Any) -> Any:
            self.hit(() if subjects is None else subjects(*args, **kwargs))
            return function(*args, **kwargs)

        return cast(FunctionT, passing)

    def buffers(self, function: FunctionT) -> FunctionT:
        """`function`, which writes or fills the buffer that is its last argument."""

        def passing(*args: Any) -> None:
            actions = self.hit()
            if "corrupt" in actions:
                _corrupt(args[-1])  # of what is written
            function(*args)
            if "corrupt" in actions:
                _corrupt(args[-1])  # of what was read

        return cast(FunctionT, passing)

    def messages(self, function: FunctionT) -> FunctionT:
        """`function`, which takes a message as its last argument (bytes, or frames) and returns nothing."""

        def passing(*args: Any) -> None:
            held, self._held = self._held, []
            actions = self.hit()
            if "corrupt" in actions:
                args = (*args[:-1], _corrupted(args[-1]))
            if "reorder" in actions:
                self._held = [args]
            elif "drop" not in actions:
                function(*args)
            if "double" in actions:
                function(*args)
            for before in held:
                function(*before)

        return cast(FunctionT, passing)


def _corrupted(message: bytes | list[bytes]) -> bytes | list[bytes]:
    if isinstance(message, list):
        return [*message[:-1], cast(bytes, _corrupted(message[-1]))]
    middle = len(message) // 2
    return (
        message[:middle] + bytes([message[middle] ^ 0xFF]) + message[middle + 1 :]
        if message
        else message
    )


def _corrupt(buffer: memoryview) -> None:
    buffer[len(buffer) // 2] ^= 0xFF


class JumpingClock:
    """A clock that goes ahead at once now and then, as that of a machine that was asleep."""

    def __init__(self, clock: Clock, point: FaultPoint) -> None:
        self._clock = clock
        self._point = point
        self._ahead_s = 0.0

    def now(self) -> float:
        self._ahead_s += sum(fault.value for fault in self._point.due())
        return self._clock.now() + self._ahead_s


class Faults:
    """The points of one process."""

    def __init__(self, plan: FaultPlan | None, rank: str = "") -> None:
        """`rank` tells processes of one kind apart; None injects nothing."""
        self.plan = plan
        self._rank = rank
        schedule = None if plan is None else parse_schedule(plan.schedule)
        self._seed = 0 if schedule is None else schedule.seed
        self._entries = () if schedule is None else schedule.entries

    def point(self, name: str) -> FaultPoint | None:
        """The point of that name; None if nothing happens there."""
        if self.plan is None:
            return None
        instance = self.plan.instance
        entries = [
            entry
            for entry in self._entries
            if entry.point == name and entry.instance in (None, instance)
        ]
        if not entries:
            return None
        return FaultPoint(name, entries, f"{self._seed} {instance} {self._rank} {name}")

    def before(
        self, name: str, function: FunctionT, subjects: Callable[..., Iterable[str]] | None = None
    ) -> FunctionT:
        """`function` behind the point, or as it is; see `FaultPoint.before`."""
        point = self.point(name)
        return function if point is None else point.before(function, subjects)

    def clock(self, name: str, clock: Clock) -> Clock:
        """`clock`, which jumps at the point, or as it is."""
        point = self.point(name)
        return clock if point is None else JumpingClock(clock, point)

    def buffers(self, name: str, function: FunctionT) -> FunctionT:
        """`function` behind the point, or as it is; see `FaultPoint.buffers`."""
        point = self.point(name)
        return function if point is None else point.buffers(function)

    def messages(self, name: str, function: FunctionT) -> FunctionT:
        """`function` behind the point, or as it is; see `FaultPoint.messages`."""
        point = self.point(name)
        return function if point is None else point.messages(function)


def plan_of(environ: Mapping[str, str]) -> FaultPlan | None:
    """The faults that the environment asks for. Raises ConfigError as `schedule_of` does."""
    schedule = schedule_of(environ)
    return FaultPlan(schedule) if schedule else None


def instance(plan: FaultPlan | None, number: int) -> FaultPlan | None:
    """The plan for the process of that number."""
    return None if plan is None else msgspec.structs.replace(plan, instance=number)
