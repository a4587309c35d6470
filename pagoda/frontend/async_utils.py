"""Several streams as one, and several works at once."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

T = TypeVar("T")

_MAX_WAITING = 64
"""Items that may wait for a slow reader before the streams behind them wait too."""
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
    queue: asyncio.Queue[tuple[int, T] | _Ended] = asyncio.Queue(_MAX_WAITING)
    tasks = [asyncio.create_task(_feed(queue, i, stream)) for i, stream in enumerate(streams)]
    try:
        running = len(tasks)
        while running:
            got = await queue.get()
            if not isinstance(got, _Ended):
                yield got
            elif got.error is not None:
                raise got.error
            else:
                running -= 1
    finally:
        await cancel_all(tasks)


async def cancel_all(tasks: Sequence[asyncio.Future[Any]]) -> None:
    """Cancels tasks and waits until they have ended, however they do."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


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
    """Returns which of `works` has ended first, or raises what it did; the others are cancelled."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        await cancel_all(tasks)
    for task in done:
        task.result()
    return min(tasks.index(task) for task in done)


class _Ended:
    def __init__(self, error: Exception | None = None) -> None:
        self.error = error


async def _feed(
    queue: asyncio.Queue[tuple[int, T] | _Ended], index: int, stream: AsyncGenerator[T, None]
) -> None:
    try:
        async with aclosing(stream):
            async for item in stream:
                await queue.put((index, item))
    except Exception as error:
        await queue.put(_Ended(error))
    else:
        await queue.put(_Ended())
