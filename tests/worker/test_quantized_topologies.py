"""Quantized models that tensor-parallel ranks share: what they answer, and how much memory each of them takes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest
from distributions import differences, log_probabilities
from gguf import GGMLQuantizationType as Kind
from gguf_models import save_gguf
from in_process import engine
from quantized_models import (
    Format,
    awq_format,
    gptq_format,
    int8_format,
    packed_format,
    save_quantized,
)
from thread_group import ThreadGroup
from tiny_models import make_model
from torch import Tensor

from pagoda.errors import ConfigError
from pagoda.messages.worker_config import WorkerConfig
from pagoda.model.decoder import Decoder
from pagoda.parallel.config import ParallelConfig, RankPlace
from pagoda.telemetry.tracer import Tracer
from pagoda.worker.loading import load_runner, plan_worker

FORMATS: dict[str, Format] = {
    "awq": awq_format(128),
    "gptq": gptq_format(4, 128),
    "gptq-act-order": gptq_format(4, 128, act_order=True),
    "packed-int4": packed_format(4, 128),
    "int8": int8_format(),
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
    """The codes are the same; what differs is how activations are rounded, and the order of sums.

    int8 maps that are split by inputs have scales of their own on each rank.
    """
    options = {"dtype": "float32", "quantization": ON_LOAD.get(name, "none")}
    one, *others = (
        log_probabilities(engine(saved(name), backend, tp, pp, **options))
        for tp, pp in ((1, 1), (2, 1), (4, 1), (2, 2))
    )
    for other in others:
        apart = differences(one, other)
        assert apart.mean() < (0.01 if name == "int4-on-load" else 0.04)
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
        runner, *_ = load_runner(plan, Tracer("worker"), group=ThreadGroup(tp).member(rank))
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
