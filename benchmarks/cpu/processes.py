# SPDX-License-Identifier: Apache-2.0
"""A program to measure, Pagoda or not: started, timed until it is ready, weighed, and stopped."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from pagoda.errors import PagodaError

_READY_TIMEOUT_S = 900.0
_STOP_TIMEOUT_S = 30.0
_POLL_S = 0.1


class NotThereError(PagodaError):
    """A program cannot be started here; the text says why."""


@dataclass(frozen=True, kw_only=True)
class ServerCommand:
    """Command that starts a server, and the address at which it answers."""

    command: Sequence[str]
    base_url: str
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Running:
    """A server that answers."""

    pid: int
    ready_s: float
    """Seconds from the start of the process to the first answer."""


@contextlib.contextmanager
def running(server: ServerCommand, log: Path) -> Iterator[Running]:
    """Runs the server, with all it writes in `log`, for as long as the context lasts.

    Raises:
        NotThereError: it does not start.
    """
    if _answers(server.base_url):
        raise NotThereError(f"another server answers at {server.base_url} already")
    with started(server.command, log, server.environment) as process:
        start = time.perf_counter()
        while not _answers(server.base_url):
            if process.poll() is not None:
                raise NotThereError(f"it ended with code {process.returncode}: {_last_line(log)}")
            if time.perf_counter() - start > _READY_TIMEOUT_S:
                raise NotThereError(f"it was not ready after {_READY_TIMEOUT_S:.0f} s")
            time.sleep(_POLL_S)
        yield Running(process.pid, time.perf_counter() - start)


@contextlib.contextmanager
def started(
    command: Sequence[str], log: Path, environment: Mapping[str, str]
) -> Iterator[subprocess.Popen[bytes]]:
    """A process in a group of its own, of which nothing is left at the end."""
    with log.open("wb") as output:
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **environment},
                start_new_session=True,
            )
        except OSError as error:
            raise NotThereError(f"{command[0]} cannot be run: {error.strerror}") from error
    try:
        yield process
    finally:
        _stop(process)


def _stop(process: subprocess.Popen[bytes]) -> None:
    _signal_group(process, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_STOP_TIMEOUT_S)
    _signal_group(process, signal.SIGKILL)
    process.wait()


def _signal_group(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)


def _answers(base_url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{base_url}/v1/models", timeout=10) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def _last_line(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "it said nothing")


def resident_bytes(pid: int) -> list[int]:
    """Resident memory of a process and of each of its descendants; of pages that several share, a part each (PSS).

    Raises:
        NotThereError: one of them has ended.
    """
    try:
        root = psutil.Process(pid)
        return [_proportional_bytes(process) for process in (root, *root.children(recursive=True))]
    except (psutil.Error, OSError) as error:
        raise NotThereError("it ended while it was measured") from error


def _proportional_bytes(process: psutil.Process) -> int:
    rollup = Path(f"/proc/{process.pid}/smaps_rollup").read_text(encoding="ascii")
    line = next(line for line in rollup.splitlines() if line.startswith("Pss:"))
    return int(line.split()[1]) * 1024


def forget_files(paths: Sequence[Path]) -> None:
    """Drops files from the page cache, so that the next reader reads them from disk."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)  # pages not yet written would stay
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)
