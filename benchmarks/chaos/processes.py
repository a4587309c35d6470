# SPDX-License-Identifier: Apache-2.0
"""Processes of a trial, and what they must end with."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from subprocess import PIPE, Popen, TimeoutExpired
from typing import TypeVar

import msgspec

T = TypeVar("T")

_ENDING_S = 10.0


@contextlib.contextmanager
def ended(process: Popen[bytes]) -> Iterator[Popen[bytes]]:
    """A process that ends with its context: its standard input is closed, and if it stays it is killed."""
    try:
        yield process
    finally:
        if process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()
        try:
            process.wait(_ENDING_S)
        except TimeoutExpired:
            process.kill()
            process.wait()
        if process.stdout is not None:
            process.stdout.close()


@contextlib.contextmanager
def reporting(module: str, arguments: Sequence[str], kind: type[T]) -> Iterator[Callable[[], T]]:
    """Runs `python -m module ARGUMENTS` until the context ends. The function asks the process for a line of JSON,
    by an empty line, and returns it as a `kind`."""
    command = [sys.executable, "-m", module, *arguments]
    with ended(Popen(command, stdin=PIPE, stdout=PIPE)) as process:
        commands, answers = process.stdin, process.stdout
        if commands is None or answers is None:
            raise RuntimeError(f"{module} has no pipes.")

        def take() -> T:
            commands.write(b"\n")
            commands.flush()
            return msgspec.json.decode(answers.readline(), type=kind)

        yield take
