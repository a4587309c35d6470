# SPDX-License-Identifier: Apache-2.0
"""MiMo-V2: windows with sinks and more heads of keys, values that are narrower than keys (Xiaomi 2025)."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import replace

from pagoda.checkpoints.families.shared import (
    NEXT_LAYERS,
    WINDOW_PATTERN,
    gguf_layers,
    sigmoid_experts,
    sparse_by_kind,
    typed_windows,
    with_attention,
    with_experts,
)
from pagoda.checkpoints.family import Family, GgufFormat
from pagoda.checkpoints.fields import Fields
from pagoda.checkpoints.layer_spec import LayerSpec, OwnHeads
from pagoda.checkpoints.model_spec import ModelSpec
from pagoda.checkpoints.rope import parse_rope, rope_of_kind
from pagoda.checkpoints.tensor_names import TensorNames

_ROTATED = 0.334
_KINDS = ("full_attention", "sliding_attention")
_FULL_HEADS = "full_kv_heads"


def _values(fields: Fields) -> Mapping[str, object]:
    """Heads of keys in layers with windows, for which the caches are; layers that see all have fewer."""
    full = fields.positive("num_key_value_heads", 4)
    of_windows = fields.positive("swa_num_key_value_heads", 2 * full)
    if of_windows % full:
        fields.refuse(
            "swa_num_key_value_heads", f"must be a multiple of num_key_value_heads ({full})"
        )
    return {_FULL_HEADS: full, "num_key_value_heads": of_windows}


def _adapt(spec: ModelSpec, fields: Fields) -> ModelSpec:
    for name, usual in (
        ("swa_head_dim", spec.head_dim),
        ("swa_num_attention_heads", spec.num_heads),
        ("add_full_attention_sink_bias", False),
    ):
        fields.require(name, usual)
    values = fields.positive("v_head_dim", 128)
    if values > spec.head_dim:
        fields.refuse("v_head_dim", f"must be at most head_dim ({spec.head_dim})")
    fields.require("swa_v_head_dim", values)
    windows = _windows(spec, fields)
    full = OwnHeads(spec.head_dim, values, fields.positive(_FULL_HEADS))
    scale = fields.optional_number("attention_value_scale") or 1.0
    spec = with_attention(spec, windows, output_bias=False, value_scale=scale)

    def change(_: int, layer: LayerSpec) -> LayerSpec:
        has_window = layer.attention.window is not None
        heads = replace(full, num_kv_heads=spec.num_kv_heads) if has_window else full
        rotary = "local" if has_window else "default"
        attention = replace(layer.attention, own_heads=heads, sinks=has_window, rotary=rotary)
        return replace(layer, attention=attention)

    local = rope_of_kind(fields, "sliding_attention")
    if local is None:
        local = fields.updated({"rope_theta": fields.number("swa_rope_theta", 10_000.0)})
    rotary = {**spec.rotary, "local": parse_rope(local, spec.head_dim, _ROTATED)}
    shared = fields.values.get("n_shared_experts") or 0
    sizes = {"n_routed_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 2048}
    experts = sigmoid_experts(fields.updated({"n_shared_experts": shared}), sizes, scale=1.0)
    spec = replace(spec.with_layers(change), rotary=rotary)
    return with_experts(spec, experts, _sparse(spec, fields))


def _windows(spec: ModelSpec, fields: Fields) -> tuple[int | None, ...]:
    """Window of each layer; its makers' files count the tokens before a token alone."""
    count = spec.num_layers
    usual = [_KINDS[layer > 0 and (layer + 1) % 6 != 0] for layer in range(count)]
    if fields.values.get("hybrid_layer_pattern") is not None:
        flags = fields.integers("hybrid_layer_pattern")
        if len(flags) != count or set(flags) - {0, 1}:
            fields.refuse("hybrid_layer_pattern", f"must be a list of {count} numbers, each 0 or 1")
        usual = [_KINDS[flag] for flag in flags]
    if fields.values.get("sliding_window_size") is not None:
        fields = fields.updated({"sliding_window": fields.positive("sliding_window_size") + 1})
    return typed_windows(fields, count, usual, 129)


def _sparse(spec: ModelSpec, fields: Fields) -> list[int]:
    """Layers that have experts; its makers' files have a flag for each."""
    if not isinstance(fields.values.get("moe_layer_freq"), list):
        return sparse_by_kind(fields, spec.num_layers)
    flags = fields.integers("moe_layer_freq")
    if len(flags) != spec.num_layers:
        fields.refuse("moe_layer_freq", f"must be a list of {spec.num_layers} numbers")
    return [layer for layer, flag in enumerate(flags) if flag]


def _gguf_values(fields: Fields) -> Mapping[str, object]:
    """Sizes of layers with a window and of others, of which files tell heads of keys layer by layer."""
    layers = gguf_layers(fields)
    count = layers["num_hidden_layers"]
    windows, heads = fields.values.get(WINDOW_PATTERN), fields.integers(_KV)
    if not isinstance(windows, list) or not len(windows) == len(heads) >= count:
        fields.refuse(WINDOW_PATTERN, f"must have a flag for each of {count} layers, as {_KV} has")
    kinds = {bool(flag): number for flag, number in zip(windows, heads, strict=True)}
    if any(kinds[bool(flag)] != number for flag, number in zip(windows, heads, strict=True)):
        fields.refuse(_KV, "must be the same for all layers with a window, and for all others")
    own = [_KINDS[bool(flag)] for flag in windows[:count]]
    size = fields.positive("attention.key_length")
    full = kinds.get(False, heads[0])
    return {
        "num_hidden_layers": count,
        "layer_types": own,
        "num_key_value_heads": full,
        "swa_num_key_value_heads": kinds.get(True, full),
        "head_dim": size,
        "v_head_dim": fields.positive("attention.value_length", size),
        "partial_rotary_factor": (fields.positive("rope.dimension_count", size) + 0.5) / size,
        "norm_topk_prob": fields.flag("expert_weights_norm", True),
    }


def _gguf_shown(names: Collection[str]) -> Mapping[str, object]:
    """The first layer with experts, behind dense ones."""
    found = [re.fullmatch(r"blk\.(\d{1,9})\.ffn_gate_inp\.weight", name) for name in names]
    return {"first_k_dense_replace": min((int(it[1]) for it in found if it), default=0)}


_KV = "attention.head_count_kv"
MIMO_V2 = Family(
    "MiMoV2FlashForCausalLM",
    "MiMo-V2-Flash",
    _adapt,
    names=TensorNames(sinks="self_attn.attention_sink_bias"),
    gguf=GgufFormat(
        "mimo2",
        keys={
            "attention.sliding_window": "sliding_window",
            "attention.value_scale": "attention_value_scale",
            "expert_count": "n_routed_experts",
            "expert_used_count": "num_experts_per_tok",
            "expert_feed_forward_length": "moe_intermediate_size",
            "expert_weights_scale": "routed_scaling_factor",
            "rope.freq_base_swa": "swa_rope_theta",
        },
        values=_gguf_values,
        shown=_gguf_shown,
        usual={"attention.value_scale": 0.707},  # of the only model that older files are of
        read=frozenset({WINDOW_PATTERN, NEXT_LAYERS, "expert_gating_func"}),
    ),
    values=_values,
    defaults={"head_dim": 192, "rms_norm_eps": 1e-5, "rope_theta": 5e6},
    partial_rotary=_ROTATED,
    own_keys=frozenset(
        {
            "attention_value_scale",
            "first_k_dense_replace",
            "n_group",
            "n_routed_experts",
            "n_shared_experts",
        }
        | {"routed_scaling_factor", "scoring_func", "topk_group", "topk_method"}
    ),
)
