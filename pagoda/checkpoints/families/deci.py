# SPDX-License-Identifier: Apache-2.0
"""DeciLM: Llama whose layers were searched for, each with heads of keys and an MLP of its own (NVIDIA 2024)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from pagoda.checkpoints.families.shared import dense_mlp
from pagoda.checkpoints.family import Family
from pagoda.checkpoints.fields import Fields
from pagoda.checkpoints.layer_spec import LayerSpec, OwnHeads
from pagoda.checkpoints.model_spec import ModelSpec

_HEADS, _SIZES = "num_key_value_heads_per_layer", "intermediate_size_per_layer"
"""Heads of keys of each layer, 0 of one without attention and -1 of one with a map in its place; inner channels of
its MLP, 0 of one without."""
_BLOCKS = "block_configs"
_MAX_FACTOR = 1024
_OTHERS = ("mamba", "llama4", "window_length", "num_sink_tokens", "sparsify", "moe")
"""Parts of blocks that other models have that were found so."""
_USUAL = {"gated": True, "unshifted_sink": False, "use_prefill_window_in_sink_attention": False}
"""Values of blocks that Pagoda computes, where they are not absent."""


def _parts(fields: Fields, name: str) -> Iterator[Fields]:
    """`attention` or `ffn` of each block."""
    blocks = fields.values[_BLOCKS]
    for number, block in enumerate(blocks if isinstance(blocks, list) else [None]):
        if not isinstance(block, dict) or not isinstance(block.get(name), dict):
            fields.refuse(_BLOCKS, f"must be a list of objects that each have an object {name}")
        if block.get("parallel_blocks") is not None:
            fields.refuse(_BLOCKS, "must have no parallel_blocks")
        part = Fields(block[name], fields.source, f"{_BLOCKS}[{number}].{name}.")
        for other in _OTHERS:
            part.require(other, None)
        for flag, usual in _USUAL.items():
            part.require(flag, usual)
        yield part


def _kv_heads(part: Fields, heads: int) -> int:
    if part.flag("no_op", False):
        return 0
    if part.flag("replace_with_linear", False):
        return -1
    group = part.positive("n_heads_in_group")
    if heads % group:
        part.refuse("n_heads_in_group", f"must divide num_attention_heads ({heads})")
    return heads // group


def _inner_size(part: Fields, hidden: int) -> int:
    part.require("replace_with_linear", False)
    part.require("hidden_act", "silu")
    if part.flag("no_op", False):
        return 0
    if part.values.get("ffn_mult") is None:
        return part.positive("intermediate_size")
    factor = part.number("ffn_mult")
    size = int(2 * min(factor, _MAX_FACTOR) * hidden / 3)
    if factor > _MAX_FACTOR or not size:
        part.refuse("ffn_mult", f"must be at most {_MAX_FACTOR}, and leave an inner channel")
    return -(-size // 256) * 256


def _values(fields: Fields) -> Mapping[str, object]:
    """Lists of layers' sizes, and the largest of each, for which the caches are."""
    count, name = fields.positive("num_hidden_layers"), _HEADS
    if fields.values.get(_BLOCKS) is not None:
        heads, hidden = (fields.positive(it) for it in ("num_attention_heads", "hidden_size"))
        kv_heads = [_kv_heads(part, heads) for part in _parts(fields, "attention")]
        sizes, name = [_inner_size(part, hidden) for part in _parts(fields, "ffn")], _BLOCKS
    else:
        kv_heads = fields.integers(_HEADS)
        sizes = [fields.positive("intermediate_size")] * count
    most = max(kv_heads, default=0)
    if len(kv_heads) != count or most < 1 or any(it < -1 or most % (it or 1) for it in kv_heads):
        fields.refuse(name, f"must have {count} layers, whose heads of keys divide the most of one")
    largest = {"num_key_value_heads": most, "intermediate_size": max(*sizes, 1)}
    return {**largest, _HEADS: kv_heads, _SIZES: sizes}


def _adapt(spec: ModelSpec, fields: Fields) -> ModelSpec:
    fields.require("mlp_bias", False)
    counts, sizes, mlp = fields.integers(_HEADS), fields.integers(_SIZES), dense_mlp(spec.layers[0])
    if -1 in counts and spec.hidden_size % spec.num_heads:
        fields.refuse("num_attention_heads", f"must divide hidden_size ({spec.hidden_size})")

    def change(index: int, layer: LayerSpec) -> LayerSpec:
        count, attention = counts[index], layer.attention
        own = replace(mlp, intermediate_size=sizes[index]) if sizes[index] else None
        if count < 1:
            layer = replace(layer, replaced="map" if count else "nothing", bare_attention=not count)
            attention = replace(attention, qkv_bias=False, output_bias=False)
        elif count < spec.num_kv_heads:
            heads = OwnHeads(spec.head_dim, spec.head_dim, count)
            attention = replace(attention, own_heads=heads)
        return replace(layer, attention=attention, mlp=own)

    return spec.with_layers(change)


DECI = Family(
    "DeciLMForCausalLM",
    "Llama-3.1-Nemotron 51B and Ultra 253B, Llama-3.3-Nemotron Super 49B; DeciLM 7B",
    _adapt,
    values=_values,
)
