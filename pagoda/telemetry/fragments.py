# SPDX-License-Identifier: Apache-2.0
"""A fragment: what one process traced, one JSON object a line.

The first line says whose it is (`ProcessHeader`, under the key `fragment`). The others are trace events as Chrome
has them (https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU), without `pid`, with
`ts` and `dur` in microseconds of the process's own clock; or what the clocks of others are ahead of it, under the
key `clock`.
`pagoda trace merge` makes one trace of all fragments in a directory.

A fragment of a process that was killed ends in the middle of a line, or some moments too early.
"""

from __future__ import annotations

import os
import secrets
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from pagoda.files import open_private

FRAGMENT_SUFFIX = ".fragment.jsonl"
MAX_FRAGMENT_BYTES = 2 * 2**30
"""A trace that was forgotten does not fill the disk."""
MAX_QUEUED_BYTES = 64 * 2**20
"""Memory for events that are not written yet. A disk that does not keep up ends tracing before memory is full."""
CLOSING_S = 5.0
"""Seconds that a slow disk may take to write the rest at the end."""
_PERIOD_S = 0.25
_BATCH = 1000


class ProcessHeader(msgspec.Struct, frozen=True, kw_only=True):
    uid: str
    """New for each process: the system uses process ids again."""
    pid: int
    role: str
    host: str
    parent_uid: str = ""
    """`uid` of the process that started this one; empty for a frontend or router."""
    run: str = ""
    level: str = ""
    clock_ns: int = 0
    """The process's own clock at the start of the fragment."""
    wall_ns: int = 0
    """The time of day at the start of the fragment, since 1970."""
    clock_id: str = ""
    """Processes with the same id read the same clock; empty if unknown."""

    @classmethod
    def of_this_process(cls, role: str, clock_ns: Callable[[], int]) -> ProcessHeader:
        return cls(
            uid=secrets.token_hex(8),
            pid=os.getpid(),
            role=role,
            host=socket.gethostname(),
            clock_id=_clock_id() if clock_ns is time.perf_counter_ns else "",
        )

    @property
    def kind(self) -> str:
        """`router`, `frontend`, `engine`, `worker`, or what else the role begins with."""
        return self.role.partition(" ")[0]

    @property
    def file_name(self) -> str:
        """Fragments of a run begin alike, so that they can be found."""
        role = self.role.replace(" ", "-")
        return f"{run_prefix(self.run)}{role}.{self.uid}.{self.clock_ns}{FRAGMENT_SUFFIX}"


def _clock_id() -> str:
    """The boot of the kernel and the time namespace, which have one CLOCK_MONOTONIC; empty if they are unknown."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {os.readlink('/proc/self/ns/time')}"
    except OSError:
        return ""


def run_prefix(run: str) -> str:
    """The beginning of the names of a run's fragments."""
    name = "".join(c if c.isascii() and (c.isalnum() or c in "-_") else "_" for c in run)
    return f"{name}."


def clear_fragments(directory: Path, run: str) -> None:
    """Removes what earlier tracing of the same run left. For the first process of a server alone."""
    for path in fragments_of(directory, run):
        path.unlink(missing_ok=True)


def fragments_of(directory: Path, run: str) -> list[Path]:
    return sorted(directory.glob(f"{run_prefix(run)}*{FRAGMENT_SUFFIX}"))


class FragmentWriter:
    """Empties a queue into a file, in a thread of its own.

    Whatever goes wrong is told once, as a sentence, and then nothing more is written.
    """

    def __init__(
        self,
        directory: str,
        header: ProcessHeader,
        on_failure: Callable[[FragmentWriter, str], None],
    ) -> None:
        """`on_failure` is told in the writer's thread, or in that of `start`, `append` or `close`."""
        self.path = Path(directory) / header.file_name
        self._on_failure = on_failure
        self._encode = msgspec.json.Encoder().encode
        self._lines: deque[bytes] = deque()
        self._num_queued_bytes = 0
        self._lock = threading.Lock()
        self._ends = threading.Event()
        self._num_bytes = 0
        self._thread = threading.Thread(target=self._run, name="trace-writer", daemon=True)
        self.append({"fragment": msgspec.to_builtins(header)})

    def append(self, event: dict[str, Any]) -> None:
        """Queues an event, as JSON, whose size is known. Any thread may call this."""
        try:
            line = self._encode(event)
        except Exception as error:  # tracing ends, serving goes on
            self._on_failure(self, f"{self.path} lacks an event ({type(error).__name__}: {error}).")
            return
        with self._lock:
            self._lines.append(line)
            self._num_queued_bytes += sys.getsizeof(line)
            is_full = self._num_queued_bytes > MAX_QUEUED_BYTES
        if is_full:
            self._on_failure(self, f"{self.path} is written too slowly.")

    def drop(self) -> None:
        """Nothing of what is queued is to be written."""
        with self._lock:
            self._lines.clear()
            self._num_queued_bytes = 0

    def start(self) -> None:
        try:
            self._thread.start()
        except RuntimeError as error:  # there are too many threads
            self._ends.set()
            self._on_failure(self, f"{self.path} cannot be written ({error}).")

    def end(self) -> None:
        """Nothing more comes. Does not wait."""
        self._ends.set()

    def close(self, timeout_s: float = CLOSING_S) -> None:
        """Returns when all events are written, or cannot be; after so many seconds in any case."""
        self.end()
        if self._thread.ident is None:
            return
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            self.drop()
            self._on_failure(self, f"{self.path} could not be written within {timeout_s:g} s.")

    def _run(self) -> None:
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with open(self.path, "xb", buffering=0, opener=open_private) as file:
                self._drain(file.write)
                while not self._ends.wait(_PERIOD_S):
                    self._drain(file.write)
                self._drain(file.write)
        except OSError as error:
            self._on_failure(self, f"{self.path} cannot be written ({error.strerror or error}).")

    def _drain(self, write: Callable[[bytes], int]) -> None:
        while lines := self._take():
            self._write(write, b"".join(line + b"\n" for line in lines))

    def _take(self) -> list[bytes]:
        with self._lock:
            lines = [self._lines.popleft() for _ in range(min(_BATCH, len(self._lines)))]
            self._num_queued_bytes -= sum(map(sys.getsizeof, lines))
        return lines

    def _write(self, write: Callable[[bytes], int], data: bytes) -> None:
        self._num_bytes += len(data)
        if self._num_bytes > MAX_FRAGMENT_BYTES:
            raise OSError(f"it has {MAX_FRAGMENT_BYTES} bytes")
        while data:  # a file without a buffer may take a part
            data = data[write(data) :]
