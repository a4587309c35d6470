# SPDX-License-Identifier: Apache-2.0
"""Answers of real ranks that are held to grammars: masks wait for nobody but the sampler."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from in_process import engine
from tiny_models import make_model

from pagoda.engine.request import Request
from pagoda.engine.structured_output.vocabulary import TokenTextsOrder
from pagoda.messages.frontend import GenerateRequest, Grammar, Work
from pagoda.messages.sampling_params import SamplingParams
from pagoda.text.token_texts import token_texts

TEXTS = token_texts(TokenTextsOrder("tiny", "dummy", simulated=True))
(EOS,) = TEXTS.eos_token_ids
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 5}, "on": {"type": "boolean"}},
    "required": ["name", "on"],
    "additionalProperties": False,
}
GRAMMARS = [
    Grammar("json_schema", json.dumps(SCHEMA | {"x-guidance": {"whitespace_flexible": False}})),
    Grammar("regex", "(yes|no|perhaps), [0-9]{3}!"),
    Grammar("regex", "[a-f]{1,40}"),
    None,
]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    make_model("qwen3", num_hidden_layers=3, vocab_size=330).save_pretrained(path)
    return path


def requests() -> list[GenerateRequest]:
    samplings = [
        SamplingParams(max_tokens=60, temperature=temperature, seed=5, **fields)
        for temperature, fields in (
            (0.0, {}),
            (1.0, {"repetition_penalty": 1.3}),
            (2.0, {"logprobs": 2}),
            (1.0, {"min_tokens": 20, "allowed_token_ids": tuple(range(300))}),
        )
    ]
    return [
        GenerateRequest(
            request_id=f"{i}-{k}",
            prompt_token_ids=[i, k, 65, 66, 67],
            work=Work(sampling, eos_token_ids=(EOS,)),
            grammar=grammar,
        )
        for i, grammar in enumerate(GRAMMARS)
        for k, sampling in enumerate(samplings)
    ]


def check(request: GenerateRequest, tokens: list[int]) -> None:
    if request.grammar is None:
        return
    is_full = tokens[-1] != EOS
    text = bytes(tokens[: None if is_full else -1]).decode(errors="replace")
    if is_full:
        assert len(tokens) == 60
    elif request.grammar.kind == "regex":
        assert re.fullmatch(request.grammar.text, text)
    else:
        answer = json.loads(text)
        assert set(answer) == {"name", "on"}
        assert len(answer["name"]) <= 5


@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_every_topology_gives_the_same_answers_in_the_language(
    directory: Path, backend: str, tp: int, pp: int
) -> None:
    alone = engine(directory, backend, token_texts=TEXTS)
    expected = alone.answer(requests())
    for request, tokens in zip(requests(), expected, strict=True):
        check(request, tokens)
    split = engine(directory, backend, tp, pp, token_texts=TEXTS, max_num_batched_tokens=23)
    assert split.answer(requests()) == expected


def test_others_answer_as_if_there_were_no_grammars(directory: Path, backend: str) -> None:
    free = [request for request in requests() if request.grammar is None]
    alone = engine(directory, backend).answer(free)
    assert engine(directory, backend, token_texts=TEXTS).answer(requests())[-len(free) :] == alone


@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 2)])
def test_drafts_change_no_answer_in_a_grammar(
    directory: Path, backend: str, tp: int, pp: int
) -> None:
    plain = engine(directory, backend, tp, pp, token_texts=TEXTS)
    expected = plain.answer(requests())
    answers = dict(zip((it.request_id for it in requests()), expected, strict=True))

    def draft(request: Request) -> list[int]:
        """Seven tokens, of which one in six is wrong."""
        answer, begin = answers[request.request_id], request.num_output_tokens
        return [(it + ((it + begin) % 6 == 0)) % 330 for it in answer[begin : begin + 7]]

    drafting = engine(directory, backend, tp, pp, token_texts=TEXTS)
    drafting.draft_with(draft)
    assert drafting.answer(requests()) == expected
    assert drafting.load().num_accepted_tokens > 100
    if pp == 1:
        assert drafting.load().num_steps < plain.load().num_steps
