# SPDX-License-Identifier: Apache-2.0
"""Tokens from the highest logits of a row are those of the whole row, where these decide."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from cpu_cases import examples, seeds
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pagoda.backend.reference.sampling import sample_candidates, sample_row
from pagoda.backend.sampling import SampledRow, SampleOutcome, SamplingRow
from pagoda.plugins.backend_check.sampling import KINDS, logits_like, mask, row_of, table_of

MOST = 32


def candidates(logits: Tensor, row: SamplingRow, rng: random.Random) -> tuple[Tensor, Tensor]:
    """As many of the highest logits as decide the row's token, and their tokens; of equal ones, any come first."""
    count = table_of(len(logits), [row]).num_candidates(0)
    assert 0 < count <= MOST
    mixed = torch.tensor(rng.sample(range(len(logits)), len(logits)))
    if row.rules.sampling.greedy:
        mixed = torch.arange(len(logits))
    order = mixed[logits[mixed].sort(descending=True, stable=True).indices][:count]
    return logits[order], order.int()


def narrow_row(vocab: int, rng: random.Random) -> SamplingRow:
    return row_of(
        vocab,
        position=rng.choice([0, 1, 2**33]),
        temperature=rng.choice([0.0, 1e-5, 0.01, 0.3, 0.6, 1.0, 2.5, 100.0]),
        top_k=rng.choice([1, 2, 3, 5, 20, 30, 31]),
        top_p=rng.choice([1.0, 0.95, 0.5, 0.1, 1e-30]),
        typical_p=rng.choice([1.0, 1.0, 0.9, 0.3, 1e-9]),
        min_p=rng.choice([0.0, 0.0, 0.05, 0.5, 1.0]),
        seed=rng.randrange(-(2**63), 2**64),
    )


@settings(examples, max_examples=400)
@given(vocab=st.sampled_from([32, 33, 128, 1000]), kind=st.sampled_from(KINDS), seed=seeds)
def test_tokens_are_those_of_all_logits(vocab: int, kind: str, seed: int) -> None:
    rng = random.Random(seed)
    logits, row = logits_like(kind, vocab, seed), narrow_row(vocab, rng)
    values, token_ids = candidates(logits, row, rng)
    found, expected = sample_candidates(values, token_ids, row), sample_row(logits, row)
    sampling = row.rules.sampling
    if expected.outcome is not SampleOutcome.DRAWN:
        # What is not finite is found where it is among the candidates: the lowest are not.
        shown = not bool(values.isfinite().all())
        assert found == expected if shown else kind == "-inf"
    elif sampling.greedy:
        assert found == expected
    elif found is None:
        assert values[sampling.top_k] == values[sampling.top_k - 1]
    else:
        assert found == expected


def test_distinct_logits_are_always_decided() -> None:
    for seed in range(100):
        rng = random.Random(seed)
        logits = torch.randperm(500, generator=torch.Generator().manual_seed(seed)) / 16
        row = narrow_row(500, rng)
        found = sample_candidates(*candidates(logits, row, rng), row)
        assert found == sample_row(logits, row)


def test_a_tie_behind_the_last_kept_token_is_not_decided() -> None:
    values, token_ids = torch.tensor([3.0, 2.0, 2.0]), torch.tensor([7, 1, 4])
    assert sample_candidates(values, token_ids, row_of(9, top_k=2)) is None
    assert sample_candidates(values[:2], token_ids[:2], row_of(9, top_k=1)) is not None


@pytest.mark.parametrize(
    "values", [[torch.nan, 1.0, 0.5], [torch.inf, 1.0, 0.5], [1.0, 0.5, -torch.inf]]
)
def test_what_is_not_finite_among_candidates_is_told(values: list[float]) -> None:
    found = sample_candidates(torch.tensor(values), torch.arange(3), row_of(9, top_k=2))
    assert found == SampledRow(SampleOutcome.NOT_FINITE)


@pytest.mark.parametrize(
    ("params", "count"),
    [
        ({"temperature": 0.0}, 1),
        ({"temperature": 0.0, "top_k": 20}, 1),
        ({"top_k": 1}, 2),
        ({"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.1, "typical_p": 0.5}, 21),
        ({}, 0),
        ({"top_p": 0.9, "min_p": 0.5}, 0),
        ({"top_k": 20, "logprobs": 0}, 0),
        ({"temperature": 0.0, "logprobs": 2}, 0),
        ({"top_k": 20, "logit_bias": {3: 1.0}}, 0),
        ({"top_k": 20, "stops": (5,)}, 0),
        ({"top_k": 20, "allowed": mask([1, 2], 300)}, 0),
        ({"top_k": 20, "seen": (4,), "counts": (0,), "repetition_penalty": 1.1}, 0),
    ],
)
def test_how_many_decide(params: dict[str, Any], count: int) -> None:
    assert table_of(300, [row_of(300, **params)]).num_candidates(0) == count
