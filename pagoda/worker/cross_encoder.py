# SPDX-License-Identifier: Apache-2.0
"""Refusal of backends and flags that do not go with a decoder that attends to what an encoder gives."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from pagoda.backend.base import Backend, UnsupportedError
from pagoda.checkpoints.model_spec import ModelSpec
from pagoda.checkpoints.text_encoder import TextEncoderSpec
from pagoda.errors import ConfigError
from pagoda.messages.speculation import HEAD_IF_ANY
from pagoda.messages.worker_config import WorkerConfig


def within(spec: ModelSpec, max_model_len: int) -> ModelSpec:
    """The model whose sequences, and the texts that they are about, have at most so many tokens."""
    beside = spec.cross_encoder
    if isinstance(beside, TextEncoderSpec):
        encoder = replace(beside.encoder, max_position_embeddings=max_model_len)
        spec = replace(spec, cross_encoder=TextEncoderSpec(encoder))
    return replace(spec, max_position_embeddings=max_model_len)


def check_cross_encoder(config: WorkerConfig, spec: ModelSpec, backend: Backend[Any, Any]) -> None:
    """Raises ConfigError: the model has such an encoder, and the backend or a flag does not go with it."""
    if spec.cross_encoder is None:
        return
    if not backend.capabilities.cross_attends:
        raise UnsupportedError(
            f"{backend.arithmetic} does not compute the encoder of {config.model}; "
            "choose --backend cpu or reference."
        )
    parallel = config.parallel
    for is_given, what in (
        (parallel.context_parallel_size > 1, "--context-parallel-size"),
        (parallel.dp_attention, "--enable-dp-attention"),
        (config.has_adapters, "adapters"),
        (config.drafter not in (None, HEAD_IF_ANY), "a draft model or head"),
        (config.kv_handoff is not None, "prefill and decode apart"),
        (bool(config.calibration_windows), "a calibration text"),
    ):
        if is_given:
            raise ConfigError(
                f"{config.model} has an encoder beside its decoder, which does not go with {what}; leave it out."
            )
