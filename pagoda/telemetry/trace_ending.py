# SPDX-License-Identifier: Apache-2.0
"""The end of a trace beside a loop that serves, and must not wait for a disk."""

from __future__ import annotations

import contextlib
import os
import threading
from concurrent.futures import Future

from pagoda.telemetry.fragments import CLOSING_S
from pagoda.telemetry.tracer import Tracer

EXIT_S = 2.0
"""Seconds that a process which ends waits for its disk."""


class TraceEnding:
    """Ends traces of this process, one at a time. Belongs to the loop, which polls `pollables`."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        self._ended: Future[list[str]] | None = None
        """The end that is waited for; ends of earlier traces are forgotten."""
        self._bell: int | None = None
        self._lock = threading.Lock()
        """Guards the bell: threads that wait for a hanging disk may ring it at any time."""

    @property
    def pollables(self) -> list[object]:
        """The bell, which is readable once `take` has news; nothing if no trace ends."""
        return [] if self._ended is None else [self._bell]

    def begin(self) -> None:
        """Traces no longer, and does not wait. Does nothing while an end is under way."""
        if self._ended is not None:
            return
        if self._bell is None:
            self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        ended: Future[list[str]] = Future()
        self._ended = ended
        finish = self._tracer.end()

        def wait(timeout_s: float) -> None:
            ended.set_result(finish(timeout_s))
            with self._lock:
                if self._bell is not None:
                    os.eventfd_write(self._bell, 1)

        try:
            threading.Thread(
                target=wait, args=(CLOSING_S,), name="trace-ending", daemon=True
            ).start()
        except RuntimeError:  # there are too many threads
            wait(0.0)

    def take(self) -> list[str] | None:
        """Sentences about what is missing in the fragment that is closed now; None if none was closed since the
        last call."""
        if self._ended is None or self._bell is None:
            return None
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._bell)
        if not self._ended.done():
            return None
        problems, self._ended = self._ended.result(), None
        return problems

    def forget(self) -> None:
        """Another trace begins: nobody wants to know of the last one any more."""
        self._ended = None

    def close(self) -> None:
        """The process ends; waits for the disk, but not for long."""
        self._tracer.stop(EXIT_S)
        with self._lock:
            if self._bell is not None:
                os.close(self._bell)
                self._bell = None
        self._ended = None
