# SPDX-License-Identifier: Apache-2.0
"""A model of which some layers have a window, in real worker processes, over host memory and disk."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from family_models import FAMILIES, make_model
from small_objects import disk_under
from tier_server import COUNT, Server
from tiny_models import continuation, save_model
from tiny_models import make_model as make_tiny_model
from transformers import PreTrainedModel

from pagoda.messages.speculation import SpeculativeConfig
from pagoda.parallel.config import ParallelConfig

PROMPTS = [[random.Random(seed).randrange(320) for _ in range(200 - 7 * seed)] for seed in range(4)]
TOPOLOGIES = {
    "one": ParallelConfig(),
    "stages": ParallelConfig(pipeline_parallel_size=2),
}


@pytest.fixture(params=TOPOLOGIES.values(), ids=TOPOLOGIES)
def parallel(request: pytest.FixtureRequest) -> ParallelConfig:
    topology: ParallelConfig = request.param
    return topology


@pytest.fixture
def model(tmp_path: Path) -> PreTrainedModel:
    return save_model("qwen2-windowed", tmp_path / "model")


def test_answers_over_tiers_are_those_of_transformers(
    model: PreTrainedModel, parallel: ParallelConfig, tmp_path: Path
) -> None:
    expected = [continuation(model, prompt, COUNT) for prompt in PROMPTS]
    disk = {"kv_tiers": disk_under(tmp_path)}
    server = Server(tmp_path, parallel, kv_host_bytes=2**22, **disk)
    assert server.core.scheduler is not None
    groups = server.core.scheduler.kv.groups
    assert [group.keeps_all for group in groups] == [True, False]
    for prompt, answer in zip(PROMPTS, expected, strict=True):
        assert server.ask(prompt) == ([answer], 0)
    answers, num_cached = server.ask(PROMPTS[0])
    assert (answers, num_cached) == (expected[:1], 192)
    assert server.figure("host") > 0
    turn = [*PROMPTS[1], *expected[1], 5, 6, 7]
    answers, num_cached = server.ask(turn)
    assert answers == [continuation(model, turn, COUNT)]
    assert num_cached == 208
    answers, _ = server.ask(*PROMPTS)  # more than the device has room for
    assert answers == expected
    server.core.close()

    server = Server(tmp_path, parallel, **disk)
    answers, num_cached = server.ask(PROMPTS[2])
    assert (answers, num_cached) == (expected[2:3], 176)
    assert server.figure("disk") > 0
    answers, num_cached = server.ask(*PROMPTS)
    assert answers == expected
    assert num_cached >= 3 * 160
    server.core.close()


@pytest.mark.parametrize("name", ["lfm2", "qwen3-next", "jamba"])
def test_a_state_goes_on_from_disk_after_a_restart(
    name: str, parallel: ParallelConfig, tmp_path: Path
) -> None:
    """A state is found behind 128 tokens, where a block of 64 ends."""
    model = make_model(name)
    model.save_pretrained(tmp_path / "model")
    expected = [continuation(model, prompt, COUNT) for prompt in PROMPTS]
    # An eighth of the blocks may be on their way to the disk: all of a prompt, so that nothing is left out.
    disk = {"kv_tiers": disk_under(tmp_path), "num_blocks": 256}
    server = Server(tmp_path, parallel, **disk)
    for prompt, answer in zip(PROMPTS, expected, strict=True):
        assert server.ask(prompt) == ([answer], 0)
    server.core.close()

    server = Server(tmp_path, parallel, **disk)
    for prompt, answer in zip(PROMPTS[2:], expected[2:], strict=True):
        assert server.ask(prompt) == ([answer], 128)
    assert server.figure("disk") > 0
    server.core.close()


@pytest.mark.parametrize(("name", "draft"), [("qwen3", "qwen3"), ("qwen3-next", "llama")])
def test_a_draft_model_goes_on_from_disk_after_a_restart(
    name: str, draft: str, parallel: ParallelConfig, tmp_path: Path
) -> None:
    """Its K and V lie in the blocks that are kept: a model that drafts for itself is right behind them, too."""
    model = make_any(name)
    model.save_pretrained(tmp_path / "model")
    make_any(draft).save_pretrained(tmp_path / "draft")
    expected = [continuation(model, prompt, COUNT) for prompt in PROMPTS]
    speculation = SpeculativeConfig(
        method="draft_model", model=str(tmp_path / "draft"), num_speculative_tokens=4
    )
    disk = {"kv_tiers": disk_under(tmp_path), "num_blocks": 256, "speculation": speculation}
    for is_restarted in (False, True):
        server = Server(tmp_path, parallel, **disk)
        for prompt, answer in zip(PROMPTS, expected, strict=True):
            answers, num_cached = server.ask(prompt)
            assert answers == [answer]
            assert num_cached == 0 or is_restarted
        load = server.core.load()
        assert load.num_draft_tokens > 0
        if name == draft:
            assert load.num_accepted_tokens == load.num_draft_tokens
        assert (server.figure("disk") > 0) == is_restarted
        server.core.close()


def make_any(name: str) -> PreTrainedModel:
    return make_model(name) if name in FAMILIES else make_tiny_model(name)
