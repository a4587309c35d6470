# SPDX-License-Identifier: Apache-2.0
"""Ranks that attend to requests of their own (`--enable-dp-attention`): what they answer, and what they hold."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import family_models
import pytest
import tiny_models
from in_process import CONTEXT, InProcessEngine, engine

from pagoda.messages.frontend import GenerateRequest, Work
from pagoda.messages.sampling_params import SamplingParams
from pagoda.parallel.config import ParallelConfig

MODELS = {
    "llama": tiny_models,
    "mistral": tiny_models,
    "qwen3-moe": tiny_models,
    "deepseek-v2": family_models,
    "deepseek-v3": family_models,
}


def split(
    directory: Path, backend: str, tp: int, pp: int = 1, *, experts: bool = False, **options: Any
) -> InProcessEngine:
    parallel = ParallelConfig(
        tensor_parallel_size=tp,
        pipeline_parallel_size=pp,
        expert_parallel=experts,
        dp_attention=True,
    )
    return InProcessEngine(
        directory,
        backend=backend,
        max_model_len=CONTEXT,
        parallel=parallel,
        dtype="float32",
        **options,
    )


def requests(count: int = 7, **sampling: Any) -> list[GenerateRequest]:
    rng = random.Random(7)
    return [
        GenerateRequest(
            request_id=str(i),
            prompt_token_ids=[rng.randrange(320) for _ in range(rng.randint(1, 60))],
            work=Work(
                SamplingParams(**{"max_tokens": 16, "temperature": 0, "seed": i, **sampling})
            ),
        )
        for i in range(count)
    ]


@pytest.fixture(scope="module", params=MODELS)
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp(request.param)
    MODELS[request.param].make_model(request.param).save_pretrained(path)
    return path


@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (4, 1), (2, 2)])
def test_greedy(directory: Path, backend: str, tp: int, pp: int) -> None:
    one = engine(directory, backend, dtype="float32")
    shared = split(directory, backend, tp, pp, max_num_batched_tokens=37)
    assert shared.answer(requests()) == one.answer(requests())
