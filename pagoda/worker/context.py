# SPDX-License-Identifier: Apache-2.0
"""Demands of context parallelism (`--cp`) on a model, a backend, and a worker's options."""

from __future__ import annotations

from typing import Any

from pagoda.backend.base import Backend
from pagoda.checkpoints.model_spec import ModelSpec
from pagoda.errors import ConfigError
from pagoda.messages.worker_config import WorkerConfig


def check_context_parallel(
    config: WorkerConfig, shape: ModelSpec, backend: Backend[Any, Any], block_size: int
) -> None:
    """Raises ConfigError: contexts cannot be spread over ranks."""
    flag = f"--context-parallel-size {config.parallel.context_parallel_size}"
    if not backend.capabilities.context_parallel:
        raise ConfigError(
            f"{flag} needs a backend that attends to contexts on several ranks, which {backend.arithmetic} "
            "does not; choose --backend cpu or reference."
        )
    if shape.encoder is not None:
        raise ConfigError(f"{flag} does not go with encoders, which keep no context; leave it out.")
    if shape.beside is not None:
        raise ConfigError(
            f"{flag} does not go with {config.model}, whose layers are given embeddings; leave it out."
        )
    if any(layer.state is not None for layer in shape.layers):
        raise ConfigError(
            f"{flag} needs a model whose layers all keep keys and values, which {config.model} is not; "
            "leave it out."
        )
    if shape.latent is not None and shape.latent.index is not None:
        raise ConfigError(
            f"{flag} needs a model whose tokens attend to all before them, but an indexer chooses those of "
            f"{config.model}; leave it out."
        )
    if config.segment_tokens % block_size:
        raise ConfigError(
            f"--block-size {block_size} does not divide the {config.segment_tokens} tokens of a segment, of which "
            f"{flag} puts each on one rank."
        )
