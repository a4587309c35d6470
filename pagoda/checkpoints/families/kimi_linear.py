# SPDX-License-Identifier: Apache-2.0
"""Kimi Linear: delta rules that forget by channels, and latent attention without positions (Kimi Team 2025)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from pagoda.checkpoints.families.deepseek import GGUF, KEYS, gguf_latents, with_latents
from pagoda.checkpoints.families.shared import (
    conv_width,
    gguf_kv_heads,
    layer_kinds,
    sigmoid_experts,
    sparse_by_kind,
    with_experts,
    with_state,
    without_rotation,
)
from pagoda.checkpoints.family import Family
from pagoda.checkpoints.fields import Fields
from pagoda.checkpoints.model_spec import ModelSpec
from pagoda.checkpoints.state_layers import ChannelDeltaSpec
from pagoda.checkpoints.tensor_names import GGUF_LATENTS, TensorNames

_DELTA, _ATTENTION = "linear_attention", "full_attention"
_SIZES = {"n_routed_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 1024}


def _values(fields: Fields) -> Mapping[str, object]:
    """Kinds of layers and sizes of delta rules, which published files have in a table of their own."""
    own = fields.table("linear_attn_config")
    if own is None:
        return {}
    names = {
        "head_dim": "linear_head_dim",
        "num_heads": "linear_num_heads",
        "short_conv_kernel_size": "linear_conv_kernel_dim",
    }
    found: dict[str, object] = {names[it]: own.positive(it) for it in names if it in own}
    if fields.values.get("layer_types") is None and "full_attn_layers" in own:
        attending = set(own.integers("full_attn_layers"))  # counted from one
        layers = range(1, fields.positive("num_hidden_layers") + 1)
        found["layer_types"] = [_ATTENTION if at in attending else _DELTA for at in layers]
    return found


def _adapt(spec: ModelSpec, fields: Fields) -> ModelSpec:
    fields.require("mla_use_nope", True)
    fields.require("num_nextn_predict_layers", 0)
    usual = [_ATTENTION if at and at % 4 == 0 else _DELTA for at in range(spec.num_layers)]
    kinds = layer_kinds(fields, spec.num_layers, (_DELTA, _ATTENTION), usual)
    experts = sigmoid_experts(fields, _SIZES, scale=2.446)
    spec = with_experts(spec, experts, sparse_by_kind(fields, spec.num_layers))
    spec = without_rotation(with_latents(spec, fields), [True] * spec.num_layers)
    state = ChannelDeltaSpec(
        fields.positive("linear_num_heads", 32),
        fields.positive("linear_head_dim", 128),
        conv_width(fields, "linear_conv_kernel_dim", 4),
    )
    return with_state(spec, state, [at for at, it in enumerate(kinds) if it == _DELTA], bias=False)


def _gguf_values(fields: Fields) -> Mapping[str, object]:
    """Values of files with latent attention, and kinds of layers: attention has heads of keys."""
    fields.require("expert_gating_func", 2)
    counts = gguf_kv_heads(fields)
    return {
        **gguf_latents(fields),
        "layer_types": [_ATTENTION if count else _DELTA for count in counts],
        "linear_num_heads": fields.positive("attention.head_count"),
        "num_key_value_heads": fields.positive("attention.head_count"),
        # llama.cpp always renormalizes, whatever files say.
        "norm_topk_prob": fields.flag("expert_weights_norm", True),
        "n_group": fields.positive("expert_group_count", 1),
        "topk_group": fields.positive("expert_group_used_count", 1),
    }


_EXPERTS = "block_sparse_moe.experts.{expert}"
KIMI_LINEAR = Family(
    "KimiLinearForCausalLM",
    "Kimi Linear 48B-A3B",
    _adapt,
    names=TensorNames(
        state_decay="self_attn.A_log",
        state_bias="self_attn.dt_bias",
        state_norm="self_attn.o_norm",
        router="block_sparse_moe.gate",
        correction="block_sparse_moe.gate.e_score_correction_bias",
        expert_gate=f"{_EXPERTS}.w1",
        expert_up=f"{_EXPERTS}.w3",
        expert_down=f"{_EXPERTS}.w2",
        shared_gate="block_sparse_moe.shared_experts.gate_proj",
        shared_up="block_sparse_moe.shared_experts.up_proj",
        shared_down="block_sparse_moe.shared_experts.down_proj",
    ),
    gguf=replace(
        GGUF,
        architecture="kimi-linear",
        names=replace(
            GGUF_LATENTS,
            channel_gate="ssm_{gate}_{part}",
            channel_b="ssm_beta",
            channel_conv="ssm_conv1d_{what}",
            state_decay="ssm_a",
            log_decay=False,
            state_bias="ssm_dt.bias",
            state_norm="ssm_norm",
        ),
        keys={
            **GGUF.keys,
            "kda.head_dim": "linear_head_dim",
            "ssm.conv_kernel": "linear_conv_kernel_dim",
        },
        values=_gguf_values,
        read=GGUF.read | {"expert_gating_func"},
    ),
    renamed={
        "qk_rope_head_dim": "head_dim",
        "model_max_length": "max_position_embeddings",
        "moe_renormalize": "norm_topk_prob",
        "moe_router_activation_func": "scoring_func",
        "num_expert_group": "n_group",
        "num_experts": "n_routed_experts",
        "num_local_experts": "n_routed_experts",
        "num_experts_per_token": "num_experts_per_tok",
        "num_shared_experts": "n_shared_experts",
    },
    values=_values,
    defaults={
        "qk_rope_head_dim": 64,
        "q_lora_rank": None,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 1_048_576,
    },
    own_keys=KEYS | {"num_experts", "num_local_experts", "num_shared_experts"},
)
