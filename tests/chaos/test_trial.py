# SPDX-License-Identifier: Apache-2.0
"""Trials end whatever they wait for, and blame a server for nothing of others."""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from benchmarks.chaos.servers import Server
from benchmarks.chaos.trial import TooLongError, limited


async def _never() -> None:
    await asyncio.Event().wait()


def _sleep() -> None:
    with subprocess.Popen(["sleep", "600"]) as process:
        try:
            process.wait()
        finally:
            process.kill()


@pytest.mark.parametrize("wait", [lambda: asyncio.run(_never()), _sleep])
def test_a_trial_ends_whatever_it_waits_for(wait: Callable[[], None]) -> None:
    with pytest.raises(TooLongError, match=r"not over after 0.05 s"), limited(0.05):
        wait()


def test_shared_memory_of_other_programs_is_not_a_servers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = tmp_path / "shm"
    shared.mkdir()
    monkeypatch.setattr("benchmarks.chaos.servers.SHARED_MEMORY", shared)
    (tmp_path / "own").mkdir()
    with subprocess.Popen(["true"]) as process:
        ended = psutil.Process(process.pid)
    server = Server("", process, tmp_path / "own", frozenset())  # type: ignore[arg-type]
    (shared / f"torch_{os.getpid()}_1").touch()
    (shared / f"x{process.pid}0").touch()
    assert server.left([ended]) == []
    (shared / f"torch_{process.pid}_1").touch()
    assert server.left([ended]) == [f"torch_{process.pid}_1"]
