# SPDX-License-Identifier: Apache-2.0
"""Numbers of devices over which a model can be split, by its shape alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pagoda.checkpoints.layer_runs import layer_runs
from pagoda.checkpoints.layer_spec import ExpertsSpec, MlpSpec, StateSpec
from pagoda.checkpoints.model_spec import ModelSpec
from pagoda.checkpoints.resolve import load_model_config
from pagoda.errors import ConfigError
from pagoda.parallel.config import ParallelConfig, can_share_heads


def check_topology(model: str, load_format: str, parallel: ParallelConfig) -> None:
    """Checks before anything starts that tensor-parallel ranks and stages can share out a model.

    `model` and `load_format` are those of a `WorkerConfig`. What is wrong with the model itself is left to the
    worker to say.
    Raises ConfigError: the ranks cannot; the error names the nearest sizes that can."""
    if parallel.replica_size == 1:
        return
    try:
        config = load_model_config(model, load_format)
    except ConfigError:
        return
    check_shares(model, config, parallel)


def check_shares(model: str, config: ModelSpec, parallel: ParallelConfig) -> None:
    """Checks the same of a known shape; `model` names it in errors."""
    tp_size, num_stages = parallel.tensor_parallel_size, parallel.pipeline_parallel_size
    channels = _channels(config, expert_parallel=parallel.expert_parallel)
    nearest = nearest_sizes(
        tp_size,
        config.num_heads,
        lambda size: _fits(config, channels, size, expert_parallel=parallel.expert_parallel),
    )
    heads, kv_heads = config.num_heads, config.num_kv_heads
    if heads % tp_size and not parallel.dp_attention:
        raise ConfigError(
            f"--tensor-parallel-size {tp_size} does not divide the {heads} attention heads of {model}; "
            f"the nearest that does is {nearest}."
        )
    if not (parallel.dp_attention or can_share_heads(heads, kv_heads, tp_size)):
        raise ConfigError(
            f"--tensor-parallel-size {tp_size} neither divides the {kv_heads} key-value heads of {model} nor is a "
            f"multiple of them; the nearest possible size is {nearest}."
        )
    for count, what in channels:
        if tp_size > count:
            raise ConfigError(
                f"--tensor-parallel-size {tp_size} is more than the {count} {what} of {model}, and every "
                f"rank needs at least one; the nearest possible size is {nearest}."
            )
    for kind in () if parallel.dp_attention else _state_kinds(config):
        if not kind.can_share(tp_size):
            raise ConfigError(
                f"--tensor-parallel-size {tp_size} cannot share out {kind.name} of {model}; the nearest that can "
                f"is {nearest}."
            )
    if parallel.expert_parallel and config.experts is None:
        raise ConfigError(
            f"--enable-expert-parallel needs a model with experts, which {model} does not have; leave it out."
        )
    if parallel.expert_parallel and config.experts and tp_size > config.experts.num_stored:
        experts = config.experts.num_stored
        raise ConfigError(
            f"--tensor-parallel-size {tp_size} is more than the {experts} experts of {model}; with "
            f"--enable-expert-parallel it may be at most {experts}."
        )
    if num_stages > 1 and config.is_whole:
        raise ConfigError(
            f"--pipeline-parallel-size {num_stages} does not go with {model}, whose layers are given "
            "embeddings, or keys and values, of the first ones; leave it out."
        )
    most = len(layer_runs(config))
    if num_stages > most:
        raise ConfigError(
            f"--pipeline-parallel-size {num_stages} is more than the {most} layers of {model}; "
            f"every stage needs at least one, so it may be at most {most}."
        )


def can_share(config: ModelSpec, tp_size: int, *, expert_parallel: bool) -> bool:
    """Tells if `tp_size` tensor-parallel ranks can each have a part of every layer."""
    channels = _channels(config, expert_parallel=expert_parallel)
    return _fits(config, channels, tp_size, expert_parallel=expert_parallel)


def _fits(
    config: ModelSpec, channels: Sequence[tuple[int, str]], tp_size: int, *, expert_parallel: bool
) -> bool:
    """The same, of the `_channels` of the model."""
    return (
        can_share_heads(config.num_heads, config.num_kv_heads, tp_size)
        and all(tp_size <= count for count, _ in channels)
        and all(kind.can_share(tp_size) for kind in _state_kinds(config))
        and not (expert_parallel and config.experts and tp_size > config.experts.num_stored)
    )


def _channels(config: ModelSpec, *, expert_parallel: bool) -> list[tuple[int, str]]:
    """Counts of what each rank needs at least one of, such as `(512, "tokens of the vocabulary")`."""
    channels = [(config.vocab_size, "tokens of the vocabulary")]
    mlps = {layer.mlp for layer in config.layers}
    dense = [mlp.intermediate_size for mlp in mlps if isinstance(mlp, MlpSpec)]
    dense += [mlp.shared_size for mlp in mlps if isinstance(mlp, ExpertsSpec) and mlp.shared_size]
    if dense:
        channels.append((min(dense), "inner channels (intermediate_size)"))
    if config.experts is not None and not expert_parallel:
        channels.append((config.experts.intermediate_size, "inner channels of an expert"))
    return channels


def _state_kinds(config: ModelSpec) -> set[StateSpec]:
    return {layer.state for layer in config.layers if layer.state is not None}


def nearest_sizes(size: int, most: int, fits: Callable[[int], bool]) -> str:
    """The next lower and the next higher size that fits, such as `2 or 4`; 1 always does."""
    lower = next((other for other in range(min(size - 1, most), 1, -1) if fits(other)), 1)
    higher = next((other for other in range(size + 1, most + 1) if fits(other)), None)
    return str(lower) if higher is None else f"{lower} or {higher}"
