# SPDX-License-Identifier: Apache-2.0
"""Mistral Small 4 and Large 3: latent attention, queries scaled by positions, and experts (Mistral AI 2025)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from pagoda.checkpoints.expert_routing import ExpertRouting
from pagoda.checkpoints.families.deepseek import with_latents
from pagoda.checkpoints.families.mistral import temperature
from pagoda.checkpoints.families.shared import (
    expert_counts,
    expert_groups,
    layers_behind_dense,
    text_sizes,
    with_attention_of,
    with_experts,
)
from pagoda.checkpoints.family import Family
from pagoda.checkpoints.fields import Fields
from pagoda.checkpoints.layer_spec import ExpertsSpec
from pagoda.checkpoints.model_spec import ModelSpec
from pagoda.checkpoints.rope import rope_table
from pagoda.checkpoints.tensor_names import TensorNames


def _values(fields: Fields) -> Mapping[str, object]:
    """The rotary table, whose part of a head is all of what is rotated."""
    rope = rope_table(fields)
    if rope is None:
        return {}
    own = {**rope.values, "partial_rotary_factor": None}
    if rope.values.get("attention_factor") == 1:  # as vLLM spells tables that scale nothing
        own |= {"mscale": None, "mscale_all_dim": None}
    return {"rope_parameters": own, "rope_scaling": None}


def _adapt(spec: ModelSpec, fields: Fields) -> ModelSpec:
    fields.require("rope_interleave", True)
    counts = expert_counts(fields, "n_routed_experts", (128, 4))
    num_groups, chosen = expert_groups(fields, *counts, (1, 1), least=2)
    routing = ExpertRouting(
        *counts,
        fields.flag("norm_topk_prob", True),
        num_groups=num_groups,
        groups_per_token=chosen,
        group_score="best_two",
        scaling_factor=fields.number("routed_scaling_factor", 1.0),
    )
    inner = fields.positive("moe_intermediate_size", 2048)
    experts = ExpertsSpec(routing, inner, shared_size=fields.count("n_shared_experts", 1) * inner)
    layers = layers_behind_dense(fields, spec.num_layers, 0)
    spec = with_experts(with_latents(spec, fields, 1024), experts, layers)
    return with_attention_of(spec, temperature=temperature(fields))


_PERIOD = "original_max_position_embeddings"
_ROPE = {
    **{"rope_type": "yarn", "rope_theta": 1e4, "factor": 128.0, _PERIOD: 8192},
    **{"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1},
}
MISTRAL4 = Family(
    "Mistral4ForCausalLM",
    "Mistral Small 4, text",
    _adapt,
    names=TensorNames(rotates_neighbours=True),
    renamed={"qk_rope_head_dim": "head_dim"},
    values=_values,
    defaults={
        **{"qk_rope_head_dim": 64, "qk_nope_head_dim": 64, "kv_lora_rank": 256},
        "rope_parameters": _ROPE,
    },
    model_types={"mistral4": text_sizes(131_072, 4096, 12_288, 36, 32, 32, 1_048_576)},
    joins_experts=True,
    own_keys=frozenset(
        {"first_k_dense_replace", "kv_lora_rank", "llama_4_scaling", "llama_4_scaling_beta"}
        | {"n_group"}
        | {"n_routed_experts", "n_shared_experts", "num_local_experts", "q_lora_rank"}
        | {"rope_interleave", "routed_scaling_factor", "topk_group"}
    ),
)
MISTRAL_LARGE3 = replace(
    MISTRAL4,
    architecture="MistralLarge3ForCausalLM",
    models="Mistral Large 3, by the names of its makers' tensors, with a config.json made of params.json",
    names=TensorNames(
        embedding="tok_embeddings",
        norm="norm",
        head="output",
        layers="layers",
        attention_norm="attention_norm",
        query="attention.wq",
        query_down="attention.wq_a",
        query_down_norm="attention.q_a_norm",
        query_up="attention.wq_b",
        latents="attention.wkv_a_with_mqa",
        latent_norm="attention.kv_a_norm",
        latent_up="attention.wkv_b",
        attention_out="attention.wo",
        mlp_norm="ffn_norm",
        gate="feed_forward.w1",
        up="feed_forward.w3",
        down="feed_forward.w2",
        router="gate",
        expert_gate="experts.{expert}.w1",
        expert_up="experts.{expert}.w3",
        expert_down="experts.{expert}.w2",
        shared_gate="shared_experts.w1",
        shared_up="shared_experts.w3",
        shared_down="shared_experts.w2",
        rotates_neighbours=True,
    ),
    model_types={},
    joins_experts=False,
)
