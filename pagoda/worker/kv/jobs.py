# SPDX-License-Identifier: Apache-2.0
"""Transfers under way on one rank, and the threads that carry them out."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from queue import Empty, PriorityQueue
from typing import Generic, TypeVar

from pagoda.backend.kv_store import DONE, DeviceEvent
from pagoda.messages.transfers import TierWord, Transfer, TransferEnd, num_places

FIRST, LATER = range(2)
"""Urgency: a request waits for a task, or one will."""
_LAST = 2
_FAREWELL_S = 5.0

_WARNING_INTERVAL_S = 10.0
"""Seconds between warnings of unforeseen errors: what breaks one block may break thousands."""

_log = logging.getLogger(__name__)

T = TypeVar("T")


class CopyError(Exception):
    """Blocks could not be copied. The text is a clause that says why."""

    def __init__(self, problem: str, *, unreadable: bool = False) -> None:
        """`unreadable`: that says nothing against what was to be read."""
        super().__init__(problem)
        self.unreadable = unreadable


class GivenUpError(Exception):
    """The part of a job has ended without its copy."""


class Job:
    """A transfer under way. It ends when all of its parts have: blocks, or the ranks that it is read from."""

    def __init__(self, transfer: Transfer, num_parts: int) -> None:
        self.transfer = transfer
        self.num_left = num_parts
        self.failures: dict[int, str] = {}
        """Reasons by the index of the block."""
        self.unreadable: set[int] = set()
        """Blocks among `failures` whose failure says nothing against an object."""
        self.begun_at = time.monotonic()

    def end(self) -> TransferEnd:
        failed = sorted(self.failures)
        return TransferEnd(
            self.transfer.transfer_id,
            self.transfer.generation,
            failed,
            self.failures[failed[0]] if failed else "",
            sorted(self.unreadable),
        )


class Jobs:
    """State that the threads of all lanes share: ends that have yet to be told, and the number of steps done."""

    def __init__(self, on_news: Callable[[], None]) -> None:
        """`on_news` is called, from any thread, when `poll` has something to tell."""
        self._on_news = on_news
        self.changed = threading.Condition()
        """Guards the jobs and all that follows."""
        self.is_closed = False
        self._executed = -1
        self._computed = DONE
        """Event of all that steps up to the last one executed do to KV."""
        self._news: deque[TransferEnd | TierWord] = deque()
        self._next_warning_at = 0.0

    def begin(self, transfer: Transfer, num_parts: int) -> Job:
        """Begins a job, which ends at once without parts."""
        job = Job(transfer, num_parts)
        if num_parts == 0:
            self._end(job)
        return job

    def end_part(
        self, job: Job, failed: Iterable[int] = (), problem: str = "", *, unreadable: bool = False
    ) -> None:
        """One part touches the blocks no more; those in `failed` were not copied, because of `problem`."""
        with self.changed:
            for index in failed:
                job.failures.setdefault(index, problem)
                if unreadable:
                    job.unreadable.add(index)
            job.num_left -= 1
            if job.num_left > 0:
                return
        self._end(job)

    def attempt(self, job: Job, batch: range, copy: Callable[[Job, range], None]) -> None:
        """Copies some blocks, one part of a job, or ends them with the reason why they were not copied."""
        try:
            copy(job, batch)
        except GivenUpError:
            pass
        except CopyError as error:
            self.end_part(job, batch, str(error), unreadable=error.unreadable)
        except Exception as error:
            with self.changed:
                now = time.monotonic()
                is_told = now >= self._next_warning_at
                if is_told:
                    self._next_warning_at = now + _WARNING_INTERVAL_S
            if is_told:
                _log.exception("blocks could not be copied")
            self.end_part(job, batch, f"{type(error).__name__}: {error}", unreadable=True)
        else:
            self.end_part(job)

    def _end(self, job: Job) -> None:
        self.tell(job.end())

    def tell(self, news: TransferEnd | TierWord) -> None:
        """Tells the engine, from any thread."""
        with self.changed:
            self._news.append(news)
        self._on_news()

    def poll(self) -> list[TransferEnd | TierWord]:
        with self.changed:
            news = list(self._news)
            self._news.clear()
        return news

    def step_done(self, step: int, computed: DeviceEvent = DONE) -> None:
        """A step has been executed, whose KV is in the cache when `computed` is done."""
        with self.changed:
            self._executed, self._computed = step, computed
            self.changed.notify_all()

    @property
    def computed(self) -> DeviceEvent:
        """The event behind which KV of all steps that have been executed is in the cache, and none uses it."""
        with self.changed:
            return self._computed

    def wait_for_step(
        self, step: int, is_over: Callable[[], bool] = lambda: False
    ) -> DeviceEvent | None:
        """Waits until a step has been executed; None if the wait ended without that.

        No step uses its blocks behind the event. Whoever makes `is_over` true notifies `changed`.
        """
        with self.changed:
            self.changed.wait_for(lambda: self._executed >= step or self.is_closed or is_over())
            return self._computed if self._executed >= step else None

    def await_step(self, step: int) -> DeviceEvent:
        """Waits for a step; behind the event, no step up to it uses the blocks any more.

        Raises CopyError if the worker ends first.
        """
        unused = self.wait_for_step(step)
        if unused is None:
            raise CopyError("the worker is ending", unreadable=True)
        return unused

    def close(self) -> None:
        """Nobody waits any more."""
        with self.changed:
            self.is_closed = True
            self.changed.notify_all()


class Lane(Generic[T]):
    """Threads that take tasks in the order of urgency, then of age."""

    def __init__(self, name: str, num_threads: int, work: Callable[[Iterator[T]], None]) -> None:
        self._tasks: PriorityQueue[tuple[int, int, T | None]] = PriorityQueue()
        """Urgency, number and task; None ends a thread."""
        self._numbers = itertools.count()
        self.threads = [
            threading.Thread(target=work, args=(self._take(),), name=f"{name}-{index}", daemon=True)
            for index in range(num_threads)
        ]
        for thread in self.threads:
            thread.start()

    def put(self, task: T | None, urgency: int = LATER) -> None:
        self._tasks.put((urgency, next(self._numbers), task))

    def _take(self) -> Iterator[T]:
        while (task := self._tasks.get()[2]) is not None:
            yield task

    def drop_tasks(self) -> None:
        with suppress(Empty):
            while True:
                self._tasks.get_nowait()

    def end(self) -> None:
        """Ends the threads when all tasks are done."""
        for _ in self.threads:
            self.put(None, _LAST)

    def close(self) -> None:
        """Drops all tasks but those under way, and ends the threads when these are done."""
        self.drop_tasks()
        self.end()

    def join(self) -> None:
        """Waits for the threads; one that the disk or a peer keeps waiting ends with the process."""
        for thread in self.threads:
            thread.join(_FAREWELL_S)


def num_blocks(transfer: Transfer) -> int:
    """Number of blocks of a transfer.

    Raises ValueError if its source and its target have different numbers of blocks.
    """
    count = num_places(transfer.source)
    if count != num_places(transfer.target):
        raise ValueError(f"Transfer {transfer.transfer_id} has a source unlike its target.")
    return count
