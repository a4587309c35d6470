# SPDX-License-Identifier: Apache-2.0
"""Refusal of models, backends and flags that do not go with ranks which attend to requests of their own."""

from __future__ import annotations

from typing import Any

from pagoda.backend.base import Backend, UnsupportedError
from pagoda.checkpoints.model_spec import ModelSpec
from pagoda.errors import ConfigError
from pagoda.messages.worker_config import WorkerConfig

_FLAG = "--enable-dp-attention"
_OPERATIONS = ("gather_rows", "scatter_rows", "dispatched_experts")


def check_dp_attention(config: WorkerConfig, spec: ModelSpec, backend: Backend[Any, Any]) -> None:
    """Raises ConfigError: the model, the backend or another flag does not go with it."""
    if not config.parallel.dp_attention:
        return
    if spec.encoder is not None:
        raise ConfigError(
            f"{_FLAG} shares out the KV of requests, and an encoder keeps none; leave it out."
        )
    if spec.beside is not None or (spec.experts is not None and spec.experts.carried):
        raise ConfigError(
            f"{_FLAG} does not go with models whose layers are given more than hidden states; leave it out."
        )
    if config.has_adapters:
        raise ConfigError(
            f"{_FLAG} does not go with adapters, whose maps are shared out among ranks; leave out one of them."
        )
    if set(_OPERATIONS) & set(backend.capabilities.lacks_operations):
        raise UnsupportedError(
            f"{_FLAG} needs a backend whose ranks exchange rows, which {backend.arithmetic} does not; choose "
            "another --backend, or leave it out."
        )
