"""Greedy answers are those of Hugging Face transformers, however they are batched, cut and cached."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from driver import Driver, load
from tiny_models import FAMILIES, continuation, make_model, save_model

LENGTH = 64


def _prompts(count: int, longest: int) -> list[list[int]]:
    rng = random.Random(count)
    return [[rng.randrange(320) for _ in range(rng.randint(1, longest))] for _ in range(count)]


@pytest.mark.parametrize("family", FAMILIES)
def test_continuations_equal_transformers(family: str, tmp_path: Path) -> None:
    model = save_model(family, tmp_path)
    prompts = _prompts(5, 150)
    expected = [continuation(model, prompt, LENGTH) for prompt in prompts]
    assert len({tuple(tokens) for tokens in expected}) == 5
    runner = load(tmp_path)

    batched = Driver(runner)
    for slot, prompt in enumerate(prompts):
        batched.start(slot, prompt)
    batched.run(list(range(5)), LENGTH)
    assert [batched.output(slot) for slot in range(5)] == expected

    chunked = Driver(load(tmp_path, block_size=4), block_size=4)
    chunked.start(9, prompts[0])
    for slot, prompt in enumerate(prompts[1:], start=1):  # the others join while it runs
        chunked.step({9: chunked.share(9, 7)})
        chunked.start(slot, prompt)
    chunked.run([9, 1, 2, 3, 4], LENGTH, chunk=7)
    assert [chunked.output(slot) for slot in (9, 1, 2, 3, 4)] == expected


def test_cached_prefix_blocks(tmp_path: Path) -> None:
    model = save_model("qwen3", tmp_path)
    prefix = list(range(100, 196))
    prompts = [prefix + tail for tail in _prompts(3, 30)] + [prefix]
    driver = Driver(load(tmp_path))
    driver.start(0, prompts[0])
    driver.run([0], LENGTH)
    for slot, prompt in enumerate(prompts[1:], start=1):
        # A prompt that is all cached still computes its last token, so one block fewer is shared.
        num_shared = min(len(prefix), len(prompt) - 1) // 16
        driver.start(slot, prompt, shared_blocks=driver.blocks[0][:num_shared])
    driver.run([1, 2, 3], LENGTH)
    for slot, prompt in enumerate(prompts):
        assert driver.output(slot) == continuation(model, prompt, LENGTH)


def test_return_after_preemption(tmp_path: Path) -> None:
    model = save_model("llama", tmp_path)
    prompts = _prompts(2, 90)
    driver = Driver(load(tmp_path))
    driver.start(0, prompts[0])
    driver.run([0], 20)
    output = driver.output(0)
    driver.free(0)
    driver.start(0, prompts[1])  # another request has the slot in between
    driver.run([0], 5)
    driver.start(1, prompts[0], output=output)
    driver.run([0, 1], LENGTH, chunk=13)
    assert driver.output(1) == continuation(model, prompts[0], LENGTH)
    assert driver.output(0) == continuation(model, prompts[1], LENGTH)


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
def test_half_precision_stays_close(dtype: str, tmp_path: Path) -> None:
    model = save_model("qwen3", tmp_path)
    (prompt,) = _prompts(1, 100)
    for options in ({"dtype": dtype}, {"dtype": "auto"}):
        if options["dtype"] == "auto":
            model.to(getattr(torch, dtype)).save_pretrained(tmp_path)
        driver = Driver(load(tmp_path, **options))
        driver.start(0, prompt)
        driver.run([0], 8)
        assert driver.output(0)[0] == continuation(model.float(), prompt, 1)[0]
