# SPDX-License-Identifier: Apache-2.0
"""The plan of a drafter's memory, and what a drafter must have in common with its model."""

from __future__ import annotations

from dataclasses import replace

import msgspec

from pagoda.checkpoints.model_spec import ModelSpec
from pagoda.checkpoints.resolve import load_model_config
from pagoda.checkpoints.same_vocabulary import vocabulary_problem
from pagoda.checkpoints.topology import check_shares
from pagoda.errors import ConfigError
from pagoda.messages.kv_groups import full_group
from pagoda.messages.speculation import DrafterConfig
from pagoda.model.sharding import Shard, check_quantized_parts
from pagoda.parallel.config import ParallelConfig, RankPlace
from pagoda.worker.backends import check_model
from pagoda.worker.memory_plan import WorkerMemoryPlan
from pagoda.worker.number_formats import choose_dtype, choose_kv_dtype, choose_quantization


def plan_drafter(target: WorkerMemoryPlan) -> WorkerMemoryPlan | None:
    """The plan of the drafter that is loaded beside a model, on each rank of its last stage; None without one.

    Ranks share the drafter as they share the model. Raises ConfigError: it does not fit the model."""
    config, drafter = target.config, target.config.drafter
    if drafter is None:
        return None
    _check_target(target, drafter)
    shape = load_model_config(drafter.model, config.load_format)
    _check_draft_model(shape, target, drafter)
    if not target.shard.is_last:
        return None
    place = RankPlace(tp=config.place.tp)
    parallel = ParallelConfig(tensor_parallel_size=config.parallel.tensor_parallel_size)
    own = msgspec.structs.replace(
        config,
        model=drafter.model,
        drafter=None,
        adapters=(),
        loads_adapters=False,
        calibration_windows=[],
        kv_host_bytes=0,
        parallel=parallel,
        place=place,
    )
    capabilities = target.backend.capabilities
    check_model(shape, target.backend)
    check_shares("the draft model", shape, parallel)
    dtype_name = choose_dtype(config.dtype, shape.dtype, capabilities)
    quantization = choose_quantization(own, shape, capabilities)
    check_quantized_parts(shape, quantization, parallel)
    max_model_len = min(target.max_model_len, shape.max_position_embeddings)
    shape = replace(shape, max_position_embeddings=max_model_len)
    tp_rank, tp_size = place.tp, parallel.tensor_parallel_size
    return replace(
        target,
        config=own,
        shard=Shard(shape, range(shape.num_layers), tp_rank, tp_size),
        quantization=quantization,
        dtype_name=dtype_name,
        kv_dtype_name=choose_kv_dtype(config.kv_cache_dtype, dtype_name, capabilities),
        kv_groups=(full_group(shape.num_layers, target.block_size),),
        max_model_len=max_model_len,
        adapters=(),
    )


def _check_target(target: WorkerMemoryPlan, drafter: DrafterConfig) -> None:
    """Raises ConfigError: no drafter goes with the model, or with its backend."""
    capabilities, name = target.backend.capabilities, target.backend.arithmetic
    method = f"--speculative-config: {drafter.method}"
    if capabilities.whole_models or not capabilities.mixed_steps:
        raise ConfigError(
            f"{method} needs a backend that samples several tokens of a request in a step, which {name} does not; "
            "choose ngram or another --backend."
        )
    if not target.shard.config.gives_logits:
        raise ConfigError(
            f"{method} is for models that give tokens, which {target.config.model} does not."
        )
    if not target.kv_groups[0].keeps_all:
        raise ConfigError(
            f"{method} needs a model with a layer that sees all tokens, whose blocks the drafter shares; all "
            f"layers of {target.config.model} have windows."
        )


def _check_draft_model(shape: ModelSpec, target: WorkerMemoryPlan, drafter: DrafterConfig) -> None:
    config, what = target.config, f"--speculative-config: the draft model {drafter.model}"
    if not shape.gives_logits:
        raise ConfigError(f"{what} gives no tokens; name a model that does.")
    if any(layer.state is not None for layer in shape.layers):
        raise ConfigError(
            f"{what} has layers that keep states, which cannot go back behind drafts; name one with "
            "attention alone."
        )
    sizes = target.shard.config.vocab_size, shape.vocab_size
    models = config.model, drafter.model
    problem = vocabulary_problem(models, sizes, config.load_format)
    if problem:
        raise ConfigError(f"{what} has another vocabulary than {config.model}: {problem}.")
