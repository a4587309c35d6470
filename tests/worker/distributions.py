# SPDX-License-Identifier: Apache-2.0
"""Distance between the answers of two engines whose activations are rounded in different ways."""

from __future__ import annotations

import random

import torch
from in_process import InProcessEngine
from torch import Tensor

from pagoda.messages.frontend import GenerateRequest, Work
from pagoda.messages.sampling_params import SamplingParams

NUM_PROMPTS = 8
NUM_TOP = 20
VOCABULARY = 320


def log_probabilities(engine: InProcessEngine) -> Tensor:
    """Log-probabilities of the likeliest tokens behind some prompts [prompts, vocabulary], NaN for the others."""
    rng = random.Random(11)
    requests = [
        GenerateRequest(
            request_id=str(i),
            prompt_token_ids=[rng.randrange(VOCABULARY) for _ in range(10 + 5 * i)],
            work=Work(SamplingParams(temperature=0, seed=0, max_tokens=1, logprobs=NUM_TOP)),
        )
        for i in range(NUM_PROMPTS)
    ]
    table = torch.full((NUM_PROMPTS, VOCABULARY), torch.nan)
    for row, found in zip(table, engine.log_probabilities(requests), strict=True):
        row[list(found)] = torch.tensor(list(found.values()))
    return table


def differences(one: Tensor, other: Tensor) -> Tensor:
    """Differences of the tokens that both find likely, most of all, [n]."""
    both = ~(one - other).isnan()
    assert both.sum() >= 0.85 * NUM_PROMPTS * NUM_TOP
    return (one - other)[both].abs()
