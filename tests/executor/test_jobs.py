# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest

from pagoda.checkpoints.resolve import resolve_model
from pagoda.errors import ConfigError, EngineDeadError
from pagoda.executor.jobs import run_job
from pagoda.messages.jobs import QualityConfig, QualityResult
from pagoda.messages.worker_config import WorkerConfig


def _run(module: str, model: str, reports: list[tuple[int, int]]) -> QualityResult:
    worker = WorkerConfig(model=model, num_threads=1)
    config = QualityConfig(
        model=worker, reference=worker, texts=[[65, 66, 67, 68, 69]], context_len=3
    )
    return run_job(module, config, QualityResult, lambda *report: reports.append(report))


def test_a_job_reports_progress_and_a_result() -> None:
    reports: list[tuple[int, int]] = []
    result = _run("pagoda.plugins.bench.quality_job", resolve_model(None).model, reports)
    assert reports == [(3, 5), (5, 5)]
    assert result.overall.positions == 3
    assert result.overall.kl_mean == 0


def test_what_is_wrong_with_a_configuration_is_the_users_error() -> None:
    with pytest.raises(ConfigError, match="there is no model directory nowhere"):
        _run("pagoda.plugins.bench.quality_job", "nowhere", [])


def test_a_job_that_ends_without_a_result_is_a_failure() -> None:
    with pytest.raises(EngineDeadError, match="exited with code 0 before it had a result"):
        _run("pagoda.errors", "nowhere", [])
