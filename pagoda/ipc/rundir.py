# SPDX-License-Identifier: Apache-2.0
"""The private directory in which the sockets of one server lie."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

from pagoda.errors import ConfigError
from pagoda.parallel.config import MAX_RANKS

ENGINE_SOCKET = "engine"
WORKER_SOCKET = "worker"
"""Followed by a number for each start of the workers; and another for a rank that takes what a stage computed."""

_PREFIX = "pagoda-"
_NAME = re.compile(f"{_PREFIX}[a-z0-9_]{{8}}")
"""Names that `mkdtemp` gives."""
_LOCK = "lock"
_REMOVE = (
    'for name in "$1"/*; do [ "$name" = "$1/lock" ] || rm -rf -- "$name"; done; rm -rf -- "$1"'
)
_WAIT_AND_REMOVE = f"exec 3<&0; {{ read -r nothing; {_REMOVE}; }} <&3 &"
"""The lock goes last: what is left when the shell is killed meanwhile is still swept."""
_OLD_S = 60.0
"""An empty directory without a lock that is older than this is being neither made nor removed."""
_MAX_SOCKET_PATH_BYTES = 107
"""Longest path of a socket that the kernel takes (unix(7))."""
_LONGEST_NAME = f"{WORKER_SOCKET}-9999999-{MAX_RANKS}"


class RuntimeDirectory:
    """A directory that only this user may enter, removed by `close`.

    A process that is killed cannot remove its directory, so a shell that waits for its end does. Where that was
    killed too, or there is none, the next server does: the owner holds a lock that the kernel takes away when it
    ends, and directories without a holder are swept at the start. The lock is made first and removed last, so a
    directory without one is empty; it is swept when it is old.

    Raises ConfigError if the name of the directory for temporary files is too long for a socket.
    """

    def __init__(self) -> None:
        parent = Path(tempfile.gettempdir())
        _sweep(parent)
        self.path, lock = _make(parent)
        self._lock: int | None = lock
        self._life: int | None = _remove_at_end(self.path)
        if len(os.fsencode(self.path / _LONGEST_NAME)) > _MAX_SOCKET_PATH_BYTES:
            self.close()
            raise ConfigError(
                f"TMPDIR {parent} is too long a path for sockets; name a shorter one."
            )

    def close(self) -> None:
        """Removes the directory. May be called twice."""
        _remove(self.path)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None
        if self._life is not None:
            os.close(self._life)
            self._life = None


def socket_address(directory: Path, name: str) -> str:
    return f"ipc://{directory / name}"


def _make(parent: Path) -> tuple[Path, int]:
    while True:
        path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))  # made with mode 0700
        try:
            lock = os.open(path / _LOCK, os.O_CREAT | os.O_RDWR, 0o600)
        except FileNotFoundError:  # this process stood still, and another one swept it meanwhile
            continue
        fcntl.flock(lock, fcntl.LOCK_EX)
        if (path / _LOCK).exists():
            return path, lock
        os.close(lock)  # another process swept it before it was locked


def _remove_at_end(path: Path) -> int | None:
    """A shell waits for the end of this process, and removes `path` then. Returns what it waits to be closed.

    The shell is nobody's child and in no group, so that whatever ends this process does not end it.
    """
    read_end, write_end = os.pipe()
    try:
        command = ["/bin/sh", "-c", _WAIT_AND_REMOVE, "sh", str(path)]
        null = subprocess.DEVNULL
        subprocess.run(command, stdin=read_end, stdout=null, stderr=null, start_new_session=True)
    except OSError:  # there is no shell
        os.close(write_end)
        return None
    finally:
        os.close(read_end)
    return write_end


def _sweep(parent: Path) -> None:
    for path in parent.glob(f"{_PREFIX}*"):
        # Another user's, still held, not empty, or just swept by another process: OSError.
        if _NAME.fullmatch(path.name):
            with contextlib.suppress(OSError):
                _sweep_one(path)


def _sweep_one(path: Path) -> None:
    """Removes a directory of this user's that no process holds. Links, which others may have put there, are not
    followed: what is behind them is nobody's runtime directory.

    Raises OSError: it is held, or is none.
    """
    directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        status = os.fstat(directory)
        if status.st_uid != os.geteuid():
            return
        try:
            lock = os.open(_LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=directory)
        except FileNotFoundError:
            if time.time() - status.st_mtime > _OLD_S:
                path.rmdir()
            return
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _empty(Path(f"/proc/self/fd/{directory}"))
            os.unlink(_LOCK, dir_fd=directory)
            path.rmdir()
        finally:
            os.close(lock)
    finally:
        os.close(directory)


def _remove(path: Path) -> None:
    """Removes a directory, its lock last."""
    with contextlib.suppress(OSError):
        _empty(path)
    shutil.rmtree(path, ignore_errors=True)


def _empty(path: Path) -> None:
    """Removes all that is in a directory but its lock. Raises OSError."""
    for child in path.iterdir():
        if child.name == _LOCK:
            continue
        if child.is_dir() and not child.is_symlink():
            shutil.rmtree(child, ignore_errors=True)
        else:
            child.unlink(missing_ok=True)
