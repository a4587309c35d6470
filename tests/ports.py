# SPDX-License-Identifier: Apache-2.0
"""Ports for servers that have to be told theirs before they start."""

from __future__ import annotations

import functools
import itertools
import os
import random
import socket
from collections.abc import Iterator

_FIRST, _PER_PROCESS, _PROCESSES = 20_000, 1_000, 10
"""The range lies below the ports that Linux gives to connections by itself (`ip_local_port_range`), any of which
may be taken between a look and its use. Test processes that run side by side have a share each."""


def free_ports(count: int, host: str = "127.0.0.1") -> list[int]:
    """So many ports in a row on which nobody listens, and which this process has not been given lately."""
    turns = _turns()
    while True:
        ports = list(itertools.islice(turns, count))
        if ports[-1] - ports[0] == count - 1 and all(_is_free(host, port) for port in ports):
            return ports


@functools.cache
def _turns() -> Iterator[int]:
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    ports = range(_PER_PROCESS * (worker % _PROCESSES), _PER_PROCESS * (worker % _PROCESSES + 1))
    start = random.randrange(_PER_PROCESS)  # another run of the tests may go on beside this one
    return itertools.cycle([_FIRST + port for port in (*ports[start:], *ports[:start])])


def _is_free(host: str, port: int) -> bool:
    try:
        socket.create_server((host, port)).close()
    except OSError:
        return False
    return True
