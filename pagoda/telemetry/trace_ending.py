"""The end of a trace beside a loop that serves, and must not wait for a disk."""

from __future__ import annotations

import contextlib
import os
import queue
import threading
from collections.abc import Callable
from functools import partial

from pagoda.telemetry.fragments import CLOSING_S
from pagoda.telemetry.tracer import Tracer

EXIT_S = 2.0
"""Seconds that a process which ends waits for its disk."""


class TraceEnding:
    """Ends traces of this process, one at a time. Belongs to the loop, which polls `pollables`."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        self._number = 0
        """Number of the trace whose end is waited for; reports of earlier traces are dropped."""
        self._is_under_way = False
        self._ended: queue.SimpleQueue[tuple[int, list[str]]] = queue.SimpleQueue()
        self._bell: int | None = None
        self._lock = threading.Lock()
        """Guards the bell: threads that wait for a hanging disk may ring it at any time."""

    @property
    def pollables(self) -> list[object]:
        """The bell, which is readable once `take` has news; nothing if no trace ends."""
        return [self._bell] if self._is_under_way else []

    def begin(self) -> None:
        """Traces no longer, and does not wait. Does nothing while an end is under way."""
        if self._is_under_way:
            return
        if self._bell is None:
            self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._is_under_way = True
        finish = partial(self._finish, self._number, self._tracer.end())
        try:
            threading.Thread(
                target=finish, args=(CLOSING_S,), name="trace-ending", daemon=True
            ).start()
        except RuntimeError:  # there are too many threads
            finish(0.0)

    def _finish(self, number: int, finish: Callable[[float], list[str]], timeout_s: float) -> None:
        self._ended.put((number, finish(timeout_s)))
        with self._lock:
            if self._bell is not None:
                os.eventfd_write(self._bell, 1)

    def take(self) -> list[str] | None:
        """Sentences about what is missing in the fragment that is closed now; None if none was closed since the
        last call."""
        if not self._is_under_way or self._bell is None:
            return None
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._bell)
        while not self._ended.empty():
            number, problems = self._ended.get()
            if number == self._number:
                self._is_under_way = False
                return problems
        return None

    def forget(self) -> None:
        """Another trace begins: nobody wants to know of the last one any more."""
        self._number += 1
        self._is_under_way = False

    def close(self) -> None:
        """The process ends; waits for the disk, but not for long."""
        self._tracer.stop(EXIT_S)
        with self._lock:
            if self._bell is not None:
                os.close(self._bell)
                self._bell = None
        self._is_under_way = False
