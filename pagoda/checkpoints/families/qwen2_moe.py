# SPDX-License-Identifier: Apache-2.0
"""Qwen2-MoE: Qwen2 with experts, and one more that every token goes through by a score of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pagoda.checkpoints.expert_routing import ExpertRouting
from pagoda.checkpoints.families.shared import (
    expert_counts,
    layer_windows,
    sparse_layers,
    with_attention,
    with_experts,
)
from pagoda.checkpoints.family import Family, GgufFormat
from pagoda.checkpoints.fields import Fields
from pagoda.checkpoints.model_spec import ExpertsSpec, ModelSpec
from pagoda.checkpoints.tensor_names import TensorNames


def _adapt(spec: ModelSpec, fields: Fields) -> ModelSpec:
    windows = layer_windows(fields, spec.num_layers)
    bias = fields.flag("qkv_bias", True)
    spec = with_attention(spec, windows, qkv_bias=bias, output_bias=False)
    return with_shared_expert(
        spec, fields, counts=(60, 4), inner=1408, shared=5632, renormalize=False
    )


def with_shared_expert(
    spec: ModelSpec,
    fields: Fields,
    *,
    counts: tuple[int, int],
    inner: int,
    shared: int,
    renormalize: bool,
) -> ModelSpec:
    """The model with experts and one that every token goes through by a score; values are for silent files."""
    if fields.values.get("num_experts") == 0:
        return spec  # all layers are dense
    own = expert_counts(fields, "num_experts", counts)
    experts = ExpertsSpec(
        ExpertRouting(*own, fields.flag("norm_topk_prob", renormalize)),
        fields.positive("moe_intermediate_size", inner),
        shared_size=fields.positive("shared_expert_intermediate_size", shared),
        scores_shared=True,
    )
    return with_experts(spec, experts, sparse_layers(fields, spec.num_layers))


SHARED_NAMES: Mapping[str, Any] = {
    "shared_gate": "mlp.shared_expert.gate_proj",
    "shared_up": "mlp.shared_expert.up_proj",
    "shared_down": "mlp.shared_expert.down_proj",
}
"""Names of the linear layers of the expert that every token goes through."""
GGUF_EXPERTS = {
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
}
"""Metadata of experts, with the keys of config.json that say the same."""
QWEN2_MOE = Family(
    "Qwen2MoeForCausalLM",
    "Qwen1.5-MoE-A2.7B, Qwen2-57B-A14B",
    _adapt,
    names=TensorNames(**SHARED_NAMES),
    gguf=GgufFormat(
        "qwen2moe",
        keys=GGUF_EXPERTS,
        # Files do not say so: llama.cpp never renormalizes in models of this architecture.
        values=lambda _: {"norm_topk_prob": False},
    ),
    own_keys=frozenset({"num_experts", "qkv_bias", "shared_expert_intermediate_size"}),
    defaults={"num_key_value_heads": 16},
)
