# SPDX-License-Identifier: Apache-2.0
"""Answers of tiny encoder-decoders of texts are those of transformers, whatever is cached or preempted."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from in_process import Answer, InProcessEngine, assert_answers
from safetensors.torch import load_file, save_file
from text_pair_models import MODELS, VOCABULARY, make_pair

from pagoda.checkpoints.config_json import parse_model_config
from pagoda.errors import ConfigError
from pagoda.messages.encoder_input import encoder_input, text_input
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
    "pp 2": {"parallel": ParallelConfig(pipeline_parallel_size=2)},
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


Save = Callable[[str], tuple[Path, list[Answer]]]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Save:
    """Saves a model once; gives its directory and its answers."""

    @cache
    def save(name: str) -> tuple[Path, list[Answer]]:
        directory = tmp_path_factory.mktemp("pair")
        model = make_pair(name)
        model.save_pretrained(directory)
        answers = [_expected(model, index) for index in range(len(LENGTHS))]
        found = {tuple(round(it, 3) for _, it in answer) for answer in answers}
        assert len(found) == len(answers)
        return directory, answers

    return save


def _engine(directory: Path, **options: Any) -> InProcessEngine:
    return InProcessEngine(directory, **{"block_size": 128, "max_model_len": LONGEST} | options)


@pytest.mark.parametrize(
    ("name", "way"),
    [(name, way) for name in MODELS for way in (WAYS if name in ("T5", "Bart") else ["batched"])],
)
def test_answers_are_those_of_transformers(name: str, way: str, backend: str, saved: Save) -> None:
    directory, expected = saved(name)
    engine = _engine(directory, backend=backend, **WAYS[way])
    requests = [_request(index) for index in range(len(LENGTHS))]
    assert_answers(engine.answers_with_logprobs(requests), expected)
    assert_answers(engine.answers_with_logprobs(requests[::-1]), expected)


@pytest.mark.parametrize(
    ("name", "stored"),
    [
        ("T5", ["shared", "decoder.embed_tokens", "encoder.embed_tokens"]),
        ("T5", ["decoder.embed_tokens"]),
        ("Bart", ["model.encoder.embed_tokens"]),
        ("Bart", ["lm_head"]),
    ],
)
def test_the_shared_table_may_have_any_of_its_names(
    name: str, stored: list[str], tmp_path: Path, saved: Save
) -> None:
    directory, expected = saved(name)
    shutil.copytree(directory, tmp_path, dirs_exist_ok=True)
    tensors = load_file(tmp_path / "model.safetensors")
    table = tensors.pop("shared.weight" if name == "T5" else "model.shared.weight")
    tensors |= {f"{it}.weight": table.clone() for it in stored}
    save_file(tensors, tmp_path / "model.safetensors")
    engine = _engine(tmp_path, backend="auto")
    assert_answers(engine.answers_with_logprobs([_request(0)]), expected[:1])


def test_a_preempted_answer_is_read_again(saved: Save) -> None:
    directory, expected = saved("T5")
    engine = _engine(directory, backend="auto", num_blocks=2)
    found: dict[str, Answer] = {str(index): [] for index in range(3)}
    first = engine.chunks([_request(index, priority=1) for index in (0, 1)])
    chunks = [next(first) for _ in range(9)]
    chunks += engine.chunks([_request(2)])
    chunks += first
    for chunk in chunks:
        reported = [token.logprob for token in chunk.logprobs or []]
        found[chunk.request_id] += zip(chunk.token_ids, reported, strict=True)
    assert engine.load().num_preemptions > 0
    assert_answers(found, expected[:3])


def test_what_is_no_text_for_the_encoder_is_refused(saved: Save) -> None:
    engine = _engine(saved("T5")[0], backend="auto")
    sampling = SamplingParams(temperature=0, seed=0, max_tokens=1)
    texts = {"is given no text": None, "has 1 to 96 tokens": text_input([5] * 97)}
    texts |= {"are below 331": text_input([331]), "of a text for": text_input([-1])}
    texts["has 1 to 96"] = encoder_input(bytes(7), 1)
    for message, text in texts.items():
        work = Work(sampling, encoder_input=text)
        request = GenerateRequest(request_id="0", prompt_token_ids=[0], work=work)
        with pytest.raises(RuntimeError, match=message):
            engine.answer([request])


def test_absent_keys_have_the_values_of_transformers() -> None:
    for make, config, _ in MODELS.values():
        named = {"architectures": [make.__name__]}
        spec = parse_model_config(named, source="config.json")
        assert spec == parse_model_config(config().to_dict() | named, source="config.json")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"feed_forward_proj": "gated-relu"}, "feed_forward_proj must be one of relu, gated-gelu"),
        ({"relative_attention_num_buckets": 10}, "num_buckets must be a multiple of 4"),
        ({"relative_attention_max_distance": 6}, "max_distance must be above 6"),
    ],
)
def test_configurations_that_would_be_computed_otherwise_are_refused(
    change: dict[str, Any], message: str
) -> None:
    values = make_pair("T5").config.to_dict() | {"architectures": ["T5ForConditionalGeneration"]}
    with pytest.raises(ConfigError, match=message):
        parse_model_config({**values, **change}, source="config.json")
