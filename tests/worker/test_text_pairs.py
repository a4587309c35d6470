# SPDX-License-Identifier: Apache-2.0
"""Answers of tiny encoder-decoders of texts are those of transformers, whatever is cached or preempted."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from in_process import Answer, InProcessEngine
from text_pair_models import MODELS, VOCABULARY, make_pair

from pagoda.messages.encoder_input import text_input
from pagoda.messages.frontend import GenerateRequest, Work
from pagoda.messages.sampling_params import SamplingParams
from pagoda.parallel.config import ParallelConfig

LENGTH = 24
LENGTHS = (1, 2, 9, 40, 96, 5)
"""Tokens of texts, of which some are shorter than answers, and one is as long as may be."""
LONGEST = 96
WAYS: dict[str, dict[str, Any]] = {
    "batched": {},
    "cut": {"max_num_batched_tokens": 2},
    "one at a time": {"num_blocks": 2},
    "prefix-cached": {"enable_prefix_caching": True},
    "tp 3": {"parallel": ParallelConfig(tensor_parallel_size=3)},
}


def _text(index: int) -> list[int]:
    generator = torch.Generator().manual_seed(index)
    return torch.randint(2, VOCABULARY, (LENGTHS[index],), generator=generator).tolist()


def _begun(index: int) -> list[int]:
    """Tokens that a decoder goes on from, of which one text has more than itself."""
    return [0, *range(20, 26)] if index == 1 else [0]


def _request(index: int, *, priority: int = 0) -> GenerateRequest:
    sampling = SamplingParams(temperature=0, seed=0, max_tokens=LENGTH, logprobs=0)
    work = Work(sampling, encoder_input=text_input(_text(index)))
    return GenerateRequest(
        request_id=str(index), prompt_token_ids=_begun(index), work=work, priority=priority
    )


def _expected(model: Any, index: int) -> Answer:
    ids, answer = torch.tensor([_begun(index)]), list[tuple[int, float]]()
    with torch.no_grad():
        encoded = model.get_encoder()(torch.tensor([_text(index)]))
        for _ in range(LENGTH):
            logits = model(encoder_outputs=encoded, decoder_input_ids=ids).logits[0, -1]
            token_id = int(logits.argmax())
            answer.append((token_id, float(logits.log_softmax(-1)[token_id])))
            ids = torch.cat([ids, torch.tensor([[token_id]])], 1)
    return answer


@pytest.fixture(scope="module", params=MODELS)
def saved(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, list[Answer]]:
    directory = tmp_path_factory.mktemp("pair")
    model = make_pair(request.param)
    model.save_pretrained(directory)
    answers = [_expected(model, index) for index in range(len(LENGTHS))]
    assert len({tuple(token for token, _ in answer) for answer in answers}) > len(answers) - 2
    return directory, answers


def _check(found: dict[str, Answer], expected: Sequence[Answer]) -> None:
    for index, answer in enumerate(expected):
        own = found[str(index)]
        assert [token for token, _ in own] == [token for token, _ in answer]
        reported, exact = (torch.tensor([it for _, it in each]) for each in (own, answer))
        torch.testing.assert_close(reported, exact, atol=5e-5, rtol=0)


def _engine(directory: Path, **options: Any) -> InProcessEngine:
    return InProcessEngine(directory, **{"block_size": 128, "max_model_len": LONGEST} | options)


@pytest.mark.parametrize("way", WAYS)
def test_answers_are_those_of_transformers(
    way: str, backend: str, saved: tuple[Path, list[Answer]]
) -> None:
    engine = _engine(saved[0], backend=backend, **WAYS[way])
    requests = [_request(index) for index in range(len(LENGTHS))]
    _check(engine.answers_with_logprobs(requests), saved[1])
    _check(engine.answers_with_logprobs(requests[::-1]), saved[1])
