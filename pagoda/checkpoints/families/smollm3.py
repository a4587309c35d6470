# SPDX-License-Identifier: Apache-2.0
"""SmolLM3: Llama in which every fourth layer does not tell positions (NoPE, Yang et al. 2025)."""

from __future__ import annotations

from dataclasses import replace

from pagoda.checkpoints.families.shared import unrotated_layers, without_rotation
from pagoda.checkpoints.family import Family, GgufFormat
from pagoda.checkpoints.fields import Fields
from pagoda.checkpoints.model_spec import MlpSpec, ModelSpec
from pagoda.checkpoints.tensor_names import GGUF_NEIGHBOURS


def _adapt(spec: ModelSpec, fields: Fields) -> ModelSpec:
    if fields.flag("use_sliding_window", False):
        fields.refuse("use_sliding_window", "must be false in models of SmolLM3")
    mlp = MlpSpec(fields.positive("intermediate_size"), fields.flag("mlp_bias", False))
    spec = spec.with_layers(lambda _, layer: replace(layer, mlp=mlp))
    return without_rotation(spec, unrotated_layers(fields, spec.num_layers))


SMOLLM3 = Family(
    "SmolLM3ForCausalLM",
    "SmolLM3",
    _adapt,
    gguf=GgufFormat("smollm3", names=GGUF_NEIGHBOURS),
    defaults={"num_key_value_heads": 4, "tie_word_embeddings": True, "rope_theta": 2e6},
    own_keys=frozenset({"mlp_bias", "no_rope_layers", "no_rope_layer_interval"}),
)
