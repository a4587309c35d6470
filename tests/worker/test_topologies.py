# SPDX-License-Identifier: Apache-2.0
"""Models that ranks share: what they answer, and how much memory each of them takes."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, cast

import pytest
from distributions import differences, log_probabilities
from gguf import GGMLQuantizationType as Kind
from gguf_models import save_gguf
from in_process import Oracle, engine, save_oracle
from quantized_models import (
    Format,
    awq_format,
    fp8_format,
    gptq_format,
    int8_format,
    packed_format,
    save_quantized,
)
from thread_group import ThreadGroup
from tiny_models import FAMILIES, WITH_EXPERTS, make_model
from torch import Tensor

from pagoda.checkpoints.config_json import read_model_config
from pagoda.checkpoints.layer_spec import ExpertsSpec
from pagoda.errors import ConfigError
from pagoda.messages.frontend import GenerateRequest, Work
from pagoda.messages.sampling_params import SamplingParams
from pagoda.messages.worker_config import WorkerConfig
from pagoda.model.decoder import Decoder
from pagoda.parallel.collectives import HostGroup, RankGroups
from pagoda.parallel.config import ParallelConfig, RankPlace
from pagoda.telemetry.tracer import Tracer
from pagoda.worker.loading import load_runner, plan_worker

LENGTH = 24
TOPOLOGIES = [(2, 1), (4, 1), (1, 2), (1, 3), (2, 2)]


@pytest.fixture(scope="module", params=FAMILIES)
def oracle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    directory = tmp_path_factory.mktemp(request.param)
    heads = {"num_attention_heads": 12} if request.param == "qwen2" else {}
    # A vocabulary and inner channels that four ranks cannot share evenly in groups of 32.
    model = make_model(request.param, num_hidden_layers=3, vocab_size=330, **heads)
    rng = random.Random(7)
    prompts = [[rng.randrange(330) for _ in range(rng.randint(1, 60))] for _ in range(5)]
    return save_oracle(directory, model, prompts, LENGTH)


@pytest.mark.parametrize(("tp", "pp"), TOPOLOGIES)
def test_greedy(oracle: Oracle, backend: str, tp: int, pp: int) -> None:
    split = engine(oracle.directory, backend, tp, pp, max_num_batched_tokens=37)
    assert split.answer(oracle.requests) == oracle.expected


@pytest.mark.parametrize("oracle", WITH_EXPERTS, indirect=True)
@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (4, 1), (2, 2)])
def test_experts_shared_out_whole(oracle: Oracle, backend: str, tp: int, pp: int) -> None:
    config = read_model_config(oracle.directory)
    split = engine(oracle.directory, backend, tp, pp, experts=True, max_num_batched_tokens=37)
    assert split.answer(oracle.requests) == oracle.expected
    load = split.load()
    assert config.experts is not None
    num_tokens = sum(len(request.prompt_token_ids) + LENGTH - 1 for request in oracle.requests)
    sparse = [isinstance(layer.mlp, ExpertsSpec) for layer in config.layers]
    passes = sum(sparse) * config.experts.routing.experts_per_token
    least = num_tokens * passes
    if sparse[-1]:
        # To the experts of the last layer go those tokens only that the next ones are sampled from.
        unwanted = num_tokens - LENGTH * len(oracle.requests)
        least -= unwanted * config.experts.routing.experts_per_token
    # The engine plans one step of a request ahead before it sees that the answer is complete.
    assert least <= sum(load.expert_tokens) <= least + 10 * passes
    assert len(load.expert_tokens) == config.experts.routing.num_experts
    assert len(load.expert_rank_tokens) == tp
    assert sum(load.expert_rank_tokens) == sum(load.expert_tokens)


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_quantized_experts(backend: str, quantization: str, tmp_path: Path) -> None:
    """Whole experts keep their codes."""
    sizes = {"hidden_size": 128, "num_attention_heads": 8, "initializer_range": 0.06}
    make_model("qwen3-moe", **sizes).save_pretrained(tmp_path)
    options = {"dtype": "float32", "quantization": quantization}
    one = engine(tmp_path, backend, **options)
    split = engine(tmp_path, backend, 2, experts=True, **options)
    assert differences(log_probabilities(one), log_probabilities(split)).mean() < 0.04


@pytest.mark.parametrize("temperature", [0, 0.7])
def test_hardly_a_token_for_each_rank(backend: str, temperature: float, tmp_path: Path) -> None:
    sizes = {"vocab_size": 33, "intermediate_size": 40, "num_attention_heads": 16}
    make_model("mistral", **sizes).save_pretrained(tmp_path)
    sampling = SamplingParams(temperature=temperature, seed=1, max_tokens=16)
    requests = [
        GenerateRequest(request_id=str(i), prompt_token_ids=list(range(i, 33)), work=Work(sampling))
        for i in range(3)
    ]
    one, split = (engine(tmp_path, backend, tp) for tp in (1, 16))
    assert split.answer(requests) == one.answer(requests)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 8}
    make_model("llama", num_hidden_layers=3, **sizes).save_pretrained(path)
    return path


def _requests(**sampling: object) -> list[GenerateRequest]:
    rng = random.Random(3)
    return [
        GenerateRequest(
            request_id=str(i),
            prompt_token_ids=[rng.randrange(320) for _ in range(20 + 9 * i)],
            work=Work(SamplingParams(**{"max_tokens": 16, "seed": i, **sampling})),  # type: ignore[arg-type]
        )
        for i in range(4)
    ]


@pytest.mark.parametrize(("tp", "pp"), TOPOLOGIES)
def test_preempted(directory: Path, backend: str, tp: int, pp: int) -> None:
    requests = _requests(temperature=0)
    one = engine(directory, backend, dtype="float32")
    scarce = {"block_size": 4, "num_blocks": 28, "enable_prefix_caching": True}
    split = engine(directory, backend, tp, pp, dtype="float32", **scarce)
    assert split.answer(requests) == one.answer(requests)
    assert split.load().num_preemptions > 0


@pytest.mark.parametrize("pp", [2, 3])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_stages_change_no_bit(directory: Path, backend: str, dtype: str, pp: int) -> None:
    """Stages round nothing that crosses them: also drawn tokens are the same, in any number format."""
    requests = _requests(temperature=1.0, top_p=0.9, logit_bias={5: 2.0})
    one, split = (engine(directory, backend, 1, n, dtype=dtype) for n in (1, pp))
    assert split.answer(requests) == one.answer(requests)


def test_sampled_with_every_rule(directory: Path, backend: str) -> None:
    """The first rank samples for all, whatever is asked for."""
    requests = _requests(
        temperature=0.8,
        top_k=9,
        min_p=0.01,
        repetition_penalty=1.2,
        presence_penalty=0.5,
        logprobs=3,
    )
    one, split = (engine(directory, backend, tp, dtype="float32") for tp in (1, 2))
    assert split.answer(requests) == one.answer(requests)


FORMATS: dict[str, Format] = {
    "awq": awq_format(128),
    "gptq": gptq_format(4, 128),
    "gptq-act-order": gptq_format(4, 128, act_order=True),
    "packed-int4": packed_format(4, 128),
    "int8": int8_format(),
    "fp8": fp8_format((96, 80)),
    "fp8-kept": fp8_format((96, 64)),
}
TYPES = {"gguf-q4-0": Kind.Q4_0, "gguf-q8-0": Kind.Q8_0}
ON_LOAD = {"int8-on-load": "int8", "int4-on-load": "int4"}
DENSE = {
    "hidden_size": 256,
    "intermediate_size": 416,
    "num_attention_heads": 8,
    "initializer_range": 0.06,
}
"""Inner channels are thirteen groups of 32, which ranks cannot share evenly."""

Save = Callable[[str], Path]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Save:
    """Makes each model but once."""
    made: dict[str, Path] = {}

    def save(name: str) -> Path:
        if name in made:
            return made[name]
        path = tmp_path_factory.mktemp(name)
        made[name] = path
        if name in FORMATS:
            save_quantized(path, FORMATS[name])
        elif name in TYPES:
            made[name] = path / "model.gguf"
            save_gguf(make_model("qwen2", **DENSE), made[name], lambda _: TYPES[name])
        else:
            make_model("llama", **DENSE).save_pretrained(path)
        return made[name]

    return save


@pytest.mark.parametrize("name", [*FORMATS, *TYPES, *ON_LOAD])
def test_ranks_answer_as_one_alone(name: str, backend: str, saved: Save) -> None:
    """The codes are the same; what differs is how activations are rounded, and the order of sums."""
    options = {"dtype": "float32", "quantization": ON_LOAD.get(name, "none")}
    one, *others = (
        log_probabilities(engine(saved(name), backend, tp, pp, **options))
        for tp, pp in ((1, 1), (2, 1), (4, 1), (2, 2))
    )
    for other in others:
        apart = differences(one, other)
        assert apart.mean() < 0.04
        assert apart.max() < 0.2


def _tensors(held: object) -> Iterator[Tensor]:
    if isinstance(held, Tensor):
        yield held
    elif isinstance(held, list | tuple):
        for item in held:
            yield from _tensors(item)
    elif is_dataclass(held):
        for field in fields(held):
            yield from _tensors(getattr(held, field.name))


def _held_bytes(decoder: Decoder[Any, Any]) -> int:
    parts = [vars(decoder)[name] for name in ("_layers", "_norm", "_embedding", "head")]
    storages = [tensor.untyped_storage() for tensor in _tensors(parts)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("name", ["dense", *FORMATS, *TYPES, *ON_LOAD])
def test_memory_is_planned_as_it_is_held(name: str, tp: int, saved: Save) -> None:
    for rank in range(tp):
        config = WorkerConfig(
            model=str(saved(name)),
            backend="reference",
            num_blocks=32,
            num_threads=1,
            parallel=ParallelConfig(tensor_parallel_size=tp),
            place=RankPlace(tp=rank),
            dtype="float32",
            quantization=ON_LOAD.get(name, "none"),
        )
        plan = plan_worker(config)
        group = cast(HostGroup, ThreadGroup(tp).member(rank))
        runner, *_ = load_runner(plan, Tracer("worker"), RankGroups(group, group))
        assert isinstance(runner.model, Decoder)
        assert plan.shard.weight_bytes(plan.quantization, 4) == _held_bytes(runner.model)


def test_groups_that_ranks_cannot_share_are_refused_before_loading(tmp_path: Path) -> None:
    make_model("llama", **DENSE | {"intermediate_size": 512}).save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    config = WorkerConfig(
        model=str(tmp_path),
        num_threads=1,
        quantization="int4",
        quantization_group_size=128,
        parallel=ParallelConfig(tensor_parallel_size=4),
    )
    with pytest.raises(ConfigError, match=r"4 cuts the 256 inputs .* is 2, or take a smaller"):
        plan_worker(config)
