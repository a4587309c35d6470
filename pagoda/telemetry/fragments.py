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
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

FRAGMENT_SUFFIX = ".fragment.jsonl"
MAX_FRAGMENT_BYTES = 2 * 2**30
"""A trace that was forgotten does not fill the disk."""
_PERIOD_S = 0.25
_BATCH = 200
"""Events that are encoded together: for this long a thread that waits for the interpreter is held up."""
_CLOSING_S = 5.0
"""How long a slow disk may take for what is left at the end."""


class ProcessHeader(msgspec.Struct, frozen=True, kw_only=True):
    """The process that a fragment is of."""

    uid: str
    """New for each process: the system uses process ids again."""
    pid: int
    role: str
    host: str
    run: str = ""
    level: str = ""
    clock_ns: int = 0
    """The process's own clock at the start of the fragment."""
    wall_ns: int = 0
    """At the same moment, since 1970; of clocks that nobody compared, the best there is."""

    @classmethod
    def of_this_process(cls, role: str) -> ProcessHeader:
        return cls(uid=secrets.token_hex(8), pid=os.getpid(), role=role, host=socket.gethostname())

    def began(self, run: str, level: str, clock_ns: int) -> ProcessHeader:
        """That of one fragment."""
        return msgspec.structs.replace(
            self, run=run, level=level, clock_ns=clock_ns, wall_ns=time.time_ns()
        )

    @property
    def file_name(self) -> str:
        """Fragments of a run begin alike, so that they can be found."""
        role = self.role.replace(" ", "-")
        return f"{run_prefix(self.run)}{role}.{self.uid}.{self.clock_ns}{FRAGMENT_SUFFIX}"


def run_prefix(run: str) -> str:
    """What the names of a run's fragments begin with."""
    name = "".join(c if c.isascii() and (c.isalnum() or c in "-_") else "_" for c in run)
    return f"{name}."


def clear_fragments(directory: Path, run: str) -> None:
    """Removes what earlier tracing of the same run left. For the first process of a server alone."""
    for path in directory.glob(f"{run_prefix(run)}*{FRAGMENT_SUFFIX}"):
        path.unlink(missing_ok=True)


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
        """`on_failure` is told in the writer's thread, or in that of `start` or `close`."""
        self.events: deque[dict[str, Any]] = deque()
        """What is to be written; any thread may append."""
        self.path = Path(directory) / header.file_name
        self._header = header
        self._on_failure = on_failure
        self._encoder = msgspec.json.Encoder()
        self._ends = threading.Event()
        self._num_bytes = 0
        self._thread = threading.Thread(target=self._run, name="trace-writer", daemon=True)

    def start(self) -> None:
        try:
            self._thread.start()
        except RuntimeError as error:  # there are too many threads
            self._ends.set()
            self._on_failure(self, f"{self.path} cannot be written ({error}).")

    def close(self) -> None:
        """Returns when all events are written, or cannot be; after some seconds in any case."""
        self._ends.set()
        if self._thread.ident is None:
            return
        self._thread.join(_CLOSING_S)
        if self._thread.is_alive():
            self._on_failure(self, f"{self.path} could not be written within {_CLOSING_S:g} s.")

    def _run(self) -> None:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with open(self.path, "xb", buffering=0) as file:
                self._write(file.write, [{"fragment": msgspec.to_builtins(self._header)}])
                while not self._ends.wait(_PERIOD_S):
                    self._drain(file.write)
                self._drain(file.write)
        except OSError as error:
            self._on_failure(self, f"{self.path} cannot be written ({error.strerror or error}).")
        except Exception as error:  # tracing ends, serving goes on
            self._on_failure(self, f"{self.path} lacks an event ({type(error).__name__}: {error}).")

    def _drain(self, write: Callable[[bytes], int]) -> None:
        while self.events:
            count = min(_BATCH, len(self.events))
            self._write(write, [self.events.popleft() for _ in range(count)])

    def _write(self, write: Callable[[bytes], int], events: list[dict[str, Any]]) -> None:
        data = self._encoder.encode_lines(events)
        self._num_bytes += len(data)
        if self._num_bytes > MAX_FRAGMENT_BYTES:
            raise OSError(f"it has {MAX_FRAGMENT_BYTES} bytes")
        while data:  # a file without a buffer may take a part
            data = data[write(data) :]
