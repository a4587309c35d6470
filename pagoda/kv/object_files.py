"""Reads and writes the objects of one directory, whole, past the page cache where the file system allows.

Threads may share an `ObjectFiles`, not a buffer. Nothing here holds the interpreter while the disk or the checksum
is at work.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import stat
import time
from collections.abc import Callable
from pathlib import Path

from pagoda.kv.objects import (
    ALIGNMENT,
    Manifest,
    ObjectError,
    ObjectUnreadableError,
    check,
    make_directory,
    object_name,
    payload,
    seal,
    temporary_name,
)

_NO_FILE = frozenset({errno.ELOOP, errno.ENOTDIR, errno.ENXIO})
"""Errors for a link, a path through a file, and a pipe or device that cannot be opened."""
_USED_AGAIN_AFTER_S = 60.0
"""Seconds by which an object's time of last use may lag: not every read writes an inode."""

_MoveCall = Callable[[int, list[memoryview], int], int]


class ObjectFiles:
    """The objects of one directory, all of one size.

    Raises:
        OSError: the directory cannot be looked at.
    """

    def __init__(self, directory: Path, manifest: Manifest) -> None:
        self.directory = directory
        self.object_bytes = manifest.object_bytes
        self.payload_bytes = manifest.payload_bytes
        self.manifest = manifest
        self._owner = directory.stat().st_uid
        self.direct = os.O_DIRECT if _supports_direct_io(directory) else 0
        """`O_DIRECT` if objects bypass the page cache; else 0."""

    def new_buffer(self) -> memoryview:
        """Room for one object, aligned for direct I/O."""
        return memoryview(mmap.mmap(-1, self.object_bytes))

    def payload(self, buffer: memoryview) -> memoryview:
        """The payload of the object in `buffer`; 64 bytes behind its start."""
        return payload(buffer, self.payload_bytes)

    def read(self, key: bytes, buffer: memoryview, *, is_use: bool = True) -> None:
        """Fills `buffer` with the object of `key`; notes the time if this is a use of the object.

        Raises:
            ObjectUnreadableError: nothing is known of it, since it could not be read.
            ObjectError: it is not there, or not whole. `buffer` holds nothing of value in both cases.
        """
        # Not blocking: whatever somebody put there under this name, a pipe even, must not make a thread wait.
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK | self.direct
        try:
            descriptor = os.open(self.directory / object_name(key), flags)
            try:
                self._fill(descriptor, buffer)
                check(buffer, key, self.payload_bytes)
                if is_use:
                    _note_use(descriptor)
            finally:
                os.close(descriptor)
        except FileNotFoundError as error:
            raise ObjectError("it is not there any more") from error
        except OSError as error:
            kind = ObjectError if error.errno in _NO_FILE else ObjectUnreadableError
            raise kind(_clause(error)) from error

    def _fill(self, descriptor: int, buffer: memoryview) -> None:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise ObjectError("it is not a file")
        if found.st_uid != self._owner:
            raise ObjectError("it belongs to another user than its directory")
        if found.st_size != self.object_bytes:
            raise ObjectError(f"it has {found.st_size} bytes, not {self.object_bytes}")
        self._move(os.preadv, descriptor, buffer)

    def write(self, key: bytes, buffer: memoryview) -> None:
        """Makes an object of `key` of the payload in `buffer`; replaces one that is there.

        Raises:
            ObjectError: it was not written; nothing is left of it.
        """
        seal(buffer, key, self.payload_bytes)
        path = self.directory / object_name(key)
        try:
            try:
                self._write(path, buffer)
            except FileNotFoundError:
                # The first object of its fan-out directory, or somebody removed the directories.
                make_directory(self.directory, self.manifest)
                path.parent.mkdir(mode=0o700, exist_ok=True)
                self._write(path, buffer)
        except OSError as error:
            raise ObjectError(_clause(error)) from error

    def _write(self, path: Path, buffer: memoryview) -> None:
        temporary = path.with_name(temporary_name())
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | self.direct
        descriptor = os.open(temporary, flags, 0o600)
        try:
            try:
                self._move(os.pwritev, descriptor, buffer)
            finally:
                os.close(descriptor)
            os.rename(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise

    def _move(self, call: _MoveCall, descriptor: int, buffer: memoryview) -> None:
        """Reads or writes a whole object.

        Raises:
            ObjectError: the file system got nowhere.
        """
        done = 0
        while done < self.object_bytes:
            count = call(descriptor, [buffer[done : self.object_bytes]], done)
            whole = count - count % ALIGNMENT  # direct I/O continues at a unit only
            if not whole:
                raise ObjectError("the file system took only a part of it")
            done += whole


def _note_use(descriptor: int) -> None:
    if abs(time.time() - os.fstat(descriptor).st_mtime) > _USED_AGAIN_AFTER_S:
        with contextlib.suppress(OSError):  # such as a read-only file system
            os.utime(descriptor)


def _clause(error: OSError) -> str:
    return error.strerror or str(error)


def _supports_direct_io(directory: Path) -> bool:
    """Tries it: some file systems refuse the flag, some the first write, and some need larger units."""
    probe = directory / temporary_name()
    unit = mmap.mmap(-1, ALIGNMENT)
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    try:
        descriptor = os.open(probe, flags | os.O_DIRECT, 0o600)
        try:
            return (
                os.pwritev(descriptor, [unit], 0) == ALIGNMENT
                and os.preadv(descriptor, [unit], 0) == ALIGNMENT
            )
        finally:
            os.close(descriptor)
    except OSError:
        return False
    finally:
        unit.close()
        with contextlib.suppress(OSError):
            probe.unlink()
