# SPDX-License-Identifier: Apache-2.0
"""Maps of heads that are narrower, or whose keys have fewer, than a model's (Gemma 4, MiMo-V2); no torch."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from pagoda.checkpoints.layer_spec import OwnHeads
from pagoda.checkpoints.linears import AttentionLinears, HeadFill, LinearRole, LinearSpec
from pagoda.checkpoints.tensor_names import StoredRows

if TYPE_CHECKING:
    from pagoda.checkpoints.model_spec import ModelSpec


def filled_linears(config: ModelSpec, layer: int) -> AttentionLinears:
    """Linear layers of heads that are filled with zeros, and repeated, up to the model's sizes."""
    spec, names, hidden = config.layers[layer].attention, config.names, config.hidden_size
    own = spec.own_heads or OwnHeads(config.head_dim, config.head_dim, config.num_kv_heads)
    values = names.key if spec.values_are_keys else names.value
    found = []
    queries, all_heads = own.num_heads or config.num_heads, config.num_heads
    for place, name, stored_heads, stored_dim, heads in (
        ("QUERY", names.query, queries, own.head_dim, all_heads),
        ("KEY", names.key, own.num_kv_heads, own.head_dim, config.num_kv_heads),
        ("VALUE", values, own.num_kv_heads, own.value_dim, config.num_kv_heads),
        ("ATTENTION_OUT", names.attention_out, queries, own.value_dim, all_heads),
    ):
        full = names.of_layer(layer, name)
        sizes, stored = (heads * config.head_dim, hidden), (stored_heads * stored_dim, hidden)
        if place == "ATTENTION_OUT":
            sizes, stored = sizes[::-1], stored[::-1]
        own_name = f"{full}.values" if place == "VALUE" and spec.values_are_keys else full
        groups = config.num_kv_heads if place in ("QUERY", "ATTENTION_OUT") and own.num_heads else 0
        is_whole = stored == sizes
        fill = HeadFill(stored_heads, stored_dim, heads, config.head_dim, groups)
        rows = None if is_whole and own_name == full else StoredRows(full, stored, 0)
        own_fill = None if is_whole else fill
        found.append(LinearSpec(own_name, *sizes, LinearRole[place], rows, fill=own_fill))
    return AttentionLinears(*found)


def head_gate(config: ModelSpec, layer: int) -> LinearSpec:
    """The map of gates, one of each head; none of those that are filled up count."""
    own, hidden = config.layers[layer].attention.own_heads, config.hidden_size
    name = config.names.of_layer(layer, config.names.attention_gate)
    gate = LinearSpec(name, config.num_heads, hidden, LinearRole.QUERY)
    if own is None or own.num_heads is None:
        return gate
    fill = HeadFill(own.num_heads, 1, config.num_heads, 1, config.num_kv_heads)
    return replace(gate, rows=StoredRows(name, (own.num_heads, hidden), 0), fill=fill)
