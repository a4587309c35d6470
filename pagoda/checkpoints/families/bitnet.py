# SPDX-License-Identifier: Apache-2.0
"""BitNet b1.58: Llama with norms in front of maps back, made for ternary weights (Ma et al. 2024 and 2025)."""

from __future__ import annotations

from dataclasses import replace

from pagoda.checkpoints.families.shared import dense_mlp
from pagoda.checkpoints.family import Family, GgufFormat
from pagoda.checkpoints.fields import Fields
from pagoda.checkpoints.layer_spec import LayerSpec
from pagoda.checkpoints.model_spec import ModelSpec


def _normed_inside(_: int, layer: LayerSpec) -> LayerSpec:
    attention = replace(layer.attention, output_norm=True)
    return replace(layer, attention=attention, mlp=replace(dense_mlp(layer), inner_norm=True))


def _adapt(spec: ModelSpec, _: Fields) -> ModelSpec:
    return spec.with_layers(_normed_inside)


BITNET = Family(
    "BitNetForCausalLM",
    "BitNet b1.58 2B4T",
    _adapt,
    # The architecture's graph has the gates of the first models of BitNet; later ones have squared ReLU.
    gguf=GgufFormat("bitnet", values=lambda _: {"hidden_act": "silu"}),
    # Of BitNet's own llama.cpp.
    other_gguf=(GgufFormat("bitnet-b1.58"), GgufFormat("bitnet-25")),
    defaults={"num_key_value_heads": 5, "rope_theta": 500000.0, "rms_norm_eps": 1e-5},
    activation="relu2",
    other_activations=frozenset({"silu"}),
)
