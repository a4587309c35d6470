# SPDX-License-Identifier: Apache-2.0
"""Granite 3 and 4, dense and with experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from pagoda.checkpoints.expert_routing import ExpertRouting
from pagoda.checkpoints.families.mamba import GGUF_KEYS as GGUF_MAMBA2
from pagoda.checkpoints.families.mamba import GGUF_SCAN, MAMBA_NAMES, with_mamba2
from pagoda.checkpoints.families.shared import (
    expert_counts,
    layer_kinds,
    text_sizes,
    with_attention,
    with_experts,
    without_rotation,
)
from pagoda.checkpoints.family import Family, GgufFormat
from pagoda.checkpoints.fields import Fields
from pagoda.checkpoints.layer_spec import ExpertsSpec, MlpSpec
from pagoda.checkpoints.model_spec import ModelSpec
from pagoda.checkpoints.multipliers import Multipliers
from pagoda.checkpoints.tensor_names import GGUF_NEIGHBOURS, TensorNames

# ---- Granite 3: Llama with four multipliers


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
GGUF_EXPERTS = {
    "expert_count": "num_local_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_shared_feed_forward_length": "shared_intermediate_size",
}
GGUF_STATES = frozenset(
    {"ssm.conv_kernel", "ssm.group_count", "ssm.inner_size", "ssm.state_size", "ssm.time_step_rank"}
)
"""Metadata of Mamba layers, which files of Granite 4 have even where the model has no such layer."""
GRANITE = Family(
    "GraniteForCausalLM",
    "Granite 3, text of Granite Speech and Vision",
    adapt_granite,
    gguf=GgufFormat(
        "granite", names=GGUF_NEIGHBOURS, keys=GGUF_KEYS, values=gguf_positions, read=GGUF_STATES
    ),
    own_keys=MULTIPLIERS | {"mlp_bias"},
    model_types={"granite": text_sizes(32_000, 4096, 11_008, 32, 32, None, 2048)},
)


# ---- Granite 3 with experts, and Granite 4 with Mamba-2 in some layers or none, with experts or without


def _adapt_third(spec: ModelSpec, fields: Fields) -> ModelSpec:
    num_shared = fields.count("shared_intermediate_size", 0)
    return _with_experts(adapt_granite(spec, fields), fields, num_shared)


_ATTENTION, _MAMBA = ("attention", "full_attention"), ("mamba", "linear_attention")
"""Kinds of layers as its makers and transformers call them."""


def _adapt_fourth(spec: ModelSpec, fields: Fields) -> ModelSpec:
    told = fields.text("position_embedding_type", "nope")
    spec = adapt_granite(spec, fields.updated({"position_embedding_type": told}))
    usual = ["mamba"] * spec.num_layers
    kinds = layer_kinds(fields, spec.num_layers, (*_ATTENTION, *_MAMBA), usual)
    spec = with_mamba2(spec, fields, [kind in _MAMBA for kind in kinds])
    num_shared = fields.positive("shared_intermediate_size", 1024)
    if fields.count("num_local_experts", 8):
        return _with_experts(spec, fields, num_shared)
    return spec.with_layers(lambda _, layer: replace(layer, mlp=MlpSpec(num_shared)))


def _with_experts(spec: ModelSpec, fields: Fields, num_shared: int) -> ModelSpec:
    """Experts weighed by a softmax over those chosen, which is that over all of them, renormalized."""
    counts = expert_counts(fields, "num_local_experts", (8, 2))
    routing = ExpertRouting(*counts, renormalize=True)
    inner = fields.positive("intermediate_size")
    experts = ExpertsSpec(routing, inner, shared_size=num_shared)
    return with_experts(spec, experts, range(spec.num_layers))


_NAMES = TensorNames(
    router="block_sparse_moe.router.layer",
    expert_gate="block_sparse_moe.input_linear",
    expert_up="block_sparse_moe.input_linear",
    expert_down="block_sparse_moe.output_linear",
    shared_gate="shared_mlp.input_linear",
    shared_up="shared_mlp.input_linear",
    shared_down="shared_mlp.output_linear",
)
GRANITE_MOE = Family(
    "GraniteMoeForCausalLM",
    "Granite 3 with experts: 1B-A400M, 3B-A800M",
    _adapt_third,
    names=_NAMES,
    gguf=GgufFormat(
        "granitemoe",
        names=GGUF_NEIGHBOURS,
        keys={**GGUF_KEYS, **GGUF_EXPERTS},
        values=gguf_positions,
        read=GGUF_STATES,
    ),
    aliases=frozenset({"GraniteMoeSharedForCausalLM"}),
    own_keys=MULTIPLIERS | {"num_local_experts", "shared_intermediate_size"},
)


def _gguf_fourth(fields: Fields) -> Mapping[str, object]:
    """Kinds of layers, of which those without heads of keys and values are Mamba-2, and sizes."""
    heads = fields.values.get("attention.head_count_kv")
    counts = heads if isinstance(heads, list) else [heads] * fields.positive("block_count")
    inner = fields.positive("ssm.inner_size")
    values: dict[str, object] = {
        **gguf_positions(fields),
        "layer_types": ["attention" if count else "mamba" for count in counts],
        "mamba_expand": inner / fields.positive("embedding_length"),
    }
    if fields.count("expert_count", 0):
        return values
    size = fields.positive("feed_forward_length")
    return {**values, "num_local_experts": 0, "shared_intermediate_size": size}


GRANITE4 = Family(
    "GraniteMoeHybridForCausalLM",
    "Granite 4: H-Small, H-Tiny, H-Micro, H-1B, H-350M, Micro, 1B, 350M",
    _adapt_fourth,
    names=replace(
        _NAMES,
        gate="shared_mlp.input_linear",
        up="shared_mlp.input_linear",
        down="shared_mlp.output_linear",
        **MAMBA_NAMES,
    ),
    gguf=GgufFormat(
        "granitehybrid",
        names=replace(GGUF_NEIGHBOURS, **GGUF_SCAN),
        keys={**GGUF_KEYS, **GGUF_EXPERTS, **GGUF_MAMBA2},
        values=_gguf_fourth,
        read=frozenset({"ssm.inner_size"}),
        required=frozenset({"attention.scale"}),
    ),
    own_keys=MULTIPLIERS | {"num_local_experts", "shared_intermediate_size"},
)
