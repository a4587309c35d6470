"""Llama 2 and 3, and models of the same shape: Yi, SmolLM2, TinyLlama, DeepSeek-R1 distillations."""

from __future__ import annotations

from dataclasses import replace

from pagoda.checkpoints.fields import Fields
from pagoda.checkpoints.model_config import Family, GgufFormat, ModelConfig


def _adapt(config: ModelConfig, fields: Fields) -> ModelConfig:
    return replace(config, mlp_bias=fields.flag("mlp_bias", False))


LLAMA = Family(
    "LlamaForCausalLM",
    _adapt,
    gguf=GgufFormat("llama", rotates_neighbours=True),
    own_keys=frozenset({"mlp_bias"}),
)
