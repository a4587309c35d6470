# SPDX-License-Identifier: Apache-2.0
"""The plan of a drafter's memory, and what a drafter must have in common with its model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec

from pagoda.checkpoints.contents import missing_tensor, tensor_names
from pagoda.checkpoints.draft_heads import head_of_next_token
from pagoda.checkpoints.eagle import read_eagle_config
from pagoda.checkpoints.gguf.reader import is_gguf, read_gguf
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


def with_drafter(target: WorkerMemoryPlan) -> WorkerMemoryPlan:
    """The plan with that of the drafter, which is loaded beside the model on each rank of its last stage.

    `auto` becomes the head that the model brings, or none where it cannot run, on all ranks alike. Ranks share the
    drafter as they share the model. Raises ConfigError: what is asked for by name does not fit the model."""
    drafter = target.config.drafter
    if drafter is None:
        return target
    if drafter.method != "auto":
        return replace(target, drafter=_planned(target, drafter))
    found: DrafterConfig | None = DrafterConfig(method="mtp")
    try:
        planned = _planned(target, DrafterConfig(method="mtp"))
    except ConfigError:
        found = planned = None
    config = msgspec.structs.replace(target.config, drafter=found)
    return replace(target, config=config, drafter=planned)


def _planned(target: WorkerMemoryPlan, drafter: DrafterConfig) -> WorkerMemoryPlan | None:
    """The drafter's plan; None on stages that lack it. Raises ConfigError: it does not fit the model."""
    config = target.config
    _check_target(target, drafter)
    if drafter.method == "mtp":
        shape, model, what = _next_token_head(target), config.model, "the head of the model"
    elif drafter.method == "eagle3":
        shape, model, what = _eagle_head(target, drafter), drafter.model, "the head"
    else:
        shape = load_model_config(drafter.model, config.load_format)
        model, what = drafter.model, "the draft model"
        _check_draft_model(shape, target, drafter)
    place = RankPlace(tp=config.place.tp)
    shares_experts = config.parallel.expert_parallel and drafter.method == "mtp"
    parallel = ParallelConfig(
        tensor_parallel_size=config.parallel.tensor_parallel_size,
        expert_parallel=shares_experts and shape.experts is not None,
    )
    own = msgspec.structs.replace(
        config,
        model=model,
        drafter=None,
        adapters=(),
        loads_adapters=False,
        calibration_windows=[],
        kv_host_bytes=0,
        kv_tiers={},
        parallel=parallel,
        place=place,
    )
    capabilities = target.backend.capabilities
    check_model(shape, target.backend)
    check_shares(what, shape, parallel)
    dtype_name = choose_dtype(config.dtype, shape.dtype, capabilities)
    quantization = choose_quantization(own, shape, capabilities)
    check_quantized_parts(shape, quantization, parallel)
    if not target.shard.is_last:
        return None
    max_model_len = target.max_model_len
    if shape.draft_head is None:
        max_model_len = min(max_model_len, shape.max_position_embeddings)
    shape = replace(shape, max_position_embeddings=max_model_len)
    tp_rank, tp_size = place.tp, parallel.tensor_parallel_size
    return replace(
        target,
        config=own,
        shard=Shard(shape, range(shape.num_layers), tp_rank, tp_size, parallel.expert_parallel),
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
    if target.config.parallel.dp_attention:
        raise ConfigError(
            f"{method} has KV of its own, which --enable-dp-attention does not share out; choose suffix or ngram, "
            "or leave it out."
        )
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


def _next_token_head(target: WorkerMemoryPlan) -> ModelSpec:
    """The head that comes with the model. Raises ConfigError: there is none, or files lack it."""
    config, what = (
        target.config,
        f"--speculative-config: mtp is for models that bring a head, and {target.config.model}",
    )
    shape = head_of_next_token(target.shard.config)
    if shape is None:
        raise ConfigError(f"{what} has none; leave it out, or choose suffix.")
    path = Path(config.model)
    if config.load_format != "dummy":
        names = read_gguf(path).tensors if is_gguf(path) else tensor_names(path)
        missing = missing_tensor(shape, names)
        if missing is not None:
            raise ConfigError(f"{what} lacks the tensor {missing} of its own; choose suffix.")
    return _with_tables(shape, target)


def _with_tables(shape: ModelSpec, target: WorkerMemoryPlan) -> ModelSpec:
    """A head that loads the embedding table by itself where its stage of the model has none to lend."""
    draft = shape.draft_head
    if draft is None or draft.has_embedding or target.shard.is_first:
        return shape
    return replace(shape, draft_head=replace(draft, has_embedding=True))


def _eagle_head(target: WorkerMemoryPlan, drafter: DrafterConfig) -> ModelSpec:
    """The EAGLE-3 head of a directory. Raises ConfigError: it is none, or that of another model."""
    what = f"--speculative-config: the head {drafter.model}"
    model, config = target.shard.config, target.config
    if config.parallel.pipeline_parallel_size > 1:
        raise ConfigError(
            f"{what} needs hidden states of layers that --pipeline-parallel-size "
            f"{config.parallel.pipeline_parallel_size} has on other ranks; choose mtp, draft_model or suffix."
        )
    shape, draft = read_eagle_config(Path(drafter.model), model, target.dtype_name)
    sizes = (
        ("elements of a hidden state", draft.model_hidden_size, model.hidden_size),
        ("tokens in the vocabulary", shape.vocab_size, model.vocab_size),
    )
    for of_what, own, models in sizes:
        if own != models:
            raise ConfigError(
                f"{what} is of another model than {config.model}: {own} {of_what}, not {models}."
            )
    if not draft.has_embedding and shape.hidden_size != model.hidden_size:
        raise ConfigError(
            f"{what} needs the tensor embed_tokens, as its hidden states have {shape.hidden_size} elements and "
            f"those of {config.model} {model.hidden_size}."
        )
    if not all(0 <= layer < model.num_layers for layer in draft.fused_layers):
        raise ConfigError(
            f"{what} is of another model than {config.model}: it takes hidden states of layers "
            f"{', '.join(map(str, draft.fused_layers))}, and there are {model.num_layers}."
        )
    return shape


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
