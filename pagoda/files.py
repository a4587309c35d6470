"""Files that are read or kept private; an error names the flag that the file was given with."""

from __future__ import annotations

import os
from pathlib import Path

from pagoda.errors import ConfigError


def open_private(path: str, flags: int) -> int:
    """Opener (as `open` takes it) of files that only the user may read, wherever they lie."""
    return os.open(path, flags, 0o600)


def read_file(path: Path, flag: str) -> bytes:
    """Raises ConfigError if the file cannot be read."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{flag}: cannot read {path}: {error.strerror}.") from error
