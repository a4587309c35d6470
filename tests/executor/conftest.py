# SPDX-License-Identifier: Apache-2.0
"""The fixture of tests of `GroupExecutor`."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from worker_group import MakeExecutor

from pagoda.executor.group import GroupExecutor
from pagoda.executor.launcher import LocalLauncher
from pagoda.ipc.clock import Clock, MonotonicClock
from pagoda.messages.worker_config import KVHandoffConfig, KVTierConfig, WorkerConfig
from pagoda.parallel.config import ParallelConfig


@pytest.fixture(params=["ipc", "tcp"])
def make_executor(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[MakeExecutor]:
    monkeypatch.setenv("PYTHONPATH", f"{Path(__file__).parent}:{os.environ.get('PYTHONPATH', '')}")
    address = f"ipc://{tmp_path / 'w'}" if request.param == "ipc" else "tcp://127.0.0.1"
    # The machine may run out of memory meanwhile; no test does.
    monkeypatch.setattr("pagoda.ipc.lifeline.count_oom_kills", lambda: 0)
    made: list[GroupExecutor] = []

    def make(
        model: str,
        parallel: ParallelConfig | None = None,
        step_timeout_s: float = 30.0,
        start_timeout_s: float = 30.0,
        worker_timeout_s: float = 30.0,
        clock: Clock | None = None,
        kv_host_bytes: int = 0,
        kv_tiers: Mapping[str, KVTierConfig] = {},
        kv_handoff: KVHandoffConfig | None = None,
    ) -> GroupExecutor:
        executor = GroupExecutor(
            WorkerConfig(
                model=model,
                parallel=parallel or ParallelConfig(),
                kv_host_bytes=kv_host_bytes,
                kv_tiers=dict(kv_tiers),
                kv_handoff=kv_handoff,
            ),
            LocalLauncher("worker_double"),
            address=address,
            step_timeout_s=step_timeout_s,
            start_timeout_s=start_timeout_s,
            worker_timeout_s=worker_timeout_s,
            clock=clock or MonotonicClock(),
        )
        made.append(executor)
        executor.start()
        return executor

    yield make
    for executor in made:
        executor.close()
