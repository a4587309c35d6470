# SPDX-License-Identifier: Apache-2.0
"""Ranks that attend to requests of their own (`--enable-dp-attention`): what they answer, and what they hold."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import family_models
import msgspec
import pytest
import tiny_models
from in_process import CONTEXT, InProcessEngine, engine

from benchmarks.ranks import CountedRank
from pagoda.checkpoints.config_json import read_model_config
from pagoda.errors import ConfigError
from pagoda.messages.frontend import GenerateRequest, Work
from pagoda.messages.sampling_params import SamplingParams
from pagoda.messages.speculation import SpeculativeConfig
from pagoda.parallel.collectives import Alone
from pagoda.parallel.config import ParallelConfig
from pagoda.plugins.backend_check import threads

MODELS = {
    "llama": tiny_models,
    "mistral": tiny_models,
    "qwen3-moe": tiny_models,
    "deepseek-v2": family_models,
    "deepseek-v3": family_models,
    "granite4-nope": family_models,
}


def split(
    directory: Path, backend: str, tp: int, pp: int = 1, *, experts: bool = False, **options: Any
) -> InProcessEngine:
    parallel = ParallelConfig(
        tensor_parallel_size=tp,
        pipeline_parallel_size=pp,
        expert_parallel=experts,
        dp_attention=True,
    )
    return InProcessEngine(
        directory,
        backend=backend,
        max_model_len=CONTEXT,
        parallel=parallel,
        dtype="float32",
        **options,
    )


def requests(count: int = 7, **sampling: Any) -> list[GenerateRequest]:
    rng = random.Random(7)
    return [
        GenerateRequest(
            request_id=str(i),
            prompt_token_ids=[rng.randrange(320) for _ in range(rng.randint(1, 60))],
            work=Work(
                SamplingParams(**{"max_tokens": 16, "temperature": 0, "seed": i, **sampling})
            ),
        )
        for i in range(count)
    ]


@pytest.fixture(scope="module", params=MODELS)
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp(request.param)
    MODELS[request.param].make_model(request.param).save_pretrained(path)
    return path


@pytest.mark.parametrize(
    ("tp", "pp", "experts"),
    [(2, 1, False), (4, 1, False), (2, 1, True), (4, 1, True), (2, 2, True)],
)
def test_greedy(directory: Path, backend: str, tp: int, pp: int, *, experts: bool) -> None:
    if experts and read_model_config(directory).experts is None:
        pytest.skip("the model has no experts")
    one = engine(directory, backend, dtype="float32", max_num_batched_tokens=37)
    shared = split(directory, backend, tp, pp, experts=experts, max_num_batched_tokens=37)
    assert shared.answer(requests()) == one.answer(requests())
    found, wanted = shared.load().expert_tokens, one.load().expert_tokens
    assert sum(found) == pytest.approx(sum(wanted), rel=0.1), "each token is counted on one rank"


def test_preempted_and_cached(directory: Path, backend: str) -> None:
    one = engine(directory, backend, dtype="float32")
    scarce = {"block_size": 4, "num_blocks": 26, "enable_prefix_caching": True}
    shared = split(directory, backend, 2, **scarce)
    asked = [
        msgspec.structs.replace(request, prompt_token_ids=[*range(20), number])
        for number, request in enumerate(requests(6, max_tokens=34))
    ]
    expected = one.answer(asked)
    assert shared.answer(asked) == expected
    again = [msgspec.structs.replace(it, request_id=f"again {it.request_id}") for it in asked]
    assert shared.answer(again) == expected
    load = shared.load()
    assert load.num_preemptions > 0
    assert load.num_prefix_hit_tokens > 0
    assert load.num_blocks == 2 * 26


def test_a_rank_without_tokens(directory: Path, backend: str) -> None:
    """One request leaves the other rank nothing of its own to do."""
    one, shared = engine(directory, backend, dtype="float32"), split(directory, backend, 2)
    assert shared.answer(requests(1)) == one.answer(requests(1))


def test_sampled_with_log_probabilities_and_drafts(directory: Path, backend: str) -> None:
    """Rows of all ranks are sampled together, in the order of the step."""
    asked = requests(temperature=0.8, logprobs=2)
    one, shared = engine(directory, backend, dtype="float32"), split(directory, backend, 2)
    assert shared.answer(asked) == one.answer(asked)
    shared.draft_with(lambda request: [5, 6] if request.num_tokens % 3 else [])
    greedy = requests()
    assert shared.answer(greedy) == one.answer(greedy)


@pytest.mark.parametrize("model", ["lfm2", "qwen3-next"])
def test_states(model: str, backend: str, tmp_path: Path) -> None:
    """Each rank has the whole states of its own requests."""
    family_models.make_model(model).save_pretrained(tmp_path)
    one = engine(tmp_path, backend, dtype="float32", block_size=64)
    shared = split(tmp_path, backend, 2, block_size=64, max_num_batched_tokens=37)
    assert shared.answer(requests(4)) == one.answer(requests(4))


@pytest.mark.parametrize("model", ["deepseek-v2", "deepseek-v3", "mistral"])
@pytest.mark.parametrize("tp", [2, 4])
def test_kv_that_fits(model: str, tp: int, tmp_path: Path) -> None:
    """Of the same memory for KV on each device, latents or one KV head are held once, not on every rank."""
    MODELS[model].make_model(model).save_pretrained(tmp_path)
    options = {"kv_cache_memory_bytes": 2**20, "num_blocks": None}
    copied = engine(tmp_path, "reference", tp, **options).load().num_blocks
    held = split(tmp_path, "reference", tp, **options).load().num_blocks
    assert held >= 0.95 * tp * copied


class CountedGroup:
    """In place of the memory that ranks of a process share."""

    found: list[CountedRank]

    def __init__(self, size: int) -> None:
        self._size, self._threads = size, threads.ThreadGroup(size)
        type(self).found = []

    def member(self, rank: int) -> CountedRank | Alone:
        if self._size == 1:
            return Alone()
        member = CountedRank(self._threads, rank)
        self.found.append(member)
        return member

    def close(self) -> None:
        pass


@pytest.mark.parametrize("model", ["qwen3-moe", "deepseek-v3"])
def test_bytes_exchanged(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against summing the outputs of attention and experts over all ranks, of one layer more."""
    monkeypatch.setattr("thread_group.ThreadGroup", CountedGroup)
    totals: dict[tuple[str, int], list[float]] = {}
    for num_layers in (2, 3):
        path = tmp_path / str(num_layers)
        MODELS[model].make_model(model, num_hidden_layers=num_layers).save_pretrained(path)
        for tp in (2, 4):
            engines = {
                "summed": lambda path=path, tp=tp: engine(path, "reference", tp, dtype="float32"),
                "gathered": lambda path=path, tp=tp: split(path, "reference", tp),
                "dispatched": lambda path=path, tp=tp: split(path, "reference", tp, experts=True),
            }
            for how, opened in engines.items():
                opened().answer(requests(8, max_tokens=6))
                counted = sum(rank.num_bytes for rank in CountedGroup.found)
                totals.setdefault((how, tp), []).append(counted)
    layers = {which: many - few for which, (few, many) in totals.items()}
    ratios = {
        which: layers[which] / layers["summed", which[1]]
        for which in layers
        if which[0] != "summed"
    }
    assert all(ratio < 1 for ratio in ratios.values())
    assert ratios["dispatched", 4] < ratios["gathered", 4]


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"loads_adapters": True}, "does not go with adapters"),
        (
            {"speculation": SpeculativeConfig(method="mtp")},
            "which --enable-dp-attention does not share out",
        ),
    ],
)
def test_refused(options: dict[str, Any], error: str, tmp_path: Path) -> None:
    tiny_models.make_model("llama").save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=error):
        split(tmp_path, "reference", 2, **options)


def test_one_rank_is_refused() -> None:
    with pytest.raises(ConfigError, match="--tensor-parallel-size 2 or more"):
        ParallelConfig(dp_attention=True)
