# SPDX-License-Identifier: Apache-2.0
"""A server whose traces go to a disk of a few kilobytes, in a mount namespace of its own."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from pagoda.cli.server_process import READY_PREFIX

_MOUNT = 'mount -t tmpfs -o "size=$1" tmpfs "$2" && shift 2 && exec "$@"'


def missing_for_a_small_disk(directory: Path) -> str | None:
    """Why this machine cannot make one; None when it can."""
    if shutil.which("unshare") is None:
        return "a mount namespace needs unshare (util-linux)"
    trial = subprocess.run(_inside("64k", directory, ["true"]), capture_output=True, text=True)
    return None if trial.returncode == 0 else f"no small disk can be made ({trial.stderr.strip()})"


def on_a_small_disk(
    size: str, directory: Path, command: Sequence[str]
) -> subprocess.CompletedProcess[str]:
    """Runs a command that sees `directory` on a disk of this size."""
    return subprocess.run(_inside(size, directory, command), capture_output=True, text=True)


def _inside(size: str, directory: Path, command: Sequence[str]) -> list[str]:
    return ["unshare", "-rm", "sh", "-c", _MOUNT, "sh", size, str(directory), *command]


@dataclass(frozen=True)
class CrampedServer:
    base_url: str
    traces: Path
    """What is on the disk, as long as the server runs: seen from outside its namespace."""


@contextlib.contextmanager
def cramped_server(
    directory: Path, log: Path, arguments: Sequence[str], size: str = "64k"
) -> Iterator[CrampedServer]:
    """Runs `pagoda serve`, with `directory` as large as `size` for its traces and its log lines in `log`."""
    directory.mkdir()
    command = [sys.executable, "-m", "pagoda", "serve", "--port", "0", *arguments]
    command += ["--profile-dir", str(directory)]
    with (
        log.open("wb") as errors,
        subprocess.Popen(
            _inside(size, directory, command), stdout=subprocess.PIPE, stderr=errors, text=True
        ) as process,
    ):
        try:
            if process.stdout is None:
                raise RuntimeError("The server has no standard output.")
            ready = next(line for line in process.stdout if line.startswith(READY_PREFIX))
            url = ready.removeprefix(READY_PREFIX).split()[0]
            yield CrampedServer(url, Path(f"/proc/{process.pid}/root{directory}"))
        finally:
            process.terminate()
