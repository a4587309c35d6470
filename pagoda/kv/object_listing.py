"""What lies in directories of objects, whoever put it there."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from typing import NamedTuple

from pagoda.kv.objects import MANIFEST_NAME, TEMPORARY_PREFIX, is_digest, parse_name

FAN_OUTS = tuple(f"{number:02x}" for number in range(256))
_STALE_AFTER_S = 600.0


class FoundFile(NamedTuple):
    """A file in a fan-out directory, or in the one above."""

    path: str
    key: bytes | None
    """None where the name is not that of an object."""
    num_bytes: int
    used_at: float
    """Seconds since 1970."""

    @property
    def is_temporary(self) -> bool:
        return self.key is None and os.path.basename(self.path).startswith(TEMPORARY_PREFIX)

    def is_stale(self, now: float) -> bool:
        """Whether nobody can still be writing it."""
        return now - self.used_at > _STALE_AFTER_S


def object_directories(root: str) -> list[str]:
    """The directories of objects under `root`, in the order of their names.

    Raises:
        OSError: `root` cannot be read.
    """
    with os.scandir(root) as entries:
        names = [entry.name for entry in entries if is_digest(entry.name)]
    paths = [os.path.join(root, name) for name in sorted(names)]
    return [path for path in paths if os.path.lexists(os.path.join(path, MANIFEST_NAME))]


def list_files(path: str) -> Iterator[FoundFile]:
    """The plain files in a directory of objects, or in one of its fan-out directories.

    Raises:
        OSError: it cannot be read.
    """
    fan_out = os.path.basename(path)
    with os.scandir(path) as entries:
        # In the order in which the disk has them: inodes that lie side by side are read at once.
        in_order = sorted(entries, key=os.DirEntry.inode)
    for entry in in_order:
        try:
            status = entry.stat(follow_symlinks=False)
        except FileNotFoundError:  # gone since it was listed
            continue
        if stat.S_ISREG(status.st_mode):
            key = parse_name(fan_out, entry.name)
            yield FoundFile(entry.path, key, status.st_size, status.st_mtime)
