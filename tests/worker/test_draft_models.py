# SPDX-License-Identifier: Apache-2.0
"""Drafters with weights in the worker: answers are those without them, and drafts those of the drafter alone."""

from __future__ import annotations

import json
import shutil
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest
from drafted_answers import PROMPT, STEPS, check_proposals, requests, said
from driver import GREEDY, Driver, load
from family_models import make_model as make_other_model
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from in_process import engine
from tiny_models import continuation, make_model, save_model
from transformers import PreTrainedModel

from pagoda.errors import ConfigError
from pagoda.messages.speculation import DrafterConfig, SpeculativeConfig
from pagoda.messages.worker_config import KVHandoffConfig, Role, WorkerConfig
from pagoda.parallel.config import ParallelConfig
from pagoda.telemetry.tracer import Tracer
from pagoda.worker.loading import load_runner, plan_worker
from pagoda.worker.runner import Runner


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


@pytest.mark.parametrize(
    ("draft", "tp", "pp"),
    [
        ("qwen3", 1, 1),
        ("qwen3", 2, 2),
        ("llama", 2, 1),
        ("llama", 1, 2),
        ("mistral", 1, 1),
    ],
)
@pytest.mark.parametrize("blocks", [512, 9])
def test_a_draft_model_changes_no_answer(
    models: dict[str, Path], backend: str, tp: int, pp: int, draft: str, blocks: int
) -> None:
    """Few blocks make requests preempt each other; prompts are computed in chunks, and begin alike."""
    options = {"num_blocks": blocks, "max_num_batched_tokens": 23, "enable_prefix_caching": True}
    plain = engine(models["qwen3"], backend, tp, pp, **options)
    drafting = engine(
        models["qwen3"], backend, tp, pp, speculation=drafted_by(models[draft]), **options
    )
    assert said(drafting.chunks(requests())) == said(plain.chunks(requests()))
    load = drafting.load()
    assert load.num_draft_tokens > 0
    if draft == "qwen3" and blocks == 512:
        assert load.num_accepted_tokens > 0
        if pp == 1:
            assert load.num_steps < plain.load().num_steps
    if blocks == 9 and draft != "qwen3":
        assert load.num_preemptions > 0


@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 2)])
@pytest.mark.parametrize("family", ["qwen3-next", "lfm2"])
def test_a_draft_model_changes_no_answer_of_states(
    models: dict[str, Path], backend: str, family: str, tp: int, pp: int, tmp_path: Path
) -> None:
    """The model keeps states behind tokens that are known alone; its drafter keeps none."""
    make_other_model(family).save_pretrained(tmp_path)
    options = {"num_blocks": 64, "max_num_batched_tokens": 23, "enable_prefix_caching": True}
    plain = engine(tmp_path, backend, tp, pp, **options)
    speculation = drafted_by(models["llama"])
    drafting = engine(tmp_path, backend, tp, pp, speculation=speculation, **options)
    assert drafting.answer(requests()) == plain.answer(requests())
    assert drafting.load().num_draft_tokens > 0


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
            found.append((list(self.tokens[slot]), result.proposals.get(slot, [])))
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
        room = -(-(len(known) - 1) // 16) * 16
        assert len(draft) == min(3, room - len(known) + 1)


@settings(deadline=None, max_examples=20, suppress_health_check=list(HealthCheck))
@given(
    steps=STEPS,
    chunk=st.integers(2, 9),
    data=st.data(),
)
def test_what_is_proposed_does_not_depend_on_how_one_got_there(
    steps: list[tuple[int, int, int]], chunk: int, data: st.DataObject
) -> None:
    runner, oracle = _shared()

    def answer(known: list[int], count: int) -> list[int]:
        return continuation(_target(), known, count)

    def drafts(known: list[int], count: int) -> list[int]:
        return continuation(oracle, known, count)

    check_proposals(Driver(runner), steps, chunk, data, answer, drafts)


@pytest.mark.parametrize("fetches", [False, True])
def test_a_drafter_begins_anew_where_kv_is_fetched(models: dict[str, Path], fetches: bool) -> None:
    """A slot that starts with K and V of the model alone, as behind a handoff."""
    role = Role.DECODE if fetches else Role.PREFILL
    handoff = KVHandoffConfig(role=role, transports=("tcp",), host="", secret=b"")
    drafter = DrafterConfig(method="draft_model", model=str(models["llama"]))
    runner = load(models["qwen3"], backend="reference", drafter=drafter, kv_handoff=handoff)
    oracle, drafts = make_model("llama"), []
    driver = Driver(runner)
    driver.start(0, PROMPT * 3, GREEDY, num_computed=23)
    for _ in range(4):
        result = driver.step({0: driver.share(0, 9)}, wanted={0: 2})
        drafts.append(result.proposals[0] == continuation(oracle, driver.tokens[0], 2))
    assert all(drafts) == fetches


@cache
def _target() -> PreTrainedModel:
    return make_model("qwen3")


@cache
def _shared() -> tuple[Runner, PreTrainedModel]:
    directory = Path(tempfile.mkdtemp())
    save_model("qwen3", directory / "target")
    save_model("llama", directory / "draft")
    drafter = DrafterConfig(method="draft_model", model=str(directory / "draft"))
    try:
        return load(directory / "target", backend="reference", drafter=drafter), make_model("llama")
    finally:
        shutil.rmtree(directory)


def _config(model: Path, draft: Path, **options: Any) -> WorkerConfig:
    drafter = DrafterConfig(method="draft_model", model=str(draft))
    sizes = {"num_blocks": 32, "block_size": 16, "max_num_seqs": 4, "num_threads": 1}
    return WorkerConfig(model=str(model), drafter=drafter, **sizes | options)


def test_a_drafter_counts_in_the_plan_of_memory(models: dict[str, Path], backend: str) -> None:
    drafting = _config(models["qwen3"], models["llama"], backend=backend)
    plan, plain = (
        plan_worker(config)
        for config in (drafting, msgspec.structs.replace(drafting, drafter=None))
    )
    own = plan_worker(msgspec.structs.replace(drafting, model=str(models["llama"]), drafter=None))
    assert plan.weight_bytes == plain.weight_bytes + own.weight_bytes
    assert plan.bytes_per_block == plain.bytes_per_block + own.bytes_per_block
    assert plan.step_bytes == plain.step_bytes + own.step_bytes
    loaded = load_runner(plan, Tracer("worker"))
    assert loaded.kv.block_bytes == plan.bytes_per_block
    assert loaded.ready.planned_memory_bytes == plan.total_bytes(
        plan.weight_bytes, plan.step_bytes, 32
    )


def _with_config(directory: Path, model: Path, **changes: Any) -> Path:
    """A directory with the configuration of a model, changed, and no weights."""
    directory.mkdir()
    values = json.loads((model / "config.json").read_text()) | changes
    (directory / "config.json").write_text(json.dumps(values))
    return directory


def _with_tokenizer(directory: Path, model: Path, tokens: list[str]) -> Path:
    _with_config(directory, model)
    vocabulary = {token: place for place, token in enumerate(tokens)}
    told = {"model": {"vocab": vocabulary}, "added_tokens": [{"id": 3, "content": "<eos>"}]}
    (directory / "tokenizer.json").write_text(json.dumps(told))
    return directory


def test_drafters_that_do_not_fit_are_refused_before_loading(
    models: dict[str, Path], tmp_path: Path
) -> None:
    qwen, llama = models["qwen3"], models["llama"]
    larger = _with_config(tmp_path / "larger", llama, vocab_size=400)
    with pytest.raises(ConfigError, match=r"another vocabulary than .*: 400 tokens, not 320"):
        plan_worker(_config(qwen, larger))
    one = _with_tokenizer(tmp_path / "one", qwen, ["a", "b", "c"])
    same = _with_tokenizer(tmp_path / "same", larger, ["a", "b", "c"])
    other = _with_tokenizer(tmp_path / "other", llama, ["a", "x", "c"])
    assert plan_worker(_config(one, same)).drafter is not None
    with pytest.raises(ConfigError, match=r"another vocabulary than .*: token 1 is 'x', not 'b'"):
        plan_worker(_config(one, other))
    odd = _with_config(tmp_path / "odd", llama, num_attention_heads=1, num_key_value_heads=1)
    parallel = ParallelConfig(tensor_parallel_size=2)
    with pytest.raises(ConfigError, match=r"--tensor-parallel-size 2 .* heads of the draft model"):
        plan_worker(_config(qwen, odd, parallel=parallel))
    with pytest.raises(ConfigError, match="draft_model needs a model with a layer that sees all"):
        plan_worker(_config(models["mistral"], llama))
    with pytest.raises(ConfigError, match="there is no model directory nowhere"):
        plan_worker(_config(qwen, Path("nowhere")))
