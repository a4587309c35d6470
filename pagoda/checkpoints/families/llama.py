# SPDX-License-Identifier: Apache-2.0
"""Llama 2 and 3, and models of the same shape: Yi, SmolLM2, TinyLlama, DeepSeek-R1 distillations."""

from __future__ import annotations

from dataclasses import replace

from pagoda.checkpoints.families.shared import text_sizes
from pagoda.checkpoints.family import Family, GgufFormat
from pagoda.checkpoints.fields import Fields
from pagoda.checkpoints.model_spec import MlpSpec, ModelSpec
from pagoda.checkpoints.tensor_names import GGUF_NEIGHBOURS


def _adapt(spec: ModelSpec, fields: Fields) -> ModelSpec:
    mlp = MlpSpec(fields.positive("intermediate_size"), fields.flag("mlp_bias", False))
    return spec.with_layers(lambda _, layer: replace(layer, mlp=mlp))


LLAMA = Family(
    "LlamaForCausalLM",
    "Llama 2 and 3, SmolLM2, TinyLlama, Yi, Falcon 3, DeepSeek-R1 distillations; text of SmolVLM, Idefics3",
    _adapt,
    gguf=GgufFormat("llama", names=GGUF_NEIGHBOURS),
    model_types={"llama": text_sizes(32_000, 4096, 11_008, 32, 32, None, 2048)},
    own_keys=frozenset({"mlp_bias"}),
)
