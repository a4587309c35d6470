# SPDX-License-Identifier: Apache-2.0
"""Sampler of the device in Triton's interpreter: the reference's tokens and log-probabilities in every bit."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from pagoda.backend.reference.sampling import sample_rows, score_rows
from pagoda.backend.sampling import SampledRows
from pagoda.backend.sampling_table import SamplingTable
from pagoda.plugins.backend_check.sampling import (
    logits_like,
    mask,
    random_row,
    row_of,
    rows_of,
    table_of,
)
from pagoda.plugins.cuda.kernels import sampler

CPU = torch.device("cpu")


def sampled(logits: Tensor, table: SamplingTable, slots: Sequence[int]) -> SampledRows:
    packed = sampler.pack_rows(table, slots).to(CPU)
    found = sampler.Found.new(len(slots), max(0, packed.most_reported), CPU)
    given = logits.clone()
    sampler.sample(given, packed, torch.full_like(logits, torch.nan), found)
    assert torch.equal(given.view(torch.int32), logits.view(torch.int32))
    return found.sampled()


def check(logits: Tensor, rows: Sequence[Any]) -> None:
    table, slots = table_of(logits.shape[1], rows), list(range(len(rows)))[::-1]
    found = rows_of(sampled(logits[slots], table, slots), table, slots)
    assert found == rows_of(sample_rows(logits[slots], table, slots), table, slots)


DRAWS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0, "logprobs": 2},
    "all": {"seed": 2**63 + 17, "position": 2**33},
    "top-k": {"top_k": 4, "temperature": 0.7},
    "top-p": {"top_p": 0.8, "min_p": 0.01},
    "typical": {"typical_p": 0.6, "top_p": 0.95},
}
EDITS: dict[str, Any] = {
    "allowed": mask([1, 2, 3, 40, 99], 130),
    "stops": (2,),
    "logit_bias": {3: 4.0, 5: -100.0},
    "seen": (1, 3, 7),
    "counts": (0, 1, 7),
    "repetition_penalty": 1.3,
    "presence_penalty": 0.7,
    "frequency_penalty": -0.4,
}


@pytest.mark.parametrize("kind", ["normal", "tied"])
def test_draws(kind: str) -> None:
    logits = torch.stack([logits_like(kind, 130, seed) for seed in range(len(DRAWS))])
    check(logits, [row_of(130, **params) for params in DRAWS.values()])


def test_edits() -> None:
    logits = torch.stack([logits_like("normal", 130, seed) for seed in range(3)])
    rows = [
        row_of(130, temperature=0.0, logprobs=1, **EDITS),
        row_of(130, top_k=2, seed=3, **EDITS),
        row_of(130, temperature=0.0),
    ]
    check(logits, rows)


def test_rows_that_fail_alone() -> None:
    kinds = ("nan", "inf", "normal", "huge", "zeros")
    logits = torch.stack([logits_like(kind, 31, 4) for kind in kinds])
    rows = [row_of(31, temperature=0.0) for _ in kinds]
    rows[2] = row_of(31, allowed=mask([], 31))
    rows[3] = row_of(31, temperature=0.0, seen=(3,), counts=(1,), repetition_penalty=0.01)
    check(logits, rows)


def test_random_rules() -> None:
    rng = random.Random(5)
    rows = [random_row(1000, rng) for _ in range(2)]
    logits = torch.stack([logits_like(kind, 1000, 3) for kind in ("normal", "peaked")])
    check(logits, rows)


def test_several_blocks_of_a_vocabulary() -> None:
    logits = logits_like("tied", 4100, 1)[None]
    check(logits, [row_of(4100, temperature=0.0, logprobs=3)])


def test_scores() -> None:
    logits, tokens = torch.stack([logits_like("tied", 500, seed) for seed in range(3)]), [4, 499, 0]
    found, ids = sampler.Found.new(3, 5, CPU), torch.tensor(tokens)
    sampler.score(logits, ids, found)
    own, wanted = found.scored(), score_rows(logits, ids, 5)
    assert own.finite
    assert torch.equal(own.ranks, wanted.ranks)
    assert torch.equal(own.top_token_ids, wanted.top_token_ids)
    assert torch.equal(own.logprobs, wanted.logprobs)
    logits[1, 3] = torch.nan
    sampler.score(logits, ids, found)
    assert not found.scored().finite


def test_a_slot_that_there_is_not() -> None:
    with pytest.raises(IndexError):
        sampler.pack_rows(table_of(50, [row_of(50)]), [1])
