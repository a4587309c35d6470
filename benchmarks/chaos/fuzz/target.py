# SPDX-License-Identifier: Apache-2.0
"""A target of fuzzing: a reader of bytes, and a way to change them without losing their form."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Feed = Callable[[bytes], object]
"""Reads an input. Errors that the reader promises are caught within; every other exception is a finding."""


@dataclass(frozen=True)
class Form:
    """A format as a tree of lists, objects and scalars, so that an input can be changed without being broken."""

    read: Callable[[bytes], Any]
    """Raises any exception for bytes that are not of the format."""
    write: Callable[[Any], bytes]
    """Raises any exception for a tree that the format cannot hold."""


@dataclass(frozen=True)
class Target:
    """Something that reads bytes of others."""

    name: str
    open: Callable[[Path], AbstractContextManager[Feed]]
    """Makes the reader. The argument is an empty directory of its own."""
    form: Form | None = None
    """None for bytes without a form."""
    words: tuple[str, ...] = ()
    """Words that inputs are made of: a dictionary for the fuzzer."""
    reserved_bytes: int = 0
    """Address space that threads of the reader reserve for their stacks, and do not touch."""
    is_native: bool = False
    """True of a reader that computes with the native kernels; it is fuzzed on those that check every access."""


def corpus_of(name: str, corpus: Path) -> Iterator[bytes]:
    """The kept inputs of a target, in order of their names."""
    for path in sorted((corpus / name).glob("*")):
        yield path.read_bytes()
