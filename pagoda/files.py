# SPDX-License-Identifier: Apache-2.0
"""Files that are read or kept private; an error names the flag that the file was given with."""

from __future__ import annotations

import errno
import json
import os
import stat
from contextlib import suppress
from io import FileIO
from pathlib import Path
from typing import Any

from pagoda.errors import ConfigError

MAX_TEXT_BYTES = 2**28
"""Bytes of a file of a model that is read whole: configuration, index or tokenizer. The largest have 40 MB."""


def open_private(path: str, flags: int) -> int:
    """Opener (as `open` takes it) of files that only the user may read, wherever they lie."""
    return os.open(path, flags, 0o600)


def open_regular(path: str, flags: int) -> int:
    """Opener (as `open` takes it) of regular files alone: who opens a pipe waits for somebody at its other end.

    Raises OSError: it is no regular file, or cannot be opened.
    """
    descriptor = os.open(path, flags | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is not a regular file", path)
    return descriptor


def read_regular(path: Path, most_bytes: int = MAX_TEXT_BYTES) -> bytes:
    """The bytes of a regular file, as those of models are; of whoever made them nothing is known.
    Raises OSError: it is no regular file, is larger than `most_bytes`, or cannot be read."""
    with open(path, "rb", opener=open_regular) as file:
        if os.fstat(file.fileno()).st_size > most_bytes:
            raise OSError(errno.EFBIG, f"it has more than {most_bytes} bytes", str(path))
        return file.read()


def read_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file of a model.
    Raises OSError as `read_regular` does, and ConfigError: it is not JSON, or no object."""
    try:
        values = json.loads(read_regular(path))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not valid JSON.") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{path} must hold a JSON object.")
    return values


def read_file(path: Path, flag: str) -> bytes:
    """Raises ConfigError if the file cannot be read."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{flag}: cannot read {path}: {error.strerror}.") from error
    except ValueError as error:  # a NUL in its name
        raise ConfigError(f"{flag}: cannot read {str(path)!r}: {error}.") from error


def check_quota(path: Path, quota: int, flag: str) -> None:
    """Makes sure that the file system on which `path` lies, or will lie, is as large as the `quota` of a flag.

    Raises ConfigError if the file system is smaller or its size cannot be read.
    """
    existing = path.absolute()
    while not os.path.lexists(existing):
        existing = existing.parent
    try:
        file_system = os.statvfs(existing)
    except OSError as error:
        raise ConfigError(f"{existing} cannot be used: {error.strerror or error}.") from error
    size = file_system.f_frsize * file_system.f_blocks
    if quota > size:
        raise ConfigError(
            f"{flag} {quota / 2**30:.1f} GiB is more than the {size / 2**30:.1f} GiB of the file "
            f"system of {path}; lower it."
        )


def append_whole(file: FileIO, line: bytes) -> None:
    """Writes a line to the end of a file. Raises OSError, and leaves no part of the line."""
    size = file.tell()
    try:
        if file.write(line) < len(line):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    except OSError:
        with suppress(OSError):
            file.truncate(size)
            file.seek(size)
        raise
