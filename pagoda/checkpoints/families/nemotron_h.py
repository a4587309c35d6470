# SPDX-License-Identifier: Apache-2.0
"""Nemotron-H and Nemotron 3: Mamba-2, attention, MLPs and experts, each with a number of its own (NVIDIA 2025)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from pagoda.checkpoints.families.mamba import (
    GGUF_SCAN,
    MIXER_NAMES,
    gguf_heads,
    mamba2,
)
from pagoda.checkpoints.families.shared import dense_mlp, sigmoid_experts, without_rotation
from pagoda.checkpoints.family import Family, GgufFormat
from pagoda.checkpoints.fields import Fields
from pagoda.checkpoints.layer_spec import ExpertsSpec, LayerSpec
from pagoda.checkpoints.model_spec import ModelSpec
from pagoda.checkpoints.tensor_names import GGUF_NAMES, TensorNames

_KINDS = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
_NAMES = {"linear_attention": "mamba", "full_attention": "attention"}
"""Kinds as transformers calls them."""
_EXPERTS = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 7688,
}


def _kinds(fields: Fields) -> list[str]:
    """Kinds of what has a number in files: mamba, attention, mlp or moe."""
    name = "layers_block_type"
    if fields.values.get(name) is None and fields.values.get("layer_types") is None:
        name = "hybrid_override_pattern"
        kinds = [_KINDS.get(it, it) for it in fields.text(name, "ME*-")]
    else:
        name = name if fields.values.get(name) is not None else "layer_types"
        kinds = [_NAMES.get(it, it) for it in fields.texts(name)]
    if not kinds or not {*kinds} <= {*_KINDS.values()}:
        fields.refuse(name, "must name mamba (M), attention (*), mlp (-) and moe (E) layers only")
    for before, kind in zip(["mlp", *kinds], kinds, strict=False):
        if {before, kind} <= {"mlp", "moe"}:
            fields.refuse(
                name, "must have a mamba or attention layer in front of each mlp or moe layer"
            )
    return kinds


def _values(fields: Fields) -> Mapping[str, object]:
    """The number of layers, each of them a mixer with the MLP behind it."""
    kinds = _kinds(fields)
    heads, size = fields.positive("mamba_num_heads", 128), fields.positive("mamba_head_dim", 64)
    return {
        "num_hidden_layers": sum(kind in ("mamba", "attention") for kind in kinds),
        "mamba_n_heads": heads,
        "mamba_d_head": size,
        "mamba_proj_bias": fields.flag("use_bias", False),
        "hidden_act": fields.text("mlp_hidden_act", "relu2"),
    }


def _adapt(spec: ModelSpec, fields: Fields) -> ModelSpec:
    kinds = _kinds(fields)
    fields.require("mamba_hidden_act", "silu")
    numbers = [number for number, kind in enumerate(kinds) if kind in ("mamba", "attention")]
    behind = [kinds[number + 1] if number + 1 < len(kinds) else "" for number in numbers]
    mlp = replace(dense_mlp(spec.layers[0]), bias=fields.flag("mlp_bias", False))
    mlps = {"mlp": mlp, "moe": _experts(fields) if "moe" in kinds else None}
    state = None
    if "mamba" in kinds:
        heads = fields.positive("mamba_n_heads")
        state = mamba2(fields, heads * fields.positive("mamba_d_head"))
    bias = fields.flag("mamba_proj_bias", False)
    spec = without_rotation(spec, [True] * spec.num_layers)

    def change(index: int, layer: LayerSpec) -> LayerSpec:
        is_state = kinds[numbers[index]] == "mamba"
        own = bias if is_state else False
        attention = replace(layer.attention, qkv_bias=own, output_bias=own)
        mlp = mlps.get(behind[index])
        return replace(layer, attention=attention, mlp=mlp, state=state if is_state else None)

    spec = spec.with_layers(change)
    return replace(spec, names=replace(spec.names, numbers=tuple(numbers)))


def _experts(fields: Fields) -> ExpertsSpec:
    fields.require("n_shared_experts", 1)
    fields.require("mlp_bias", False)
    experts = sigmoid_experts(fields, _EXPERTS, scale=1.0)
    size = fields.positive("moe_shared_expert_intermediate_size", 7688)
    given = "moe_latent_size"
    latent = None if fields.values.get(given) is None else fields.positive(given)
    return replace(experts, shared_size=size, gated=False, latent_size=latent)


_KV, _INNER, _DIM = "attention.head_count_kv", "feed_forward_length", "rope.dimension_count"


def _gguf_values(fields: Fields) -> Mapping[str, object]:
    """Kinds of blocks: attention has heads of keys, MLPs have inner channels, and Mamba neither."""
    fields.require("expert_gating_func", 2)
    counts, sizes = fields.integers(_KV), fields.integers(_INNER)
    number = fields.positive("block_count")
    if not len(counts) == len(sizes) == number or not any(sizes):
        fields.refuse(_INNER, f"must have {number} numbers as {_KV} has, not all of them 0")
    behind = "moe" if fields.count("expert_count", 0) else "mlp"
    heads, size = gguf_heads(fields)
    return {
        "layers_block_type": [
            "attention" if count else behind if inner else "mamba"
            for count, inner in zip(counts, sizes, strict=True)
        ],
        "intermediate_size": max(sizes),
        "mamba_num_heads": heads,
        "mamba_head_dim": size,
        "norm_topk_prob": fields.flag("expert_weights_norm", True),
        "n_group": fields.positive("expert_group_count", 1),
        "topk_group": fields.positive("expert_group_used_count", 1),
    }


_GGUF = GgufFormat(
    "nemotron_h",
    names=replace(
        GGUF_NAMES,
        **GGUF_SCAN,
        mlp_norm="+attn_norm",
        up="+ffn_up",
        down="+ffn_down",
        router="+ffn_gate_inp",
        correction="+exp_probs_b.bias",
        expert_up="+ffn_up_exps",
        expert_down="+ffn_down_exps",
        expert_latent="+ffn_latent_down",
        expert_latent_back="+ffn_latent_up",
        shared_up="+ffn_up_shexp",
        shared_down="+ffn_down_shexp",
    ),
    keys={
        "ssm.conv_kernel": "conv_kernel",
        "ssm.group_count": "n_groups",
        "ssm.state_size": "ssm_state_size",
    },
    values=_gguf_values,
    read=frozenset({"ssm.inner_size", "ssm.time_step_rank", _DIM}),
)
NEMOTRON_H = Family(
    "NemotronHForCausalLM",
    "Nemotron-H 4B to 56B, Nemotron Nano 2, Nemotron 3 Nano and Super",
    _adapt,
    names=TensorNames(
        embedding="backbone.embeddings",
        norm="backbone.norm_f",
        layers="backbone.layers",
        attention_norm="norm",
        query="mixer.q_proj",
        key="mixer.k_proj",
        value="mixer.v_proj",
        attention_out="mixer.o_proj",
        mlp_norm="+norm",
        up="+mixer.up_proj",
        down="+mixer.down_proj",
        router="+mixer.gate",
        correction="+mixer.gate.e_score_correction_bias",
        expert_up="+mixer.experts.{expert}.up_proj",
        expert_down="+mixer.experts.{expert}.down_proj",
        expert_latent="+mixer.fc1_latent_proj",
        expert_latent_back="+mixer.fc2_latent_proj",
        shared_up="+mixer.shared_experts.up_proj",
        shared_down="+mixer.shared_experts.down_proj",
        **MIXER_NAMES,
    ),
    gguf=_GGUF,
    other_gguf=(
        replace(
            _GGUF,
            architecture="nemotron_h_moe",
            keys={
                **_GGUF.keys,
                "expert_count": "n_routed_experts",
                "expert_used_count": "num_experts_per_tok",
                "expert_shared_count": "n_shared_experts",
                "expert_feed_forward_length": "moe_intermediate_size",
                "expert_shared_feed_forward_length": "moe_shared_expert_intermediate_size",
                "expert_weights_scale": "routed_scaling_factor",
                "moe_latent_size": "moe_latent_size",
            },
            read=_GGUF.read
            | {"expert_gating_func", "expert_group_count", "expert_group_used_count"},
        ),
    ),
    renamed={
        "n_groups": "mamba_n_groups",
        "ssm_state_size": "mamba_d_state",
        "conv_kernel": "mamba_d_conv",
        "use_conv_bias": "mamba_conv_bias",
        "layer_norm_epsilon": "rms_norm_eps",
        "attention_head_dim": "head_dim",
    },
    values=_values,
    defaults={
        "num_key_value_heads": 8,
        "head_dim": 128,
        "n_groups": 8,
        "ssm_state_size": 128,
        "rms_norm_eps": 1e-5,
        "intermediate_size": 21_504,
    },
    activation="relu2",
    gated=False,
    own_keys=frozenset({"mlp_bias", *_EXPERTS, "n_group", "topk_group", "routed_scaling_factor"}),
)
