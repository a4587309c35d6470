# SPDX-License-Identifier: Apache-2.0
"""Prompts with embedded spans are answered as transformers answers the same embeddings, whatever is cached."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from in_process import InProcessEngine
from tier_server import Server
from tiny_models import save_model

from pagoda.messages.frontend import GenerateRequest, Work
from pagoda.messages.sampling_params import SamplingParams
from pagoda.messages.spans import EmbeddedSpan, embedded_span
from pagoda.messages.worker_config import KVTierConfig
from pagoda.parallel.config import ParallelConfig
from pagoda.plugins.disk_tier.directory import MIN_TOUCHES, TIER

HIDDEN, COUNT, CONTEXT = 64, 16, 224
WAYS: dict[str, dict[str, Any]] = {
    "batched": {},
    "chunked": {"block_size": 4, "max_num_batched_tokens": 7},
    "preempted": {"block_size": 4, "max_num_batched_tokens": 64, "num_blocks": 80},
    "tp 2": {"parallel": ParallelConfig(tensor_parallel_size=2)},
    "pp 2": {"parallel": ParallelConfig(pipeline_parallel_size=2)},
}


def _span(seed: int, start: int, length: int) -> EmbeddedSpan:
    vectors = torch.randn(length, HIDDEN, generator=torch.Generator().manual_seed(seed))
    return embedded_span(start, length, vectors.numpy().tobytes())


def _tokens(seed: int, count: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(320) for _ in range(count)]


LONG = _tokens(1, 150)
PROMPTS: list[tuple[list[int], tuple[EmbeddedSpan, ...]]] = [
    (LONG, (_span(1, 20, 37), _span(2, 100, 9))),
    (LONG, (_span(3, 20, 37), _span(2, 100, 9))),
    (LONG, (_span(1, 20, 37),)),
    (LONG, ()),
    (_tokens(2, 9), (_span(4, 0, 9),)),
]
"""The first four have the same tokens."""


def _request(index: int) -> GenerateRequest:
    prompt, spans = PROMPTS[index]
    sampling = SamplingParams(temperature=0, seed=0, max_tokens=COUNT)
    return GenerateRequest(
        request_id=str(index), prompt_token_ids=prompt, work=Work(sampling, spans=spans)
    )


REQUESTS = [_request(index) for index in range(len(PROMPTS))]


def _expected(model: Any, prompt: list[int], spans: tuple[EmbeddedSpan, ...]) -> list[int]:
    with torch.inference_mode():
        embedded = model.get_input_embeddings()(torch.tensor([prompt]))
        for span in spans:
            vectors = torch.frombuffer(bytearray(span.vectors), dtype=torch.float32)
            embedded[0, span.start : span.end] = vectors.view(span.length, HIDDEN)
        tokens = model.generate(
            inputs_embeds=embedded,
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=COUNT,
            do_sample=False,
        )
    return [int(token_id) for token_id in tokens[0]]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("spans")


@pytest.fixture(scope="module")
def expected(directory: Path) -> list[list[int]]:
    model = save_model("qwen3", directory / "model")
    answers = [_expected(model, *prompt) for prompt in PROMPTS]
    assert len(set(map(tuple, answers))) == len(answers)
    return answers


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("way", WAYS)
def test_answers_are_those_of_transformers(
    way: str, backend: str, directory: Path, expected: list[list[int]]
) -> None:
    options = {"backend": backend, "max_model_len": CONTEXT} | WAYS[way]
    engine = InProcessEngine(directory / "model", **options)
    assert engine.answer(REQUESTS) == expected
    assert (engine.load().num_preemptions > 0) is (way == "preempted")


def test_a_prefix_is_cached_up_to_the_first_span_that_differs(
    directory: Path, expected: list[list[int]]
) -> None:
    engine = InProcessEngine(
        directory / "model", backend="reference", max_model_len=CONTEXT, enable_prefix_caching=True
    )
    found = []
    for request, answer in zip(REQUESTS[:4], expected, strict=False):
        before = engine.load().num_prefix_hit_tokens
        assert engine.answer([request]) == [answer]
        found.append(engine.load().num_prefix_hit_tokens - before)
    # The spans of the second differ from place 20 on, those of the third from 100 on; the last has none.
    assert found == [0, 16, 96, 16]
    before = engine.load().num_prefix_hit_tokens
    assert engine.answer(REQUESTS) == expected
    assert engine.load().num_prefix_hit_tokens - before >= 4 * 144


def test_answers_over_host_memory_and_disk(directory: Path, expected: list[list[int]]) -> None:
    disk = {"kv_tiers": {TIER: KVTierConfig(str(directory / "kv"), 2**30, {MIN_TOUCHES: 1})}}
    server = Server(directory, ParallelConfig(), num_blocks=20, kv_host_bytes=2**22, **disk)
    for request, answer, cached in zip(REQUESTS[:4], expected, [0, 16, 96, 16], strict=False):
        assert server.ask_requests([request]) == ([answer], cached)
    answers, num_cached = server.ask_requests(REQUESTS)  # more than the device has room for
    assert answers == expected
    assert num_cached >= 4 * 144
    assert server.figure("host") > 0
    server.core.close()

    server = Server(directory, ParallelConfig(), num_blocks=20, **disk)
    answers, num_cached = server.ask_requests(REQUESTS)
    assert answers == expected
    assert num_cached >= 4 * 144
    assert server.figure("disk") > 0
    server.core.close()


def test_a_span_out_of_the_prompt_is_refused(directory: Path, expected: list[list[int]]) -> None:  # noqa: ARG001
    engine = InProcessEngine(directory / "model", backend="reference", max_model_len=CONTEXT)
    for spans in ((_span(1, 5, 5),), (_span(1, 0, 4), _span(2, 3, 2))):
        sampling = SamplingParams(temperature=0, seed=0, max_tokens=1)
        work = Work(sampling, spans=spans)
        request = GenerateRequest(request_id="out", prompt_token_ids=_tokens(1, 9), work=work)
        with pytest.raises(RuntimeError, match="must lie in the prompt"):
            engine.answer([request])
