# SPDX-License-Identifier: Apache-2.0
"""The thread that compiles grammars, and those that it is replaced by where a grammar takes too long."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from pagoda.admission.turns import Turns
from pagoda.ipc.clock import Clock

MAX_LATE_THREADS = 3
"""Threads that may be busy with grammars of one tenant that nobody waits for any more: they cannot be stopped."""
HUNG_S = 60.0
"""Seconds after which such a thread will hardly end, and keeps its tenant out no longer."""
MAX_HUNG_THREADS = 16
"""Threads of both kinds that one tenant may have."""
MAX_THREADS = 64
"""Threads of both kinds that all tenants may have together."""
STACK_BYTES = 256 << 20
"""Address space of a thread's stack: a chain of rules is followed by recursion."""
_IDLE_NICENESS = 19
_CLOSING_S = 2.0

Job = TypeVar("Job")


class GrammarThreads(Generic[Job]):
    """Runs work in one thread, that of tenants in turn. A job that takes too long keeps its thread, and another
    does the rest. A tenant that keeps too many threads gets no more, whatever others keep."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._lock = threading.Lock()
        self._has_news = threading.Condition(self._lock)
        self._work: Turns[Callable[[], None]] = Turns()
        self._is_closing = False
        self._job: tuple[Job, str, float] | None = None
        """The job of the serving thread, its tenant, and the time at which it has taken too long."""
        self._late: dict[threading.Thread, tuple[str, float]] = {}
        """Threads that took too long, for whom, and the time at which each was given up."""
        self._serving = self._start()

    @property
    def readable(self) -> int:
        """A file descriptor that becomes readable with news: a job has begun, or work is done."""
        return self._bell

    @property
    def deadline(self) -> float | None:
        """Time at which the job under way has taken too long; None without one."""
        job = self._job
        return None if job is None else job[2]

    def is_full(self, tenant: str) -> bool:
        """True if as many threads as may be are busy with jobs of the tenant that took too long."""
        since = self._clock.now() - HUNG_S
        with self._lock:
            own = [given_up for whose, given_up in self._late.values() if whose == tenant]
            num_busy = sum(given_up > since for given_up in own)
            return (
                num_busy >= MAX_LATE_THREADS
                or len(own) >= MAX_HUNG_THREADS
                or len(self._late) >= MAX_THREADS
            )

    def put(self, tenant: str, work: Callable[[], None]) -> None:
        with self._has_news:
            self._work.put(tenant, work)
            self._has_news.notify()

    def heard(self) -> bool:
        """True if there have been news since the last call."""
        try:
            os.eventfd_read(self._bell)
        except BlockingIOError:
            return False
        return True

    @contextlib.contextmanager
    def timed(self, job: Job, tenant: str, limit_s: float) -> Iterator[None]:
        """Counts the time of a part of the work for a tenant, in its thread; after `limit_s` it has taken too
        long."""
        thread = threading.current_thread()
        with self._lock:
            self._job = job, tenant, self._clock.now() + limit_s
        self._ring()
        try:
            yield
        finally:
            with self._lock:
                if self._serving is thread:
                    self._job = None

    def give_up(self, on_late: Callable[[Job], None]) -> bool:
        """Leaves the job under way to its thread if it has taken too long, and has another thread do the rest.

        `on_late` is told of the job before the other thread begins. False if nothing has taken too long.
        """
        with self._lock:
            if self._job is None or self._clock.now() < self._job[2]:
                return False
            job, tenant, _ = self._job
            self._job = None
            late = self._serving
            self._late[late] = tenant, self._clock.now()
            on_late(job)
            self._serving = self._start()
        if late.native_id is not None:
            with contextlib.suppress(OSError):  # it has ended in the meantime
                os.setpriority(os.PRIO_PROCESS, late.native_id, _IDLE_NICENESS)
        return True

    def close(self) -> None:
        """Waits for the work under way, for a while; what is in line is not done."""
        with self._has_news:
            self._is_closing = True
            self._has_news.notify_all()
        self._serving.join(_CLOSING_S)
        with self._lock:
            if not self._late and not self._serving.is_alive():
                os.close(self._bell)  # else a thread may ring it still

    def _start(self) -> threading.Thread:
        before = threading.stack_size(STACK_BYTES)
        try:
            thread = threading.Thread(target=self._serve, name="grammars", daemon=True)
            thread.start()
        finally:
            threading.stack_size(before)
        return thread

    def _serve(self) -> None:
        thread = threading.current_thread()
        while (work := self._next()) is not None:
            work()
            with self._lock:
                self._ring()
                if thread in self._late:
                    del self._late[thread]
                    return

    def _next(self) -> Callable[[], None] | None:
        """Waits for work; None at the end."""
        with self._has_news:
            while not self._is_closing:
                if self._work:
                    return self._work.pop()
                self._has_news.wait()
        return None

    def _ring(self) -> None:
        os.eventfd_write(self._bell, 1)
