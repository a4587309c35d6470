# SPDX-License-Identifier: Apache-2.0
"""Contexts whose segments lie on several ranks: their answers have the bits of one rank, which holds its share."""

from __future__ import annotations

import random
from pathlib import Path

import msgspec
import pytest
from family_models import make_model
from in_process import InProcessEngine

from pagoda.backend.reference.backend import ReferenceBackend
from pagoda.checkpoints.resolve import load_model_config
from pagoda.errors import ConfigError
from pagoda.messages.frontend import GenerateRequest, Work
from pagoda.messages.sampling_params import SamplingParams
from pagoda.messages.worker_config import WorkerConfig
from pagoda.parallel.config import ParallelConfig
from pagoda.worker.context import check_context_parallel

SEGMENT = 128
LONGEST = 512
VOCABULARY = 320
ALONE = ParallelConfig()
CASES = [
    ("olmo2", ParallelConfig(context_parallel_size=2)),
    ("olmo2", ParallelConfig(context_parallel_size=3)),
    ("olmo2", ParallelConfig(context_parallel_size=2, pipeline_parallel_size=2)),
    ("olmo2", ParallelConfig(context_parallel_size=2, tensor_parallel_size=2)),
    ("gemma3", ParallelConfig(context_parallel_size=2)),  # windows
    ("llama4-chunked", ParallelConfig(context_parallel_size=2)),
    ("gpt-oss", ParallelConfig(context_parallel_size=3)),  # sinks
    ("deepseek-v2-lite", ParallelConfig(context_parallel_size=2)),  # latents
    ("bloom", ParallelConfig(context_parallel_size=2)),  # scores by distance
    ("hunyuan", ParallelConfig(context_parallel_size=2)),  # norms behind the rotary embedding
]


def _engine(
    directory: Path, backend: str, parallel: ParallelConfig = ALONE, **options: object
) -> InProcessEngine:
    """Several ranks have far fewer blocks than all requests want."""
    size = parallel.context_parallel_size
    sizes = {"num_blocks": 512 if size == 1 else 48 // size, "dtype": "float32"}
    return InProcessEngine(
        directory,
        backend=backend,
        parallel=parallel,
        max_model_len=LONGEST,
        segment_tokens=SEGMENT,
        max_num_batched_tokens=200,
        enable_prefix_caching=True,
        **sizes | options,
    )


def _requests(seed: int, *lengths: int) -> list[GenerateRequest]:
    """Prompts that begin alike."""
    rng = random.Random(seed)
    common = [rng.randrange(VOCABULARY) for _ in range(300)]
    requests = []
    for i, length in enumerate(lengths):
        cut = rng.choice([0, 200, 300])
        own = [rng.randrange(VOCABULARY) for _ in range(length)]
        sampling = SamplingParams(
            temperature=rng.choice([0.0, 0.8]),
            seed=i,
            max_tokens=min(rng.randint(20, 50), LONGEST - length),
            logprobs=0,
        )
        prompt = (common[:cut] + own)[:length]
        requests.append(
            GenerateRequest(request_id=f"{seed}-{i}", prompt_token_ids=prompt, work=Work(sampling))
        )
    return requests


@pytest.mark.parametrize(("family", "parallel"), CASES)
def test_answers_have_the_bits_of_one_rank(
    tmp_path: Path, backend: str, family: str, parallel: ParallelConfig
) -> None:
    """Also where requests are preempted, and go on from a prefix that others have left on the ranks."""
    make_model(family).save_pretrained(tmp_path)
    whole = msgspec.structs.replace(parallel, context_parallel_size=1)
    one, several = _engine(tmp_path, backend, whole), _engine(tmp_path, backend, parallel)
    for lengths in ((3, 127, 128, 129, 300, 480, 390), (250, 120, 110, 490, 125, 100, 119)):
        requests = _requests(0, *lengths)
        assert several.answers_with_logprobs(requests) == one.answers_with_logprobs(requests)
    load = several.load()
    assert load.num_prefix_hit_tokens > 0
    assert load.num_preemptions > 0 or parallel.context_parallel_size > 2


class _OfOneRank(ReferenceBackend):
    """A backend that attends to whole contexts alone."""

    def __init__(self) -> None:
        super().__init__()
        self.capabilities = msgspec.structs.replace(self.capabilities, context_parallel=False)


def test_backends_that_attend_to_whole_contexts_refuse() -> None:
    config = WorkerConfig(model="m", parallel=ParallelConfig(context_parallel_size=2))
    shape = load_model_config("qwen3-0.6b", "dummy")
    with pytest.raises(ConfigError, match="attends to contexts on several ranks, which reference"):
        check_context_parallel(config, shape, _OfOneRank(), 16)


def test_blocks_that_lie_on_two_ranks_are_refused() -> None:
    config = WorkerConfig(model="m", parallel=ParallelConfig(context_parallel_size=2))
    shape = load_model_config("qwen3-0.6b", "dummy")
    with pytest.raises(ConfigError, match="does not divide the 4096 tokens of a segment"):
        check_context_parallel(config, shape, ReferenceBackend(), 384)
