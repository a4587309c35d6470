# SPDX-License-Identifier: Apache-2.0
"""Model loading: a worker makes a model that is ready to run, or one rank's part of it, of its `WorkerConfig`."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pagoda.backend.base import Backend
from pagoda.backend.kv_store import KVStore
from pagoda.backend.operation import Operation
from pagoda.backend.overlap import OverlapBackend
from pagoda.backend.weights import DenseWeight, Fp8Weight, LinearWeight
from pagoda.checkpoints.checkpoint_quantization import CheckpointQuantization
from pagoda.checkpoints.gguf.reader import is_gguf, read_gguf
from pagoda.checkpoints.linears import LinearSpec
from pagoda.checkpoints.model_spec import ModelSpec
from pagoda.checkpoints.resolve import load_model_config
from pagoda.checkpoints.text_encoder import TextEncoderSpec
from pagoda.checkpoints.weight_formats import DenseFormat
from pagoda.errors import ConfigError
from pagoda.faults.injector import Faults
from pagoda.ipc.machine import available_cores, format_bytes
from pagoda.messages.kv_formats import KV_FORMATS
from pagoda.messages.kv_groups import KVGroup, KVKind, layer_groups
from pagoda.messages.segments import LEAST_SEGMENT
from pagoda.messages.speculation import MAX_DRAFT_TOKENS
from pagoda.messages.worker import Capabilities, WorkerReady
from pagoda.messages.worker_config import WorkerConfig
from pagoda.model.caches import allocate_cache
from pagoda.model.calibration import CalibratedWeights, calibrate
from pagoda.model.decoder import Decoder
from pagoda.model.gguf_weights import GgufWeights
from pagoda.model.gptq import LoadedGrids
from pagoda.model.loader import WeightLoader
from pagoda.model.quantization import QuantizationOnLoad
from pagoda.model.quantized_checkpoint import QuantizedCheckpoint
from pagoda.model.sharding import (
    check_quantized_parts,
    least_block_size,
    shard_of,
    whole_part,
)
from pagoda.model.weights import DequantizedWeights, DummyWeights, WeightSource, open_checkpoint
from pagoda.parallel.collectives import ALONE, Collectives, RankGroups
from pagoda.parallel.config import RankPlace
from pagoda.parallel.segments import BlockNumbers
from pagoda.telemetry.tracer import Tracer
from pagoda.worker.adapter_loader import AdapterLoader, adapter_files
from pagoda.worker.backends import DevicesOf, check_model, choose_backend
from pagoda.worker.context import check_context_parallel
from pagoda.worker.cross_encoder import check_cross_encoder, within
from pagoda.worker.dp_attention import check_dp_attention
from pagoda.worker.drafting.drafter import Drafter, DraftLimits
from pagoda.worker.drafting.planning import with_drafter
from pagoda.worker.group_sampler import AwaitMasks, GroupSampler, no_masks
from pagoda.worker.input_batch import InputBatch
from pagoda.worker.kv.sizing import allocate_kv, measured_blocks, planned_blocks, share_of
from pagoda.worker.memory import check_arena, tokens_held
from pagoda.worker.memory_plan import WorkerMemoryPlan
from pagoda.worker.number_formats import (
    choose_dtype,
    choose_kv_dtype,
    choose_quantization,
)
from pagoda.worker.profiling import profile_steps
from pagoda.worker.progress import loading_weights
from pagoda.worker.prompt_outputs import PromptReader
from pagoda.worker.runner import Runner, StageRunner
from pagoda.worker.sampler import Sampler

_log = logging.getLogger("pagoda.worker")


def plan_worker(config: WorkerConfig, *, keeps_all: bool = False) -> WorkerMemoryPlan:
    """Reads the model's configuration and looks at the machine.

    With `keeps_all`, layers keep what lies behind their windows.
    Raises ConfigError: the model, the machine or a flag does not allow it."""
    torch.set_num_threads(config.num_threads or available_cores())
    backend, backend_summary = choose_backend(config.backend, _devices_of(config))
    capabilities = backend.capabilities
    shape = load_model_config(config.model, config.load_format)
    check_model(shape, backend)
    check_dp_attention(config, shape, backend)
    check_cross_encoder(config, shape, backend)
    _check_batch_invariant(config, backend)
    dtype_name = choose_dtype(config.dtype, shape.dtype, capabilities)
    quantization = choose_quantization(config, shape, capabilities)
    check_quantized_parts(shape, quantization, config.parallel)
    _check_max_num_seqs(config.max_num_seqs, capabilities)
    _check_segment(config.segment_tokens)
    max_model_len = _max_model_len(config.max_model_len, shape, capabilities)
    shape = within(shape, max_model_len)
    kv_dtype_name = choose_kv_dtype(config.kv_cache_dtype, dtype_name, capabilities)
    block_size = _block_size(config, shape, kv_dtype_name, capabilities)
    if config.parallel.context_parallel_size > 1:
        check_context_parallel(config, shape, backend, block_size)
        keeps_all = True  # where a block lies is said by its place in the context
    _tell_of_long_factors(shape, config)
    plan = WorkerMemoryPlan(
        config=config,
        shard=shard_of(shape, config.parallel, config.place),
        quantization=quantization,
        dtype_name=dtype_name,
        kv_dtype_name=kv_dtype_name,
        kv_groups=_kv_groups(shape, block_size, capabilities, keeps_all=keeps_all),
        max_model_len=max_model_len,
        backend=backend,
        backend_summary=backend_summary,
        available_bytes=share_of(backend.memory, config),
        taken_bytes=backend.memory.taken_bytes(),
        adapters=tuple(adapter_files(adapter, shape, config) for adapter in config.adapters),
    )
    plan = with_drafter(plan)
    check_arena(config, plan.bytes_per_block)
    return replace(plan, num_blocks=planned_blocks(plan))


class LoadedWorker(NamedTuple):
    runner: Runner | StageRunner
    ready: WorkerReady
    kv: KVStore
    description: Mapping[str, Mapping[str, object]]
    """Figures of the model for traces; see `_description`."""
    adapters: AdapterLoader

    def describe(self, tracer: Tracer) -> None:
        """Writes the description to the current fragment; does nothing while tracing is off."""
        for name, figures in self.description.items():
            tracer.describe(name, figures)


def load_runner(
    plan: WorkerMemoryPlan,
    tracer: Tracer,
    groups: RankGroups = ALONE,
    agree_on_kv: Callable[[int], int] = lambda num_blocks: num_blocks,
    on_progress: Callable[[], None] = lambda: None,
    await_masks: AwaitMasks = no_masks,
    faults: Faults | None = None,
) -> LoadedWorker:
    """Loads weights, asks what the largest step takes, and allocates a KV cache of what is left.

    `groups` are those of this rank. `agree_on_kv` is told for how many blocks this rank has room, and gives the
    size that all ranks take. `on_progress` is called after each weight. `await_masks` waits for the masks of a
    step, where steps have any. `faults` are those of this process.
    Raises ConfigError: a file does not hold what it should, or too little memory is left for KV."""
    config, shard = plan.config, plan.shard
    backend, group = plan.backend, groups.stage
    if groups.tensor.size > 1:
        backend.join(groups.tensor)
    with loading_weights(config.place, plan.weight_bytes, on_progress) as on_loaded:
        model = _load_model(plan, tracer, on_loaded, on_progress, groups.context)
        own = (
            None
            if plan.drafter is None
            else _load_model(
                plan.drafter, tracer, on_loaded, on_progress, groups.context, lent=model
            )
        )
    adapter = None
    if model.adapters is not None:
        for files in plan.adapters:
            model.adapters.load(files)
            adapter = model.adapters.number(files.digest)
            on_progress()
    began = tracer.e2e()
    step_bytes = profile_steps(
        model,
        num_tokens=plan.step_tokens,
        max_model_len=plan.max_model_len,
        block_sizes=plan.block_sizes,
        whole_prompts=plan.computes_whole_prompts,
        adapter=adapter,
    )
    if plan.drafter is not None and own is not None:
        step_bytes += plan.drafter.kept_hidden_bytes + profile_steps(
            own,
            num_tokens=plan.drafter.step_tokens,
            max_model_len=plan.drafter.max_model_len,
            block_sizes=plan.drafter.block_sizes,
            whole_prompts=False,
        )
    step_bytes += plan.streaming_bytes
    tracer.span("profile", began)
    weight_bytes = backend.memory.taken_bytes() - plan.taken_bytes
    num_blocks = agree_on_kv(measured_blocks(plan, weight_bytes, step_bytes))
    encodes_text = isinstance(shard.config.cross_encoder, TextEncoderSpec)
    began = tracer.e2e()
    caches, store = allocate_kv(plan, num_blocks)
    tracer.span("allocate kv cache", began)
    model.use_caches(plan.layer_caches(caches[: plan.num_places]))
    ready = WorkerReady(
        capabilities=backend.capabilities,
        num_blocks=num_blocks,
        block_size=plan.block_size,
        max_model_len=plan.max_model_len,
        vocab_size=shard.config.vocab_size,
        hidden_size=shard.config.hidden_size if backend.capabilities.embeds_spans else 0,
        feature_bytes=0 if shard.config.audio is None else shard.config.audio.feature_bytes,
        encodes_text=encodes_text,
        summary=_summary(plan, num_blocks),
        gives_logits=shard.config.gives_logits,
        arithmetic=_arithmetic(backend.arithmetic, config),
        kv_groups=plan.kv_groups,
        max_proposals=MAX_DRAFT_TOKENS if config.drafter is not None else 0,
        planned_memory_bytes=plan.total_bytes(plan.weight_bytes, plan.step_bytes, plan.num_blocks),
        taken_memory_bytes=plan.total_bytes(weight_bytes, step_bytes, num_blocks),
    )
    description = _description(plan, model.operations)
    batch = InputBatch(
        config.max_num_seqs,
        plan.max_model_len,
        plan.block_sizes,
        None if model.adapters is None else model.adapters.number,
        embeds_spans=shard.is_first,
        blocks=BlockNumbers(config.place.cp, num_blocks, config.parallel.context_parallel_size),
        keeps_states=any(group.kind is KVKind.STATE for group in plan.kv_groups),
        segment=config.segment_tokens,
        rank_blocks=num_blocks if config.parallel.dp_attention else None,
        encodes_text=encodes_text,
    )
    drafter = None
    if plan.drafter is not None and own is not None:
        own.use_caches(plan.drafter.layer_caches(caches[plan.num_places :]))
        vocab_size = min(shard.config.vocab_size, own.vocab_size)
        handoff = config.kv_handoff
        limits = DraftLimits(
            vocab_size,
            plan.drafter.max_model_len,
            plan.drafter.step_tokens,
            begins_anew=handoff is not None and handoff.role.fetches_kv,
        )
        drafter = Drafter(own, batch, limits)
    runner: Runner | StageRunner
    if shard.is_last:
        sampler = GroupSampler(
            Sampler(config.max_num_seqs, shard.config.vocab_size, backend.sample),
            group,
            tracer,
            await_masks,
            backend if isinstance(backend, OverlapBackend) else None,
        )
        has_states = any(layer.state is not None for layer in shard.config.layers)
        alone = shard.is_first and group.size == 1
        classifier = shard.config.classifier
        prompts = PromptReader(
            backend.score,
            leads=group.rank == 0,
            scored_as="last" if classifier is None else classifier.pooling,
        )
        runner = Runner(
            *(model, batch, sampler, prompts, tracer),
            alone=alone,
            has_states=has_states,
            drafter=drafter,
            faults=faults,
        )
    else:
        runner = StageRunner(model, batch, tracer)
    adapters = AdapterLoader(plan, model.adapters)
    return LoadedWorker(runner, ready, store, description, adapters)


def _load_model(
    plan: WorkerMemoryPlan,
    tracer: Tracer,
    on_loaded: Callable[[int], None],
    on_progress: Callable[[], None],
    context: Collectives,
    lent: Decoder[Any, Any] | None = None,
) -> Decoder[Any, Any]:
    """The model of a plan, over caches of one block; a head takes from `lent` what it shares with its model."""
    config, shard, backend = plan.config, plan.shard, plan.backend
    one_block = allocate_cache(backend, shard, 1, plan.block_size, plan.dtype, plan.kv_dtype)
    with _weights(plan) as source:
        if config.dequantizes:
            source = DequantizedWeights(source)
        on_load = plan.quantization if isinstance(plan.quantization, QuantizationOnLoad) else None
        if on_load is not None and config.calibration_windows:
            source, on_load = _calibrated(plan, on_load, source, backend, on_progress), None
        return Decoder(
            WeightLoader(shard, backend, source, on_load, plan.dtype, tracer, on_loaded),
            backend,
            plan.layer_caches([one_block] * len(shard.layers)),
            has_adapters=config.has_adapters,
            batch_invariant=config.batch_invariant,
            context=context if context.size > 1 else None,
            lent=lent,
            captured=plan.captured_layers,
        )


def _calibrated(
    plan: WorkerMemoryPlan,
    on_load: QuantizationOnLoad,
    source: WeightSource,
    backend: Backend[Any, Any],
    on_progress: Callable[[], None],
) -> CalibratedWeights:
    """The model's weights, rounded by the inputs that they have on the calibration text."""
    config, rounded = plan.shard.config, dict[str, LinearWeight]()
    began = time.monotonic()

    def read(linear: LinearSpec) -> Tensor:
        weight = source.linear(linear, plan.dtype)
        if not isinstance(weight, DenseWeight):
            raise TypeError(f"{linear.name} is quantized already.")
        return weight.values

    def round_to_grids(linear: LinearSpec, values: Tensor, importance: Tensor) -> LoadedGrids:
        part, weight = whole_part(linear), DenseWeight(values)
        quantized = on_load.quantize(linear, part, weight, backend, importance)
        if isinstance(quantized, DenseWeight | Fp8Weight):
            raise TypeError(f"{linear.name} is not quantized.")
        return quantized

    def keep(linear: LinearSpec, weight: LoadedGrids) -> None:
        rounded[linear.name] = weight
        on_progress()

    windows = plan.config.calibration_windows
    calibrate(
        config,
        source,
        backend,
        plan.dtype,
        windows,
        read=read,
        rounds=lambda linear: not isinstance(on_load.format_of(linear), DenseFormat),
        round_to_grids=round_to_grids,
        on_rounded=keep,
    )
    _log.info(
        "rounded weights by %d tokens of a calibration text in %.1f s",
        sum(map(len, windows)),
        time.monotonic() - began,
    )
    return CalibratedWeights(
        source,
        rounded,
        lambda linear, weight: on_load.quantize(linear, whole_part(linear), weight, backend),
    )


def _description(
    plan: WorkerMemoryPlan, operations: Sequence[Operation]
) -> Mapping[str, Mapping[str, object]]:
    """Least cost of a rank's part of a forward pass, without the head, and the operations of the pass."""
    shard, itemsize = plan.shard, plan.dtype.itemsize
    experts = shard.config.experts
    model = {
        "weight_bytes": shard.forward_bytes(plan.quantization, itemsize),
        "flops_per_token": shard.flops_per_token(),
        "kv_bytes_per_token": plan.kv_bytes_per_token,
        "expert_bytes": shard.expert_bytes(plan.quantization, itemsize),
        "experts_held": len(shard.experts),
        "experts_per_token": experts.routing.experts_per_token if experts else 0,
    }
    if not operations:  # they come as spans
        return {"model": model}
    columns = {
        "names": [operation.name for operation in operations],
        "kinds": [operation.kind for operation in operations],
        "weight_bytes": [operation.weight_bytes for operation in operations],
        "flops_per_token": [operation.flops_per_token for operation in operations],
    }
    return {"model": model, "forward_ops": columns}


def _summary(plan: WorkerMemoryPlan, num_blocks: int) -> str:
    quantization = "" if plan.quantization is None else f"{plan.quantization.summary}, "
    num_cached = plan.config.parallel.num_pools * tokens_held(plan.kv_groups, num_blocks)
    return (
        f"{plan.backend_summary}, {plan.dtype_name}, {quantization}{format_bytes(plan.weight_bytes)} weights, "
        f"{format_bytes(num_blocks * plan.bytes_per_block)} {plan.kv_dtype_name} KV cache "
        f"for {num_cached} tokens"
    )


def _devices_of(config: WorkerConfig) -> DevicesOf:
    return partial(config.parallel.devices_of, config.place)


def _block_size(
    config: WorkerConfig, shape: ModelSpec, kv_dtype_name: str, capabilities: Capabilities
) -> int:
    """Tokens of a block, which has room for the state of a layer that keeps one or for what is encoded."""
    wanted, sizes = config.block_size, capabilities.block_sizes
    least = least_block_size(shape, KV_FORMATS[kv_dtype_name].element_bytes)
    fitting = [size for size in sizes if size >= least]
    if not fitting:
        kept = (
            "states as large as" if shape.cross_encoder is None else "what is encoded in a block of"
        )
        raise ConfigError(
            f"{config.model} keeps {kept} {least} tokens of KV, but blocks have at most {max(sizes)}."
        )
    if wanted is None:
        return fitting[0]
    if wanted in sizes and wanted not in fitting:
        kept = "the state of a layer" if shape.cross_encoder is None else "all that is encoded"
        raise ConfigError(
            f"--block-size must be at least {min(fitting)} for {config.model}, so that a block has room for "
            f"{kept}, got {wanted}."
        )
    if wanted not in fitting:
        *some, last = map(str, sorted(fitting))
        listed = ", ".join(some[:9]) + (" ... " if len(some) > 9 else ", ")
        several = f"one of {listed}" if some else ""
        raise ConfigError(f"--block-size must be {several}{last}, got {wanted}.")
    return wanted


def _tell_of_long_factors(shape: ModelSpec, config: WorkerConfig) -> None:
    """Logs that answers to short prompts are others, once for all ranks."""
    if shape.short_context is not None and config.place == RankPlace():
        _log.warning(
            "frequencies are those for long contexts (LongRoPE, dynamic NTK), which change answers to short "
            "prompts too, as up to %d tokens are taken; --max-model-len %d takes the model's own for prompts up "
            "to that length",
            shape.max_position_embeddings,
            shape.short_context,
        )


def _kv_groups(
    shape: ModelSpec, block_size: int, capabilities: Capabilities, *, keeps_all: bool
) -> tuple[KVGroup, ...]:
    """The groups of the whole model's layers, the same on all ranks."""
    kinds = [it and (KVKind(it[0]), it[1]) for it in shape.kept_layers]
    if keeps_all and shape.encoder is None:
        windows = (KVKind.WINDOW, KVKind.CHUNK)
        kinds = [it and (KVKind.FULL if it[0] in windows else it[0], 0) for it in kinds]
    return layer_groups(kinds, block_size, capabilities.window_multiple)


def _check_batch_invariant(config: WorkerConfig, backend: Backend[Any, Any]) -> None:
    if not (config.batch_invariant or backend.capabilities.varies_with_batch):
        raise ConfigError(
            f"--no-batch-invariant has no effect on {backend.arithmetic}, whose products are no quicker for it; "
            "leave it out."
        )


def _arithmetic(name: str, config: WorkerConfig) -> str:
    """Name of the arithmetic of a backend: KV that depends on batches is not taken for KV that does not."""
    return name if config.batch_invariant else f"{name}, not batch-invariant"


def _max_model_len(wanted: int | None, shape: ModelSpec, capabilities: Capabilities) -> int:
    longest = min(shape.max_position_embeddings, capabilities.max_model_len)
    if wanted is None:
        return min(longest, shape.usual_length or longest)
    if not 1 <= wanted <= longest:
        raise ConfigError(
            f"--max-model-len must be from 1 to the model's own {longest}, got {wanted}."
        )
    return wanted


def _check_segment(tokens: int) -> None:
    if tokens < LEAST_SEGMENT or tokens.bit_count() != 1:
        raise ConfigError(
            f"segment_tokens must be a power of two of {LEAST_SEGMENT} or more, got {tokens}."
        )


def _check_max_num_seqs(wanted: int, capabilities: Capabilities) -> None:
    if not 1 <= wanted <= capabilities.max_batch_seqs:
        raise ConfigError(
            f"--max-num-seqs must be from 1 to {capabilities.max_batch_seqs}, got {wanted}."
        )


@contextlib.contextmanager
def _weights(plan: WorkerMemoryPlan) -> Iterator[WeightSource]:
    config, path = plan.config, Path(plan.config.model)
    if config.load_format == "dummy":
        yield DummyWeights(config.seed)
    elif config.load_format != "auto":
        raise ConfigError(f"--load-format must be auto or dummy, got {config.load_format!r}.")
    elif is_gguf(path):
        yield GgufWeights(read_gguf(path))
    else:
        with open_checkpoint(path) as checkpoint:
            if plan.shard.config.draft_head is None:
                checkpoint.refuse_unread(plan.shard.config)
            planned, stored = plan.quantization, plan.shard.config.quantization
            read_by = planned if isinstance(planned, CheckpointQuantization) else stored
            if isinstance(read_by, CheckpointQuantization):
                yield QuantizedCheckpoint(checkpoint, read_by)
            else:
                yield checkpoint
