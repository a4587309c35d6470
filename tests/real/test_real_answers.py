"""Greedy answers in float32 are those of transformers on the same weights."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from real_model import LANGUAGES, Oracle

from pagoda import LLM, SamplingParams

NUM_PROMPTS, LENGTH = 100, 48
NEAR_TIE = 2e-3
"""Logits that lie closer than this may change places: sums in float32 differ by some 1e-4 with their order."""


def _prompts(oracle: Oracle) -> list[list[int]]:
    """Pieces of 8 to 130 tokens out of all texts."""
    per_text = NUM_PROMPTS // len(LANGUAGES)
    prompts = []
    for name in LANGUAGES:
        ids = oracle.ids(name)
        for i in range(per_text):
            length = 8 + i * 37 % 123
            at = i * (len(ids) - length) // per_text
            prompts.append(ids[at : at + length])
    return prompts


def _near_ties(oracle: Oracle, prompt: list[int], answer: list[int]) -> list[float]:
    """Margins by which transformers finds another token more likely, where it does."""
    places = range(len(prompt) - 1, len(prompt) + len(answer) - 1)
    logits = oracle.logits(prompt + answer, list(places))
    chosen = logits.gather(1, logits.new_tensor(answer).long()[:, None])[:, 0]
    margins = logits.max(1).values - chosen
    return [margin for margin in margins.tolist() if margin > 0]


@pytest.fixture(scope="module")
def llm(oracle: Oracle) -> Iterator[LLM]:
    with LLM(str(oracle.directory), dtype="float32", max_num_batched_tokens=1024) as running:
        yield running


def test_greedy_answers_are_those_of_transformers(llm: LLM, oracle: Oracle) -> None:
    """Every token is checked behind the tokens before it, so one near-tie hides no difference after it."""
    prompts = _prompts(oracle)
    greedy = SamplingParams(temperature=0, max_tokens=LENGTH, ignore_eos=True)
    ties: list[float] = []
    for prompt, output in zip(prompts, llm.generate(prompts, greedy, use_tqdm=False), strict=True):
        answer = output.outputs[0].token_ids
        assert len(answer) == LENGTH
        ties += _near_ties(oracle, prompt, list(answer))
    assert max(ties, default=0) < NEAR_TIE
    assert len(ties) <= NUM_PROMPTS * LENGTH // 1000
