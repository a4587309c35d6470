"""Qwen2 and Qwen2.5: Llama with biases of queries, keys and values."""

from __future__ import annotations

from dataclasses import replace

from pagoda.checkpoints.families.shared import layer_windows
from pagoda.checkpoints.fields import Fields
from pagoda.checkpoints.model_config import Family, GgufFormat, ModelConfig


def _adapt(config: ModelConfig, fields: Fields) -> ModelConfig:
    return replace(
        config,
        qkv_bias=True,
        output_bias=False,
        sliding_windows=layer_windows(fields, config.num_layers),
    )


QWEN2 = Family("Qwen2ForCausalLM", _adapt, gguf=GgufFormat("qwen2"))
