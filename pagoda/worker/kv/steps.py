"""Counter of executed steps, for threads that may touch blocks only after one of them."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Steps:
    def __init__(self) -> None:
        self._state = threading.Condition()
        self._executed = -1
        self._is_closed = False

    def done(self, step: int) -> None:
        with self._state:
            self._executed = step
            self._state.notify_all()

    def wake(self) -> None:
        """Makes all waiting threads check again if their wait is over."""
        with self._state:
            self._state.notify_all()

    def close(self) -> None:
        """Nobody waits any more."""
        with self._state:
            self._is_closed = True
            self._state.notify_all()

    def wait_for(self, step: int, is_over: Callable[[], bool] = lambda: False) -> bool:
        """Waits until no running step may use the blocks any more; False if the wait ended without that."""
        with self._state:
            self._state.wait_for(lambda: self._executed >= step or self._is_closed or is_over())
            return self._executed >= step
