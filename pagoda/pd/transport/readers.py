"""Who reads by a link: what they read by is let go when the link is closed and the last of them has gone."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from pagoda.pd.transport.base import TransportError


class Readers:
    """Closing waits for nobody."""

    def __init__(self, let_go: Callable[[], None]) -> None:
        """`let_go` is called once, by whoever closes or by the last that reads; nobody reads then, nor will."""
        self._let_go = let_go
        self._lock = threading.Lock()
        self._num_reads = 0
        self._closed_at: float | None = None

    @property
    def is_closed(self) -> bool:
        return self._closed_at is not None

    def patience(self, deadline: float, farewell_s: float) -> float:
        """Until when to wait for something, to which only `farewell_s` are left from the moment of closing on."""
        closed_at = self._closed_at
        return deadline if closed_at is None else min(deadline, closed_at + farewell_s)

    def check(self) -> None:
        """
        Raises:
            TransportError: it has been closed.
        """
        if self.is_closed:
            raise TransportError("the connection was closed")

    @contextmanager
    def reading(self) -> Iterator[None]:
        """
        Raises:
            TransportError: it has been closed, before or meanwhile.
        """
        with self._lock:
            self.check()
            self._num_reads += 1
        try:
            yield
            self.check()
        finally:
            with self._lock:
                self._num_reads -= 1
                is_last = self.is_closed and self._num_reads == 0
            if is_last:
                self._let_go()

    def close(self) -> None:
        """May be called twice, from any thread, also from one that reads."""
        with self._lock:
            if self.is_closed:
                return
            self._closed_at = time.monotonic()
            is_idle = self._num_reads == 0
        if is_idle:
            self._let_go()
