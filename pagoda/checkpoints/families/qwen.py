# SPDX-License-Identifier: Apache-2.0
"""Qwen2 and Qwen3, dense and with experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pagoda.checkpoints.draft_heads import DraftHeadSpec
from pagoda.checkpoints.expert_routing import ExpertRouting
from pagoda.checkpoints.families.shared import (
    expert_counts,
    layer_windows,
    sparse_layers,
    text_sizes,
    with_attention,
    with_experts,
)
from pagoda.checkpoints.family import Family, GgufFormat
from pagoda.checkpoints.fields import Fields
from pagoda.checkpoints.layer_spec import ExpertsSpec
from pagoda.checkpoints.model_spec import ModelSpec
from pagoda.checkpoints.pooling_spec import ClassifierSpec
from pagoda.checkpoints.tensor_names import TensorNames, with_joined_experts

# ---- Qwen2 and Qwen2.5: Llama with biases of queries, keys and values


def _adapt_qwen2(spec: ModelSpec, fields: Fields) -> ModelSpec:
    windows = layer_windows(fields, spec.num_layers)
    return with_attention(spec, windows, qkv_bias=True, output_bias=False)


_QWEN2_VL = {
    **text_sizes(152_064, 8192, 29_568, 80, 64, 8, 32_768),
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
}

_REWARD = ClassifierSpec("score.2", "score.0", activation="relu", pooling="all")
"""Head of reward models, which scores each token."""
QWEN2 = Family(
    "Qwen2ForCausalLM",
    "Qwen2, Qwen2.5, text of Qwen2-VL and Qwen2.5-VL",
    _adapt_qwen2,
    gguf=GgufFormat("qwen2"),
    other_gguf=(GgufFormat("qwen2vl"),),
    model_types={
        "qwen2": text_sizes(151_936, 4096, 22_016, 32, 32, 32, 32_768),
        "qwen2_vl_text": _QWEN2_VL,
        "qwen2_5_vl_text": _QWEN2_VL,
    },
    aliases=frozenset({"Qwen2VLForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration"}),
    defaults={"num_key_value_heads": 32},
    heads={it: lambda _: _REWARD for it in ("ForRewardModel", "ForProcessRewardModel")},
)


# ---- MiMo: Qwen2 with a head that guesses one more token (LLM-Core Xiaomi 2025)


def _adapt_mimo(spec: ModelSpec, fields: Fields) -> ModelSpec:
    spec = _adapt_qwen2(spec, fields)
    if fields.count("num_nextn_predict_layers", 0) == 0:
        return spec
    layers = "model.mtp_layers"
    head = DraftHeadSpec(
        layers=layers,
        norm=f"{layers}.0.final_layernorm",
        hidden_norm=f"{layers}.0.hidden_layernorm",
        embedding_norm=f"{layers}.0.token_layernorm",
        joined=f"{layers}.0.input_proj",
        hidden_first=True,
        passes_normed=True,
    )
    return replace(spec, next_token=head)


MIMO = Family(
    "MiMoForCausalLM",
    "MiMo-7B",
    _adapt_mimo,
    defaults={"num_key_value_heads": 32},
)


# ---- Qwen2-MoE: Qwen2 with experts, and one more that every token goes through by a score of its own


def _adapt_qwen2_moe(spec: ModelSpec, fields: Fields) -> ModelSpec:
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
    _adapt_qwen2_moe,
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


# ---- Qwen3: Llama with norms of queries and keys

_OF_PICTURES = frozenset({"n_deepstack_layers"})
"""Metadata of layers that are given what is made of pictures."""


def _adapt_qwen3(spec: ModelSpec, fields: Fields) -> ModelSpec:
    fields.require("use_qk_norm", True)
    return with_attention(spec, layer_windows(fields, spec.num_layers), qk_norm="head")


QWEN3 = Family(
    "Qwen3ForCausalLM",
    "Qwen3, text of Qwen3-VL; Voyage 4 nano (vectors)",
    _adapt_qwen3,
    gguf=GgufFormat("qwen3"),
    other_gguf=(GgufFormat("qwen3vl", read=_OF_PICTURES),),
    defaults={"num_key_value_heads": 32, "head_dim": 128},
    model_types={
        "qwen3": text_sizes(151_936, 4096, 22_016, 32, 32, 32, 32_768),
        "qwen3_vl_text": {
            **text_sizes(151_936, 4096, 22_016, 32, 32, 32, 128_000),
            "rope_theta": 500_000.0,
        },
    },
    own_keys=frozenset({"use_qk_norm"}),
    aliases=frozenset({"VoyageQwen3BidirectionalEmbedModel"}),
)


# ---- Qwen3-MoE: Qwen3 with experts in some or all layers


def _adapt_qwen3_moe(spec: ModelSpec, fields: Fields) -> ModelSpec:
    fields.require("use_qk_norm", True)
    windowed = fields.flag("use_sliding_window", False)
    window = fields.positive("sliding_window", 4096) if windowed else None
    spec = with_attention(spec, (window,) * spec.num_layers, qk_norm="head")
    # New files spell the field as Mixtral does.
    name = "num_local_experts" if "num_local_experts" in fields.values else "num_experts"
    if fields.values.get(name) == 0:
        return spec  # all layers are dense
    counts = expert_counts(fields, name, (128, 8))
    routing = ExpertRouting(*counts, fields.flag("norm_topk_prob", False))
    experts = ExpertsSpec(routing, fields.positive("moe_intermediate_size", 768))
    return with_experts(spec, experts, sparse_layers(fields, spec.num_layers))


_GGUF_MOE = GgufFormat(
    "qwen3moe",
    keys={
        "expert_count": "num_experts",
        "expert_used_count": "num_experts_per_tok",
        "expert_feed_forward_length": "moe_intermediate_size",
    },
    # Files do not say so: llama.cpp renormalizes in all models of this architecture.
    values=lambda _: {"norm_topk_prob": True},
)
QWEN3_MOE = Family(
    "Qwen3MoeForCausalLM",
    "Qwen3-30B-A3B, Qwen3-235B-A22B, Qwen3-Coder, text of InternVL3.5 with experts",
    _adapt_qwen3_moe,
    gguf=_GGUF_MOE,
    other_gguf=(replace(_GGUF_MOE, architecture="qwen3vlmoe", read=_OF_PICTURES),),
    own_keys=frozenset({"num_experts", "num_local_experts", "use_qk_norm"}),
    defaults={"num_key_value_heads": 4},
    model_types={"qwen3_moe": text_sizes(151_936, 2048, 6144, 24, 32, 4, 32_768)},
)


# ---- Qwen3-VL with experts: weights are of inputs by outputs, and all experts of a layer are in two tensors


def _adapt_qwen3_vl_moe(spec: ModelSpec, fields: Fields) -> ModelSpec:
    usual = {"num_experts": 60, "num_experts_per_tok": 4, "moe_intermediate_size": 1408}
    if fields.values.get("num_local_experts") is not None:
        del usual["num_experts"]
    silent = {name: size for name, size in usual.items() if fields.values.get(name) is None}
    # The class of transformers has no field for it, and renormalizes.
    return _adapt_qwen3_moe(spec, fields.updated({**silent, "norm_topk_prob": True}))


QWEN3_VL_MOE = Family(
    "Qwen3VLMoeForConditionalGeneration",
    "text of Qwen3-VL with experts: 30B-A3B, 235B-A22B",
    _adapt_qwen3_vl_moe,
    names=replace(with_joined_experts(TensorNames()), expert_layout="transposed"),
    joins_experts=True,
    own_keys=QWEN3_MOE.own_keys,
    model_types={
        "qwen3_vl_moe_text": {
            **text_sizes(151_936, 2048, 5632, 24, 16, 16, 128_000),
            "head_dim": 128,
            "rope_theta": 500_000.0,
            "tie_word_embeddings": True,
        }
    },
)
