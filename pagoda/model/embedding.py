# SPDX-License-Identifier: Apache-2.0
"""Embeddings of tokens as a first stage records them."""

from __future__ import annotations

from pagoda.backend.base import LinearT
from pagoda.backend.decoder_operations import scaled
from pagoda.backend.graph import Value
from pagoda.backend.operations import GraphBuilder
from pagoda.backend.own_rows import scatter_rows
from pagoda.model.loaded_layers import InputTables
from pagoda.model.recording import normed
from pagoda.model.sharding import Shard


def embed(
    ops: GraphBuilder,
    shard: Shard,
    embedding: LinearT | None,
    tables: InputTables[LinearT] | None,
    multiplier: float,
    *,
    embeds_spans: bool,
) -> Value:
    """Embeddings of the tokens times the multiplier, [n, hidden]; hidden states of a stage without a table.

    With `embeds_spans`, those that are given count for tokens of the id behind the vocabulary, whose row of the
    table is zeros.
    """
    config = shard.config
    if embedding is None:
        return ops.input("hidden", config.hidden_size)
    given = ops.input("embedded", config.hidden_size) if embeds_spans else None
    ids = shard.vocabulary.start, config.vocab_size + embeds_spans
    tokens = ops.input("token_ids", gathered=shard.dp_attention)
    x = ops.embedding(tokens, embedding, *ids)
    x = scatter_rows(ops, x) if shard.dp_attention else ops.all_reduce(x)
    x = scaled(ops, x, multiplier)
    x = x if given is None else ops.add(x, given)
    if tables is None:
        return x
    for name, table in (("token_types", tables.token_types), ("positions", tables.positions)):
        if table is not None:
            x = ops.add(x, ops.embedding(ops.input(name), table, 0, table.outputs))
    x = normed(ops, x, tables.norm, config.norm.eps)
    return x if tables.projection is None else ops.linear(x, tables.projection)
