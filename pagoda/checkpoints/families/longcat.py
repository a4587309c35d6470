# SPDX-License-Identifier: Apache-2.0
"""LongCat-Flash: pairs of layers, of which the first one's experts count behind the second one (Meituan 2025)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from pagoda.checkpoints.expert_routing import ExpertRouting
from pagoda.checkpoints.families.deepseek import with_latents
from pagoda.checkpoints.families.shared import MAX_EXPERTS, with_attention_of
from pagoda.checkpoints.family import Family
from pagoda.checkpoints.fields import Fields
from pagoda.checkpoints.layer_spec import ExpertsSpec, LayerSpec
from pagoda.checkpoints.model_spec import ModelSpec
from pagoda.checkpoints.tensor_names import TensorNames


def _values(fields: Fields) -> Mapping[str, object]:
    """Layers, each with attention and an MLP, of which files count two as one."""

    def either(own: str, name: str, usual: int) -> int:
        return fields.positive(own, fields.positive(name, usual))

    pairs = max(1, fields.positive("num_hidden_layers", 56) // 2)
    return {
        "num_hidden_layers": 2 * fields.positive("num_layers", pairs),
        "head_dim": fields.positive("qk_rope_head_dim", 64),
        "intermediate_size": either("ffn_hidden_size", "intermediate_size", 12_288),
        "moe_intermediate_size": either("expert_ffn_hidden_size", "moe_intermediate_size", 2048),
        "num_experts_per_tok": either("moe_topk", "num_experts_per_tok", 12),
    }


def _adapt(spec: ModelSpec, fields: Fields) -> ModelSpec:
    fields.require("router_bias", False)
    fields.require("norm_topk_prob", False)
    kind = fields.values.get("zero_expert_type")
    if kind not in (None, "identity"):
        fields.refuse("zero_expert_type", "must be identity")
    spec = with_latents(spec, fields)
    latent = spec.latent
    if latent is None or latent.query_rank is None:
        fields.refuse("q_lora_rank", "must be a number")
    if fields.flag("mla_scale_q_lora", True):
        latent = replace(latent, query_factor=(spec.hidden_size / latent.query_rank) ** 0.5)
    if fields.flag("mla_scale_kv_lora", True):
        latent = replace(latent, latent_factor=(spec.hidden_size / latent.rank) ** 0.5)
    spec = with_attention_of(spec, latent=latent)
    identities = fields.count("zero_expert_num", 256)
    count = fields.positive("n_routed_experts", 512, most=MAX_EXPERTS) + identities
    chosen = fields.positive("num_experts_per_tok")
    if chosen > count:
        fields.refuse("moe_topk", f"must be at most n_routed_experts and zero_expert_num ({count})")
    routing = ExpertRouting(
        count,
        chosen,
        renormalize=False,
        scaling_factor=fields.number("routed_scaling_factor", 6.0),
    )
    inner = fields.positive("moe_intermediate_size")
    dense = fields.positive("intermediate_size")
    experts = ExpertsSpec(
        routing, inner, correction=True, shared_size=dense, identities=identities, carried=True
    )

    def change(index: int, layer: LayerSpec) -> LayerSpec:
        return layer if index % 2 else replace(layer, mlp=experts)

    return spec.with_layers(change)


_ATTENTION, _MLP = "self_attn.{half}", "mlps.{half}"
LONGCAT = Family(
    "LongcatFlashForCausalLM",
    "LongCat-Flash",
    _adapt,
    names=TensorNames(
        halves=("0", "1"),
        rotates_neighbours=True,
        attention_norm="input_layernorm.{half}",
        mlp_norm="post_attention_layernorm.{half}",
        query_down=f"{_ATTENTION}.q_a_proj",
        query_down_norm=f"{_ATTENTION}.q_a_layernorm",
        query_up=f"{_ATTENTION}.q_b_proj",
        latents=f"{_ATTENTION}.kv_a_proj_with_mqa",
        latent_norm=f"{_ATTENTION}.kv_a_layernorm",
        latent_up=f"{_ATTENTION}.kv_b_proj",
        attention_out=f"{_ATTENTION}.o_proj",
        gate=f"{_MLP}.gate_proj",
        up=f"{_MLP}.up_proj",
        down=f"{_MLP}.down_proj",
        shared_gate=f"{_MLP}.gate_proj",
        shared_up=f"{_MLP}.up_proj",
        shared_down=f"{_MLP}.down_proj",
        router="mlp.router.classifier",
        correction="mlp.router.e_score_correction_bias",
    ),
    values=_values,
    defaults={"rms_norm_eps": 1e-5, "rope_theta": 1e7},
    own_keys=frozenset(
        {"kv_lora_rank", "q_lora_rank", "n_routed_experts", "routed_scaling_factor"}
        | {"zero_expert_num"}
    ),
)
