# SPDX-License-Identifier: Apache-2.0
"""Drafters with weights in the worker: answers are those without them, and drafts those of the drafter alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from driver import GREEDY, Driver, load
from in_process import engine
from tiny_models import continuation, make_model, save_model

from pagoda.errors import ConfigError
from pagoda.messages.frontend import GenerateRequest, Work
from pagoda.messages.sampling_params import SamplingParams
from pagoda.messages.speculation import DrafterConfig, SpeculativeConfig
from pagoda.messages.worker import SlotStart, StepPlan
from pagoda.messages.worker_config import WorkerConfig
from pagoda.worker.loading import plan_worker

PROMPT = [7, 7, 9, 300, 7, 9, 11, 7]
SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "greedy too": {"temperature": 0},
    "sampled": {"temperature": 0.9, "top_p": 0.9},
    "reported": {"temperature": 1.0, "logprobs": 3},
    "penalised": {"temperature": 0.8, "repetition_penalty": 1.3, "logprobs": 1},
}


def requests(length: int = 40) -> list[GenerateRequest]:
    return [
        GenerateRequest(
            request_id=name,
            prompt_token_ids=PROMPT * 3 + [place],
            work=Work(SamplingParams(**{"seed": 3, "max_tokens": length} | SAMPLING[name])),
        )
        for place, name in enumerate(SAMPLING)
    ]


def drafted_by(model: Path, most: int = 4) -> SpeculativeConfig:
    return SpeculativeConfig(method="draft_model", model=str(model), num_speculative_tokens=most)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A target, and draft models of other families and sizes."""
    found: dict[str, Path] = {}
    for name in ("qwen3", "llama", "mistral"):
        found[name] = tmp_path_factory.mktemp(name)
        save_model(name, found[name])
    return found


@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (1, 2), (2, 2)])
@pytest.mark.parametrize("draft", ["qwen3", "llama", "mistral"])
@pytest.mark.parametrize("blocks", [512, 12])
def test_a_draft_model_changes_no_answer(
    models: dict[str, Path], backend: str, tp: int, pp: int, draft: str, blocks: int
) -> None:
    """Few blocks make requests preempt each other; prompts are computed in chunks, and begin alike."""
    options = {"num_blocks": blocks, "max_num_batched_tokens": 23, "enable_prefix_caching": True}
    plain = engine(models["qwen3"], backend, tp, pp, **options)
    drafting = engine(
        models["qwen3"], backend, tp, pp, speculation=drafted_by(models[draft]), **options
    )
    expected = list(plain.chunks(requests()))
    found = list(drafting.chunks(requests()))
    for name in SAMPLING:
        ours, theirs = (
            [
                (token, chunk.logprobs[at] if chunk.logprobs else None)
                for chunk in chunks
                if chunk.request_id == name
                for at, token in enumerate(chunk.token_ids)
            ]
            for chunks in (found, expected)
        )
        assert ours == theirs
    load = drafting.load()
    assert load.num_draft_tokens > 0
    if draft == "qwen3" and blocks == 512:
        assert load.num_accepted_tokens > 0
        if pp == 1:
            assert load.num_steps < plain.load().num_steps
    if blocks == 12:
        assert load.num_preemptions > 0


def test_all_drafts_of_the_model_itself_are_right(models: dict[str, Path], backend: str) -> None:
    """Greedily and in float32, over chunks, prefix hits and further turns."""
    drafting = engine(
        models["qwen3"],
        backend,
        speculation=drafted_by(models["qwen3"]),
        max_num_batched_tokens=23,
        enable_prefix_caching=True,
    )
    for turn in range(3):
        asked = [it for it in requests() if it.work.sampling.temperature == 0]
        asked = [msgspec.structs.replace(it, request_id=f"{it.request_id} {turn}") for it in asked]
        drafting.answer(asked)
    load = drafting.load()
    assert load.num_prefix_hit_tokens > 0
    assert load.num_accepted_tokens == load.num_draft_tokens > 100
    assert load.num_draft_tokens > 2 * load.num_drafts


class _Drafting(Driver):
    """Asks for drafts behind every step, and keeps those of the last one."""

    def run_drafting(self, slot: int, steps: int, most: int) -> list[tuple[list[int], list[int]]]:
        """What was known behind each step, and what was proposed then."""
        found = []
        for _ in range(steps):
            share = self.share(slot, 10_000)
            result = self.step({slot: share}, wanted={slot: most})
            found.append((list(self.tokens[slot]), result.drafts.get(slot, [])))
        return found


def test_drafts_are_greedy_continuations_by_the_draft_model(
    models: dict[str, Path], backend: str
) -> None:
    runner = load(
        models["qwen3"],
        backend=backend,
        drafter=DrafterConfig(method="draft_model", model=str(models["llama"])),
    )
    driver = _Drafting(runner)
    driver.start(0, PROMPT, GREEDY)
    oracle = make_model("llama")
    for known, draft in driver.run_drafting(0, 12, 3):
        assert draft == continuation(oracle, known, 3)[: len(draft)]
        assert len(draft) == 3 or len(known) % 16 > 13 or len(known) % 16 == 0
