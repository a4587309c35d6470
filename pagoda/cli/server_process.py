# SPDX-License-Identifier: Apache-2.0
"""A server of our own in a process of its own, on a free port, ended with this process."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from pagoda.errors import ConfigError
from pagoda.ipc.lifeline import ChildProcess

READY_PREFIX = "ready: "
"""The words before the URL on the line in which `pagoda serve` says that it is ready."""


@dataclass(frozen=True)
class ServerProcess:
    base_url: str
    pid: int


@contextlib.contextmanager
def server_process(
    arguments: Sequence[str],
    command: Literal["serve", "route"] = "serve",
    *,
    stderr: int | None = None,
) -> Iterator[ServerProcess]:
    """Runs `pagoda COMMAND --port 0 ARGUMENTS` for as long as the context lasts.

    At the end the server is asked to finish (SIGTERM), and nothing of it is left behind. `stderr` is a file
    descriptor that takes its log.

    Raises ConfigError if the server does not start; the server has given the reason on standard error.
    """
    read_end, write_end = os.pipe()
    with open(read_end, encoding="utf-8") as output:
        try:
            child = ChildProcess(
                "pagoda", [command, "--port", "0", *arguments], stdout=write_end, stderr=stderr
            )
        finally:
            os.close(write_end)
        try:
            url = next(filter(None, map(_url_in, output)), None)
            if url is None:
                raise ConfigError(f"the server did not start; it {child.describe_end()}.")
            yield ServerProcess(url, child.pid)
            os.kill(child.pid, signal.SIGTERM)
            child.describe_end()
        finally:
            child.close()


def _url_in(line: str) -> str | None:
    return line.removeprefix(READY_PREFIX).split()[0] if line.startswith(READY_PREFIX) else None
