# SPDX-License-Identifier: Apache-2.0
"""Helpers for concurrent work: merged streams, gathered works, threads for long work, restarts."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import aclosing
from typing import Any, TypeVar, TypeVarTuple

from pagoda.admission.turns import Turns

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

_MAX_WAITING = 64
"""Items that may wait for a slow reader before the streams behind them wait too."""
MAX_BEGINNINGS = 32
"""Works that begin in one turn of the event loop."""
_RESTART_S = 1.0

_log = logging.getLogger(__name__)


async def merge(streams: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[tuple[int, T], None]:
    """The items of all streams as they come, each with the index of its stream.

    The first error of any stream is raised; then, and when closed early, all streams are closed.
    """
    if len(streams) == 1:
        async with aclosing(streams[0]) as only:
            async for item in only:
                yield 0, item
        return
    queue: asyncio.Queue[tuple[int, T] | Exception | None] = asyncio.Queue(_MAX_WAITING)
    tasks = [asyncio.create_task(_feed(queue, i, stream)) for i, stream in enumerate(streams)]
    try:
        running = len(tasks)
        while running:
            got = await queue.get()
            if isinstance(got, tuple):
                yield got
            elif got is not None:
                raise got
            else:
                running -= 1
    finally:
        await cancel_all(tasks)


async def gather_all(works: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """The results of works done at the same time, in order. The first failure cancels the others and is raised.
    Works begin in turns of the event loop, so that others go on between the beginnings of many."""
    if len(works) == 1:
        return [await works[0]]
    tasks: list[asyncio.Task[T]] = []
    try:
        async with asyncio.TaskGroup() as group:
            for work in works:
                if tasks and len(tasks) % MAX_BEGINNINGS == 0:
                    await asyncio.sleep(0)
                tasks.append(group.create_task(work))
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None
    finally:
        for work in works[len(tasks) :]:
            work.close()
    return [task.result() for task in tasks]


async def cancel_all(tasks: Sequence[asyncio.Future[Any]]) -> None:
    """Cancels tasks and waits until they have ended, however they do."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def watched_task(work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
    """A task that nobody waits for, whose failure is told at once (`raise_failure`)."""
    task = asyncio.create_task(work)
    task.add_done_callback(raise_failure)
    return task


def raise_failure(task: asyncio.Task[Any]) -> None:
    """Callback of a task that nobody waits for, whose failure is told to the loop's exception handler at once."""
    if not task.cancelled():
        task.result()


def bound_to_loop(work: Callable[[*Ts], object]) -> Callable[[*Ts], None]:
    """`work` on what belongs to the running loop, as its thread and others may call it: in that thread it is done
    at once, else in a turn of the loop, before the result of what the other thread does is there."""
    loop, thread = asyncio.get_running_loop(), threading.get_ident()

    def call(*args: *Ts) -> None:
        if threading.get_ident() == thread:
            work(*args)
        else:
            loop.call_soon_threadsafe(work, *args)

    return call


LONG_TEXT_CHARS = 8192
"""Characters of all texts of a body that are tokenized, rendered and made into grammars on the event loop, and of
the texts of all bodies in one turn of it. Beyond them this is done in threads: other streams go on meanwhile."""
_SHORT_TEXT_CHARS = 256
"""Work on so short a text takes less time than a thread does to begin it."""
_ITEM_CHARS = 32
"""Counted for each piece of work beside its text."""
_SPARE_CHARS = LONG_TEXT_CHARS // 4
"""Characters of a turn that bodies leave to others once they have spent their own budget."""


class LoopBudget:
    """The work that one body may still do on the event loop, in characters of text."""

    def __init__(self) -> None:
        self._left = LONG_TEXT_CHARS

    def take(self, cost: int, spare: int = 0) -> bool:
        """True if there was room for so much more, which is counted, and for `spare` beside it."""
        if cost + spare > self._left:
            return False
        self._left -= cost
        return True


class LongWork:
    """Threads for work that takes long. The executor of `asyncio.to_thread` stays free for short work.

    A place is taken until its thread is done, even if the caller has been cancelled meanwhile. Tenants get places
    in turn, callers of one in the order of their coming; a cancelled caller leaves the queue at once.
    """

    def __init__(self, num_threads: int) -> None:
        self._executor = ThreadPoolExecutor(num_threads, thread_name_prefix="long-work")
        self._num_free = num_threads
        self._waiting: Turns[asyncio.Future[None]] = Turns()
        self._turn = LoopBudget()
        """Work that may still be done in this turn of the event loop, for all bodies together."""
        self._turn_of: asyncio.AbstractEventLoop | None = None
        """The event loop that has begun to spend it, and gives a new budget to its next turn."""

    async def run_sized(
        self, work: Callable[[], T], size: int, budget: LoopBudget, tenant: str = ""
    ) -> T:
        """The result of work that takes as long as a text of `size` characters: done on the event loop while the
        `budget` of its body and that of the turn last, else in a thread, or in a later turn if it is short."""
        cost = size + _ITEM_CHARS
        is_short = size <= _SHORT_TEXT_CHARS
        spare = 0 if budget.take(cost) else _SPARE_CHARS
        if spare and not is_short:
            return await self.run(work, tenant)
        while not self._budget_of_turn().take(cost, spare):
            if not is_short:
                return await self.run(work, tenant)
            await asyncio.sleep(0)
        return work()

    def _budget_of_turn(self) -> LoopBudget:
        loop = asyncio.get_running_loop()
        if self._turn_of is not loop:
            self._begin_turn()
            self._turn_of = loop
            loop.call_soon(self._begin_turn)
        return self._turn

    def _begin_turn(self) -> None:
        self._turn = LoopBudget()
        self._turn_of = None

    async def run(self, work: Callable[[], T], tenant: str = "") -> T:
        """The result of `work`; `tenant` is the name of the client's API key."""
        await self._take_place(tenant)
        done = asyncio.get_running_loop().run_in_executor(self._executor, work)
        done.add_done_callback(self._leave)
        return await asyncio.shield(done)

    async def _take_place(self, tenant: str) -> None:
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.put(tenant, place)
        if self._num_free:
            self._num_free -= 1
            self._waiting.pop()  # which counts as its tenant's turn
            return
        try:
            await place
        except asyncio.CancelledError:
            self._waiting.discard(tenant, place)
            if not place.cancelled():
                self._free_place()  # which the caller was given just now
            raise

    def _free_place(self) -> None:
        while self._waiting:
            place = self._waiting.pop()
            if not place.done():
                place.set_result(None)
                return
        self._num_free += 1

    def _leave(self, done: asyncio.Future[Any]) -> None:
        self._free_place()
        if not done.cancelled():
            done.exception()  # a caller that has gone leaves nobody to retrieve the exception


async def keep_going(work: Callable[[], Awaitable[None]], name: str) -> None:
    """Does `work` until it returns; when it fails, that is logged, and it is started again."""
    while True:
        try:
            await work()
            return
        except Exception:
            _log.exception("%s failed, and goes on in %g s", name, _RESTART_S)
        await asyncio.sleep(_RESTART_S)


async def first_of(*works: Coroutine[Any, Any, object]) -> int:
    """The index of the work that ends first; its error is raised. The others are cancelled."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        await cancel_all(tasks)
    for task in done:
        task.result()
    return min(tasks.index(task) for task in done)


async def _feed(
    queue: asyncio.Queue[tuple[int, T] | Exception | None],
    index: int,
    stream: AsyncGenerator[T, None],
) -> None:
    """Puts the items of a stream into `queue`, and behind them its error, or None."""
    try:
        async with aclosing(stream):
            async for item in stream:
                await queue.put((index, item))
    except Exception as error:
        await queue.put(error)
    else:
        await queue.put(None)


async def beside(work: Callable[[], T]) -> T:
    """Runs `work` in a daemon thread of its own. Unlike `asyncio.to_thread`, that lets the process end when a disk
    never answers."""
    done: Future[T] = Future()

    def run() -> None:
        try:
            done.set_result(work())
        except Exception as error:
            done.set_exception(error)

    waiting = asyncio.wrap_future(done)
    done.set_running_or_notify_cancel()  # from now on nobody cancels it
    threading.Thread(target=run, name="beside", daemon=True).start()
    return await waiting
