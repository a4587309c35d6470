# SPDX-License-Identifier: Apache-2.0
"""SIGKILL for the worker and the engine while answers are held to constraints: the same tokens arrive."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Iterator

import pytest
from constrained import check_answers, constrained_bodies
from streams import Answer, children, stream_all, until_more

from pagoda.cli.server_process import ServerProcess, server_process


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with server_process(["--dtype", "float32", "--log-level", "warning"]) as server:
        yield server


@pytest.fixture(scope="module")
def expected(plain_url: str) -> list[Answer]:
    answers = asyncio.run(stream_all(plain_url, constrained_bodies()))
    check_answers(answers)
    return answers


@pytest.mark.parametrize("num_events", [30, 200, 600])
@pytest.mark.parametrize("module", ["pagoda.worker.main", "pagoda.engine.main"])
async def test_a_process_is_killed(
    server: ServerProcess, expected: list[Answer], module: str, num_events: int
) -> None:
    """Some answers have not begun, are under way or have ended whenever the process is killed."""

    async def kill(received: Callable[[], int]) -> None:
        await until_more(received, num_events)
        (victim,) = children(server.pid, module)
        os.kill(victim, signal.SIGKILL)
        await until_more(received, 1)

    assert await stream_all(server.base_url, constrained_bodies(), kill) == expected
