# SPDX-License-Identifier: Apache-2.0
"""Greedy answers in float32 are those of transformers on the same weights, at any length of the prompt."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from real_model import LANGUAGES, Oracle, all_ids
from torch import Tensor

from pagoda import LLM, SamplingParams
from pagoda.messages.frontend import Pooling
from pagoda.text.embeddings import EmbeddingOptions

NUM_PROMPTS, LENGTH = 25, 48
"""Prompts of each text, and tokens of each answer."""
NUM_PARTS = 4
"""Cases that share the prompts of a text."""
NEAR_TIE = 2e-3
"""Logits that lie closer than this may change places: sums in float32 differ by some 1e-4 with their order."""
LONG = (1023, 2049, 4096, 6000, 8144)
"""Tokens of prompts; the last leaves room for `LENGTH` tokens up to the model's 8,192."""


def _prompts(oracle: Oracle, text: str) -> list[list[int]]:
    """Pieces of 8 to 130 tokens out of a text."""
    ids = oracle.ids(text)
    prompts = []
    for i in range(NUM_PROMPTS):
        length = 8 + i * 37 % 123
        at = i * (len(ids) - length) // NUM_PROMPTS
        prompts.append(ids[at : at + length])
    return prompts


def _near_ties(oracle: Oracle, prompt: list[int], answer: list[int]) -> list[float]:
    """Margins by which transformers finds another token more likely, where it does."""
    places = range(len(prompt) - 1, len(prompt) + len(answer) - 1)
    return _margins(oracle.logits(prompt + answer, list(places)), answer)


def _margins(logits: Tensor, chosen: list[int]) -> list[float]:
    margins = logits.max(1).values - logits.gather(1, torch.tensor(chosen)[:, None])[:, 0]
    return [margin for margin in margins.tolist() if margin > 0]


@pytest.fixture(scope="module")
def llm(oracle: Oracle) -> Iterator[LLM]:
    with LLM(str(oracle.directory), dtype="float32", max_num_batched_tokens=1024) as running:
        yield running


@pytest.mark.parametrize("part", range(NUM_PARTS))
@pytest.mark.parametrize("text", LANGUAGES)
def test_greedy_answers_are_those_of_transformers(
    llm: LLM, oracle: Oracle, text: str, part: int
) -> None:
    """Every token is checked behind the tokens before it, so one near-tie hides no difference after it."""
    prompts = _prompts(oracle, text)[part::NUM_PARTS]
    greedy = SamplingParams(temperature=0, max_tokens=LENGTH, ignore_eos=True)
    ties: list[float] = []
    for prompt, output in zip(prompts, llm.generate(prompts, greedy, use_tqdm=False), strict=True):
        answer = output.outputs[0].token_ids
        assert len(answer) == LENGTH
        ties += _near_ties(oracle, prompt, list(answer))
    assert max(ties, default=0) < NEAR_TIE
    assert len(ties) <= 1 + len(prompts) * LENGTH // 500


@pytest.mark.parametrize("length", LONG)
def test_long_prompts(llm: LLM, oracle: Oracle, length: int) -> None:
    """Chunks, prefix cache and rotary angles up to the last position are those of one pass of transformers."""
    ids = all_ids(oracle)[:length]
    assert LONG[-1] + LENGTH == 8192
    greedy = SamplingParams(temperature=0, max_tokens=LENGTH, logprobs=20, ignore_eos=True)
    [output] = llm.generate([ids], greedy, use_tqdm=False)
    answer = list(output.outputs[0].token_ids)
    logits = oracle.logits(ids + answer, list(range(length - 1, length + LENGTH - 1)))
    assert max(_margins(logits, answer), default=0) < NEAR_TIE
    logprobs = output.outputs[0].logprobs
    assert logprobs is not None
    for row, told in zip(logits.log_softmax(1), logprobs, strict=True):
        assert told is not None
        for token_id, it in told.items():
            assert abs(it.logprob - row[token_id].item()) < NEAR_TIE


@pytest.mark.parametrize("length", [2, 1023, 2049])
def test_log_probabilities_of_prompts_are_those_of_transformers(
    llm: LLM, oracle: Oracle, length: int
) -> None:
    """Those of the tokens that are sampled behind it, too."""
    prompt = all_ids(oracle)[:length]
    wanted = SamplingParams(
        temperature=0, max_tokens=8, ignore_eos=True, prompt_logprobs=5, logprobs=5
    )
    [output] = llm.generate([prompt], wanted, use_tqdm=False)
    [answer] = output.outputs
    assert output.prompt_logprobs is not None
    assert answer.logprobs is not None
    tokens = [*prompt, *answer.token_ids]
    expected = oracle.logits(tokens, list(range(len(tokens) - 1))).log_softmax(-1)
    first, *rest = [*output.prompt_logprobs, *answer.logprobs]
    assert first is None
    worst = 0.0
    for token_id, position, row in zip(tokens[1:], rest, expected, strict=True):
        assert position is not None
        assert len(position) >= 5
        assert token_id in position
        worst = max(worst, *(abs(one.logprob - row[i].item()) for i, one in position.items()))
    assert worst < 1e-4


@pytest.mark.parametrize("pooling", [Pooling.LAST, Pooling.MEAN])
def test_vectors_of_texts_are_those_of_transformers(
    llm: LLM, oracle: Oracle, pooling: Pooling
) -> None:
    prompts = [
        oracle.ids(name)[:length] for name, length in zip(LANGUAGES, (1, 30, 300, 700), strict=True)
    ]
    found = llm.embed(prompts, EmbeddingOptions(pooling=pooling))
    for prompt, output in zip(prompts, found, strict=True):
        with torch.inference_mode():
            states = oracle.model.model(torch.tensor([prompt])).last_hidden_state[0]
        pooled = states[-1] if pooling is Pooling.LAST else states.mean(0)
        expected = torch.nn.functional.normalize(pooled, dim=0)
        torch.testing.assert_close(torch.tensor(output.embedding), expected, atol=1e-4, rtol=0)
