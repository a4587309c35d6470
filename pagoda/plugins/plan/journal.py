# SPDX-License-Identifier: Apache-2.0
"""A journal of decisions: lines of JSON with rules and memory, then with figures and the plan made of them.

Whoever decides again what a journal says gets the same bytes; a planner that starts again goes on with the memory
that this gives.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec

from pagoda.errors import ConfigError
from pagoda.files import append_whole
from pagoda.plugins.plan.figures import Figures, Memory, Plan, PlanConfig
from pagoda.plugins.plan.policy import decide

_MOST_LINE_BYTES = 2**24
_MOST_BYTES = 2**26
"""A journal that is longer becomes the one before, and another begins."""


class Rules(msgspec.Struct, frozen=True, tag="rules", forbid_unknown_fields=True):
    """Rules of the decisions that follow, and the memory before them."""

    config: PlanConfig
    memory: Memory


class Decided(msgspec.Struct, frozen=True, tag="decided", forbid_unknown_fields=True):
    """One decision: its inputs, and the plan as it was written."""

    figures: Figures
    plan: msgspec.Raw


_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(Rules | Decided).decode


class Replayed(NamedTuple):
    """State behind a line of a journal."""

    line: int
    config: PlanConfig
    memory: Memory
    is_same: bool
    """True if the plan, decided again, has the bytes of the journal."""
    plan: bytes
    """The plan as it is decided now; empty for rules."""


def replay(path: Path, *, may_be_torn: bool = False) -> Iterator[Replayed]:
    """Decides everything again. With `may_be_torn` a last line that was not written to its end is cut off.

    Raises ConfigError: the file cannot be read, or a line is none of a journal.
    """
    config: PlanConfig | None = None
    memory = Memory()
    try:
        with path.open("rb") as file:
            for number, line in enumerate(iter(lambda: file.readline(_MOST_LINE_BYTES), b""), 1):
                is_torn = not line.endswith(b"\n") and len(line) < _MOST_LINE_BYTES
                if is_torn and may_be_torn and config is not None:
                    _drop_torn_line(path)
                    return
                entry = _entry(path, number, line)
                if isinstance(entry, Rules):
                    config, memory = entry.config, entry.memory
                    yield Replayed(number, config, memory, True, b"")
                elif config is None:
                    raise ConfigError(f"{path}:{number}: a decision must come behind its rules.")
                else:
                    plan, memory = decide(config, memory, entry.figures)
                    again = _encode(plan)
                    yield Replayed(number, config, memory, again == bytes(entry.plan), again)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}).") from None


def _entry(path: Path, number: int, line: bytes) -> Rules | Decided:
    if not line.endswith(b"\n"):
        raise ConfigError(f"{path}:{number}: the line must have an end and less than 16 MiB.")
    try:
        return _decode(line)
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path}:{number}: the line is none of a journal ({error}).") from None


def _drop_torn_line(path: Path) -> None:
    """Cuts off what is behind the last end of a line. Raises OSError: the file cannot be changed."""
    with path.open("r+b") as file:
        start = max(0, file.seek(0, os.SEEK_END) - _MOST_LINE_BYTES)
        file.seek(start)
        file.truncate(start + file.read().rfind(b"\n") + 1)


class Journal:
    """Decides, and writes down every decision. Without a path it only decides."""

    def __init__(self, config: PlanConfig, path: Path | None = None) -> None:
        """Goes on with the memory that a journal at `path` gives; a last line that was not written to its end is
        dropped.

        Raises ConfigError: the file is no journal, or cannot be written.
        """
        self._config = config
        self._path = path
        self.memory = Memory()
        if path is not None:
            if path.exists():
                for state in replay(path, may_be_torn=True):
                    self.memory = state.memory
            self._write(_encode(Rules(config, self.memory)))

    def decide(self, figures: Figures) -> Plan:
        """The plan for these figures, which has been written down. Raises ConfigError: it cannot be."""
        plan, memory = decide(self._config, self.memory, figures)
        self._rotate()
        self._write(_encode(Decided(figures, msgspec.Raw(_encode(plan)))))
        self.memory = memory
        return plan

    def _rotate(self) -> None:
        """Begins another file where this one is long, or was taken away."""
        path = self._path
        if path is None:
            return
        try:
            if path.exists():
                if path.stat().st_size <= _MOST_BYTES:
                    return
                path.replace(path.with_name(f"{path.name}.1"))
        except OSError as error:
            raise ConfigError(f"--journal: {path} cannot be moved ({error.strerror}).") from None
        self._write(_encode(Rules(self._config, self.memory)))

    def _write(self, line: bytes) -> None:
        if self._path is None:
            return
        try:
            with self._path.open("ab", buffering=0) as file:
                append_whole(file, line + b"\n")
        except OSError as error:
            raise ConfigError(
                f"--journal: {self._path} cannot be written ({error.strerror})."
            ) from None
