# SPDX-License-Identifier: Apache-2.0
"""Greedy answers are those of Hugging Face transformers, however they are batched, cut, cached and preempted."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from driver import Driver, load
from in_process import InProcessEngine, Oracle, save_oracle
from tiny_models import FAMILIES, continuation, make_model, save_model

LENGTH = 64
CONTEXT = 224
"""Holds the longest prompt and its answer."""


def _prompts(count: int, longest: int) -> list[list[int]]:
    rng = random.Random(count)
    return [[rng.randrange(320) for _ in range(rng.randint(1, longest))] for _ in range(count)]


@pytest.fixture(scope="module", params=FAMILIES)
def oracle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    """A family, with prompts of which some begin alike."""
    prefix = list(range(100, 196))
    prompts = [*_prompts(3, 150), *(prefix + tail for tail in _prompts(2, 30)), prefix]
    directory = tmp_path_factory.mktemp(request.param)
    oracle = save_oracle(directory, make_model(request.param), prompts, LENGTH)
    assert len({tuple(tokens) for tokens in oracle.expected}) == len(prompts)
    return oracle


Open = Callable[..., InProcessEngine]


@pytest.fixture
def start(oracle: Oracle, backend: str) -> Open:
    return partial(InProcessEngine, oracle.directory, backend=backend, max_model_len=CONTEXT)


def test_batched(oracle: Oracle, start: Open) -> None:
    engine = start()
    assert engine.answer(oracle.requests) == oracle.expected
    load = engine.load()
    assert (load.num_preemptions, load.num_prefix_hit_tokens) == (0, 0)


def test_chunked(oracle: Oracle, start: Open) -> None:
    engine = start(block_size=4, max_num_batched_tokens=7)
    assert engine.answer(oracle.requests) == oracle.expected
    num_prompt_tokens = sum(len(request.prompt_token_ids) for request in oracle.requests)
    assert engine.load().num_steps > num_prompt_tokens / 7


def test_prefix_cached(oracle: Oracle, start: Open) -> None:
    engine = start(enable_prefix_caching=True)
    alike = slice(3, 5)
    assert engine.answer(oracle.requests[alike]) == oracle.expected[alike]
    first_hits = engine.load().num_prefix_hit_tokens
    assert engine.answer(oracle.requests) == oracle.expected
    assert engine.load().num_prefix_hit_tokens - first_hits >= 3 * 80


def test_preempted(oracle: Oracle, start: Open) -> None:
    num_groups = len(start().kv_groups)
    for prefix_caching in (False, True):
        engine = start(
            block_size=4,
            num_blocks=num_groups * -(-CONTEXT // 4) + 3,
            max_num_batched_tokens=64,
            enable_prefix_caching=prefix_caching,
        )
        assert engine.answer(oracle.requests) == oracle.expected
        load = engine.load()
        # What lies behind windows may be enough for all.
        assert load.num_preemptions > 0 or engine.gives_back
        assert (load.num_prefix_hit_tokens > 0) is prefix_caching


@pytest.mark.parametrize("tied", [True, False])
def test_sharded_files(tied: bool, tmp_path: Path) -> None:
    model = make_model("qwen3" if tied else "mistral")
    assert model.config.tie_word_embeddings is tied
    model.save_pretrained(tmp_path, max_shard_size="60KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    (prompt,) = _prompts(1, 100)
    driver = Driver(load(tmp_path))
    driver.start(0, prompt)
    driver.run([0], LENGTH)
    assert driver.output(0) == continuation(model, prompt, LENGTH)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_stays_close(dtype: str, backend: str, tmp_path: Path) -> None:
    model = save_model("qwen3", tmp_path)
    (prompt,) = _prompts(1, 100)
    for options in ({"dtype": dtype}, {"dtype": "auto"}):
        if options["dtype"] == "auto":
            model.to(getattr(torch, dtype)).save_pretrained(tmp_path)
        driver = Driver(load(tmp_path, backend=backend, **options))
        driver.start(0, prompt)
        driver.run([0], 8)
        assert driver.output(0)[0] == continuation(model.float(), prompt, 1)[0]
