# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from pagoda.backend.reference.backend import ReferenceBackend
from pagoda.backend.reference.sampling import kept_weights, uniform_bits
from pagoda.messages.frontend import Work
from pagoda.messages.sampling_params import SamplingParams
from pagoda.messages.worker import SlotStart
from pagoda.plugins.backend_check.sampling import mask, row_of
from pagoda.worker.sampler import NOT_FINITE, NOTHING_ALLOWED, OVERFLOWN, Sampled, Sampler

VOCAB = 50
SLOTS = 400
REFERENCE = ReferenceBackend()
"""tests/backend/test_sampling.py finds the same on all backends."""


def _start(
    slot: int = 0,
    prompt: tuple[int, ...] = (1, 2),
    output: tuple[int, ...] = (),
    eos: tuple[int, ...] = (),
    never: tuple[int, ...] = (),
    **params: Any,
) -> SlotStart:
    sampling = SamplingParams(**{"temperature": 0.0, "seed": 0, "max_tokens": 1000} | params)
    return SlotStart(
        slot,
        [*prompt, *output],
        len(prompt),
        0,
        [[]],
        Work(sampling, eos_token_ids=eos, never=never),
    )


def _sample(logits: Tensor, *starts: SlotStart) -> Sampled:
    sampler = Sampler(SLOTS, logits.shape[1], REFERENCE.sample)
    for start in starts:
        sampler.start(start)
    return sampler.sample(logits.clone(), [start.slot for start in starts])


def _step(sampler: Sampler, logits: Tensor, slots: list[int]) -> Sampled:
    """Samples and remembers what was drawn."""
    sampled = sampler.sample(logits.clone(), slots)
    sampler.append(sampled.token_ids)
    return sampled


def _one(values: dict[int, float], start: SlotStart, vocab: int = VOCAB) -> int:
    """The token for logits that are 0 but for `values`."""
    logits = torch.zeros(1, vocab)
    for token_id, value in values.items():
        logits[0, token_id] = value
    return _sample(logits, start).token_ids[start.slot]


# ---- rules, in vLLM's order and with its formulas

HELD = {"eos": (7,), "stop_token_ids": (8,), "min_tokens": 2}
STOPS = {7: 9.0, 8: 8.0, 3: 1.0}
CLOSE = {7: 3.0, 8: 2.6, 9: 2.2}


@pytest.mark.parametrize(
    ("logits", "start", "expected"),
    [
        ({7: 3.0, 9: 2.0}, {}, 7),
        ({30: 2.0, 9: 2.0}, {}, 9),  # of equals the first
        ({7: 9.0, 3: 1.0}, {"allowed_token_ids": (3, 4)}, 3),
        ({7: 9.0, 3: 50.0}, {"allowed_token_ids": (3, 4), "temperature": 1.0}, 3),
        ({7: 9.0, 8: 5.0, 3: 1.0}, {"never": (7, 8)}, 3),
        ({7: 9.0, 8: 5.0, 3: 1.0}, {"never": (7,), "allowed_token_ids": (3, 7)}, 3),
        ({7: 9.0, 3: 1.0}, {"logit_bias": {7: -100.0}}, 3),
        ({7: 9.0}, {"logit_bias": {5: 9.5}}, 5),
        (STOPS, HELD, 3),
        (STOPS, {**HELD, "output": (3,)}, 3),
        (STOPS, {**HELD, "output": (3, 3)}, 7),
        # Of prompt and output.
        (
            {7: 3.0, 8: 2.9, 9: 2.8},
            {"prompt": (7,), "output": (8,), "repetition_penalty": 1.5},
            9,
        ),
        (
            dict.fromkeys(range(VOCAB), -1.0) | {7: -0.9},
            {"prompt": (7,), "repetition_penalty": 2.0},
            0,
        ),
        # Of the output only.
        (CLOSE, {"prompt": (7,), "presence_penalty": 0.5}, 7),
        (CLOSE, {"prompt": (7, 7), "frequency_penalty": 0.3}, 7),
        (CLOSE, {"output": (7, 7, 7), "presence_penalty": 0.2}, 7),
        (CLOSE, {"output": (7, 7, 7), "presence_penalty": 0.5}, 8),
        (CLOSE, {"output": (7,), "frequency_penalty": 0.3}, 7),
        (CLOSE, {"output": (7, 7, 8), "frequency_penalty": 0.3}, 7),
        (CLOSE, {"output": (7, 7, 7, 8), "frequency_penalty": 0.3}, 8),
    ],
)
def test_rules(logits: dict[int, float], start: dict[str, Any], expected: int) -> None:
    assert _one(logits, _start(**start)) == expected


def test_penalties_grow_with_every_token() -> None:
    sampler = Sampler(SLOTS, VOCAB, REFERENCE.sample)
    sampler.start(_start(frequency_penalty=1.0))
    logits = torch.zeros(1, VOCAB)
    logits[0, 7], logits[0, 8] = 2.5, 1.0
    drawn = [_step(sampler, logits, [0]).token_ids[0] for _ in range(5)]
    assert drawn == [7, 7, 8, 7, 0]


def test_sampling_again_gives_the_same() -> None:
    sampler = Sampler(SLOTS, VOCAB, REFERENCE.sample)
    sampler.start(_start(temperature=1.0, seed=5, frequency_penalty=1.0, min_tokens=1, logprobs=2))
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(0))
    first = sampler.sample(logits.clone(), [0])
    assert sampler.sample(logits.clone(), [0]) == first
    sampler.append(first.token_ids)
    assert len({sampler.sample(logits.clone(), [0]).token_ids[0] for _ in range(5)}) == 1


# ---- truncation


def _kept(logits: Tensor, **params: Any) -> set[int]:
    """Every token that some seed draws."""
    starts = [_start(slot, seed=slot, temperature=1.0, **params) for slot in range(400)]
    sampled = _sample(logits.expand(400, -1), *starts)
    return set(sampled.token_ids.values())


FALLING = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log()


@pytest.mark.parametrize(
    ("logits", "params", "kept"),
    [
        (FALLING, {"top_k": 2}, {0, 1}),
        (FALLING, {"top_k": 1}, {0}),
        (FALLING, {"top_k": -1}, {0, 1, 2, 3}),
        (torch.zeros(1, VOCAB), {"top_k": 3}, set(range(VOCAB))),  # equals are kept, as in vLLM
        (FALLING, {"top_p": 0.35}, {0}),
        (FALLING, {"top_p": 0.6}, {0, 1}),
        (FALLING, {"top_p": 0.75}, {0, 1, 2}),
        (FALLING, {"top_p": 0.95}, {0, 1, 2, 3}),
        (torch.zeros(1, VOCAB), {"top_p": 1e-9}, {0}),
        (FALLING, {"top_p": 0.6, "top_k": 2}, {0, 1}),
        (FALLING, {"top_p": 0.5, "top_k": 2}, {0}),  # 4/7 of what top-k leaves
        (FALLING, {"min_p": 0.6}, {0, 1}),
        (FALLING, {"min_p": 1.0}, {0}),
    ],
)
def test_truncation(logits: Tensor, params: dict[str, Any], kept: set[int]) -> None:
    assert _kept(logits, **params) == kept


def test_nucleus_equals_a_full_sort() -> None:
    generator = torch.Generator().manual_seed(0)
    for scale in (0.1, 1.0, 5.0):
        logits = torch.randn(1, 300, generator=generator) * scale
        for top_p in (0.05, 0.5, 0.9, 0.999):
            ordered, order = logits[0].double().softmax(0).sort(descending=True)
            nucleus = order[ordered.cumsum(0) - ordered < top_p]
            row = row_of(300, temperature=1.0, top_p=top_p)
            kept = kept_weights(logits[0], row).nonzero()[:, 0]
            assert kept.tolist() == nucleus.sort().values.tolist()


# ---- drawing


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_draws_by_inverting_the_distribution(temperature: float) -> None:
    logits = torch.tensor([[0.1, 0.2, 0.3, 0.4]]).log() * temperature
    for seed in (0, 5, -3, 2**64 - 1):
        for position in range(20):
            number = uniform_bits(seed, position) * 2.0**-53
            expected = sum(number >= bound for bound in (0.1, 0.3, 0.6))
            start = _start(output=(0,) * position, seed=seed, temperature=temperature)
            assert _sample(logits, start).token_ids[0] == expected


@pytest.mark.parametrize("temperature", [1e-42, 1e-38, 1e-6, 1e-5])
@pytest.mark.parametrize("size", [3.0, 300.0, 3e34, 3e38])
def test_a_tiny_temperature_is_greedy(temperature: float, size: float) -> None:
    start = _start(temperature=temperature, seed=3, presence_penalty=0.1, top_p=0.9, min_p=0.1)
    assert _one({7: size, 9: 0.9 * size, 11: -size}, start) == 7


@settings(max_examples=200, deadline=None)
@given(
    logits=st.lists(st.floats(-(2.0**127), 2.0**127, width=32), min_size=2, max_size=9),
    temperature=st.floats(0, 100),
    top_p=st.floats(1e-30, 1),
    min_p=st.floats(0, 1),
    top_k=st.integers(-1, 9),
    repetition_penalty=st.floats(0.01, 100),
    seed=st.integers(0, 2**64 - 1),
)
@example(
    logits=[-6.5e36, -6.5e36],
    temperature=0.0,
    top_p=1.0,
    min_p=0.0,
    top_k=0,
    repetition_penalty=52.0,
    seed=0,
)
def test_no_parameters_draw_a_token_that_does_not_exist(logits: list[float], **params: Any) -> None:
    sampled = _sample(torch.tensor([logits]), _start(prompt=(0, 1), **params))
    assert sampled.errors in ({}, {0: OVERFLOWN})
    assert all(0 <= token_id < len(logits) for token_id in sampled.token_ids.values())


# ---- log-probabilities


def test_logprobs_are_of_the_raw_distribution() -> None:
    logits = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log()
    start = _start(logit_bias={3: 50.0}, logprobs=2, temperature=0.5, prompt=(0,))
    sampled = _sample(logits, start)
    assert sampled.token_ids == {0: 3}
    reported = sampled.logprobs[0]
    assert reported.logprob == pytest.approx(math.log(0.1), abs=1e-5)
    assert reported.rank == 4
    assert reported.top_token_ids == [0, 1]
    assert reported.top_logprobs == pytest.approx([math.log(0.4), math.log(0.3)], abs=1e-5)


def test_logprobs_without_top_tokens_and_beyond_the_vocabulary() -> None:
    logits = torch.zeros(2, 4)
    sampled = _sample(logits, _start(0, logprobs=0), _start(1, logprobs=20))
    assert sampled.logprobs[0].top_token_ids == []
    assert sampled.logprobs[0].rank == 1
    assert sorted(sampled.logprobs[1].top_token_ids) == [0, 1, 2, 3]


# ---- one row does not touch another


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_a_bad_row_fails_alone(poison: float) -> None:
    logits = torch.zeros(3, VOCAB)
    logits[:, 5] = 1.0
    logits[1, 20] = poison
    starts = [_start(slot, temperature=t, logprobs=1) for slot, t in enumerate((0.0, 1.0, 1.0))]
    expected = _sample(logits[[0, 2]], starts[0], starts[2])
    sampled = _sample(logits, *starts)
    assert sampled.errors == {1: NOT_FINITE}
    assert sampled.token_ids == expected.token_ids
    assert set(sampled.logprobs) == {0, 2}


@pytest.mark.parametrize(
    ("params", "error"),
    [
        ({"repetition_penalty": 0.01}, OVERFLOWN),
        ({"allowed_token_ids": (4,), "eos": (4,), "min_tokens": 3}, NOTHING_ALLOWED),
    ],
)
def test_rules_that_leave_no_token_fail_alone(params: dict[str, Any], error: str) -> None:
    logits = torch.zeros(3, VOCAB)
    logits[:, 5] = 3e37
    starts = [
        _start(slot, (5,), temperature=1.0, **(params if slot == 1 else {})) for slot in range(3)
    ]
    sampled = _sample(logits, *starts)
    assert sampled.errors == {1: error}
    assert sampled.token_ids == {0: 5, 2: 5}


_parameters = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 0.3, 1.0, 2.5]),
        "top_k": st.sampled_from([0, 1, 5, 40]),
        "top_p": st.sampled_from([1.0, 0.9, 0.3]),
        "min_p": st.sampled_from([0.0, 0.05]),
        "repetition_penalty": st.sampled_from([1.0, 1.3]),
        "presence_penalty": st.sampled_from([0.0, 0.7]),
        "frequency_penalty": st.sampled_from([0.0, -0.4]),
        "logit_bias": st.sampled_from([None, {3: 4.0}]),
        "allowed_token_ids": st.sampled_from([None, tuple(range(0, 97, 2))]),
        "min_tokens": st.sampled_from([0, 30]),
        "logprobs": st.sampled_from([None, 0, 4]),
        "seed": st.integers(-(2**63), 2**64 - 1),
    }
)


@settings(max_examples=60, deadline=None)
@given(rows=st.lists(_parameters, min_size=1, max_size=9), seed=st.integers(0, 99))
def test_rows_are_independent(rows: list[dict[str, Any]], seed: int) -> None:
    """Three steps together give what three steps alone give."""
    vocab = 97
    generator = torch.Generator().manual_seed(seed)
    steps = [torch.randn(len(rows), vocab, generator=generator) * 3 for _ in range(3)]
    starts = [_start(slot, (1, 2), (5,), (9,), **row) for slot, row in enumerate(rows)]

    def run(slots: list[int]) -> list[Sampled]:
        sampler = Sampler(SLOTS, vocab, REFERENCE.sample)
        for slot in slots:
            sampler.start(starts[slot])
        return [_step(sampler, logits[slots], slots) for logits in steps]

    together = run(list(range(len(rows))))
    for slot in range(len(rows)):
        for alone, step in zip(run([slot]), together, strict=True):
            assert alone.token_ids == {slot: step.token_ids[slot]}
            assert alone.logprobs.get(slot) == step.logprobs.get(slot)


def test_a_freed_slot_leaves_nothing() -> None:
    sampler = Sampler(SLOTS, VOCAB, REFERENCE.sample)
    sampler.start(_start(frequency_penalty=2.0, output=(7, 7), logit_bias={3: 100.0}))
    sampler.free(0)
    sampler.start(_start())
    logits = torch.zeros(1, VOCAB)
    logits[0, 7] = 1.0
    assert sampler.sample(logits, [0]).token_ids == {0: 7}


def test_a_mask_counts_for_one_token() -> None:
    """It says all that min_tokens does; behind it, that and the allowed tokens count again."""
    sampler = Sampler(SLOTS, VOCAB, REFERENCE.sample)
    start = _start(5, eos=(7,), min_tokens=3, allowed_token_ids=(3, 7, 9), frequency_penalty=0.1)
    sampler.start(start)
    sampler.start(_start(4))
    logits = torch.zeros(2, VOCAB)
    logits[:, 7], logits[:, 9], logits[:, 3], logits[:, 20] = 8.0, 5.0, 2.0, 9.0

    def step(allowed: list[int] | None = None) -> int:
        if allowed is not None:
            words = mask(allowed, VOCAB).tolist()
            masks = b"".join(word.to_bytes(4, "little", signed=True) for word in words)
            sampler.take_masks({5: masks, 6: masks})
        sampled = _step(sampler, logits, [4, 5])
        assert sampled.token_ids[4] == 20
        return sampled.token_ids[5]

    assert [step(), step([7, 20]), step(), step([3, 20]), step()] == [9, 7, 9, 3, 7]
    with pytest.raises(ValueError, match="has 3 words instead of 2"):
        sampler.take_masks({5: bytes(12)})


def test_who_needs_logits() -> None:
    sampler = Sampler(SLOTS, VOCAB, REFERENCE.sample)
    kinds: list[dict[str, Any]] = [
        {},
        {"logprobs": 0},
        {"temperature": 1.0},
        {"eos": (7,), "min_tokens": 1},
        {"presence_penalty": 1.0},
        {},
    ]
    for slot, kind in enumerate(kinds):
        sampler.start(_start(slot, **kind))
    slots = range(len(kinds))
    sampler.take_masks({5: b"\xff" * 8})
    assert sampler.needing_logits(slots) == {1, 2, 3, 5}
    sampler.append(dict.fromkeys(slots, 9))
    assert sampler.needing_logits(slots) == {1, 2, 4}
    for slot in slots:
        sampler.free(slot)
        sampler.start(_start(slot))
    assert sampler.needing_logits(slots) == set()
    assert not sampler.sample(torch.zeros(6, VOCAB), list(slots)).logprobs
