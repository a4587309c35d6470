# SPDX-License-Identifier: Apache-2.0
"""Digests of all on which engines must agree to share KV: the model, its weights and its KV groups."""

from __future__ import annotations

import hashlib

import msgspec

from pagoda.backend.kv_store import KVStore
from pagoda.checkpoints.fingerprint import weights_digest
from pagoda.messages.kv_groups import KVGroup
from pagoda.worker.memory_plan import WorkerMemoryPlan


def kv_digest(plan: WorkerMemoryPlan, store: KVStore) -> str:
    """SHA-256 of all that engines must agree on to use each other's KV, in hex.

    That is what a block of one head is, of which layers of which model. Into how many ranks the model is cut does
    not count, nor how the processor rounds.

    Raises ConfigError if the model's files cannot be read.
    """
    agreed = (
        model_digest(plan),
        plan.dtype_name,
        plan.kv_dtype_name,
        quantization_name(plan),
        plan.block_size,
        [tensor.head_layout for tensor in store.tensors if tensor.place == 0],
        agreed_groups(plan),
    )
    return hashlib.sha256(msgspec.json.encode(agreed)).hexdigest()


def agreed_groups(plan: WorkerMemoryPlan) -> tuple[KVGroup, ...]:
    """The groups of the model, unless a block is of all its layers and keeps all."""
    groups = plan.kv_groups
    return () if len(groups) == 1 and groups[0].keeps_all else groups


def model_digest(plan: WorkerMemoryPlan) -> str:
    """Digest of the weights, in hex. Raises ConfigError if the model's files cannot be read."""
    config = plan.config
    digest = weights_digest(config.model, config.load_format, config.seed)
    if plan.shard.config.short_context is None:
        return digest
    return hashlib.sha256(f"{digest} long".encode()).hexdigest()


def blocks_digest(plan: WorkerMemoryPlan) -> str:
    """Digest of all weights that a block has KV of, those of a drafter too, in hex."""
    own = model_digest(plan)
    if plan.drafter is None:
        return own
    drafter = plan.drafter.config
    drafted = weights_digest(drafter.model, drafter.load_format, drafter.seed)
    return hashlib.sha256(f"{own} {drafted} {plan.drafter.dtype_name}".encode()).hexdigest()


def quantization_name(plan: WorkerMemoryPlan) -> str:
    """Name of the rounding of weights; `none` without it."""
    return "none" if plan.quantization is None else plan.quantization.summary
