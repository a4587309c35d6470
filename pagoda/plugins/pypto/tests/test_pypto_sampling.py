# SPDX-License-Identifier: Apache-2.0
"""Tokens drawn from candidates of the device are those of all logits, which are copied where they are needed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from pypto_rig import GREEDY, PROMPTS, Rig
from torch import Tensor

from pagoda.backend.reference.sampling import sample_rows
from pagoda.messages.frontend import Work
from pagoda.messages.sampling_params import SamplingParams
from pagoda.messages.worker import SlotStart
from pagoda.plugins.backend_check.sampling import row_of, table_of
from pagoda.worker.sampler import NOT_FINITE, Sampler

VOCAB, MOST = 960, 32
ROW_BYTES = 4 * VOCAB
QWEN = SamplingParams(temperature=0.6, top_k=20, top_p=0.95, seed=11, max_tokens=24)
WIDEST = SamplingParams(top_k=31, min_p=0.01, seed=12, max_tokens=24)
WHOLE = (
    SamplingParams(top_k=32, seed=13, max_tokens=24),
    SamplingParams(temperature=0.9, top_p=0.9, seed=14, max_tokens=24),
    SamplingParams(top_k=5, logprobs=1, seed=15, max_tokens=24),
    SamplingParams(top_k=5, repetition_penalty=1.2, seed=16, max_tokens=24),
)
Mix = tuple[SamplingParams, SamplingParams, SamplingParams]


class Logits:
    """What the device computes, by step, and what a test does to it."""

    def __init__(self) -> None:
        self.change: Callable[[Tensor], Tensor] = lambda logits: logits
        self.last = torch.empty(0)
        """[sequences, vocab] float32 of the last step."""


@pytest.fixture
def logits(install: object, monkeypatch: pytest.MonkeyPatch) -> Logits:
    assert install is not None
    from pagoda_pypto_device import worker as module

    own, found = vars(module)["compute"], Logits()

    def compute(*args: Any) -> Tensor:
        computed = found.change(own(*args))
        found.last = computed[:, :VOCAB].clone()
        return computed

    monkeypatch.setattr(module, "compute", compute)
    return found


def started(mix: Mix) -> Sampler:
    """The state of sampling of three requests, whose tokens are those of the reference, from all logits."""
    sampler = Sampler(4, VOCAB, sample_rows)
    for slot, (prompt, own) in enumerate(zip(PROMPTS, mix, strict=True)):
        sampler.start(
            SlotStart(slot, prompt, len(prompt), 0, [[2 * slot, 2 * slot + 1]], Work(own))
        )
    return sampler


def is_decided(sampler: Sampler, slot: int, logits: Tensor) -> bool:
    """The slot's token can be drawn from candidates, of which the last does not equal the one before."""
    count = sampler.table.num_candidates(slot)
    if not 0 < count <= MOST:
        return False
    best = logits.topk(count).values
    return count == 1 or bool(best[-1] < best[-2])


@pytest.mark.parametrize("mix", [(GREEDY, QWEN, WIDEST), *((GREEDY, QWEN, own) for own in WHOLE)])
@pytest.mark.parametrize("change", [lambda logits: logits, torch.round], ids=["exact", "tied"])
def test_tokens_are_those_of_all_logits_and_no_row_is_copied_in_vain(
    rig: Callable[..., Rig], logits: Logits, mix: Mix, change: Callable[[Tensor], Tensor]
) -> None:
    found, expected = rig(), started(mix)
    logits.change = change
    needed = 0
    for step in range(6):
        result = found.decode(step) if step else found.prefill(mix)
        drawn = expected.sample(logits.last.clone(), [0, 1, 2])
        assert result.token_ids == [[drawn.token_ids[slot]] for slot in range(3)]
        needed += sum(not is_decided(expected, slot, logits.last[slot]) for slot in range(3))
        assert found.downloads == [ROW_BYTES] * needed
        expected.append(drawn.token_ids)
    assert (needed > 0) == (mix[2] is not WIDEST or change is torch.round)


def test_one_selection_is_for_all(rig: Callable[..., Rig]) -> None:
    found = rig()
    selections: list[list[int]] = []
    submit = found.worker.submit

    def submitted(program: Any, *args: Any) -> Any:
        if program.name == "topk_select":
            selections.append(args[1].tolist())
        return submit(program, *args)

    found.worker.submit = submitted
    found.prefill((GREEDY, QWEN, WHOLE[1]))
    found.decode()
    assert selections == [[3, 21], [3, 21]]


def test_a_row_that_is_not_finite_fails_alone(rig: Callable[..., Rig], logits: Logits) -> None:
    mix = GREEDY, QWEN, WIDEST
    for slot in range(3):
        found, expected = rig(), started(mix)
        found.prefill(mix)
        expected.append(expected.sample(logits.last.clone(), [0, 1, 2]).token_ids)
        sound = torch.arange(3) != slot
        logits.change = lambda all_logits, sound=sound: all_logits.where(  # type: ignore[misc]
            sound[:, None], torch.nan
        )
        result = found.decode()
        drawn = expected.sample(logits.last.clone(), [0, 1, 2])
        assert result.errors == drawn.errors == {slot: NOT_FINITE}
        assert dict(zip(result.slots, result.token_ids, strict=True)) == {
            one: [token] for one, token in drawn.token_ids.items()
        }
        logits.change = lambda all_logits: all_logits


def test_a_reference_that_was_made_nan_is_not_finite(rig: Callable[..., Rig]) -> None:
    found = rig()
    found.prefill()
    sampler = found.runner.model.row_sampler
    assert sampler is not None
    table = table_of(VOCAB, [row_of(VOCAB, top_k=20), row_of(VOCAB, top_k=20)])
    rows = sampler.sample(torch.tensor([[0.0 + len(PROMPTS[0]) - 1], [torch.nan]]), table, [0, 1])
    assert rows.outcomes.tolist() == [0, 1]
    with pytest.raises(ValueError, match="1 rows of hidden states are not of 2 slots"):
        sampler.sample(torch.zeros(1, 1), table, [0, 1])
