# SPDX-License-Identifier: Apache-2.0
"""Files of the configuration that are read again when they change, while the server runs."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from pathlib import Path

from pagoda.concurrency.async_utils import cancel_all, keep_going
from pagoda.errors import ConfigError

_INTERVAL_S = 1.0
"""Seconds between two looks. A look is one `stat` of each file, in a thread; file systems of the network, and the
links by which Kubernetes changes a Secret, tell nobody of changes."""

_log = logging.getLogger("pagoda.api")
_State = tuple[int, int, int] | None


class WatchedFiles:
    """Files that are read together."""

    def __init__(self, paths: Sequence[Path], read: Callable[[], None]) -> None:
        """`read` reads the files and takes what they say; it may run in any thread, and is called here first.
        Raises ConfigError: what `read` raises if they are wrong. Later errors leave in force what was read before.
        """
        self._paths = paths
        self._read = read
        self._known = self._states()
        read()

    def look(self) -> None:
        """Reads the files if they have changed. Files that are wrong are told of once, until they change again."""
        states = self._states()
        if states == self._known:
            return
        self._known = states
        try:
            self._read()
        except ConfigError as error:
            _log.error("%s What was there before stays in force.", error)
        else:
            _log.info("%s changed and is in force", ", ".join(map(str, self._paths)))

    def _states(self) -> list[_State]:
        return [_state(path) for path in self._paths]


class FileWatch:
    """Looks after files until it is closed."""

    def __init__(self, watched: Sequence[WatchedFiles]) -> None:
        self._watched = watched
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begins to look, if there are files. Needs a running event loop."""
        if self._watched:
            self._task = asyncio.ensure_future(keep_going(self._run, "watching files"))

    async def close(self) -> None:
        if self._task is not None:
            await cancel_all([self._task])

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(_INTERVAL_S)
            for files in self._watched:
                await asyncio.to_thread(files.look)


def _state(path: Path) -> _State:
    """Time of the change, size and number of a file; None if it is not there."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ctime_ns, status.st_size, status.st_ino
