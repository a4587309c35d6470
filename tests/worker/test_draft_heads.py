# SPDX-License-Identifier: Apache-2.0
"""Heads that guess tokens: hidden states, drafts and acceptance are those of their makers' definition."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from driver import GREEDY, Driver, load
from head_models import EAGLE, MTP, HeadModel, save_head_model
from torch import Tensor

from pagoda.messages.speculation import DrafterConfig
from pagoda.worker.runner import Runner

PROMPT = [7, 7, 9, 300, 7, 9, 11, 7]


@pytest.fixture(scope="module", params=[*MTP, *EAGLE])
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> HeadModel:
    kind: str = request.param
    return save_head_model(kind, tmp_path_factory.mktemp(kind))


def drafter_of(made: HeadModel) -> DrafterConfig:
    if made.drafter is None:
        return DrafterConfig(method="mtp")
    return DrafterConfig(method="eagle3", model=str(made.drafter))


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
        room = -(-(len(known) - 1) // 16) * 16
        assert len(draft) == min(3, room - len(known) + 2)
        for ours, wanted in zip(states, hidden, strict=True):
            torch.testing.assert_close(ours[0].cpu(), wanted, atol=2e-4, rtol=2e-4)
    assert accepted == expected
    assert sum(accepted) > 0
