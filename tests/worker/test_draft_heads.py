# SPDX-License-Identifier: Apache-2.0
"""Heads that guess tokens: hidden states, drafts and acceptance are those of their makers' definition."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch
from driver import GREEDY, Driver, load
from head_models import EAGLE, MTP, HeadModel, save_head_model
from in_process import engine
from torch import Tensor

from pagoda.messages.frontend import GenerateRequest, Work
from pagoda.messages.sampling_params import SamplingParams
from pagoda.messages.speculation import DrafterConfig, SpeculativeConfig
from pagoda.messages.worker_config import WorkerConfig
from pagoda.telemetry.tracer import Tracer
from pagoda.worker.loading import load_runner, plan_worker
from pagoda.worker.runner import Runner

PROMPT = [7, 7, 9, 300, 7, 9, 11, 7]


@pytest.fixture(scope="module", params=[*MTP, *EAGLE])
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> HeadModel:
    kind: str = request.param
    return save_head_model(kind, tmp_path_factory.mktemp(kind))


SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
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


def speculation_of(made: HeadModel) -> SpeculativeConfig:
    if made.drafter is None:
        return SpeculativeConfig(method="mtp", num_speculative_tokens=4)
    return SpeculativeConfig(method="eagle3", model=str(made.drafter), num_speculative_tokens=4)


def drafter_of(made: HeadModel) -> DrafterConfig:
    drafter = speculation_of(made).drafter
    assert drafter is not None
    return drafter


def _watched(runner: Runner) -> list[Tensor]:
    """The hidden states in front of the logits of each draft, as they come."""
    states: list[Tensor] = []
    model: Any = vars(runner)["_drafter"].model
    argmax = model.argmax

    def watch(hidden: Tensor) -> Tensor:
        states.append(hidden.clone())
        return argmax(hidden)

    model.argmax = watch
    return states


@pytest.mark.parametrize("chunk", [5, 10_000])
def test_drafts_are_those_of_the_definition(made: HeadModel, backend: str, chunk: int) -> None:
    runner = load(made.directory, backend=backend, drafter=drafter_of(made), dtype="float32")
    states = _watched(runner)
    driver = Driver(runner)
    driver.start(0, PROMPT * 3, GREEDY)
    draft: list[int] = []
    accepted, expected = [], []
    for _ in range(12):
        share = driver.share(0, chunk)
        drafts = {}
        if share == 1 and draft:
            drafts, share = {0: draft}, 1 + len(draft)
        states.clear()
        before = list(driver.tokens[0])
        result = driver.step({0: share}, drafts, {0: 3})
        said = driver.tokens[0][len(before) :]
        if drafts:
            accepted.append(len(said) - 1)
            expected.append(sum(all(map(int.__eq__, draft[:n], said)) for n in range(1, 4)))
        draft = result.proposals.get(0, [])
        if not said:
            assert not draft
            continue
        known = driver.tokens[0]
        theirs, hidden = made.drafts(known, len(draft))
        assert draft == theirs
        room = 16 * len(driver.blocks[0][0])
        assert len(draft) == min(3, room - len(known) + 2)
        for ours, wanted in zip(states, hidden, strict=True):
            torch.testing.assert_close(ours[0].cpu(), wanted, atol=2e-4, rtol=2e-4)
    assert accepted == expected
    assert sum(accepted) > 0


@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (1, 2)])
@pytest.mark.parametrize("blocks", [512, 9])
def test_a_head_changes_no_answer(
    made: HeadModel, backend: str, tp: int, pp: int, blocks: int
) -> None:
    """Few blocks make requests preempt each other; prompts are computed in chunks, and begin alike."""
    if made.drafter is not None and pp > 1:
        pytest.skip("its model's layers lie on several ranks, which is refused")
    options = {"num_blocks": blocks, "max_num_batched_tokens": 23, "enable_prefix_caching": True}
    plain = engine(made.directory, backend, tp, pp, **options)
    drafting = engine(made.directory, backend, tp, pp, speculation=speculation_of(made), **options)
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
    assert load.num_accepted_tokens > 0
    assert load.num_draft_tokens > load.num_accepted_tokens


def test_a_head_counts_in_the_plan_of_memory(made: HeadModel, backend: str) -> None:
    sizes = {"num_blocks": 32, "block_size": 16, "max_num_seqs": 4, "num_threads": 1}
    config = WorkerConfig(
        model=str(made.directory), drafter=drafter_of(made), backend=backend, **sizes
    )
    plan = plan_worker(config)
    plain = plan_worker(msgspec.structs.replace(config, drafter=None))
    assert plan.drafter is not None
    assert plan.weight_bytes - plain.weight_bytes == 4 * made.num_parameters
    assert plan.bytes_per_block > plain.bytes_per_block
    kept = (plan.step_tokens + 4 * 16) * 64 * 4
    assert plan.step_bytes - plain.step_bytes > kept
    loaded = load_runner(plan, Tracer("worker"))
    assert loaded.kv.block_bytes == plan.bytes_per_block
    assert loaded.ready.planned_memory_bytes == plan.total_bytes(
        plan.weight_bytes, plan.step_bytes, 32
    )
