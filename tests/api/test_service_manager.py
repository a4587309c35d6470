# SPDX-License-Identifier: Apache-2.0
"""A real server beside a socket in the place of systemd's."""

from __future__ import annotations

import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from pagoda.api.monitoring.service_manager import RECOVERY_S, ServiceManager
from pagoda.cli.server_process import server_process
from pagoda.fleet.endpoint import Health

SIM = ["qwen3-0.6b", "--load-format", "dummy", "--executor", "sim"]


@pytest.fixture
def manager() -> Iterator[socket.socket]:
    """Where a server tells what it does; each read gives up after 20 s."""
    with (
        tempfile.TemporaryDirectory(dir="/tmp") as directory,
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager,
    ):
        manager.bind(str(Path(directory) / "notify"))
        manager.settimeout(20)
        yield manager


def until(manager: socket.socket, wanted: str) -> list[str]:
    """What is told before `wanted` is."""
    told: list[str] = []
    while wanted not in (told := [*told, *manager.recv(4096).decode().split("\n")]):
        pass
    return told


def test_a_server_tells_that_it_loads_is_ready_lives_and_stops(
    manager: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", manager.getsockname())
    monkeypatch.setenv("WATCHDOG_USEC", "300000")
    with server_process(SIM) as server:
        before = until(manager, "READY=1")
        assert "EXTEND_TIMEOUT_USEC=30000000" in before
        assert not {"WATCHDOG=1", "STOPPING=1"}.intersection(before)
        assert f"STATUS=serving at {server.base_url}" in before
        for _ in range(3):
            until(manager, "WATCHDOG=1")
    assert "EXTEND_TIMEOUT_USEC=60000000" in until(manager, "STOPPING=1")


async def test_a_server_that_does_not_recover_is_left_to_the_watchdog(
    manager: socket.socket,
) -> None:
    environment = {"NOTIFY_SOCKET": manager.getsockname(), "WATCHDOG_USEC": "3000"}
    times = iter([0.0, 1.0, RECOVERY_S - 1, RECOVERY_S, RECOVERY_S + 1])
    asked = 0

    async def health() -> Health:
        nonlocal asked
        asked += 1
        if asked == 2:
            raise ValueError("a bug")
        return Health(False, "the engine is restarting")

    class OutOfTimeError(Exception):
        pass

    def clock() -> float:
        for now in times:
            return now
        raise OutOfTimeError

    with pytest.raises(OutOfTimeError):
        await ServiceManager(environment).feed_watchdog(health, clock)
    assert asked == 5
    for status in ("the engine is restarting", "the health of the server cannot be told"):
        assert manager.recv(4096) == f"WATCHDOG=1\nSTATUS={status}".encode()
    manager.setblocking(False)
    with pytest.raises(BlockingIOError):
        manager.recv(4096)


@pytest.mark.parametrize(
    ("environment", "watchdog_s"),
    [
        ({}, None),
        ({"WATCHDOG_USEC": "2000000"}, 2.0),
        ({"WATCHDOG_USEC": "2000000", "WATCHDOG_PID": "1"}, None),
    ],
)
def test_the_watchdog_is_that_of_this_process(
    environment: dict[str, str], watchdog_s: float | None
) -> None:
    assert ServiceManager(environment).watchdog_s == watchdog_s
    ServiceManager(environment).tell("READY=1")  # to nobody
