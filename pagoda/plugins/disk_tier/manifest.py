# SPDX-License-Identifier: Apache-2.0
"""Manifest of all that makes two blocks under one key the same bytes: model, arithmetic and layout."""

from __future__ import annotations

from pathlib import Path

from pagoda.backend.kv_store import KVStore, layout_of
from pagoda.plugins.disk_tier.objects import Manifest
from pagoda.worker.kv.manifest import agreed_groups, blocks_digest, quantization_name
from pagoda.worker.memory_plan import WorkerMemoryPlan


def make_manifest(plan: WorkerMemoryPlan, store: KVStore, arithmetic: str) -> Manifest:
    """Manifest of the objects of one rank. Ranks that hold other blocks of the same layers and heads share it.

    Raises ConfigError if the model's files cannot be read."""
    config, parallel, place = plan.config, plan.config.parallel, plan.config.place
    return Manifest(
        model=Path(config.model).name,
        model_digest=blocks_digest(plan),
        dtype=plan.dtype_name,
        kv_dtype=plan.kv_dtype_name,
        quantization=quantization_name(plan),
        arithmetic=arithmetic,
        layout=layout_of(store.tensors),
        block_size=plan.block_size,
        kv_groups=agreed_groups(plan),
        payload_bytes=store.block_bytes,
        tensor_parallel_size=parallel.tensor_parallel_size,
        tensor_parallel_rank=0 if parallel.dp_attention else place.tp,
        pipeline_parallel_size=parallel.pipeline_parallel_size,
        stage=place.pp,
        expert_parallel=parallel.expert_parallel,
        dp_attention=parallel.dp_attention,
    )
