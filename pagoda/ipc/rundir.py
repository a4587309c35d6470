"""The private directory in which the sockets of one server lie."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

from pagoda.errors import ConfigError
from pagoda.parallel.config import MAX_RANKS

ENGINE_SOCKET = "engine"
WORKER_SOCKET = "worker"
"""Followed by a number for each start of the workers; and another for a rank that takes what a stage computed."""

_PREFIX = "pagoda-"
_LOCK = "lock"
_MAX_SOCKET_PATH_BYTES = 107
"""Longest path of a socket that the kernel takes (unix(7))."""
_LONGEST_NAME = f"{WORKER_SOCKET}-9999999-{MAX_RANKS}"


class RuntimeDirectory:
    """A directory that only this user may enter, removed by `close`.

    A process that is killed cannot remove its directory, so the next one does: the owner holds a lock that
    the kernel takes away when it ends, and directories without a holder are swept at the start.

    Raises ConfigError if the name of the directory for temporary files is too long for a socket.
    """

    def __init__(self) -> None:
        parent = Path(tempfile.gettempdir())
        _sweep(parent)
        self.path, lock = _make(parent)
        self._lock: int | None = lock
        if len(os.fsencode(self.path / _LONGEST_NAME)) > _MAX_SOCKET_PATH_BYTES:
            self.close()
            raise ConfigError(
                f"TMPDIR {parent} is too long a path for sockets; name a shorter one."
            )

    def close(self) -> None:
        """Removes the directory. May be called twice."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def socket_address(directory: Path, name: str) -> str:
    return f"ipc://{directory / name}"


def _make(parent: Path) -> tuple[Path, int]:
    while True:
        path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))  # made with mode 0700
        lock = os.open(path / _LOCK, os.O_CREAT | os.O_RDWR, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX)
        if (path / _LOCK).exists():
            return path, lock
        os.close(lock)  # another process swept it before it was locked


def _sweep(parent: Path) -> None:
    for lock_path in parent.glob(f"{_PREFIX}*/{_LOCK}"):
        with contextlib.suppress(
            OSError
        ):  # another user's, still held, or just swept by another process
            lock = os.open(lock_path, os.O_RDWR)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(lock_path.parent, ignore_errors=True)
            finally:
                os.close(lock)
