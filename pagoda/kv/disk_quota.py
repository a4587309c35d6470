"""How much a directory of KV objects may grow: no further than the disk."""

from __future__ import annotations

import os
from pathlib import Path

from pagoda.errors import ConfigError


def check_quota(path: Path, quota: int) -> None:
    """Makes sure that the file system on which `path` lies, or will lie, is as large as `quota` bytes.

    Raises:
        ConfigError: it is smaller, or cannot be asked.
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
            f"--kv-disk-bytes {_amount(quota)} is more than the {_amount(size)} of the file system "
            f"of {path}; give it less."
        )


def _amount(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"
