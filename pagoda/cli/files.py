# SPDX-License-Identifier: Apache-2.0
"""Files that commands read and write; an error names the flag that the file was given with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TypeVar

import msgspec

from pagoda.errors import ConfigError
from pagoda.files import read_file

T = TypeVar("T")


def write_file(path: Path, data: bytes, flag: str) -> None:
    """Raises ConfigError if the file cannot be written."""
    try:
        path.write_bytes(data)
    except OSError as error:
        raise ConfigError(f"{flag}: cannot write {path}: {error.strerror}.") from error


def check_writable(path: Path | None, flag: str) -> None:
    """Makes sure, before work that takes long, that its result can be written; None is not written.
    Raises ConfigError if it cannot."""
    try:
        if path is not None:
            path.open("ab").close()
    except OSError as error:
        raise ConfigError(f"{flag}: cannot write {path}: {error.strerror}.") from error


def write_json(path: Path, value: Mapping[str, object]) -> None:
    """Writes `value` as indented JSON to the file of `--output`."""
    text = msgspec.json.format(msgspec.json.encode(value, enc_hook=str), indent=2)
    write_file(path, text + b"\n", "--output")


def read_jsonl(path: Path, kind: type[T], flag: str) -> Iterator[tuple[str, T]]:
    """Yields the object of each line after the words that name the line in an error. Blank lines are skipped.

    Raises ConfigError if the file cannot be read, or a line, which the error names, is not such an object.
    """
    decode = msgspec.json.Decoder(kind).decode
    for number, line in enumerate(read_file(path, flag).splitlines(), start=1):
        place = f"{flag}: {path} line {number}"
        if line.strip():
            try:
                yield place, decode(line)
            except msgspec.DecodeError as error:
                raise ConfigError(f"{place}: {error}.") from error
