"""Qwen3: Llama with norms of queries and keys."""

from __future__ import annotations

from dataclasses import replace

from pagoda.checkpoints.families.shared import layer_windows
from pagoda.checkpoints.fields import Fields
from pagoda.checkpoints.model_config import Family, GgufFormat, ModelConfig


def _adapt(config: ModelConfig, fields: Fields) -> ModelConfig:
    windows = layer_windows(fields, config.num_layers)
    return replace(config, qk_norm=True, sliding_windows=windows)


QWEN3 = Family("Qwen3ForCausalLM", _adapt, gguf=GgufFormat("qwen3"), default_head_dim=128)
