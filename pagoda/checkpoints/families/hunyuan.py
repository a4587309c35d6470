# SPDX-License-Identifier: Apache-2.0
"""Hunyuan, dense and with experts (Tencent 2025): norms of queries and keys behind the rotary embedding."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from pagoda.checkpoints.expert_routing import ExpertRouting
from pagoda.checkpoints.families.shared import expert_counts, with_attention, with_experts
from pagoda.checkpoints.family import Family, GgufFormat
from pagoda.checkpoints.fields import Fields
from pagoda.checkpoints.layer_spec import ExpertsSpec
from pagoda.checkpoints.model_spec import ModelSpec
from pagoda.checkpoints.tensor_names import TensorNames


def _adapt(spec: ModelSpec, fields: Fields) -> ModelSpec:
    fields.require("use_qk_norm", True)
    fields.require("use_cla", False)
    return with_attention(spec, qk_norm="head", norms_rotated=True)


_NAMES = TensorNames(
    query_norm="self_attn.query_layernorm",
    key_norm="self_attn.key_layernorm",
    router="mlp.gate.wg",
    shared_gate="mlp.shared_mlp.gate_proj",
    shared_up="mlp.shared_mlp.up_proj",
    shared_down="mlp.shared_mlp.down_proj",
)
HUNYUAN = Family(
    "HunYuanDenseV1ForCausalLM",
    "Hunyuan 0.5B, 1.8B, 4B and 7B",
    _adapt,
    names=_NAMES,
    gguf=GgufFormat("hunyuan-dense"),
    defaults={"rms_norm_eps": 1e-5},
    own_keys=frozenset({"use_qk_norm"}),
)


# ---- Hunyuan with experts, and one for all tokens


def _values(fields: Fields) -> Mapping[str, object]:
    """Numbers of experts, which some files tell of each layer. Raises ConfigError: layers differ."""
    found: dict[str, object] = {}
    for name in ("num_experts", "moe_topk", "num_shared_expert", "moe_intermediate_size"):
        value = fields.values.get(name)
        if isinstance(value, list):
            numbers = set(fields.integers(name))
            if len(numbers) != 1:
                fields.refuse(name, "must be the same of all layers")
            value = numbers.pop()
        if value is not None:
            found[name] = value
    if "moe_topk" in found:
        found["num_experts_per_tok"] = found["moe_topk"]
    return found


def _adapt_moe(spec: ModelSpec, fields: Fields) -> ModelSpec:
    inner = fields.positive("intermediate_size")
    for name, usual in (("num_shared_expert", 1), ("moe_intermediate_size", inner)):
        fields.require(name, usual)
    counts = expert_counts(fields, "num_experts", (1, 1))
    routing = ExpertRouting(*counts, renormalize=True)
    experts = ExpertsSpec(routing, inner, shared_size=inner)
    return with_experts(_adapt(spec, fields), experts, range(spec.num_layers))


HUNYUAN_MOE = replace(
    HUNYUAN,
    architecture="HunYuanMoEV1ForCausalLM",
    models="Hunyuan A13B",
    adapt=_adapt_moe,
    gguf=GgufFormat(
        "hunyuan-moe",
        keys={
            "expert_count": "num_experts",
            "expert_used_count": "moe_topk",
            "expert_shared_count": "num_shared_expert",
            "expert_feed_forward_length": "moe_intermediate_size",
        },
    ),
    values=_values,
    own_keys=frozenset({"num_experts", "use_qk_norm"}),
    aliases=frozenset({"HunYuanForCausalLM"}),
)
