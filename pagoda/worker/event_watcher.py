# SPDX-License-Identifier: Apache-2.0
"""Events of a device as a file that becomes readable, so that a loop may wait for one and for messages at once."""

from __future__ import annotations

import contextlib
import os
import queue
import threading

from pagoda.backend.kv_store import DeviceEvent


class EventWatcher:
    """A thread that waits for the events of steps in their order, once there is one."""

    def __init__(self) -> None:
        self._file = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_SEMAPHORE)
        self._events: queue.SimpleQueue[DeviceEvent] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def fileno(self) -> int:
        """File that is readable while events are done that nobody has taken."""
        return self._file

    def watch(self, event: DeviceEvent) -> None:
        """Waits for a further event."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="step events", daemon=True)
            self._thread.start()
        self._events.put(event)

    def take(self) -> None:
        """Waits for the oldest event that nobody has taken."""
        os.eventfd_read(self._file)

    def _run(self) -> None:
        while True:
            event = self._events.get()
            with contextlib.suppress(Exception):  # whoever reads the results finds out
                event.wait()
            os.eventfd_write(self._file, 1)
