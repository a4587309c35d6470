# SPDX-License-Identifier: Apache-2.0
"""Heads that guess tokens: hidden states, drafts and acceptance are those of their makers' definition."""

from __future__ import annotations

import json
import shutil
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from drafted_answers import PROMPT, STEPS, check_proposals, requests, said
from driver import GREEDY, Driver, load, load_config
from gguf_models import save_gguf
from head_models import EAGLE, MTP, HeadModel, save_head_model
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from in_process import engine
from torch import Tensor

from pagoda.errors import ConfigError
from pagoda.messages.speculation import DrafterConfig, SpeculativeConfig
from pagoda.messages.worker_config import KVHandoffConfig, Role, WorkerConfig
from pagoda.parallel.config import ParallelConfig
from pagoda.telemetry.tracer import Tracer
from pagoda.worker import backends
from pagoda.worker.loading import load_runner, plan_worker
from pagoda.worker.runner import Runner


@pytest.fixture(scope="module", params=[*MTP, *EAGLE])
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> HeadModel:
    kind: str = request.param
    return save_head_model(kind, tmp_path_factory.mktemp(kind))


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
            expected.append(
                sum(all(map(int.__eq__, draft[:n], said)) for n in range(1, len(draft) + 1))
            )
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
@pytest.mark.parametrize("blocks", [512, 7])
def test_a_head_changes_no_answer(
    made: HeadModel, backend: str, tp: int, pp: int, blocks: int
) -> None:
    """Few blocks make requests preempt each other; prompts are computed in chunks, and begin alike."""
    if made.drafter is not None and pp > 1:
        pytest.skip("its model's layers lie on several ranks, which is refused")
    shares_experts = tp > 1 and blocks < 512 and hasattr(made.target.config, "n_routed_experts")
    has_states = hasattr(made.target.config, "linear_num_value_heads")  # whose blocks come on top
    options = {
        "experts": shares_experts,
        "num_blocks": 2 * blocks if has_states else blocks,
        "max_num_batched_tokens": 23,
        "enable_prefix_caching": True,
    }
    plain = engine(made.directory, backend, tp, pp, **options)
    drafting = engine(made.directory, backend, tp, pp, speculation=speculation_of(made), **options)
    assert said(drafting.chunks(requests())) == said(plain.chunks(requests()))
    load = drafting.load()
    assert load.num_draft_tokens >= load.num_accepted_tokens > 0
    assert load.num_preemptions > 0 or blocks > 7 or has_states


def test_a_head_counts_in_the_plan_of_memory(made: HeadModel, backend: str) -> None:
    sizes = {"num_blocks": 64, "block_size": 16, "max_num_seqs": 4, "num_threads": 1}
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
        plan.weight_bytes, plan.step_bytes, 64
    )


def _drafted(directory: Path, made: HeadModel, steps: int = 6, **options: Any) -> None:
    """Checks drafts of 2 behind each of some steps."""
    driver = Driver(load(directory, dtype="float32", **options))
    driver.start(0, PROMPT * 3, GREEDY)
    for _ in range(steps):
        result = driver.step({0: driver.share(0, 100)}, wanted={0: 2})
        assert result.proposals[0] == made.drafts(driver.tokens[0], 2)[0]


def test_heads_in_gguf_files(tmp_path: Path) -> None:
    made = save_head_model("glm4-moe", tmp_path)
    save_gguf(made.target, tmp_path / "m.gguf", head=made.tensors)
    _drafted(tmp_path / "m.gguf", made, drafter=DrafterConfig(method="mtp"))


@pytest.mark.parametrize("method", ["auto", "mtp"])
def test_the_head_of_a_model_is_chosen_where_it_is_there(
    tmp_path: Path, method: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """Files may lack it although their configuration counts it, as converters leave it out."""
    made = save_head_model("mimo", tmp_path)
    drafter = DrafterConfig(method=method)
    _drafted(made.directory, made, drafter=drafter)
    backends.main([str(made.directory), "auto", "float32", "none"])
    torch.set_num_threads(1)
    assert "with a KV cache of" in (told := capsys.readouterr().out)
    assert told.endswith(" and a head that drafts\n")
    made.target.save_pretrained(tmp_path / "bare")
    (tmp_path / "bare" / "config.json").write_bytes((made.directory / "config.json").read_bytes())
    config = WorkerConfig(model=str(tmp_path / "bare"), num_blocks=32, drafter=drafter)
    if method == "mtp":
        with pytest.raises(
            ConfigError, match=r"bare lacks the tensor model.mtp_layers.0.\S+ of its own"
        ):
            plan_worker(config)
    else:
        assert plan_worker(config).drafter is None
        _, ready = load_config(config)
        assert ready.max_proposals == 0


@pytest.mark.parametrize("fetches", [False, True])
def test_a_head_drafts_behind_kv_of_others(tmp_path: Path, fetches: bool) -> None:
    """A slot that starts with K and V of the model alone, as behind a handoff: the head computes zeros for hidden
    states that nobody has, and the same drafts whatever is in the blocks."""
    made = save_head_model("mimo", tmp_path)
    role = Role.DECODE if fetches else Role.PREFILL
    handoff = KVHandoffConfig(role=role, transports=("tcp",), host="", secret=b"")
    runner = load(made.directory, drafter=drafter_of(made), kv_handoff=handoff, dtype="float32")
    found = []
    for slot in (0, 1):
        driver = Driver(runner)
        driver.start(slot, PROMPT * 3, GREEDY, num_computed=23)
        found.append([])
        for _ in range(4):
            result = driver.step({slot: driver.share(slot, 9)}, wanted={slot: 2})
            found[-1].append(result.proposals[slot])
        driver.free(slot)
        driver.step({})
    assert all(len(draft) == 2 for draft in found[0])
    assert found[0] == found[1]


@settings(deadline=None, max_examples=20, suppress_health_check=list(HealthCheck))
@given(
    steps=STEPS,
    chunk=st.integers(2, 9),
    kind=st.sampled_from(["mimo", "eagle3"]),
    data=st.data(),
)
def test_what_is_proposed_does_not_depend_on_how_one_got_there(
    steps: list[tuple[int, int, int]], chunk: int, kind: str, data: st.DataObject
) -> None:
    runner, made = _shared(kind)
    driver = Driver(runner)
    check_proposals(
        driver, steps, chunk, data, made.answer, lambda known, count: made.drafts(known, count)[0]
    )


@cache
def _shared(kind: str) -> tuple[Runner, HeadModel]:
    directory = Path(tempfile.mkdtemp())
    made = save_head_model(kind, directory)
    try:
        options = {"drafter": drafter_of(made), "dtype": "float32"}
        return load(made.directory, backend="reference", **options), made
    finally:
        shutil.rmtree(directory)


def _changed(directory: Path, head: Path, **changes: Any) -> DrafterConfig:
    """An EAGLE-3 head whose configuration says something else."""
    shutil.copytree(head, directory)
    values = json.loads((head / "config.json").read_text()) | changes
    (directory / "config.json").write_text(json.dumps(values))
    return DrafterConfig(method="eagle3", model=str(directory))


def test_heads_that_do_not_fit_are_refused_before_loading(tmp_path: Path) -> None:
    made = save_head_model("eagle3", tmp_path)
    assert made.drafter is not None
    own = drafter_of(made)

    def refused(drafter: DrafterConfig, match: str, **options: Any) -> None:
        config = WorkerConfig(model=str(made.directory), drafter=drafter, num_blocks=32, **options)
        with pytest.raises(ConfigError, match=match):
            plan_worker(config)

    refused(DrafterConfig(method="mtp"), "mtp is for models that bring a head, and .* has none")
    changes: dict[str, Any]
    for place, (changes, match) in enumerate(
        (
            ({"vocab_size": 400}, "another model than .*: 400 tokens in the vocabulary, not 320"),
            (
                {"target_hidden_size": 32},
                "another model than .*: 32 elements of a hidden state, not 64",
            ),
            ({"hidden_size": 32, "target_hidden_size": 64}, "needs the tensor embed_tokens"),
            (
                {"eagle_aux_hidden_state_layer_ids": [2, 3, 9]},
                "takes hidden states of layers 2, 3, 9, and there are 5",
            ),
        )
    ):
        refused(_changed(tmp_path / str(place), made.drafter, **changes), match)
    no_head = DrafterConfig(method="eagle3", model=str(made.directory))
    refused(no_head, "is not an EAGLE-3 head: it has no tensor fc.weight")
    two = ParallelConfig(pipeline_parallel_size=2)
    refused(own, "--pipeline-parallel-size 2 has on other ranks; choose mtp", parallel=two)
    odd = _changed(tmp_path / "odd", made.drafter, num_key_value_heads=1, num_attention_heads=1)
    two = ParallelConfig(tensor_parallel_size=2)
    refused(odd, r"--tensor-parallel-size 2 .* heads of the head", parallel=two)
