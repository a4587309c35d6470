"""Mistral 7B and Nemo: Llama with a sliding window."""

from __future__ import annotations

from dataclasses import replace

from pagoda.checkpoints.fields import Fields
from pagoda.checkpoints.model_config import Family, GgufFormat, ModelConfig


def _adapt(config: ModelConfig, fields: Fields) -> ModelConfig:
    # An absent field means 4096 (the first Mistral), an explicit null means none.
    if fields.values.get("sliding_window", 4096) is None:
        return config
    window = fields.positive("sliding_window", 4096)
    return replace(config, sliding_windows=(window,) * config.num_layers)


MISTRAL = Family(
    "MistralForCausalLM",
    _adapt,
    gguf=GgufFormat("llama", windowed=True, rotates_neighbours=True),
)
