# SPDX-License-Identifier: Apache-2.0
"""Gemma 4: Gemma 3n's embeddings and shared keys without its streams; heads differ from layer to layer."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from pagoda.checkpoints.expert_routing import ExpertRouting
from pagoda.checkpoints.families.gemma3n import (
    DEFAULTS,
    OWN_KEYS,
    OWN_NAMES,
    adapted,
    with_shared_kv,
)
from pagoda.checkpoints.families.shared import (
    WINDOW_PATTERN,
    dense_mlp,
    expert_counts,
    gguf_windows,
    text_sizes,
)
from pagoda.checkpoints.family import Family, GgufFormat
from pagoda.checkpoints.fields import Fields
from pagoda.checkpoints.layer_inputs import LayerInputs
from pagoda.checkpoints.layer_spec import ExpertsSpec, LayerSpec, OwnHeads
from pagoda.checkpoints.model_spec import ModelSpec
from pagoda.checkpoints.rope import parse_rope, rope_of_kind
from pagoda.checkpoints.tensor_names import GGUF_NAMES

# ---- Gemma 4: wider heads, and fewer of keys, in layers that see all (Google DeepMind 2026)


def _values_4(fields: Fields) -> Mapping[str, object]:
    """Sizes of the heads that the model's caches are for: the largest of both kinds of layers."""
    heads, own = fields.positive("num_key_value_heads", 4), _wide_heads(fields)
    fewer = {own.num_kv_heads, heads}
    if max(fewer) % min(fewer):
        fields.refuse("num_key_value_heads", "must be a multiple of num_global_key_value_heads")
    return {
        _NARROW: fields.positive("head_dim", 256),
        _FEW: heads,
        "head_dim": max(own.head_dim, fields.positive("head_dim", 256)),
        "num_key_value_heads": max(fewer),
    }


_NARROW, _FEW = "window_head_dim", "window_kv_heads"


def _wide_heads(fields: Fields) -> OwnHeads:
    """Heads of layers that see all; transformers saves their sizes layer by layer."""
    own = fields.table("per_layer_config")
    first = next((name for name in own.values), None) if own is not None else None
    told = own.table(first) if own is not None and first is not None else None
    heads = fields.positive("num_key_value_heads", 4)
    if told is not None:
        dim = told.positive("head_dim", fields.positive("head_dim", 256))
        return OwnHeads(dim, dim, told.positive("num_key_value_heads", heads))
    dim = fields.positive("global_head_dim", 512)
    if fields.flag("attention_k_eq_v", False):
        heads = fields.positive("num_global_key_value_heads", heads)
    return OwnHeads(dim, dim, heads)


def _adapt_4(spec: ModelSpec, fields: Fields) -> ModelSpec:
    if fields.values.get("use_bidirectional_attention") not in (None, "vision"):
        fields.refuse("use_bidirectional_attention", "must be null or vision")
    narrow = fields.positive(_NARROW)
    window = OwnHeads(narrow, narrow, fields.positive(_FEW))
    full = _wide_heads(
        fields.updated({"head_dim": narrow, "num_key_value_heads": fields.positive(_FEW)})
    )
    equal = fields.flag("attention_k_eq_v", False)
    usual = OwnHeads(spec.head_dim, spec.head_dim, spec.num_kv_heads)

    def change(_: int, layer: LayerSpec) -> LayerSpec:
        is_full = layer.attention.window is None
        heads = full if is_full else window
        own = None if heads == usual and not (is_full and equal) else heads
        changed = replace(layer.attention, own_heads=own, values_are_keys=is_full and equal)
        mlp = dense_mlp(layer)
        if fields.flag("use_double_wide_mlp", False) and changed.kv_layer is not None:
            mlp = replace(mlp, intermediate_size=2 * mlp.intermediate_size)
        experts = _experts(fields, mlp.intermediate_size)
        return replace(layer, attention=changed, mlp=experts or mlp)

    spec = with_shared_kv(adapted(spec, fields, 6, None, last_full=True), fields, 0)
    local = rope_of_kind(fields, "sliding_attention")
    rotary = dict(spec.rotary)
    rotary["default"] = parse_rope(_full_rope(fields), full.head_dim, None)
    if "local" in rotary:
        table = fields.updated({"rope_parameters": {"rope_theta": 1e4}}) if local is None else local
        rotary["local"] = parse_rope(table, narrow, None)
    beside = LayerInputs(
        fields.count("hidden_size_per_layer_input", 256),
        fields.positive("vocab_size_per_layer_input", 262_144),
        spec.vocab_size,
        spec.num_layers,
        scaled=True,
    )
    return replace(spec.with_layers(change), rotary=rotary, beside=beside)


def _experts(fields: Fields, dense: int) -> ExpertsSpec | None:
    """Experts beside an MLP of so many inner channels; None in models that have none."""
    if not fields.flag("enable_moe_block", False):
        return None
    counts = expert_counts(fields, "num_experts", (None, None), "top_k_experts")
    routing = ExpertRouting(*counts, renormalize=False, scores="given")
    inner = fields.positive("moe_intermediate_size")
    return ExpertsSpec(routing, inner, shared_size=dense, apart=True, activation="gelu_tanh")


def _full_rope(fields: Fields) -> Fields:
    """Fields of the rotary table of layers that see all."""
    if rope_of_kind(fields, "full_attention") is not None:
        return fields
    usual = {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6}
    return fields.updated({"rope_parameters": usual})


_SHARED, _SWA = "attention.shared_kv_layers", "attention.key_length_swa"


def _gguf_values(fields: Fields) -> Mapping[str, object]:
    """Sizes of heads and MLPs, which files have layer by layer where they differ."""
    narrow = fields.positive(_SWA)
    for name in ("attention.value_length_swa", "rope.dimension_count_swa"):
        fields.require(name, narrow)
    kinds, counts, sizes = (
        fields.values.get(it)
        for it in (WINDOW_PATTERN, "attention.head_count_kv", "feed_forward_length")
    )
    found: dict[str, object] = {
        **gguf_windows(fields),
        "num_kv_shared_layers": fields.count(_SHARED, 0),
        "hidden_size_per_layer_input": fields.count("embedding_length_per_layer_input", 0),
        "head_dim": narrow,
        "global_head_dim": fields.positive("attention.key_length"),
        "enable_moe_block": fields.count("expert_count", 0) > 0,
        "rope_scaling": {
            "full_attention": {"rope_theta": fields.number("rope.freq_base", 1e6)},
            "sliding_attention": {"rope_theta": fields.number("rope.freq_base_swa", 1e4)},
        },
    }
    if isinstance(counts, list) and isinstance(kinds, list):
        heads = {bool(kind): count for kind, count in zip(kinds, counts, strict=False)}
        full = heads.get(False)
        found |= {"num_key_value_heads": heads.get(True, full), "num_global_key_value_heads": full}
    if isinstance(sizes, list) and sizes:
        wide = {"use_double_wide_mlp": sizes[-1] == 2 * sizes[0]}
        found |= {"intermediate_size": sizes[0], **wide}
    return found


def _shown(names: Collection[str]) -> Mapping[str, object]:
    """Values are keys where files have none."""
    keys = (it for it in names if it.endswith(".attn_k.weight"))
    return {"attention_k_eq_v": any(it.replace("attn_k", "attn_v") not in names for it in keys)}


GEMMA4 = Family(
    "Gemma4ForCausalLM",
    "Gemma 4 E2B, E4B, 26B-A4B and 31B",
    _adapt_4,
    names=replace(
        OWN_NAMES,
        router="router.proj",
        expert_gate="experts.gate_up_proj",
        expert_up="experts.gate_up_proj",
        expert_down="experts.down_proj",
        expert_layout="bare",
        shared_gate="mlp.gate_proj",
        shared_up="mlp.up_proj",
        shared_down="mlp.down_proj",
    ),
    gguf=GgufFormat(
        "gemma4",
        names=replace(
            GGUF_NAMES,
            expert_gate="ffn_gate_up_exps",
            expert_up="ffn_gate_up_exps",
            shared_gate="ffn_gate",
            shared_up="ffn_up",
            shared_down="ffn_down",
            apart_norms=(
                "ffn_gate_inp.scale",
                "pre_ffw_norm_2.weight",
                "post_ffw_norm_1.weight",
                "post_ffw_norm_2.weight",
            ),
            expert_factors="ffn_down_exps.scale",
        ),
        keys={
            "attention.sliding_window": "sliding_window",
            "final_logit_softcapping": "final_logit_softcapping",
            "expert_count": "num_experts",
            "expert_used_count": "top_k_experts",
            "expert_feed_forward_length": "moe_intermediate_size",
        },
        values=_gguf_values,
        shown=_shown,
        read=frozenset({_SHARED, _SWA, WINDOW_PATTERN, "embedding_length_per_layer_input"})
        | {"attention.value_length_swa", "rope.dimension_count_swa", "rope.freq_base_swa"},
    ),
    defaults={**DEFAULTS, "num_key_value_heads": 4},
    values=_values_4,
    activation="gelu_tanh",
    model_types={"gemma4_text": text_sizes(262_144, 2304, 9216, 30, 8, 4, 131_072)},
    own_keys=OWN_KEYS,
)
