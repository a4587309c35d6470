# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import select
import threading

from pagoda.worker.event_watcher import EventWatcher


class _Event:
    """An event that a test sets."""

    def __init__(self, error: Exception | None = None) -> None:
        self._set = threading.Event()
        self._error = error

    @property
    def done(self) -> bool:
        return self._set.is_set()

    def set(self) -> None:
        self._set.set()

    def wait(self) -> None:
        self._set.wait()
        if self._error is not None:
            raise self._error


def _readable(watcher: EventWatcher, seconds: float) -> bool:
    return bool(select.select([watcher], [], [], seconds)[0])


def test_the_file_is_readable_while_events_are_done_that_nobody_took() -> None:
    watcher, first, second = EventWatcher(), _Event(), _Event()
    assert not _readable(watcher, 0)
    watcher.watch(first)
    watcher.watch(second)
    second.set()
    assert not _readable(watcher, 0)  # events are taken in their order
    first.set()
    assert _readable(watcher, 60)
    watcher.take()
    watcher.take()
    assert not _readable(watcher, 0)


def test_an_event_that_fails_wakes_the_loop_which_finds_out() -> None:
    watcher, failing, behind = EventWatcher(), _Event(RuntimeError("broken")), _Event()
    watcher.watch(failing)
    watcher.watch(behind)
    failing.set()
    watcher.take()
    behind.set()
    assert _readable(watcher, 60)
