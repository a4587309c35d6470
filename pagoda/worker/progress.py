# SPDX-License-Identifier: Apache-2.0
"""Progress of loading weights: a bar on a terminal while it goes on, a line in the log at its end."""

from __future__ import annotations

import logging
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TextIO

from pagoda.ipc.machine import format_bytes
from pagoda.parallel.config import RankPlace

_BAR_COLUMNS = 16
_LINE_COLUMNS = 60
"""No log line is shorter: one that any process writes meanwhile covers the whole bar."""
_FIRST_AFTER_S = 0.3
_EVERY_S = 0.1
_CLEAR_LINE = "\r\x1b[K"

_log = logging.getLogger("pagoda.worker")


@contextmanager
def loading_weights(
    place: RankPlace,
    total_bytes: int,
    on_progress: Callable[[], None] = lambda: None,
    *,
    stream: TextIO | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[Callable[[int], None]]:
    """Yields a function to call with the bytes of each weight that is loaded; `total_bytes` are expected.

    `on_progress` is called with each weight. Of several workers the first one shows a bar for all, as they load
    alike.
    """
    stream = stream or sys.stderr
    began = clock()
    is_shown = place == RankPlace() and _can_move_cursor(stream)
    bar = _Bar(stream, total_bytes, clock) if is_shown else None

    def on_loaded(num_bytes: int) -> None:
        on_progress()
        if bar is not None:
            bar.advance(num_bytes)

    try:
        yield on_loaded
    finally:
        if bar is not None:
            bar.close()
    seconds = max(clock() - began, 1e-3)
    _log.info(
        "loaded %s of weights in %.1f s, %s/s",
        format_bytes(total_bytes),
        seconds,
        format_bytes(int(total_bytes / seconds)),
    )


def _can_move_cursor(stream: TextIO) -> bool:
    if not stream.isatty() or os.environ.get("TERM", "dumb") == "dumb":
        return False
    return shutil.get_terminal_size().columns >= _LINE_COLUMNS


class _Bar:
    """One line, behind whose drawing the cursor is at its start again."""

    def __init__(self, stream: TextIO, total: int, clock: Callable[[], float]) -> None:
        self._stream = stream
        self._total = max(total, 1)
        self._clock = clock
        self._done = 0
        self._next_at = clock() + _FIRST_AFTER_S
        self._is_drawn = False

    def advance(self, num_bytes: int) -> None:
        self._done = min(self._done + num_bytes, self._total)
        now = self._clock()
        if now < self._next_at:
            return
        self._next_at = now + _EVERY_S
        self._is_drawn = True
        self._write(f"{_CLEAR_LINE}{self._line()}\r")

    def close(self) -> None:
        if self._is_drawn:
            self._write(_CLEAR_LINE)

    def _line(self) -> str:
        filled = self._done * _BAR_COLUMNS // self._total
        bar = "#" * filled + "-" * (_BAR_COLUMNS - filled)
        line = f"loading weights [{bar}] {format_bytes(self._done)} of {format_bytes(self._total)}"
        return line[: _LINE_COLUMNS - 1]

    def _write(self, text: str) -> None:
        with suppress(OSError):  # the terminal has gone; loading goes on
            self._stream.write(text)
            self._stream.flush()
