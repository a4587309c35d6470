# SPDX-License-Identifier: Apache-2.0
"""Weights that a head has besides a decoder layer, and the operations in front of that."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Generic

import torch
from torch import Tensor

from pagoda.backend.base import LinearT
from pagoda.backend.graph import Value
from pagoda.backend.operations import GraphBuilder
from pagoda.model.loaded_layers import Norm
from pagoda.model.loader import WeightLoader


@dataclass(frozen=True)
class Joint(Generic[LinearT]):
    """Weights in front of a head's layer, whose norms are RMS norms (`DraftHeadSpec`)."""

    embedding_norm: Norm | None
    """None where it is the norm in front of the layer's attention."""
    hidden_norm: Norm
    of_embedding: LinearT
    """Map of the embedding: its part of the map of both, or of the layer's queries, keys and values."""
    of_hidden: LinearT | None
    """Map of the hidden state; None where the layer's queries, keys and values are of it."""
    fused: Sequence[LinearT]
    """Maps of several hidden states of the model, whose sum is the head's."""
    adds_normed: bool

    def record(
        self,
        ops: GraphBuilder,
        embedded: Value,
        hidden: Value,
        attention_norm: Norm | None,
        eps: float,
    ) -> tuple[Value, Value | None, Value | None]:
        """Hidden states [n, hidden] in front of the layer, of embeddings and hidden states [n, hidden].

        Where its attention joins both, also what queries, keys and values are of, and what is added to them.
        """
        norm = self.embedding_norm or attention_norm
        e = embedded if norm is None else ops.rms_norm(embedded, norm.weight, eps)
        of_embedding = ops.linear(e, self.of_embedding)
        normed = ops.rms_norm(hidden, self.hidden_norm.weight, eps)
        if self.of_hidden is not None:
            return ops.add(of_embedding, ops.linear(normed, self.of_hidden)), None, None
        return normed if self.adds_normed else hidden, normed, of_embedding

    def record_fused(self, ops: GraphBuilder) -> Value:
        """The head's hidden states, of the model's."""
        first, *others = (
            ops.linear(ops.input(fused_input(place), part.inputs), part)
            for place, part in enumerate(self.fused)
        )
        for other in others:
            first = ops.add(first, other)
        return first

    def named(self) -> Mapping[str, object]:
        """Weights by their names in traces."""
        fused = {f"fused.{place}": part for place, part in enumerate(self.fused)}
        maps = {"of_embedding": self.of_embedding, "of_hidden": self.of_hidden}
        norms = {"embedding_norm": self.embedding_norm, "hidden_norm": self.hidden_norm}
        return norms | maps | fused


def fused_input(place: int) -> str:
    """Name of the input of a head's graph that are the model's hidden states at this place of several."""
    return f"hidden_{place}"


def load_joint(loader: WeightLoader[LinearT]) -> Joint[LinearT] | None:
    """Loads what is in front of a head's layer; None of a model."""
    config, draft = loader.shard.config, loader.shard.config.draft_head
    if draft is None:
        return None
    size, parts = config.hidden_size, dict[str, list[LinearT]]()
    for linear in draft.linears(size):
        width = draft.model_hidden_size if linear.name == draft.fused else size
        firsts = range(0, linear.inputs, width)
        parts[linear.name] = [
            loader.linear([linear], inputs=range(first, first + width)) for first in firsts
        ]
    of_hidden: LinearT | None = None
    if draft.joined:
        of_embedding, of_hidden = parts[draft.joined][:: -1 if draft.hidden_first else 1]
    else:
        of_embedding = loader.linear(config.attention_linears(0).into, inputs=range(size))
    return Joint(
        loader.norm(draft.embedding_norm) if draft.embedding_norm else None,
        loader.norm(draft.hidden_norm),
        of_embedding,
        of_hidden,
        parts.get(draft.fused, []),
        draft.adds_normed,
    )


def load_token_offsets(loader: WeightLoader[LinearT]) -> Tensor | None:
    """Numbers [outputs] int64 in host memory that make tokens of the model of those of a head."""
    draft = loader.shard.config.draft_head
    if draft is None or not draft.token_offsets:
        return None
    offsets = torch.empty(draft.num_outputs, dtype=torch.int64)
    loader.source.read_into(draft.token_offsets, offsets)
    return offsets
