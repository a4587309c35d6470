# SPDX-License-Identifier: Apache-2.0
"""Zamba2: Mamba-2 layers, in front of some of which lie blocks that they share (Glorioso et al. 2024)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pagoda.checkpoints.families.mamba import MAMBA_NAMES, expanded, mamba2
from pagoda.checkpoints.families.shared import (
    with_attention,
    with_shared_blocks,
    without_rotation,
)
from pagoda.checkpoints.family import Family
from pagoda.checkpoints.fields import Fields
from pagoda.checkpoints.model_spec import ModelSpec
from pagoda.checkpoints.shared_blocks import SharedSpec
from pagoda.checkpoints.tensor_names import TensorNames

_KINDS = {"mamba": False, "linear_attention": False, "hybrid": True}
"""Kinds of layers, as older and newer files call them, and whether a block lies in front of each."""
_PARTS = "shared_transformer.", "mamba_decoder."
"""Parts of a layer with a block in front of it."""


def _hybrids(fields: Fields) -> list[bool]:
    """True of each layer of the file that has a block in front of it."""
    kinds = fields.texts("layers_block_type")
    count = fields.positive("num_hidden_layers", len(kinds))
    if len(kinds) != count or not {*kinds} <= {*_KINDS}:
        fields.refuse("layers_block_type", f"must be a list of {count} of {', '.join(_KINDS)}")
    return [_KINDS[kind] for kind in kinds]


def _values(fields: Fields) -> Mapping[str, object]:
    """Layers, blocks included, and heads, which share twice the channels of hidden states."""
    hybrids, hidden = _hybrids(fields), fields.positive("hidden_size")
    longest = fields.positive("max_position_embeddings")
    return {
        "num_hidden_layers": len(hybrids) + sum(hybrids),
        "head_dim": 2 * hidden // fields.positive("num_attention_heads", 32),
        "intermediate_size": fields.positive("intermediate_size", 4 * hidden),
        "layer_types": None,
        "max_position_embeddings": 16_384 if fields.flag("use_long_context", False) else longest,
    }


def _adapt(spec: ModelSpec, fields: Fields) -> ModelSpec:
    fields.require("add_bias_linear", False)
    fields.require("rms_norm_eps", 1e-5)
    scan, least = mamba2(fields, expanded(fields)), fields.number("time_step_min", 0.001)
    state = replace(scan, bias=True, dt_limit=(least, scan.dt_limit[1]))
    rank, adapts = fields.positive("adapter_rank", 128), "use_shared_attention_adapter"
    shared = SharedSpec(0, rank, fields.flag(adapts, False))
    spec = with_attention(spec, scale=(spec.head_dim / 2) ** -0.5)
    block = replace(spec.layers[0], shared=shared)
    behind = replace(spec.layers[0], mlp=None, state=state)
    hybrids = _hybrids(fields.updated({"num_hidden_layers": None}))
    count = fields.positive("num_mem_blocks", 1)
    spec = with_shared_blocks(spec, block, behind, hybrids, count, _PARTS)
    return without_rotation(spec, [not fields.flag("use_mem_rope", False)] * spec.num_layers)


_MAMBA: Mapping[str, Any] = {name: f"{{part}}{it}" for name, it in MAMBA_NAMES.items()}
ZAMBA2 = Family(
    "Zamba2ForCausalLM",
    "Zamba2 1.2B, 2.7B and 7B",
    _adapt,
    names=TensorNames(
        norm="model.final_layernorm",
        attention_norm="{part}input_layernorm",
        query="{part}self_attn.q_proj",
        key="{part}self_attn.k_proj",
        value="{part}self_attn.v_proj",
        attention_out="{part}self_attn.o_proj",
        mlp_norm="{part}pre_ff_layernorm",
        gate="{part}feed_forward.gate_up_proj",
        up="{part}feed_forward.gate_up_proj",
        down="{part}feed_forward.down_proj",
        state_skip="{part}mamba.D",
        **_MAMBA,
    ),
    renamed={
        "n_mamba_heads": "mamba_n_heads",
        "mamba_ngroups": "mamba_n_groups",
        "mamba_headdim": "mamba_d_head",
    },
    values=_values,
    defaults={
        "max_position_embeddings": 4096,
        "mamba_d_state": 64,
        "mamba_n_heads": 8,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "num_attention_heads": 32,
    },
    activation="gelu",
)
