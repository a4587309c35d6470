# SPDX-License-Identifier: Apache-2.0
"""gpt-oss: experts with clamped gates and biases, windows in every other layer, and sinks (OpenAI 2025)."""

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
)
from pagoda.checkpoints.family import Family, GgufFormat
from pagoda.checkpoints.fields import Fields
from pagoda.checkpoints.layer_spec import ClampedGate, ExpertsSpec
from pagoda.checkpoints.model_spec import ModelSpec
from pagoda.checkpoints.tensor_names import GGUF_NAMES, TensorNames


def _adapt(spec: ModelSpec, fields: Fields) -> ModelSpec:
    windows = every_nth_full(fields, spec.num_layers, 2, usual_window=128)
    bias = fields.flag("attention_bias", True)
    spec = with_attention(spec, windows, qkv_bias=bias, output_bias=bias, sinks=True)
    counts = expert_counts(fields, "num_local_experts", (128, 4))
    gate = ClampedGate(fields.number("swiglu_alpha", 1.702), fields.number("swiglu_limit", 7.0))
    experts = ExpertsSpec(
        ExpertRouting(*counts, renormalize=True),  # a softmax over those chosen alone
        fields.positive("intermediate_size"),
        bias=True,
        clamp=gate,
    )
    return with_experts(spec, experts, range(spec.num_layers))


_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "original_max_position_embeddings": 4096,
    "truncate": False,
}
GPT_OSS = Family(
    "GptOssForCausalLM",
    "gpt-oss-20b, gpt-oss-120b",
    _adapt,
    names=TensorNames(
        router="mlp.router",
        expert_gate="mlp.experts.gate_up_proj",
        expert_up="mlp.experts.gate_up_proj",
        expert_down="mlp.experts.down_proj",
        expert_layout="interleaved",
    ),
    gguf=GgufFormat(
        "gpt-oss",
        names=replace(GGUF_NAMES, mlp_norm="post_attention_norm"),
        keys={
            "attention.sliding_window": "sliding_window",
            "expert_count": "num_local_experts",
            "expert_used_count": "num_experts_per_tok",
            "expert_feed_forward_length": "intermediate_size",
        },
        # Files do not say so; the models' own files do.
        values=lambda fields: {"rope_scaling": {"truncate": False}, **gguf_windows(fields)},
        read=frozenset({WINDOW_PATTERN}),
    ),
    defaults={
        "num_key_value_heads": 8,
        "head_dim": 64,
        "rms_norm_eps": 1e-5,
        "rope_theta": 150_000.0,
        "rope_parameters": _ROPE,
    },
    own_keys=frozenset({"num_local_experts", "swiglu_alpha", "swiglu_limit"}),
)
