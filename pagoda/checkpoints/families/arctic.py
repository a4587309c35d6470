# SPDX-License-Identifier: Apache-2.0
"""Arctic: every other layer has experts of attention's input beside an MLP of its output (Snowflake 2024)."""

from __future__ import annotations

from dataclasses import replace

from pagoda.checkpoints.expert_routing import ExpertRouting
from pagoda.checkpoints.families.shared import expert_counts, with_experts
from pagoda.checkpoints.family import Family
from pagoda.checkpoints.fields import Fields
from pagoda.checkpoints.layer_spec import ExpertsSpec
from pagoda.checkpoints.model_spec import ModelSpec
from pagoda.checkpoints.tensor_names import TensorNames


def _adapt(spec: ModelSpec, fields: Fields) -> ModelSpec:
    fields.require("use_residual", True)
    if not fields.flag("parallel_attn_mlp_res", False):
        fields.refuse("parallel_attn_mlp_res", "must be true")
    counts = expert_counts(fields, "num_local_experts", (8, 1))
    routing = ExpertRouting(*counts, renormalize=counts[1] > 1)
    inner = fields.positive("intermediate_size")
    experts = ExpertsSpec(routing, inner, shared_size=spec.hidden_size, early=True)
    every = fields.positive("moe_layer_frequency", 2)
    layers = range(every - 1, spec.num_layers, every)
    # The norm in front of the dense MLP has another name where experts have that of their norm.
    parts = tuple("residual" if at in layers else "post_attention" for at in range(spec.num_layers))
    spec = replace(spec, names=replace(spec.names, parts=parts))
    return with_experts(spec, experts, layers)


_MOE = "block_sparse_moe"
ARCTIC = Family(
    "ArcticForCausalLM",
    "Snowflake Arctic 480B",
    _adapt,
    names=TensorNames(
        mlp_norm="{part}_layernorm",
        gate=f"{_MOE}.mlp.w1",
        up=f"{_MOE}.mlp.w3",
        down=f"{_MOE}.mlp.w2",
        router=f"{_MOE}.gate",
        expert_gate=f"{_MOE}.experts.{{expert}}.w1",
        expert_up=f"{_MOE}.experts.{{expert}}.w3",
        expert_down=f"{_MOE}.experts.{{expert}}.w2",
        shared_gate="residual_mlp.w1",
        shared_up="residual_mlp.w3",
        shared_down="residual_mlp.w2",
    ),
    defaults={"rms_norm_eps": 1e-5, "rope_theta": 1e6},
    own_keys=frozenset({"num_local_experts"}),
)
