# SPDX-License-Identifier: Apache-2.0
"""Manifest of all that makes two blocks under one key the same bytes: model, arithmetic and layout."""

from __future__ import annotations

import hashlib
from pathlib import Path

import msgspec

from pagoda.backend.kv_store import KVStore, layout_of
from pagoda.checkpoints.fingerprint import weights_digest
from pagoda.messages.kv_groups import KVGroup
from pagoda.plugins.disk_tier.objects import Manifest
from pagoda.worker.loading import WorkerPlan


def make_manifest(plan: WorkerPlan, store: KVStore, arithmetic: str) -> Manifest:
    """Manifest of the objects of one rank. Raises ConfigError if the model's files cannot be read."""
    config, parallel, place = plan.config, plan.config.parallel, plan.config.place
    return Manifest(
        model=Path(config.model).name,
        model_digest=_model_digest(plan),
        dtype=plan.dtype_name,
        kv_dtype=plan.kv_dtype_name,
        quantization=_quantization(plan),
        arithmetic=arithmetic,
        layout=layout_of(store.tensors),
        block_size=plan.block_size,
        kv_groups=_kv_groups(plan),
        payload_bytes=store.block_bytes,
        tensor_parallel_size=parallel.tensor_parallel_size,
        tensor_parallel_rank=place.tp,
        pipeline_parallel_size=parallel.pipeline_parallel_size,
        stage=place.pp,
        expert_parallel=parallel.expert_parallel,
    )


def kv_digest(plan: WorkerPlan, store: KVStore) -> str:
    """SHA-256 of all that engines must agree on to use each other's KV, in hex.

    That is what a block of one head is, of which layers of which model. Into how many ranks the model is cut does
    not count, nor how the processor rounds.

    Raises ConfigError if the model's files cannot be read.
    """
    agreed = (
        _model_digest(plan),
        plan.dtype_name,
        plan.kv_dtype_name,
        _quantization(plan),
        plan.block_size,
        [tensor.head_layout for tensor in store.tensors if tensor.place == 0],
        _kv_groups(plan),
    )
    return hashlib.sha256(msgspec.json.encode(agreed)).hexdigest()


def _kv_groups(plan: WorkerPlan) -> tuple[KVGroup, ...]:
    """The groups of the model, unless a block is of all its layers and keeps all."""
    groups = plan.kv_groups
    return () if len(groups) == 1 and groups[0].keeps_all else groups


def _model_digest(plan: WorkerPlan) -> str:
    config = plan.config
    digest = weights_digest(config.model, config.load_format, config.seed)
    if plan.shard.config.short_context is None:
        return digest
    return hashlib.sha256(f"{digest} long".encode()).hexdigest()


def _quantization(plan: WorkerPlan) -> str:
    return "none" if plan.quantization is None else plan.quantization.summary
