# SPDX-License-Identifier: Apache-2.0
"""Calls that may never return, such as those to a disk that hangs."""

from __future__ import annotations

import concurrent.futures
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def within(seconds: float, work: Callable[[], T]) -> T:
    """Runs `work` in a daemon thread of its own, which stays where it hangs; this process may end all the same.

    Returns what `work` returns, raises what it raises, and TimeoutError if it takes longer than `seconds`.
    """
    done: concurrent.futures.Future[T] = concurrent.futures.Future()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=run, name="bounded", daemon=True).start()
    return done.result(seconds)
