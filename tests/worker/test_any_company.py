# SPDX-License-Identifier: Apache-2.0
"""Answers of models of several KV groups have the same bits in any company, pool and cut of their prompts."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from family_models import make_model
from in_process import InProcessEngine

from pagoda.messages.frontend import GenerateRequest, Work
from pagoda.messages.sampling_params import SamplingParams
from pagoda.worker.memory import LEAST_RUN

FAMILIES = (
    *("gemma3", "llama4-chunked", "gpt-oss", "lfm2", "qwen3-next", "deepseek-v2-lite"),
    *("bamba", "jamba", "falcon-h1"),
)
LENGTH = 320
CUTS = (0, 0, 16, 64, 100, 128, 192)
"""Leading tokens that a prompt has in common with others."""
BUDGETS = (7, 33, 2048)
"""Tokens of a step, at most."""


def _requests(rng: random.Random) -> list[GenerateRequest]:
    common = [rng.randrange(320) for _ in range(max(CUTS))]
    requests = []
    for _ in range(8):
        own = [rng.randrange(320) for _ in range(rng.randint(1, 80))]
        sampling = SamplingParams(
            temperature=rng.choice([0.0, 0.8]),
            seed=rng.randrange(2**31),
            max_tokens=rng.randint(1, 80),
            logprobs=0,
            repetition_penalty=rng.choice([1.0, 1.2]),
        )
        request = GenerateRequest(
            request_id=f"{rng.randrange(10**9)}",
            prompt_token_ids=common[: rng.choice(CUTS)] + own,
            work=Work(sampling),
            priority=rng.choice([0, 0, 1, -1]),
        )
        requests.append(request)
    return requests


@pytest.mark.parametrize("family", FAMILIES)
def test_answers_have_the_same_bits(family: str, tmp_path: Path) -> None:
    make_model(family).save_pretrained(tmp_path)
    alone = InProcessEngine(tmp_path, backend="auto", max_model_len=LENGTH)
    longest = sum(group.most_blocks(0, LENGTH, LEAST_RUN) for group in alone.kv_groups)
    num_hit_tokens = num_preemptions = 0
    for seed, budget in enumerate(BUDGETS):
        engine = InProcessEngine(
            tmp_path,
            backend="auto",
            max_model_len=LENGTH,
            max_num_batched_tokens=budget,
            enable_prefix_caching=True,
            num_blocks=longest + 4,  # far fewer than all requests want
        )
        rng = random.Random(seed)
        for _ in range(2):
            requests = _requests(rng)
            found = engine.answers_with_logprobs(requests)
            for request in requests:
                assert (
                    found[request.request_id]
                    == alone.answers_with_logprobs([request])[request.request_id]
                )
        load = engine.load()
        num_hit_tokens += load.num_prefix_hit_tokens
        num_preemptions += load.num_preemptions
    assert num_hit_tokens > 0
    assert num_preemptions > 0
