# SPDX-License-Identifier: Apache-2.0
"""The same request and seed give the same tokens and log-probabilities, bit for bit, in any company."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from driver import Driver, load
from gguf import GGMLQuantizationType as Kind
from gguf_models import save_gguf
from quantized_models import fp8_format, gptq_format, int8_format, packed_format, save_quantized
from tiny_models import make_model, save_model

from pagoda.messages.frontend import TokenLogprobs
from pagoda.messages.sampling_params import SamplingParams
from pagoda.worker.runner import Runner

LENGTH = 24
BATCH = 32
Answer = tuple[list[int], list[list[TokenLogprobs]]]
"""Tokens, and what each step reports of them."""


def _requests() -> list[tuple[list[int], SamplingParams]]:
    rng = random.Random(7)
    requests = []
    for index in range(BATCH):
        prompt = [rng.randrange(320) for _ in range(rng.randint(1, 140))]
        sampling = SamplingParams(
            temperature=[0.0, 0.8, 1.5][index % 3],
            top_k=[0, 20][index // 3 % 2],
            top_p=[1.0, 0.9][index // 2 % 2],
            min_p=[0.0, 0.02][index // 5 % 2],
            typical_p=[1.0, 0.9][index // 6 % 2],
            presence_penalty=[0.0, 0.3][index // 8 % 2],
            logit_bias=[None, {7: 1.5, 40: -3.0}][index // 9 % 2],
            allowed_token_ids=[None, tuple(range(3, 320, 2))][index // 10 % 2],
            min_tokens=[0, 12][index // 11 % 2],
            stop_token_ids=(17, 42),
            repetition_penalty=[1.0, 1.2][index // 7 % 2],
            frequency_penalty=[0.0, 0.4][index // 4 % 2],
            seed=index - 5,
            max_tokens=10_000,
            logprobs=[3, None, 0][index // 12 % 3],
        )
        requests.append((prompt, sampling))
    return requests


def _answer(
    runner: Runner, chosen: list[int], chunk: int, preempt_at: int | None = None
) -> dict[int, Answer]:
    requests, driver = _requests(), Driver(runner)
    for slot in chosen:
        driver.start(slot, *requests[slot])
    if preempt_at is not None:
        driver.run(chosen, preempt_at, chunk=chunk)
        for slot in chosen:
            output = driver.output(slot)
            driver.free(slot)
            driver.start(slot, *requests[slot], output=output)
    driver.run(chosen, LENGTH, chunk=chunk)
    answers = {
        slot: (
            driver.output(slot),
            [result.logprobs[slot] for result in driver.results if slot in result.logprobs],
        )
        for slot in chosen
    }
    for slot in chosen:
        driver.free(slot)
    driver.step({})
    return answers


@pytest.mark.parametrize(
    ("family", "dtype", "threads", "quantization"),
    [
        ("qwen3", "float32", 1, "none"),
        ("qwen3", "bfloat16", 2, "none"),
        ("mistral", "float32", 2, "none"),
        ("qwen3-moe", "float32", 2, "none"),
        ("qwen3-moe", "bfloat16", 1, "none"),
        ("mixtral", "bfloat16", 2, "none"),
        ("qwen3", "bfloat16", 2, "int8"),
        ("qwen3", "float32", 2, "int4"),
        ("qwen3-moe", "float32", 2, "int8"),
        ("qwen3-moe", "bfloat16", 2, "int4"),
    ],
)
def test_alone_batched_chunked_preempted(
    family: str, dtype: str, threads: int, quantization: str, backend: str, tmp_path: Path
) -> None:
    save_model(family, tmp_path)
    options = {"dtype": dtype, "num_threads": threads, "quantization": quantization}
    runner = load(tmp_path, backend=backend, **options)
    _check(runner)


KINDS = {"Q8_0": Kind.Q8_0, "Q4_1": Kind.Q4_1, "Q2_K": Kind.Q2_K, "IQ4_XS": Kind.IQ4_XS}


@pytest.mark.parametrize("kind", KINDS)
def test_gguf_files(kind: str, backend: str, tmp_path: Path) -> None:
    if backend == "reference" and kind != "Q2_K":
        pytest.skip("plain PyTorch is slow, and does the same for all kinds")
    model = make_model("llama", hidden_size=256, intermediate_size=512)
    save_gguf(model, tmp_path / "model.gguf", lambda _: KINDS[kind])
    _check(load(tmp_path / "model.gguf", backend=backend, num_threads=2))


CHECKPOINTS = {
    "w8a8": int8_format(),
    "w4a16": packed_format(4, 64, symmetric=False),
    "act-order": gptq_format(4, 64, act_order=True),
    "fp8": fp8_format((96, 64)),
}


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_quantized_checkpoints(name: str, backend: str, tmp_path: Path) -> None:
    save_quantized(tmp_path, CHECKPOINTS[name])
    _check(load(tmp_path, backend=backend, num_threads=2))


def _drafted(runner: Runner, answers: dict[int, Answer]) -> dict[int, Answer]:
    """Answers of steps that sample behind up to four drafts of each slot, of which the last is wrong."""
    requests, driver = _requests(), Driver(runner)
    for slot in answers:
        driver.start(slot, *requests[slot])
    while any(len(driver.output(slot)) < LENGTH for slot in answers):
        shares, drafts = {}, dict[int, list[int]]()
        for slot, (tokens, _) in answers.items():
            begin, shares[slot] = len(driver.output(slot)), driver.share(slot, 100)
            draft = tokens[begin : begin + (slot + begin) % 5]
            if draft and shares[slot] == 1:
                draft[-1] = (draft[-1] + 1) % 320
                drafts[slot] = draft
                shares[slot] += len(draft)
        driver.step(shares, drafts)
    found = {
        slot: (
            driver.output(slot)[:LENGTH],
            [[one] for it in driver.results for one in it.logprobs.get(slot, ())][:LENGTH],
        )
        for slot in answers
    }
    for slot in answers:
        driver.free(slot)
    driver.step({})
    return found


def _check(runner: Runner) -> None:
    """All requests together give what some of them give alone, in chunks, after preemption, and behind drafts."""
    together = _answer(runner, list(range(BATCH)), 10_000)
    assert len({tuple(tokens) for tokens, _ in together.values()}) > BATCH * 3 // 4
    for slot in (0, 1, 5, 13, 31):
        assert _answer(runner, [slot], 10_000)[slot] == together[slot]
    shuffled = random.Random(1).sample(range(BATCH), 11)
    assert _answer(runner, shuffled, 7) == {slot: together[slot] for slot in shuffled}
    some = {slot: together[slot] for slot in shuffled}
    assert _drafted(runner, some) == some
    assert _answer(runner, shuffled[:4], 7, preempt_at=10) == {
        slot: together[slot] for slot in shuffled[:4]
    }
