"""Whether a model can be split over so many devices, seen from its shape alone."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

from pagoda.errors import ConfigError
from pagoda.models.gguf import is_gguf, read_gguf
from pagoda.models.gguf_config import config_values
from pagoda.models.presets import PRESETS
from pagoda.parallel.config import ParallelConfig

_EXPERT_COUNTS = ("num_local_experts", "num_experts")


def check_topology(model: str, load_format: str, parallel: ParallelConfig) -> None:
    """Checks before anything starts that tensor-parallel ranks and stages can share out a model.

    `model` and `load_format` are those of a `WorkerConfig`. What is wrong with the model itself is left to the
    worker to say.

    Raises:
        ConfigError: they cannot; the error names the nearest sizes that can.
    """
    if parallel.replica_size == 1:
        return
    shape = _shape(model, load_format)
    heads, layers = _count(shape.get("num_attention_heads")), _count(shape.get("num_hidden_layers"))
    if heads is not None:
        kv_heads = _count(shape.get("num_key_value_heads")) or heads
        _check_heads(model, parallel.tensor_parallel_size, heads, kv_heads)
    if parallel.expert_parallel:
        _check_experts(model, parallel.tensor_parallel_size, shape)
    if layers is not None and parallel.pipeline_parallel_size > layers:
        raise ConfigError(
            f"--pipeline-parallel-size {parallel.pipeline_parallel_size} is more than the {layers} layers of "
            f"{model}; a stage has at least one, so it may be at most {layers}."
        )


def _check_heads(model: str, size: int, heads: int, kv_heads: int) -> None:
    def fits(size: int) -> bool:
        return heads % size == 0 and (kv_heads % size == 0 or size % kv_heads == 0)

    if heads % size:
        raise ConfigError(
            f"--tensor-parallel-size {size} does not divide the {heads} attention heads of {model}; "
            f"the nearest that does is {_nearest(size, heads, fits)}."
        )
    if not fits(size):
        raise ConfigError(
            f"--tensor-parallel-size {size} neither divides the {kv_heads} key-value heads of {model} nor is a "
            f"multiple of them; the nearest that is one or the other is {_nearest(size, heads, fits)}."
        )


def _check_experts(model: str, size: int, shape: Mapping[str, object]) -> None:
    if not shape:
        return
    experts = next(
        (count for name in _EXPERT_COUNTS if (count := _count(shape.get(name))) is not None), None
    )
    if experts is None:
        raise ConfigError(
            f"--enable-expert-parallel needs a model with experts, which {model} does not have; leave it out."
        )
    if size > experts:
        raise ConfigError(
            f"--tensor-parallel-size {size} is more than the {experts} experts of {model}; with "
            f"--enable-expert-parallel it may be at most {experts}."
        )


def _nearest(size: int, most: int, fits: Callable[[int], bool]) -> str:
    """The next lower and the next higher size that fits, such as `2 or 4`; 1 always does."""
    lower = max(other for other in range(1, min(size, most + 1)) if fits(other))
    higher = next((other for other in range(size + 1, most + 1) if fits(other)), None)
    return str(lower) if higher is None else f"{lower} or {higher}"


def _shape(model: str, load_format: str) -> Mapping[str, object]:
    """What a config.json says or would say; empty if there is none that can be read."""
    if load_format == "dummy" and model in PRESETS:
        return PRESETS[model]
    path = Path(model)
    if is_gguf(path):
        return config_values(read_gguf(path))
    try:
        values = json.loads((path / "config.json").read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return values if isinstance(values, dict) else {}


def _count(value: object) -> int | None:
    return value if isinstance(value, int) and value > 0 else None
