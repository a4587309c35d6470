# SPDX-License-Identifier: Apache-2.0
"""Waits for the threads that write fragments of traces."""

from __future__ import annotations

import threading

_NAMES = ("trace-writer", "trace-ending")


class TraceWriters:
    """Trace threads that start after this object is made; those of other tests in the process may never end."""

    def __init__(self) -> None:
        self._others = set(threading.enumerate())

    def running(self) -> list[threading.Thread]:
        threads = threading.enumerate()
        return [it for it in threads if it.name in _NAMES and it not in self._others]

    def join(self) -> None:
        for thread in self.running():
            thread.join()
