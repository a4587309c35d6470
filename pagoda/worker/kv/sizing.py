# SPDX-License-Identifier: Apache-2.0
"""The KV cache of a rank: as large as its weights and its largest step have left room for."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from pagoda.ipc.machine import available_memory_bytes
from pagoda.kv.capacity import segment_blocks, usable_blocks
from pagoda.model.caches import allocate_cache
from pagoda.worker.input_batch import input_batch_bytes
from pagoda.worker.kv.memory import KVAllocation, shares_kv, slot_bytes
from pagoda.worker.kv.store import open_kv
from pagoda.worker.memory import check_weights, choose_num_blocks, left_for_kv_cache

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pagoda.backend.base import KVCache, LatentCache, Memory, NewTensor
    from pagoda.backend.kv_store import KVStore
    from pagoda.messages.worker_config import WorkerConfig
    from pagoda.worker.memory_plan import WorkerMemoryPlan

_OBJECT_BYTES = 4096
"""Bytes that a tier adds to those of a block, about."""
_TENSORS_PER_LAYER = 4
"""Tensors of a layer's KV cache, at most."""


def share_of(memory: Memory, config: WorkerConfig) -> int:
    """Free bytes that a worker may take: its share of a host's memory, or all of its own device's."""
    if not memory.on_host:
        return memory.free_bytes()
    free = config.host_memory_bytes or memory.free_bytes()
    return free // config.workers_on_host


def planned_blocks(plan: WorkerMemoryPlan) -> int:
    """Blocks that there would be room for by the plan alone, made before anything is loaded.

    Raises ConfigError: the model does not fit.
    """
    config = plan.config
    check_weights(config, plan.weight_bytes, plan.available_bytes)
    if not plan.backend.memory.on_host:  # the rest lies there all the same
        host = config.host_memory_bytes or available_memory_bytes()
        _left(plan, config, 0, 0, 0, _batch_bytes(plan), host // config.workers_on_host)
    return _blocks(plan, plan.weight_bytes, plan.step_bytes, plan.available_bytes)


def measured_blocks(plan: WorkerMemoryPlan, taken_bytes: int, step_bytes: int) -> int:
    """Blocks that there is room for beside the weights, which took so many bytes, and the largest step.

    What others have taken meanwhile is not there. Weights that are mapped from files are taken as they are read,
    so no less than planned counts.

    Raises ConfigError: there is no room for one sequence.
    """
    available = min(plan.available_bytes, plan.backend.memory.free_bytes() + taken_bytes)
    return _blocks(plan, max(plan.weight_bytes, taken_bytes), step_bytes, available)


def allocate_kv(
    plan: WorkerMemoryPlan, num_blocks: int
) -> tuple[Sequence[KVCache | LatentCache], KVStore]:
    """The caches of all places, then those of a drafter's layers, and the store of all."""
    plans = [plan] if plan.drafter is None else [plan, plan.drafter]
    num_places = sum(it.num_places for it in plans)

    def allocate(new: NewTensor) -> list[KVCache | LatentCache]:
        return [
            allocate_cache(
                it.backend, it.shard, num_blocks, it.block_size, it.dtype, it.kv_dtype, new
            )
            for it in plans
            for _ in range(it.num_places)
        ]

    def open_allocation() -> KVAllocation:
        num_bytes = num_blocks * plan.bytes_per_block
        num_tensors = _TENSORS_PER_LAYER * num_places
        return KVAllocation(num_bytes, num_tensors, shared=shares_kv(plan.config))

    return open_kv(plan.backend, allocate, open_allocation)


def _blocks(
    plan: WorkerMemoryPlan, weight_bytes: int, step_bytes: int, available_bytes: int
) -> int:
    config = plan.config
    if config.kept_blocks is not None:
        return config.kept_blocks
    num_cold_segments = cold_segments(plan)
    batch_bytes = _batch_bytes(plan)
    if not plan.backend.memory.on_host:
        config, batch_bytes = msgspec.structs.replace(config, kv_host_bytes=0), 0
    sizes = weight_bytes, step_bytes, plan.sampling_bytes, batch_bytes
    return choose_num_blocks(
        config,
        groups=plan.kv_groups,
        bytes_per_block=plan.bytes_per_block,
        max_model_len=plan.max_model_len,
        available_bytes=_left(plan, config, *sizes, available_bytes),
        segment_tokens=plan.segment_tokens,
        num_cold_segments=num_cold_segments,
    )


def cold_segments(plan: WorkerMemoryPlan) -> int:
    """Segments of running requests that host memory and the tiers below it hold, about."""
    config, each = plan.config, segment_blocks(plan.kv_groups, plan.segment_tokens)
    if not each:
        return 0
    ranks_on_host = min(config.parallel.replica_size, config.workers_on_host)
    in_tier = ranks_on_host * (plan.bytes_per_block + _OBJECT_BYTES)
    sharers = config.replicas_on_host
    below = sum(usable_blocks(tier, in_tier, sharers) // each for tier in config.kv_tiers.values())
    return config.kv_host_bytes // slot_bytes(plan.bytes_per_block) // each + below


def _left(
    plan: WorkerMemoryPlan,
    config: WorkerConfig,
    weight_bytes: int,
    step_bytes: int,
    sampling_bytes: int,
    batch_bytes: int,
    available_bytes: int,
) -> int:
    return left_for_kv_cache(
        config,
        weight_bytes=weight_bytes,
        step_bytes=step_bytes,
        sampling_bytes=sampling_bytes,
        batch_bytes=batch_bytes,
        step_tokens=plan.step_tokens,
        max_model_len=plan.max_model_len,
        available_bytes=available_bytes,
    )


def _batch_bytes(plan: WorkerMemoryPlan) -> int:
    return input_batch_bytes(plan.config.max_num_seqs, plan.max_model_len, plan.block_sizes)
