"""Whether a model can be split over so many devices, seen from its shape alone."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from pagoda.checkpoints.gguf.config import config_values
from pagoda.checkpoints.gguf.reader import is_gguf, read_gguf
from pagoda.checkpoints.presets import PRESETS
from pagoda.errors import ConfigError
from pagoda.parallel.config import ParallelConfig, can_share_heads

VOCABULARY = "tokens of the vocabulary"
INNER = "inner channels (intermediate_size)"
EXPERT_INNER = "inner channels of an expert"
_EXPERT_COUNTS = ("num_local_experts", "num_experts")


class ModelSizes(msgspec.Struct, frozen=True, kw_only=True):
    """What ranks share out; None is not known."""

    heads: int | None = None
    kv_heads: int | None = None
    layers: int | None = None
    channels: tuple[tuple[int, str], ...] = ()
    """How many there are of what each rank needs one of at least, such as `(512, "tokens of the vocabulary")`."""
    experts: int | None = None
    """Zero where all layers are dense."""

    def can_share(self, tp_size: int, *, expert_parallel: bool) -> bool:
        """Whether so many tensor-parallel ranks can."""
        heads_fit = self.heads is None or can_share_heads(
            self.heads, self.kv_heads or self.heads, tp_size
        )
        experts_fit = not expert_parallel or self.experts is None or tp_size <= self.experts
        return heads_fit and experts_fit and all(tp_size <= count for count, _ in self.channels)


def check_topology(model: str, load_format: str, parallel: ParallelConfig) -> None:
    """Checks before anything starts that tensor-parallel ranks and stages can share out a model.

    `model` and `load_format` are those of a `WorkerConfig`. What is wrong with the model itself is left to the
    worker to say.

    Raises:
        ConfigError: they cannot; the error names the nearest sizes that can.
    """
    if parallel.replica_size > 1:
        sizes = _sizes(_shape(model, load_format), expert_parallel=parallel.expert_parallel)
        check_sizes(model, sizes, parallel)


def check_sizes(model: str, sizes: ModelSizes, parallel: ParallelConfig) -> None:
    """Checks the same of sizes that are known; `model` names it in errors.

    Raises:
        ConfigError: they cannot be shared out so.
    """
    tp_size, num_stages = parallel.tensor_parallel_size, parallel.pipeline_parallel_size
    nearest = nearest_sizes(
        tp_size,
        sizes.heads or tp_size,
        lambda size: sizes.can_share(size, expert_parallel=parallel.expert_parallel),
    )
    if sizes.heads is not None:
        _check_heads(model, tp_size, sizes.heads, sizes.kv_heads or sizes.heads, nearest)
    for count, what in sizes.channels:
        if tp_size > count:
            raise ConfigError(
                f"--tensor-parallel-size {tp_size} is more than the {count} {what} of {model}, of which every "
                f"rank needs one at least; the nearest that is not is {nearest}."
            )
    if parallel.expert_parallel and sizes.experts is not None:
        _check_experts(model, tp_size, sizes.experts)
    if sizes.layers is not None and num_stages > sizes.layers:
        raise ConfigError(
            f"--pipeline-parallel-size {num_stages} is more than the {sizes.layers} layers of {model}; "
            f"a stage has at least one, so it may be at most {sizes.layers}."
        )


def nearest_sizes(size: int, most: int, fits: Callable[[int], bool]) -> str:
    """The next lower and the next higher size that fits, such as `2 or 4`; 1 always does."""
    lower = next((other for other in range(min(size - 1, most), 1, -1) if fits(other)), 1)
    higher = next((other for other in range(size + 1, most + 1) if fits(other)), None)
    return str(lower) if higher is None else f"{lower} or {higher}"


def _check_heads(model: str, size: int, heads: int, kv_heads: int, nearest: str) -> None:
    if heads % size:
        raise ConfigError(
            f"--tensor-parallel-size {size} does not divide the {heads} attention heads of {model}; "
            f"the nearest that does is {nearest}."
        )
    if not can_share_heads(heads, kv_heads, size):
        raise ConfigError(
            f"--tensor-parallel-size {size} neither divides the {kv_heads} key-value heads of {model} nor is a "
            f"multiple of them; the nearest that is one or the other is {nearest}."
        )


def _check_experts(model: str, size: int, experts: int) -> None:
    if experts == 0:
        raise ConfigError(
            f"--enable-expert-parallel needs a model with experts, which {model} does not have; leave it out."
        )
    if size > experts:
        raise ConfigError(
            f"--tensor-parallel-size {size} is more than the {experts} experts of {model}; with "
            f"--enable-expert-parallel it may be at most {experts}."
        )


def _sizes(shape: Mapping[str, object], *, expert_parallel: bool) -> ModelSizes:
    """Of a config.json as far as it can be understood."""
    if not shape:
        return ModelSizes()
    experts = next(
        (count for name in _EXPERT_COUNTS if (count := _count(shape.get(name))) is not None), 0
    )
    counts = [(_count(shape.get("vocab_size")), VOCABULARY)]
    if not experts:
        counts.append((_count(shape.get("intermediate_size")), INNER))
    elif not expert_parallel:
        inner = "moe_intermediate_size" if "moe_intermediate_size" in shape else "intermediate_size"
        counts.append((_count(shape.get(inner)), EXPERT_INNER))
    return ModelSizes(
        heads=_count(shape.get("num_attention_heads")),
        kv_heads=_count(shape.get("num_key_value_heads")),
        layers=_count(shape.get("num_hidden_layers")),
        channels=tuple((count, what) for count, what in counts if count is not None),
        experts=experts,
    )


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
