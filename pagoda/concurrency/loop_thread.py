# SPDX-License-Identifier: Apache-2.0
"""An event loop in a thread of its own, for code that has none."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future, wait
from typing import Any, TypeVar

from pagoda.concurrency import event_loop

T = TypeVar("T")

_LOOK_S = 0.5
"""A signal that comes just before a thread waits for a lock is seen when it looks up again (CPython)."""


class LoopThread:
    """Runs coroutines for other threads. What they have begun goes on between two calls of `run`."""

    def __init__(self, what: str) -> None:
        """`what` goes on in the thread, for error messages."""
        self._what = what
        self._stopped = asyncio.Event()
        self._loop: Future[asyncio.AbstractEventLoop] = Future()
        self._thread = threading.Thread(target=self._live, name=f"pagoda {what}", daemon=True)
        self._thread.start()

    def _live(self) -> None:
        event_loop.run(self._until_stopped())

    async def _until_stopped(self) -> None:
        self._loop.set_result(asyncio.get_running_loop())
        await self._stopped.wait()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`. Ctrl-C in the waiting thread cancels it and raises KeyboardInterrupt once it has
        ended; a second one raises at once.

        Raises RuntimeError: the thread was stopped.
        """
        loop = self._loop.result()
        if loop.is_closed():
            work.close()
            raise RuntimeError(f"The {self._what} was closed.")
        ended: Future[T] = Future()
        tasks: list[asyncio.Task[T]] = []

        def begin() -> None:
            tasks.append(loop.create_task(work))
            tasks[0].add_done_callback(lambda task: _settle(ended, task))

        def cancel() -> None:
            if tasks:
                tasks[0].cancel()
            else:  # Ctrl-C came before the work was begun.
                work.close()
                ended.cancel()

        try:
            loop.call_soon_threadsafe(begin)
            _wait(ended)
        except KeyboardInterrupt:
            loop.call_soon_threadsafe(cancel)
            _wait(ended)
            raise
        return ended.result()

    def stop(self) -> None:
        """Cancels all that still goes on, and ends the thread."""
        loop = self._loop.result()
        if not loop.is_closed():
            loop.call_soon_threadsafe(self._stopped.set)
        self._thread.join()


def _wait(ended: Future[T]) -> None:
    while not ended.done():
        wait([ended], _LOOK_S)


def _settle(ended: Future[T], task: asyncio.Task[T]) -> None:
    if task.cancelled():
        ended.set_exception(asyncio.CancelledError())
    elif (error := task.exception()) is not None:
        ended.set_exception(error)
    else:
        ended.set_result(task.result())
