"""Files that are read; an error names the flag that the file was given with."""

from __future__ import annotations

from pathlib import Path

from pagoda.errors import ConfigError


def read_file(path: Path, flag: str) -> bytes:
    """Raises ConfigError if the file cannot be read."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{flag}: cannot read {path}: {error.strerror}.") from error
