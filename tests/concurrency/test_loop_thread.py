# SPDX-License-Identifier: Apache-2.0
"""An event loop in a thread: what goes on between calls, and what Ctrl-C and the end do."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Iterator

import pytest

from pagoda.concurrency.loop_thread import LoopThread

_LIMIT_S = 60.0


@pytest.fixture
def thread() -> Iterator[LoopThread]:
    thread = LoopThread("test")
    yield thread
    thread.stop()


@pytest.fixture
def ctrl_c() -> Iterator[int]:
    """The signal of Ctrl-C, which raises KeyboardInterrupt in this thread."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield signal.SIGINT
    signal.signal(signal.SIGINT, before)


def test_results_and_errors_are_those_of_the_work(thread: LoopThread) -> None:
    async def work(result: int) -> int:
        await asyncio.sleep(0)
        return 6 // result

    assert thread.run(work(3)) == 2
    with pytest.raises(ZeroDivisionError):
        thread.run(work(0))


def test_what_was_begun_goes_on_between_two_calls(thread: LoopThread) -> None:
    reached, tasks = threading.Event(), []

    async def later() -> None:
        await asyncio.sleep(0)
        reached.set()

    async def begin() -> None:
        tasks.append(asyncio.create_task(later()))

    thread.run(begin())
    assert reached.wait(_LIMIT_S)


def test_ctrl_c_raises_once_the_work_has_cleaned_up(thread: LoopThread, ctrl_c: int) -> None:
    main, said = threading.get_ident(), []

    async def work() -> None:
        try:
            signal.pthread_kill(main, ctrl_c)
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            said.append("cleaned up")

    with pytest.raises(KeyboardInterrupt):
        thread.run(work())
    assert said == ["cleaned up"]
    assert thread.run(asyncio.sleep(0, "goes on")) == "goes on"


def test_a_second_ctrl_c_does_not_wait(thread: LoopThread, ctrl_c: int) -> None:
    main = threading.get_ident()

    async def work() -> None:
        signal.pthread_kill(main, ctrl_c)
        try:
            await asyncio.Event().wait()
        finally:
            signal.pthread_kill(main, ctrl_c)
            await asyncio.Event().wait()

    with pytest.raises(KeyboardInterrupt):
        thread.run(work())


def test_stopping_cancels_what_still_goes_on() -> None:
    thread, tasks = LoopThread("test"), []

    async def begin() -> None:
        tasks.append(asyncio.create_task(asyncio.Event().wait()))
        await asyncio.sleep(0)

    thread.run(begin())
    thread.stop()
    assert tasks[0].cancelled()
    with pytest.raises(RuntimeError, match=r"The test was closed\."):
        thread.run(asyncio.sleep(0))
    thread.stop()
