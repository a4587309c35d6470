"""Manifest of all that makes two blocks under one key the same bytes: model, arithmetic and layout."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

import msgspec

from pagoda.backend.base import KVCache
from pagoda.checkpoints.fingerprint import weights_digest
from pagoda.kv.objects import Manifest
from pagoda.worker.kv.memory import KVMemory
from pagoda.worker.loading import WorkerPlan


def make_manifest(plan: WorkerPlan, memory: KVMemory, arithmetic: str) -> Manifest:
    """Manifest of the objects of one rank. Raises ConfigError if the model's files cannot be read."""
    config, parallel, place = plan.config, plan.config.parallel, plan.config.place
    return Manifest(
        model=Path(config.model).name,
        model_digest=_model_digest(plan),
        dtype=plan.dtype_name,
        kv_dtype=plan.kv_dtype_name,
        quantization=_quantization(plan),
        arithmetic=arithmetic,
        layout=memory.layout,
        block_size=plan.block_size,
        payload_bytes=memory.block_bytes,
        tensor_parallel_size=parallel.tensor_parallel_size,
        tensor_parallel_rank=place.tp,
        pipeline_parallel_size=parallel.pipeline_parallel_size,
        stage=place.pp,
        expert_parallel=parallel.expert_parallel,
    )


def kv_digest(plan: WorkerPlan, caches: Sequence[KVCache]) -> str:
    """SHA-256 of all that engines must agree on to use each other's KV, in hex.

    That is what a block of one head is, and of which model. Into how many ranks the model is cut does not count,
    nor how the processor rounds.

    Raises ConfigError if the model's files cannot be read.
    """
    tensors = caches[0].tensors.values()
    layout = [(str(tensor.dtype), list(tensor.shape[2:])) for tensor in tensors]
    agreed = (
        _model_digest(plan),
        plan.dtype_name,
        plan.kv_dtype_name,
        _quantization(plan),
        plan.block_size,
        layout,
    )
    return hashlib.sha256(msgspec.json.encode(agreed)).hexdigest()


def _model_digest(plan: WorkerPlan) -> str:
    config = plan.config
    return weights_digest(config.model, config.load_format, config.seed)


def _quantization(plan: WorkerPlan) -> str:
    return "none" if plan.quantization is None else plan.quantization.summary
