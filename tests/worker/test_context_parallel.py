# SPDX-License-Identifier: Apache-2.0
"""Contexts whose segments lie on several ranks: what they answer, and what each rank holds."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from in_process import InProcessEngine
from tiny_models import make_model

from pagoda.messages.frontend import GenerateRequest, Work
from pagoda.messages.sampling_params import SamplingParams
from pagoda.parallel.config import ParallelConfig

SEGMENT = 128
LONGEST = 1024


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    make_model("llama", num_hidden_layers=2, max_position_embeddings=LONGEST).save_pretrained(path)
    return path


def _engine(
    directory: Path, cp: int, tp: int = 1, pp: int = 1, **options: object
) -> InProcessEngine:
    parallel = ParallelConfig(
        context_parallel_size=cp, tensor_parallel_size=tp, pipeline_parallel_size=pp
    )
    sizes = {"num_blocks": 96 // cp, "max_num_batched_tokens": 200, "dtype": "float32"}
    return InProcessEngine(
        directory,
        parallel=parallel,
        max_model_len=LONGEST,
        segment_tokens=SEGMENT,
        **sizes | options,
    )


def _requests(*lengths: int, seed: int = 0) -> list[GenerateRequest]:
    rng = random.Random(seed)
    sampling = SamplingParams(temperature=0, seed=0, max_tokens=12)
    return [
        GenerateRequest(
            request_id=str(i),
            prompt_token_ids=[rng.randrange(256) for _ in range(length)],
            work=Work(sampling),
        )
        for i, length in enumerate(lengths)
    ]


@pytest.mark.parametrize(("cp", "tp", "pp"), [(2, 1, 1), (3, 1, 1), (2, 2, 1), (2, 1, 2)])
def test_answers_are_those_of_one_rank(
    directory: Path, backend: str, cp: int, tp: int, pp: int
) -> None:
    requests = _requests(3, 127, 128, 129, 300, 700)
    one = _engine(directory, 1, backend=backend).answer(requests)
    assert _engine(directory, cp, tp, pp, backend=backend).answer(requests) == one
