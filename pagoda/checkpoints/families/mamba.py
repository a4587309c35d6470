# SPDX-License-Identifier: Apache-2.0
"""Mamba-2 alone, and with attention in some layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pagoda.checkpoints.families.shared import (
    conv_width,
    gguf_kv_heads,
    layer_kinds,
    with_attention,
    with_state,
)
from pagoda.checkpoints.family import Family, GgufFormat
from pagoda.checkpoints.fields import Fields
from pagoda.checkpoints.model_spec import ModelSpec
from pagoda.checkpoints.scan_layers import MOST, Mamba2Spec
from pagoda.checkpoints.tensor_names import GGUF_NAMES, TensorNames

_MAX_FACTOR = 1024
LONGEST = 131_072
"""Tokens of a sequence where files do not say how many: states take as much of any number."""
MAMBA_NAMES: Mapping[str, Any] = {
    "state_in": "mamba.in_proj",
    "state_conv": "mamba.conv1d",
    "state_out": "mamba.out_proj",
    "state_decay": "mamba.A_log",
    "state_bias": "mamba.dt_bias",
    "state_norm": "mamba.norm",
}
HYBRID_NAMES: Mapping[str, Any] = {
    **MAMBA_NAMES,
    "norm": "model.final_layernorm",
    "mlp_norm": "pre_ff_layernorm",
    "gate": "feed_forward.gate_proj",
    "up": "feed_forward.up_proj",
    "down": "feed_forward.down_proj",
}
"""The same with those of norms and MLPs, as Bamba, Falcon-H1 and Jamba have them."""
MIXER_NAMES: Mapping[str, Any] = {
    **{name: it.replace("mamba.", "mixer.") for name, it in MAMBA_NAMES.items()},
    "state_skip": "mixer.D",
    "state_x": "mixer.x_proj",
    "state_step": "mixer.dt_proj",
}
"""The same of makers that call attention and MLPs mixers as well."""
GGUF_KEYS = {
    "ssm.conv_kernel": "mamba_d_conv",
    "ssm.group_count": "mamba_n_groups",
    "ssm.state_size": "mamba_d_state",
    "ssm.time_step_rank": "mamba_n_heads",
}
"""Metadata of Mamba-2, with the keys of config.json that say the same."""
GGUF_SCAN: Mapping[str, Any] = {
    "state_in": "ssm_in",
    "state_conv": "ssm_conv1d",
    "state_out": "ssm_out",
    "state_decay": "ssm_a",
    "log_decay": False,
    "state_bias": "ssm_dt.bias",
    "state_norm": "ssm_norm",
    "state_skip": "ssm_d",
    "state_x": "ssm_x",
    "state_step": "ssm_dt",
    "state_step_norm": "ssm_dt_norm.weight",
    "state_b_norm": "ssm_b_norm.weight",
    "state_c_norm": "ssm_c_norm.weight",
}
"""Names of Mamba layers in GGUF files."""
GGUF_ALONE = {"attention.head_count": 1, "attention.head_count_kv": 1, "feed_forward_length": 1}
"""Metadata of attention and MLPs, which files of Mamba alone have as 0."""


def gguf_heads(fields: Fields) -> tuple[int, int]:
    """Heads of Mamba-2 in a file, and their elements. Raises ConfigError: the heads do not share all channels."""
    inner, heads = fields.positive("ssm.inner_size"), fields.positive("ssm.time_step_rank")
    if inner % heads:
        fields.refuse("ssm.time_step_rank", f"must divide ssm.inner_size ({inner})")
    return heads, inner // heads


def mamba2(fields: Fields, inner: int) -> Mamba2Spec:
    """Layers of so many channels, whose outputs are normed by groups."""
    heads = fields.positive("mamba_n_heads", 128)
    groups = fields.positive("mamba_n_groups", 1)
    told = fields.values.get("mamba_d_head")
    head_dim = inner // heads if told in (None, "auto") else fields.positive("mamba_d_head")
    if heads * head_dim != inner:
        fields.refuse("mamba_n_heads", f"times mamba_d_head must be the {inner} inner channels")
    if heads % groups:
        fields.refuse("mamba_n_groups", f"must divide mamba_n_heads ({heads})")
    return Mamba2Spec(
        heads,
        head_dim,
        groups,
        fields.positive("mamba_d_state", 256),
        conv_width(fields, "mamba_d_conv", 4),
        bias=fields.flag("mamba_conv_bias", True),
        norm_groups=groups,
        dt_limit=_dt_limit(fields),
    )


def _dt_limit(fields: Fields) -> tuple[float, float]:
    """Least and greatest step, of which transformers writes an infinite one as an object."""
    name = "time_step_limit"
    given = fields.values.get(name)
    if given is None:
        return 0.0, MOST
    limits = (
        [it.get("__float__") if isinstance(it, dict) else it for it in given]
        if isinstance(given, list)
        else []
    )
    limits = [MOST if it in ("Infinity", float("inf")) else it for it in limits]
    numbers = [float(it) for it in limits if isinstance(it, int | float) and 0 <= it <= MOST]
    if len(numbers) != 2 or len(limits) != 2:
        fields.refuse(name, "must be a list of two numbers from 0 on")
    return numbers[0], numbers[1]


def expanded(fields: Fields) -> int:
    """Inner channels by those of hidden states."""
    factor = fields.number("mamba_expand", 2)
    if factor > _MAX_FACTOR:
        fields.refuse("mamba_expand", f"must be at most {_MAX_FACTOR}")
    return round(factor * fields.positive("hidden_size"))


def with_mamba2(spec: ModelSpec, fields: Fields, kinds: list[bool]) -> ModelSpec:
    """The model with Mamba-2 in the layers whose flag is True."""
    layers = [layer for layer, flag in enumerate(kinds) if flag]
    if not layers:
        return spec
    state = mamba2(fields, expanded(fields))
    return with_state(spec, state, layers, bias=fields.flag("mamba_proj_bias", False))


# ---- Mamba-2 alone (Dao and Gu 2024)


def alone(spec: ModelSpec) -> ModelSpec:
    """The model whose layers have no MLPs."""
    return spec.with_layers(lambda _, layer: replace(layer, mlp=None))


def _adapt_mamba2(spec: ModelSpec, fields: Fields) -> ModelSpec:
    return alone(with_mamba2(spec, fields, [True] * spec.num_layers))


def _state_heads(fields: Fields) -> Mapping[str, object]:
    """Heads of states in the place of those of attention, which sizes of blocks follow from."""
    heads, size = fields.positive("num_heads", 128), fields.positive("head_dim", 64)
    own = {"num_attention_heads": heads, "num_key_value_heads": heads}
    return {**own, "head_dim": size + size % 2, "mamba_n_heads": heads, "mamba_d_head": size}


def _gguf_values(fields: Fields) -> Mapping[str, object]:
    heads, size = gguf_heads(fields)
    expand = heads * size / fields.positive("embedding_length")
    return {"num_heads": heads, "head_dim": size, "mamba_expand": expand}


ALONE = TensorNames(
    embedding="backbone.embeddings",
    norm="backbone.norm_f",
    layers="backbone.layers",
    attention_norm="norm",
    **MIXER_NAMES,
)
MAMBA2 = Family(
    "Mamba2ForCausalLM",
    "Mamba-2 130M to 2.7B, Mamba-Codestral-7B",
    _adapt_mamba2,
    names=ALONE,
    gguf=GgufFormat(
        "mamba2",
        names=replace(GGUF_NAMES, **GGUF_SCAN),
        keys={
            "ssm.conv_kernel": "conv_kernel",
            "ssm.group_count": "n_groups",
            "ssm.state_size": "state_size",
        },
        values=_gguf_values,
        usual=GGUF_ALONE,
        read=frozenset({"ssm.inner_size", "ssm.time_step_rank"}),
    ),
    renamed={
        "n_groups": "mamba_n_groups",
        "state_size": "mamba_d_state",
        "conv_kernel": "mamba_d_conv",
        "expand": "mamba_expand",
        "use_conv_bias": "mamba_conv_bias",
        "use_bias": "mamba_proj_bias",
        "layer_norm_epsilon": "rms_norm_eps",
    },
    values=_state_heads,
    defaults={
        "n_groups": 8,
        "state_size": 128,
        "intermediate_size": 1,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": LONGEST,
    },
)


# ---- Bamba: attention in some layers, MLPs in all (IBM, Princeton and UIUC 2024)


def _adapt_bamba(spec: ModelSpec, fields: Fields) -> ModelSpec:
    spec = with_attention(spec, output_bias=fields.flag("attention_bias", False))
    given = fields.values.get("attn_layer_indices")
    attending = set(() if given is None else fields.integers("attn_layer_indices"))
    usual = [_ATTENTION if at in attending else _MAMBA for at in range(spec.num_layers)]
    kinds = layer_kinds(fields, spec.num_layers, (_MAMBA, _ATTENTION), usual)
    return with_mamba2(spec, fields, [kind == _MAMBA for kind in kinds])


def _gguf_bamba(fields: Fields) -> Mapping[str, object]:
    """Kinds of layers, of which those with heads of keys and values are attention.

    The converter brings all of a head into the order in which ggml turns neighbours, of which a half turns: what
    llama.cpp then turns are other pairs than the model's."""
    heads, size = gguf_heads(fields)
    counts = gguf_kv_heads(fields)
    return {
        "layer_types": [_ATTENTION if count else _MAMBA for count in counts],
        "mamba_expand": heads * size / fields.positive("embedding_length"),
    }


_MAMBA, _ATTENTION = "linear_attention", "full_attention"
BAMBA = Family(
    "BambaForCausalLM",
    "Bamba-9B",
    _adapt_bamba,
    names=TensorNames(**HYBRID_NAMES),
    gguf=GgufFormat(
        "granitehybrid",
        names=replace(GGUF_NAMES, **GGUF_SCAN, permutes_heads=True),
        keys=GGUF_KEYS,
        values=_gguf_bamba,
        read=frozenset({"ssm.inner_size"}),
    ),
    defaults={"num_key_value_heads": 8, "rms_norm_eps": 1e-5},
    partial_rotary=0.5,
    own_keys=frozenset({"attn_layer_indices"}),
)
