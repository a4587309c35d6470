# SPDX-License-Identifier: Apache-2.0
"""OLMo 1, 2 and 3, OLMoE and FlexOlmo."""

from __future__ import annotations

from dataclasses import replace

from pagoda.checkpoints.expert_routing import ExpertRouting
from pagoda.checkpoints.families.shared import (
    WINDOW_PATTERN,
    every_nth_full,
    expert_counts,
    gguf_windows,
    with_attention,
    with_experts,
    with_local_rotary,
)
from pagoda.checkpoints.family import Family, GgufFormat
from pagoda.checkpoints.fields import Fields
from pagoda.checkpoints.layer_spec import ExpertsSpec, NormSpec
from pagoda.checkpoints.model_spec import ModelSpec
from pagoda.checkpoints.tensor_names import GGUF_NEIGHBOURS, TensorNames

# ---- OLMo 2 and 3: norms behind instead of before, and one norm for the queries of all heads (OLMo Team 2024)
# OLMo 3 has windows in three of four layers, whose rotary table is not scaled.


def _adapt_second(spec: ModelSpec, _: Fields) -> ModelSpec:
    spec = spec.with_layers(lambda _, layer: replace(layer, pre_norm=False, post_norm=True))
    return with_attention(spec, qk_norm="all")


def _adapt_third(spec: ModelSpec, fields: Fields) -> ModelSpec:
    windows = every_nth_full(fields, spec.num_layers, 4)
    spec = with_attention(_adapt_second(spec, fields), windows)
    return with_local_rotary(spec, fields, spec.rotary["default"].theta)


_NAMES = TensorNames(attention_post_norm="post_attention_layernorm")
_WINDOW = "attention.sliding_window"
OLMO2 = Family(
    "Olmo2ForCausalLM",
    "OLMo 2",
    _adapt_second,
    names=_NAMES,
    gguf=GgufFormat("olmo2"),
    defaults={"rms_norm_eps": 1e-5},
)
OLMO3 = Family(
    "Olmo3ForCausalLM",
    "OLMo 3",
    _adapt_third,
    names=_NAMES,
    gguf=GgufFormat(
        "olmo2",
        keys={_WINDOW: "sliding_window"},
        values=gguf_windows,
        required=frozenset({_WINDOW}),
        read=frozenset({WINDOW_PATTERN}),
    ),
    defaults={"rms_norm_eps": 1e-5, "rope_theta": 500_000.0},
)


# ---- OLMo: Llama with norms that have no weights (Groeneveld et al. 2024)


def _adapt_olmo(spec: ModelSpec, fields: Fields) -> ModelSpec:
    norm = NormSpec(1e-5, "layer", bias=False, weight=False)
    return replace(with_attention(spec, clip=fields.optional_number("clip_qkv")), norm=norm)


OLMO = Family(
    "OlmoForCausalLM",
    "OLMo 1B and 7B",
    _adapt_olmo,
    gguf=GgufFormat(
        "olmo",
        names=GGUF_NEIGHBOURS,
        keys={"attention.layer_norm_epsilon": "layer_norm_eps", "attention.clamp_kqv": "clip_qkv"},
    ),
    own_keys=frozenset({"clip_qkv"}),
)


# ---- FlexOlmo: OLMo 2 with experts (Shi et al. 2025)


def _adapt_flex(spec: ModelSpec, fields: Fields) -> ModelSpec:
    counts = expert_counts(fields, "num_experts", (7, 5))
    routing = ExpertRouting(*counts, fields.flag("norm_topk_prob", False))
    experts = ExpertsSpec(routing, fields.positive("intermediate_size"))
    return with_experts(_adapt_second(spec, fields), experts, range(spec.num_layers))


FLEX_OLMO = Family(
    "FlexOlmoForCausalLM",
    "FlexOlmo",
    _adapt_flex,
    names=_NAMES,
    defaults={"rope_theta": 500_000.0},
    own_keys=frozenset({"num_experts"}),
)


# ---- OLMoE: experts in every layer, and one norm for the queries of all heads (Muennighoff et al. 2024)


def _adapt(spec: ModelSpec, fields: Fields) -> ModelSpec:
    counts = expert_counts(fields, "num_experts", (64, 8))
    routing = ExpertRouting(*counts, fields.flag("norm_topk_prob", False))
    experts = ExpertsSpec(routing, fields.positive("intermediate_size"))
    spec = with_attention(spec, qk_norm="all")
    return with_experts(spec, experts, range(spec.num_layers))


OLMOE = Family(
    "OlmoeForCausalLM",
    "OLMoE 1B-7B",
    _adapt,
    gguf=GgufFormat(
        "olmoe",
        keys={"expert_count": "num_experts", "expert_used_count": "num_experts_per_tok"},
        # Files do not say so: llama.cpp never renormalizes in models of this architecture.
        values=lambda _: {"norm_topk_prob": False},
    ),
    defaults={"rms_norm_eps": 1e-5},
    own_keys=frozenset({"num_experts"}),
)
