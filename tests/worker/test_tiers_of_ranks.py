# SPDX-License-Identifier: Apache-2.0
"""Real workers, each of which holds other blocks than the others, over host memory and disk."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from small_objects import disk_under
from tier_server import Server
from tiny_models import continuation, make_model

from pagoda.messages.frontend import GenerateRequest, Work
from pagoda.messages.sampling_params import SamplingParams
from pagoda.parallel.config import ParallelConfig

SEGMENT = 128
TOPOLOGIES = {
    "own requests": ParallelConfig(tensor_parallel_size=2, dp_attention=True),
    "segments": ParallelConfig(context_parallel_size=2),
    "segments and heads": ParallelConfig(context_parallel_size=2, tensor_parallel_size=2),
}
ANSWER = 140
_RNG = random.Random(0)
PROMPTS = [_RNG.choices(range(320), k=length) for length in (100, 97, 91, 87)]


def requests(*prompts: list[int]) -> list[GenerateRequest]:
    work = Work(SamplingParams(temperature=0, seed=0, max_tokens=ANSWER))
    return [
        GenerateRequest(request_id=str(index), prompt_token_ids=prompt, work=work)
        for index, prompt in enumerate(prompts)
    ]


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_answers_over_tiers_are_those_of_transformers(topology: str, tmp_path: Path) -> None:
    model = make_model("llama")
    model.save_pretrained(tmp_path / "model")
    expected = [continuation(model, prompt, ANSWER) for prompt in PROMPTS]
    options = {"num_blocks": 22, "segment_tokens": SEGMENT, "kv_tiers": disk_under(tmp_path)}
    server = Server(tmp_path, TOPOLOGIES[topology], kv_host_bytes=2**21, **options)
    answers, num_cached = server.ask_requests(requests(*PROMPTS))
    assert (answers, num_cached) == (expected, 0)
    assert server.core.load().num_preemptions > 0
    for prompt, answer in zip(PROMPTS, expected, strict=True):
        answers, num_cached = server.ask_requests(requests(prompt))
        assert answers == [answer]
        assert num_cached >= len(prompt) - 16
    assert server.figure("host") > 0
    server.core.close()

    server = Server(tmp_path, TOPOLOGIES[topology], **options)
    answers, num_cached = server.ask_requests(requests(*PROMPTS))
    assert answers == expected
    assert num_cached >= 3 * 80
    assert server.figure("disk") > 0
    server.core.close()
