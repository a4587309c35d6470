# SPDX-License-Identifier: Apache-2.0
"""ERNIE 4.5, dense and with experts (Baidu 2025): Llama that rotates neighbours."""

from __future__ import annotations

from collections.abc import Mapping

from pagoda.checkpoints.expert_routing import ExpertRouting
from pagoda.checkpoints.families.shared import expert_counts, with_biases, with_experts
from pagoda.checkpoints.family import Family, GgufFormat
from pagoda.checkpoints.fields import Fields
from pagoda.checkpoints.layer_spec import ExpertsSpec
from pagoda.checkpoints.model_spec import ModelSpec
from pagoda.checkpoints.tensor_names import GGUF_NEIGHBOURS, TensorNames


def _adapt(spec: ModelSpec, fields: Fields) -> ModelSpec:
    bias = fields.flag("use_bias", False)
    return with_biases(spec, qkv=bias, out=bias, mlp=bias)


_DEFAULTS = {"rms_norm_eps": 1e-5, "rope_theta": 500_000.0, "tie_word_embeddings": True}
ERNIE = Family(
    "Ernie4_5ForCausalLM",
    "ERNIE 4.5 0.3B",
    _adapt,
    names=TensorNames(rotates_neighbours=True),
    gguf=GgufFormat("ernie4_5", names=GGUF_NEIGHBOURS),
    defaults={**_DEFAULTS, "num_key_value_heads": 2, "head_dim": 128},
    aliases=frozenset({"Ernie4_5_ForCausalLM"}),
)


# ---- ERNIE 4.5 with experts: chosen by corrected shares, and some for all tokens


def _gguf_moe(fields: Fields) -> Mapping[str, object]:
    fields.require("expert_weights_norm", True)
    return {"moe_layer_start_index": fields.count(_FIRST, 0)}


def _adapt_moe(spec: ModelSpec, fields: Fields) -> ModelSpec:
    fields.require("use_bias", False)
    fields.require("moe_norm_min", 1e-12)
    counts = expert_counts(fields, "moe_num_experts", (64, 6))
    inner = fields.positive("moe_intermediate_size", 1536)
    experts = ExpertsSpec(
        ExpertRouting(*counts, renormalize=True),
        inner,
        correction=True,
        shared_size=fields.count("moe_num_shared_experts", 2) * inner,
    )
    return with_experts(spec, experts, _sparse(fields, spec.num_layers))


def _sparse(fields: Fields, num_layers: int) -> list[int]:
    """Every so manyth layer from a first to a last one, -1 being that of the model."""
    first, every = (
        fields.count("moe_layer_start_index", 1),
        fields.positive("moe_layer_interval", 1),
    )
    end = fields.values.get("moe_layer_end_index", -1)
    last = num_layers - 1 if end == -1 else fields.count("moe_layer_end_index")
    return [
        layer for layer in range(num_layers) if first <= layer <= last and (layer + 1) % every == 0
    ]


_FIRST = "leading_dense_block_count"
ERNIE_MOE = Family(
    "Ernie4_5_MoeForCausalLM",
    "ERNIE 4.5 21B-A3B and 300B-A47B",
    _adapt_moe,
    names=TensorNames(
        rotates_neighbours=True,
        correction="mlp.moe_statics.e_score_correction_bias",
        correction_rows=True,
    ),
    gguf=GgufFormat(
        "ernie4_5-moe",
        names=GGUF_NEIGHBOURS,
        keys={
            "expert_count": "moe_num_experts",
            "expert_used_count": "num_experts_per_tok",
            "expert_shared_count": "moe_num_shared_experts",
            "expert_feed_forward_length": "moe_intermediate_size",
            "interleave_moe_layer_step": "moe_layer_interval",
        },
        values=_gguf_moe,
        read=frozenset({_FIRST}),
    ),
    renamed={"moe_k": "num_experts_per_tok"},
    defaults={**_DEFAULTS, "num_key_value_heads": 4},
    own_keys=frozenset({"moe_num_experts", "moe_num_shared_experts"}),
)
