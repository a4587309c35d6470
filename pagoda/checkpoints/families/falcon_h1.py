# SPDX-License-Identifier: Apache-2.0
"""Falcon-H1: Mamba-2 and attention side by side in every layer (TII 2025, arXiv 2507.22448)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from pagoda.checkpoints.families.mamba import (
    GGUF_KEYS,
    GGUF_SCAN,
    HYBRID_NAMES,
    expanded,
    gguf_heads,
    mamba2,
)
from pagoda.checkpoints.family import Family, GgufFormat
from pagoda.checkpoints.fields import Fields
from pagoda.checkpoints.layer_spec import LayerSpec, MlpSpec
from pagoda.checkpoints.model_spec import ModelSpec
from pagoda.checkpoints.multipliers import Multipliers
from pagoda.checkpoints.scan_layers import Mamba2Spec
from pagoda.checkpoints.tensor_names import GGUF_NAMES, TensorNames

_FACTORS = (
    *("attention_in_multiplier", "attention_out_multiplier", "key_multiplier"),
    *("embedding_multiplier", "lm_head_multiplier"),
)


def _adapt(spec: ModelSpec, fields: Fields) -> ModelSpec:
    """Each layer of the file as two: Mamba-2 alone, then attention of the same input, and the MLP."""
    gate, down = _factors(fields, "mlp_multipliers", 2)
    mlp = MlpSpec(
        fields.positive("intermediate_size"),
        fields.flag("mlp_bias", False),
        gate_factor=gate,
        down_factor=down,
    )
    out_bias = fields.flag("projectors_bias", False)
    (both,) = {*spec.layers}
    attention = replace(
        both.attention, scale=both.attention.scale * fields.number(_FACTORS[2], 1.0)
    )
    of_state = replace(
        attention, qkv_bias=fields.flag("mamba_proj_bias", False), output_bias=out_bias
    )
    first = LayerSpec(
        of_state,
        None,
        state=_state(fields),
        input_factor=fields.number("ssm_in_multiplier", 1.0),
        output_factor=fields.number("ssm_out_multiplier", 1.0),
    )
    second = LayerSpec(
        attention,
        mlp,
        bare_attention=True,
        same_input=True,
        input_factor=fields.number(_FACTORS[0], 1.0),
        output_factor=fields.number(_FACTORS[1], 1.0),
    )
    numbers = tuple(number for number in range(spec.num_layers) for _ in range(2))
    multipliers = Multipliers(
        embedding=fields.number(_FACTORS[3], 1.0), logits=fields.number(_FACTORS[4], 1.0)
    )
    names = replace(spec.names, numbers=numbers)
    layers = (first, second) * spec.num_layers
    return replace(spec, layers=layers, names=names, multipliers=multipliers)


def _state(fields: Fields) -> Mamba2Spec:
    told = fields.values.get("mamba_d_ssm", 1024)
    inner = expanded(fields) if told is None else fields.positive("mamba_d_ssm", 1024)
    state = mamba2(fields, inner)
    z, x, b, c, dt = _factors(fields, "ssm_multipliers", 5)
    behind = not fields.flag("mamba_norm_before_gate", True)
    state = replace(state, norm=None, factors=(z, x, b, c, dt))
    if not fields.flag("mamba_rms_norm", False):
        return state
    return replace(state, norm="behind gate" if behind else "before gate")


def _factors(fields: Fields, name: str, count: int) -> list[float]:
    if fields.values.get(name) is None:
        return [1.0] * count
    factors = fields.amounts(name)
    if len(factors) != count:
        fields.refuse(name, f"must be a list of {count} positive numbers")
    return factors


def _gguf_values(fields: Fields) -> Mapping[str, object]:
    """Sizes of Mamba-2, whose multipliers, as all others, files have in the weights."""
    heads, size = gguf_heads(fields)
    own = {"mamba_d_ssm": heads * size, "mamba_d_head": size}
    return {**own, "mamba_norm_before_gate": False}


FALCON_H1 = Family(
    "FalconH1ForCausalLM",
    "Falcon-H1 0.5B to 34B, Falcon-H1-Tiny",
    _adapt,
    names=TensorNames(**HYBRID_NAMES),
    gguf=GgufFormat(
        "falcon-h1",
        names=replace(GGUF_NAMES, **GGUF_SCAN),
        keys=GGUF_KEYS,
        values=_gguf_values,
        shown=lambda names: {"mamba_rms_norm": "blk.0.ssm_norm.weight" in names},
        read=frozenset({"ssm.inner_size"}),
    ),
    defaults={"num_key_value_heads": 8, "rms_norm_eps": 1e-5},
    own_keys=frozenset({*_FACTORS, "mlp_bias"}),
)
