# SPDX-License-Identifier: Apache-2.0
"""Sampling: the native sampler against plain PyTorch in every bit, and both against exact probabilities."""

from __future__ import annotations

import math
import random
from collections import Counter
from typing import Any

import pytest
import torch
from cpu_cases import REFERENCE, SETS, examples, needs_kernels, seeds, threads
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pagoda.backend.cpu.backend import CpuBackend
from pagoda.backend.sampling import SampledRow, SampleOutcome
from pagoda.backend.sampling_table import SamplingTable
from pagoda.plugins.backend_check.sampling import (
    KINDS,
    logits_like,
    mask,
    random_row,
    row_of,
    rows_of,
    sample_all,
    table_of,
)

NATIVE = {name: CpuBackend(name) for name in SETS}
VOCABULARIES = (1, 31, 128, 130, 257, 1000, 8191, 8193, 20_000)
"""Numbers of tokens about the size of a block (128), of a chunk (8,192), and of several chunks."""


sized = st.sampled_from(VOCABULARIES)


@needs_kernels
@settings(examples, max_examples=120)
@given(
    vocab=sized,
    kinds=st.lists(st.sampled_from(KINDS), min_size=1, max_size=7),
    seed=seeds,
    n=threads,
)
def test_the_same_in_every_bit(vocab: int, kinds: list[str], seed: int, n: int) -> None:
    """Tokens, log-probabilities and errors of random rules, alone and with other rows."""
    rng = random.Random(seed)
    logits = torch.stack([logits_like(kind, vocab, seed + i) for i, kind in enumerate(kinds)])
    rows = [random_row(vocab, rng) for _ in kinds]
    expected = sample_all(REFERENCE, logits.clone(), rows)
    torch.set_num_threads(n)
    for backend in NATIVE.values():
        assert sample_all(backend, logits.clone(), rows) == expected
    last = sample_all(backend, logits[-1:].clone(), rows[-1:])
    assert last == expected[-1:]


@needs_kernels
def test_slots_are_taken_in_any_order(ops: Any) -> None:
    rng = random.Random(3)
    rows = [random_row(300, rng) for _ in range(9)]
    logits = torch.randn(9, 300, generator=torch.Generator().manual_seed(4))
    expected = sample_all(ops, logits.clone(), rows)
    table, slots = table_of(300, rows), [7, 0, 8, 3]
    found = ops.sample(logits[slots], table, slots)
    assert rows_of(found, table, slots) == [expected[slot] for slot in slots]


def test_a_table_that_changes(ops: Any) -> None:
    """Position, mask, stops and penalties are what they are when a step samples."""
    logits = torch.zeros(1, 300)
    logits[0, [5, 40, 7]] = torch.tensor([3.0, 2.0, 1.2])
    stop = row_of(300, temperature=0.0, stops=(5,), presence_penalty=2.0, logprobs=0)
    table = table_of(300, [stop])

    def token() -> int:
        return int(ops.sample(logits.clone(), table, [0]).token_ids)

    assert token() == 40
    table.hold_back_stops(0, held=False)
    assert token() == 5
    for seen in (5, 40):
        stop.seen.append(seen)
        stop.counts.append(1)
    table.seen_more(0)
    assert token() == 7  # the others are 1 and 0 now
    stop.counts[0] = 0
    assert token() == 5
    table.allow(0, mask([7, 40], 300))
    assert token() == 7
    table.allow(0, None)
    table.put(0, row_of(300, temperature=0.0))
    assert token() == 5


def test_a_slot_that_there_is_not(ops: Any) -> None:
    with pytest.raises(IndexError):
        ops.sample(torch.zeros(1, 50), table_of(50, [row_of(50)]), [1])


# ---- the distribution

DRAWS = 4096
SETTINGS: dict[str, dict[str, Any]] = {
    "all": {},
    "hot": {"temperature": 1.7},
    "min-p": {"min_p": 0.2},
    "top-k": {"top_k": 7},
    "top-p": {"top_p": 0.8},
    "typical-p": {"typical_p": 0.6},
    "together": {"temperature": 0.8, "min_p": 0.01, "top_k": 20, "top_p": 0.9, "typical_p": 0.9},
}


def exact_probabilities(
    logits: Tensor,
    *,
    temperature: float = 1.0,
    min_p: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    typical_p: float = 1.0,
) -> Tensor:
    """Probabilities [vocab] float64 as the papers have them, by sorting."""
    p = (logits.double() / temperature).softmax(0)
    p[p < min_p * p.max()] = 0
    if top_k:
        p[p < p.topk(top_k).values[-1]] = 0
    p = _nucleus(p / p.sum(), -p, top_p)
    surprise = -p.log()
    entropy = (p * surprise).nansum()
    return _nucleus(p, (surprise - entropy).abs(), typical_p)


def _nucleus(p: Tensor, order_by: Tensor, share: float) -> Tensor:
    order = order_by.sort(stable=True).indices
    before = p[order].cumsum(0) - p[order]
    p[order[before >= share]] = 0
    return p / p.sum()


@pytest.mark.parametrize("setting", SETTINGS)
def test_draws_are_distributed_as_they_should_be(ops: Any, setting: str) -> None:
    """Chi-square against exact probabilities, at a level of about one in a million."""
    logits = torch.randn(40, generator=torch.Generator().manual_seed(5)) * 1.5
    rows = [row_of(40, seed=7, position=i, **SETTINGS[setting]) for i in range(DRAWS)]
    sampled = sample_all(ops, logits.repeat(DRAWS, 1), rows)
    found = Counter(row.token_id for row in sampled)
    probabilities = exact_probabilities(logits, **SETTINGS[setting]).tolist()
    possible = {token: p * DRAWS for token, p in enumerate(probabilities) if p > 0}
    assert set(found) <= set(possible)
    chi_square = sum((found[token] - mean) ** 2 / mean for token, mean in possible.items())
    freedom = len(possible) - 1
    # Wilson and Hilferty 1931.
    limit = freedom * (1 - 2 / (9 * freedom) + 4.75 * math.sqrt(2 / (9 * freedom))) ** 3
    assert chi_square < limit


# ---- rules for ties, and bounds


def kept(ops: Any, logits: list[float], **params: Any) -> set[int]:
    """Every token that some position draws."""
    rows = [row_of(len(logits), position=i, **params) for i in range(300)]
    return {row.token_id for row in sample_all(ops, torch.tensor([logits] * 300), rows)}


@pytest.mark.parametrize(
    ("logits", "params", "expected"),
    [
        ([1, 2, 2, 2, 0], {"top_k": 2}, {1, 2, 3}),  # all that equal the k-th
        ([1, 2, 2, 2, 0], {"top_k": 2, "top_p": 0.4}, {1, 2}),  # the lower ids of equal ones
        ([0.0, -0.0, 0.0, -9], {"top_p": 0.6}, {0, 1}),  # zeros are equal
        ([3, 1, 1, 1, 1], {"typical_p": 0.1}, {0}),
        # The entropy of 8 equal ones and a likelier one is nearer to the equal ones.
        ([1.5, *[0] * 8], {"typical_p": 0.2}, {1, 2, 3}),
        ([0, -28, -29], {}, {0}),  # what is less likely than 2^-40
    ],
)
def test_ties_and_bounds(
    ops: Any, logits: list[float], params: dict[str, Any], expected: set[int]
) -> None:
    assert kept(ops, [float(x) for x in logits], **params) == expected


def test_the_first_of_equal_logits_is_the_likeliest(ops: Any) -> None:
    logits = torch.zeros(1, 9000)
    logits[0, [8500, 300, 131]] = 2.0
    [row] = sample_all(ops, logits, [row_of(9000, temperature=0.0, logprobs=4)])
    assert row.token_id == 131
    assert row.logprobs is not None
    assert row.logprobs.rank == 1
    assert row.logprobs.top_token_ids == [131, 300, 8500, 0]


def test_a_mask_of_a_grammar_leaves_its_tokens(ops: Any) -> None:
    vocab, tokens = 1000, [31, 32, 999]
    logits = torch.randn(60, vocab, generator=torch.Generator().manual_seed(1))
    rows = [row_of(vocab, position=i, allowed=mask(tokens, vocab)) for i in range(60)]
    assert {row.token_id for row in sample_all(ops, logits, rows)} == set(tokens)


def test_what_may_not_be_given(ops: Any) -> None:
    with pytest.raises(ValueError, match="are not of 2 rows"):
        ops.sample(torch.zeros(3, 50), table_of(50, [row_of(50), row_of(50)]), [0, 1])
    with pytest.raises(ValueError, match="Logits are of 51 tokens, the parameters of 50"):
        ops.sample(torch.zeros(1, 51), table_of(50, [row_of(50)]), [0])


def test_a_mask_of_another_vocabulary_is_refused() -> None:
    with pytest.raises(ValueError, match="must be 2 words of int32"):
        table_of(50, [row_of(50, allowed=mask([0], 200))])
    with pytest.raises(ValueError, match="has 3 words instead of 2"):
        SamplingTable(1, 50).allow_bytes(0, bytes(12), None)


@needs_kernels
def test_rows_of_a_wider_tensor(ops: Any) -> None:
    wide = torch.randn(3, 500, generator=torch.Generator().manual_seed(2))
    rows = [row_of(300, position=i, top_p=0.9) for i in range(3)]
    expected = sample_all(REFERENCE, wide[:, :300].clone(), rows)
    assert sample_all(ops, wide[:, :300], rows) == expected


@pytest.mark.parametrize("vocab", [1, 130, 8193])
@pytest.mark.parametrize("num_top", [0, 3, 10_000])
def test_given_tokens_are_reported_like_sampled_ones(ops: Any, vocab: int, num_top: int) -> None:
    logits = torch.stack([logits_like(kind, vocab, 1) for kind in ("normal", "tied", "peaked")])
    token_ids = torch.tensor([i * 7 % vocab for i in range(3)])
    rows = [
        row_of(vocab, allowed=mask([token_id], vocab), logprobs=num_top)
        for token_id in token_ids.tolist()
    ]
    reported = [row.logprobs for row in sample_all(ops, logits.clone(), rows)]
    wide = torch.nn.functional.pad(logits, (0, 5))[:, :vocab]
    scored = ops.score(wide, token_ids, num_top)
    assert scored.finite
    assert scored.ranks.tolist() == [one.rank for one in reported]
    assert scored.top_token_ids.tolist() == [one.top_token_ids for one in reported]
    assert scored.logprobs.tolist() == [[one.logprob, *one.top_logprobs] for one in reported]


def test_rows_that_are_not_finite_are_not_scored(ops: Any) -> None:
    logits = torch.zeros(3, 300)
    logits[1, 200] = math.inf
    assert not ops.score(logits, torch.zeros(3, dtype=torch.int64), 2).finite
    with pytest.raises(IndexError):
        ops.score(torch.zeros(1, 300), torch.tensor([300]), 0)


def test_no_rows(ops: Any) -> None:
    assert sample_all(ops, torch.zeros(0, 50), []) == []


def test_a_bad_row_is_told_from_the_others(ops: Any) -> None:
    logits = torch.zeros(4, 40)
    logits[:, 7] = 1e37
    logits[1, 3] = math.nan
    overflows = row_of(40, seen=(7,), counts=(0,), repetition_penalty=0.01)
    rows = [row_of(40), row_of(40), overflows, row_of(40, allowed=mask([4], 40), stops=(4,))]
    assert sample_all(ops, logits, rows) == [
        SampledRow(SampleOutcome.DRAWN, 7),
        SampledRow(SampleOutcome.NOT_FINITE),
        SampledRow(SampleOutcome.OVERFLOWN),
        SampledRow(SampleOutcome.NOTHING_ALLOWED),
    ]
