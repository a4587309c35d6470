# SPDX-License-Identifier: Apache-2.0
"""Granite 3: Llama with four multipliers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from pagoda.checkpoints.families.shared import with_attention, without_rotation
from pagoda.checkpoints.family import Family, GgufFormat
from pagoda.checkpoints.fields import Fields
from pagoda.checkpoints.model_spec import MlpSpec, ModelSpec, Multipliers
from pagoda.checkpoints.tensor_names import GGUF_NEIGHBOURS


def adapt_granite(spec: ModelSpec, fields: Fields) -> ModelSpec:
    """The model with the multipliers that all Granites have, and dense MLPs."""
    mlp = MlpSpec(fields.positive("intermediate_size"), fields.flag("mlp_bias", False))
    spec = spec.with_layers(lambda _, layer: replace(layer, mlp=mlp))
    spec = with_attention(spec, scale=fields.number("attention_multiplier", 1.0))
    multipliers = Multipliers(
        embedding=fields.number("embedding_multiplier", 1.0),
        residual=fields.number("residual_multiplier", 1.0),
        logits=1 / fields.number("logits_scaling", 1.0),
    )
    spec = replace(spec, multipliers=multipliers)
    kind = fields.text("position_embedding_type", "rope")
    if kind not in ("rope", "nope"):
        fields.refuse("position_embedding_type", "must be 'rope' or 'nope'")
    if kind == "rope":
        return spec
    return without_rotation(spec, [True] * spec.num_layers)


def gguf_positions(fields: Fields) -> Mapping[str, object]:
    """Key of positions by the flag that files have."""
    told = fields.flag("rope.scaling.finetuned", True)
    return {"position_embedding_type": "rope" if told else "nope"}


MULTIPLIERS = frozenset(
    {"attention_multiplier", "embedding_multiplier", "residual_multiplier", "logits_scaling"}
)
"""Keys of config.json that all Granites have."""
GGUF_KEYS = {
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
}
GGUF_STATES = frozenset(
    {"ssm.conv_kernel", "ssm.group_count", "ssm.inner_size", "ssm.state_size", "ssm.time_step_rank"}
)
"""Metadata of Mamba layers, which files of Granite 4 have even where the model has no such layer."""
GRANITE = Family(
    "GraniteForCausalLM",
    "Granite 3",
    adapt_granite,
    gguf=GgufFormat(
        "granite", names=GGUF_NEIGHBOURS, keys=GGUF_KEYS, values=gguf_positions, read=GGUF_STATES
    ),
    own_keys=MULTIPLIERS | {"mlp_bias"},
)
