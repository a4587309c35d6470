"""Files with a JSON object in each line."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

import msgspec

from pagoda.errors import ConfigError

T = TypeVar("T")


def read_file(path: Path, flag: str) -> bytes:
    """Raises ConfigError, which names the flag, if the file cannot be read."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{flag}: cannot read {path}: {error.strerror}.") from error


def read_jsonl(path: Path, kind: type[T], flag: str) -> Iterator[tuple[str, T]]:
    """Yields each object behind the words that name its line in an error. Blank lines are skipped.

    Raises:
        ConfigError: the file cannot be read, or a line is no such object; the error says which.
    """
    decode = msgspec.json.Decoder(kind).decode
    for number, line in enumerate(read_file(path, flag).splitlines(), start=1):
        place = f"{flag}: {path} line {number}"
        if line.strip():
            try:
                yield place, decode(line)
            except msgspec.DecodeError as error:
                raise ConfigError(f"{place}: {error}.") from error
