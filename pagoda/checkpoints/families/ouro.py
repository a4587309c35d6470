# SPDX-License-Identifier: Apache-2.0
"""Ouro: Llama with norms on both sides, whose layers are gone through several times (Zhu et al. 2025)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from pagoda.checkpoints.family import Family
from pagoda.checkpoints.fields import Fields
from pagoda.checkpoints.layer_spec import LayerSpec
from pagoda.checkpoints.model_spec import ModelSpec
from pagoda.checkpoints.tensor_names import TensorNames


def _values(fields: Fields) -> Mapping[str, object]:
    """Layers, each of which counts as often as it is gone through."""
    count, steps = fields.positive("num_hidden_layers"), fields.positive("total_ut_steps", 4)
    return {"num_hidden_layers": count * steps}


def _adapt(spec: ModelSpec, fields: Fields) -> ModelSpec:
    fields.require("use_sliding_window", False)
    fields.require("early_exit_threshold", 1)
    steps = fields.positive("total_ut_steps", 4)
    count = spec.num_layers // steps

    def change(index: int, layer: LayerSpec) -> LayerSpec:
        return replace(layer, post_norm=True, begins_loop=index > 0 and index % count == 0)

    names = replace(spec.names, numbers=tuple(range(count)) * steps)
    return replace(spec.with_layers(change), names=names)


OURO = Family(
    "OuroForCausalLM",
    "Ouro 1.4B and 2.6B",
    _adapt,
    names=TensorNames(
        attention_post_norm="input_layernorm_2", mlp_post_norm="post_attention_layernorm_2"
    ),
    values=_values,
)
