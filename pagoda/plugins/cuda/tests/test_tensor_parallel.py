# SPDX-License-Identifier: Apache-2.0
"""Tensor-parallel ranks on emulated devices answer as one alone on the reference."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from msgspec.structs import replace

from pagoda.backend.reference.backend import ReferenceBackend
from pagoda.messages.frontend import Work
from pagoda.messages.sampling_params import SamplingParams
from pagoda.messages.worker import SlotStart, StepPlan, StepResult
from pagoda.messages.worker_config import WorkerConfig
from pagoda.parallel.collectives import RankGroups
from pagoda.parallel.config import ParallelConfig, RankPlace
from pagoda.plugins.backend_check.small_models import WITH_EXPERTS, model_directory
from pagoda.plugins.backend_check.threads import ThreadGroup, ThreadRank
from pagoda.plugins.cuda.backend import GpuBackend
from pagoda.plugins.cuda.emulation import EmulatedDevice
from pagoda.telemetry.tracer import Tracer
from pagoda.worker import loading
from pagoda.worker.runner import Runner

SHARES = [(3, 2), (2, 2), (1, 1), (1, 1), (1, 1)]
"""Tokens of two slots, step by step: the first two sample nothing."""
PROMPTS = ([5, 6, 7, 8, 9, 10], [40, 41, 42, 43, 44])
SAMPLING = (
    SamplingParams(temperature=0, seed=0, max_tokens=20),
    SamplingParams(temperature=0.9, seed=3, max_tokens=20),
)


def _results(worker: loading.LoadedWorker) -> list[StepResult]:
    runner = worker.runner
    assert isinstance(runner, Runner)
    starts = [
        SlotStart(slot, prompt, len(prompt), 0, [[slot]], Work(sampling))
        for slot, (prompt, sampling) in enumerate(zip(PROMPTS, SAMPLING, strict=True))
    ]
    plans = [
        StepPlan(step, [0, 1], [*shares], starts if step == 0 else [])
        for step, shares in enumerate(SHARES)
    ]
    return [runner.submit(plan).result() for plan in plans]


def test_prompts_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hosts of ranks meet behind steps that sample nothing, and tell each other tokens behind others."""

    def plan(backend: Any, config: WorkerConfig) -> loading.WorkerMemoryPlan:
        monkeypatch.setattr(loading, "choose_backend", lambda *_: (backend, "test"))
        return loading.plan_worker(config)

    with model_directory(WITH_EXPERTS) as directory, ThreadPoolExecutor(2) as pool:
        sizes: dict[str, Any] = {"num_blocks": 8, "max_num_seqs": 2, "max_model_len": 16}
        alone = WorkerConfig(model=directory, load_format="dummy", dtype="float32", **sizes)
        expected = _results(loading.load_runner(plan(ReferenceBackend(), alone), Tracer("worker")))
        shared = replace(alone, parallel=ParallelConfig(tensor_parallel_size=2))
        plans = [
            plan(GpuBackend(EmulatedDevice()), replace(shared, place=RankPlace(tp=rank)))
            for rank in range(2)
        ]
        group = ThreadGroup(2)

        def run(rank: int) -> list[StepResult]:
            host = ThreadRank(group, rank)
            return _results(
                loading.load_runner(plans[rank], Tracer("worker"), RankGroups(host, host))
            )

        ranks = list(pool.map(run, range(2)))
    tokens = [it.token_ids for it in expected]
    assert tokens[:2] == [[], []]
    assert [len(drawn) for drawn in tokens[2:]] == [2, 2, 2]
    assert [[it.token_ids for it in own] for own in ranks] == [tokens, tokens]
    assert [it.expert_tokens for it in ranks[0]] == [it.expert_tokens for it in expected]
