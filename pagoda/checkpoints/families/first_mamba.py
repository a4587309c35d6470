# SPDX-License-Identifier: Apache-2.0
"""Mamba alone, and with attention in some layers (Jamba)."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Literal

from pagoda.checkpoints.expert_routing import ExpertRouting
from pagoda.checkpoints.families.mamba import (
    ALONE,
    GGUF_ALONE,
    GGUF_SCAN,
    HYBRID_NAMES,
    LONGEST,
    alone,
    expanded,
)
from pagoda.checkpoints.families.shared import (
    conv_width,
    expert_counts,
    gguf_kv_heads,
    with_experts,
    with_state,
    without_rotation,
)
from pagoda.checkpoints.family import Family, GgufFormat
from pagoda.checkpoints.fields import Fields
from pagoda.checkpoints.layer_spec import ExpertsSpec
from pagoda.checkpoints.model_spec import ModelSpec
from pagoda.checkpoints.scan_layers import MambaSpec
from pagoda.checkpoints.tensor_names import GGUF_NAMES, TensorNames


def _mamba(
    spec: ModelSpec,
    fields: Fields,
    inner: int,
    layers: range | list[int],
    norms: Literal["weighed", "unit"] | None = None,
) -> ModelSpec:
    """The model with Mamba of `inner` channels in some layers."""
    told = fields.values.get("mamba_dt_rank")
    rank = (
        fields.positive("mamba_dt_rank")
        if told not in (None, "auto")
        else -(-spec.hidden_size // 16)
    )
    state = MambaSpec(
        inner,
        fields.positive("mamba_d_state", 16),
        rank,
        conv_width(fields, "mamba_d_conv", 4),
        bias=fields.flag("mamba_conv_bias", True),
        norms=norms,
        norm_eps=fields.number("mixer_rms_eps", 1e-6) if norms == "unit" else spec.norm.eps,
    )
    return with_state(spec, state, layers, bias=fields.flag("mamba_proj_bias", False))


def _of_all(spec: ModelSpec, fields: Fields) -> ModelSpec:
    norms: Literal["unit"] | None = "unit" if spec.family is FALCON_MAMBA else None
    inner = fields.positive("intermediate_size")
    return alone(_mamba(spec, fields, inner, range(spec.num_layers), norms))


def _sizes(fields: Fields) -> Mapping[str, object]:
    """Parts of the channels in the place of heads, which sizes of blocks follow from."""
    inner = fields.positive("intermediate_size", expanded(fields))
    heads = next(
        count for count in (64, 32, 16, 8, 4, 2, 1) if inner % (2 * count) == 0 or count == 1
    )
    own = {"num_attention_heads": heads, "num_key_value_heads": heads}
    return {**own, "head_dim": inner // heads + inner // heads % 2, "intermediate_size": inner}


_GGUF_KEYS = {
    "ssm.conv_kernel": "mamba_d_conv",
    "ssm.state_size": "mamba_d_state",
    "ssm.time_step_rank": "mamba_dt_rank",
}
_NORMED = "ssm.dt_b_c_rms"
_GGUF = GgufFormat(
    "mamba",
    names=replace(GGUF_NAMES, **GGUF_SCAN),
    keys={**_GGUF_KEYS, "ssm.inner_size": "intermediate_size"},
    values=lambda _: {"head_dim": 2},
    usual=GGUF_ALONE,
)
MAMBA = Family(
    "MambaForCausalLM",
    "Mamba 130M to 2.8B",
    _of_all,
    names=ALONE,
    gguf=_GGUF,
    renamed={
        "state_size": "mamba_d_state",
        "conv_kernel": "mamba_d_conv",
        "expand": "mamba_expand",
        "time_step_rank": "mamba_dt_rank",
        "use_conv_bias": "mamba_conv_bias",
        "use_bias": "mamba_proj_bias",
        "layer_norm_epsilon": "rms_norm_eps",
    },
    values=_sizes,
    defaults={
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": LONGEST,
        "tie_word_embeddings": True,
    },
)
FALCON_MAMBA = replace(
    MAMBA,
    architecture="FalconMambaForCausalLM",
    models="Falcon-Mamba-7B",
    gguf=replace(_GGUF, read=frozenset({_NORMED}), required=frozenset({_NORMED})),
)


# ---- Jamba: attention in some layers, experts in some (Lieber et al. 2024, arXiv 2403.19887)


def _adapt_jamba(spec: ModelSpec, fields: Fields) -> ModelSpec:
    attending = _every(fields, "attn_layer", (8, 4), spec.num_layers)
    layers = [at for at in range(spec.num_layers) if at not in attending]
    spec = without_rotation(spec, [True] * spec.num_layers)
    spec = _mamba(spec, fields, expanded(fields), layers, "weighed")
    counts = expert_counts(fields, "num_experts", (16, 2))
    if counts[0] == 1:
        return spec
    experts = ExpertsSpec(
        ExpertRouting(*counts, renormalize=False), fields.positive("intermediate_size")
    )
    return with_experts(spec, experts, _every(fields, "expert_layer", (2, 1), spec.num_layers))


def _gguf_jamba(fields: Fields) -> Mapping[str, object]:
    """Layers with attention, which are those that have heads of keys."""
    counts, inner = gguf_kv_heads(fields), fields.positive("ssm.inner_size")
    attending = [at for at, count in enumerate(counts) if count]
    return {"mamba_expand": inner / fields.positive("embedding_length"), "attn_layers": attending}


def _shown_jamba(names: Collection[str]) -> Mapping[str, object]:
    """Layers with experts, which are those that have a router."""
    routers = [it.split(".")[1] for it in names if it.endswith(".ffn_gate_inp.weight")]
    return {"expert_layers": [int(it) for it in routers if it.isdecimal()]}


def _every(fields: Fields, name: str, usual: tuple[int, int], num_layers: int) -> range | set[int]:
    """Layers by a period and the first of them, or those that GGUF files tell one by one."""
    if f"{name}s" in fields:
        return set(fields.integers(f"{name}s"))
    period = fields.positive(f"{name}_period", usual[0])
    return range(fields.count(f"{name}_offset", usual[1]), num_layers, period)


JAMBA = Family(
    "JambaForCausalLM",
    "Jamba 1.5 and 1.6, Jamba Reasoning 3B, Jamba2",
    _adapt_jamba,
    names=TensorNames(
        router="feed_forward.router",
        expert_gate="feed_forward.experts.{expert}.gate_proj",
        expert_up="feed_forward.experts.{expert}.up_proj",
        expert_down="feed_forward.experts.{expert}.down_proj",
        **HYBRID_NAMES,
    ),
    gguf=GgufFormat(
        "jamba",
        names=_GGUF.names,
        keys={
            **_GGUF_KEYS,
            "expert_count": "num_experts",
            "expert_used_count": "num_experts_per_tok",
        },
        values=_gguf_jamba,
        shown=_shown_jamba,
        read=frozenset({"ssm.inner_size"}),
    ),
    defaults={"num_key_value_heads": 8},
    own_keys=frozenset({"num_experts"}),
)
