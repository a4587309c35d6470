# SPDX-License-Identifier: Apache-2.0
"""Latent attention: all heads make their keys and values of one short vector a token (Liu et al. 2024)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from pagoda.checkpoints.linears import LinearRole, LinearSpec
from pagoda.checkpoints.tensor_names import StoredRows, TensorNames, head_order

NORM_EPS = 1e-6
"""Epsilon of the norms of latent vectors, whatever that of the model's other norms is."""


class IndexLinears(NamedTuple):
    """Linear layers of an indexer."""

    query: LinearSpec
    """Queries of all its heads, of the latent vector of queries."""
    key: LinearSpec
    """The key that all its heads share, of hidden states."""
    weights: LinearSpec
    """Weight of each head's scores, of hidden states."""


@dataclass(frozen=True)
class IndexSpec:
    """An indexer, which chooses the tokens that a token attends to (DeepSeek-AI 2025, DeepSeek-V3.2-Exp)."""

    heads: int
    dim: int
    """Elements of a head's queries, and of keys; the first are rotated, as many as in latent attention."""
    most: int
    """Tokens that are chosen at most (`index_topk`)."""
    rotates_neighbours: bool
    """Files have those that are rotated in pairs of neighbours."""

    def linears(
        self, names: TensorNames, layer: int, hidden: int, query_rank: int, rope_dim: int
    ) -> IndexLinears:
        sizes = {
            names.index_query: (self.heads * self.dim, query_rank, LinearRole.LATENT_IN),
            names.index_key: (self.dim, hidden, LinearRole.LATENT_IN),
            names.index_weights: (self.heads, hidden, LinearRole.ROUTER),
        }
        query, key, weights = (
            LinearSpec(names.of_layer(layer, name), outputs, inputs, role)
            for name, (outputs, inputs, role) in sizes.items()
        )
        order = self.order(rope_dim)
        return IndexLinears(
            replace(query, head_order=order), replace(key, head_order=order), weights
        )

    def order(self, rope_dim: int) -> tuple[int, ...] | None:
        """Stored elements of a query or key in the order in which they are computed; None if that is their own."""
        return head_order(self.dim, rope_dim) if self.rotates_neighbours else None


class LatentLinears(NamedTuple):
    """Linear layers of latent attention."""

    latents: LinearSpec
    """Latent vector of keys and values, and behind it the rotated part of keys."""
    query_down: LinearSpec | None
    """Latent vector of queries, if they are made of one."""
    query_nope: LinearSpec
    """Parts of all heads' queries that are not rotated."""
    query_rope: LinearSpec
    key_up: LinearSpec
    """Keys of all heads without their rotated part: [heads nope_dim, rank], or [heads rank, nope_dim]."""
    value_up: LinearSpec
    out: LinearSpec
    index_query: LinearSpec | None = None
    index_key: LinearSpec | None = None
    index_weights: LinearSpec | None = None

    @property
    def into(self) -> tuple[LinearSpec, ...]:
        """Maps of hidden states to what is kept of a token."""
        return (self.latents,) if self.index_key is None else (self.index_key, self.latents)


@dataclass(frozen=True)
class LatentSpec:
    """Sizes of latent attention."""

    rank: int
    """Numbers of the vector that keys and values are made of (`kv_lora_rank`)."""
    rope_dim: int
    """Part of a key that is rotated; all heads have the same, which is kept behind the vector."""
    nope_dim: int
    """Part of a head's queries and keys that is not rotated."""
    value_dim: int
    """Elements of a head's values."""
    query_rank: int | None
    """Numbers of the vector that queries are made of; None where they are made of hidden states."""
    query_factor: float = 1.0
    """Factor of the vector that queries are made of (LongCat-Flash)."""
    latent_factor: float = 1.0
    """Factor of the vector that keys and values are made of."""
    index: IndexSpec | None = None
    """The indexer; None where a token attends to all before it. Queries are made of a vector then."""

    @property
    def index_dim(self) -> int:
        """Numbers of a token's key for the indexer; 0 without one."""
        return 0 if self.index is None else self.index.dim

    @property
    def kept(self) -> int:
        """Numbers that a layer keeps of a token."""
        return self.rank + self.rope_dim + self.index_dim

    @property
    def name(self) -> str:
        return "latent attention"

    @property
    def kept_name(self) -> str:
        return f"a latent vector of {self.kept} numbers a token"

    @property
    def operations(self) -> frozenset[str]:
        found = {"head_linear", "rotate_and_cache_latents"}
        if self.query_rank is not None:
            found.add("rms_norm")
        if self.index is None:
            return frozenset({*found, "latent_attention"})
        found |= {"layer_norm_heads", "rotate_heads", "indexed_latent_attention"}
        return frozenset(found)

    @property
    def limits(self) -> Mapping[str, int]:
        """Sizes by the limits of `Capabilities` that they have to keep."""
        return {}

    def linears(self, names: TensorNames, layer: int, hidden: int, num_heads: int) -> LatentLinears:
        """Linear layers of a layer of `num_heads`."""
        turned = head_order(self.rope_dim, self.rope_dim) if names.rotates_neighbours else None
        query_down, inputs = None, hidden
        tensor = names.of_layer(layer, names.query)
        if self.query_rank is not None:
            inputs, tensor = self.query_rank, names.of_layer(layer, names.query_up)
            down = names.of_layer(layer, names.query_down)
            query_down = LinearSpec(down, inputs, hidden, LinearRole.LATENT_IN)

        def rows(of: str, count: int, first: int, together: int, width: int) -> StoredRows:
            return StoredRows(of, (count * together, width), first, group=together)

        both = self.nope_dim + self.rope_dim
        nope, rope = (rows(tensor, num_heads, first, both, inputs) for first in (0, self.nope_dim))
        latents = LinearSpec(
            names.of_layer(layer, names.latents),
            self.rank + self.rope_dim,
            hidden,
            LinearRole.LATENT_IN,
            head_order=None
            if turned is None
            else (*range(self.rank), *(self.rank + place for place in turned)),
        )
        index: tuple[LinearSpec, ...] = ()
        if self.index is not None:
            index = self.index.linears(names, layer, hidden, inputs, self.rope_dim)
        values = num_heads * self.value_dim
        return LatentLinears(
            latents,
            query_down,
            LinearSpec(f"{tensor}.nope", num_heads * self.nope_dim, inputs, LinearRole.QUERY, nope),
            LinearSpec(
                f"{tensor}.rope", num_heads * self.rope_dim, inputs, LinearRole.QUERY, rope, turned
            ),
            *_heads_of_latents(self, names, layer, num_heads),
            LinearSpec(
                names.of_layer(layer, names.attention_out), hidden, values, LinearRole.ATTENTION_OUT
            ),
            *index,
        )

    def gates(self, names: TensorNames, layer: int, hidden: int) -> list[LinearSpec]:  # noqa: ARG002
        return []

    def vectors(self, names: TensorNames, layer: int) -> list[tuple[str, int]]:
        """Names and sizes of its tensors besides maps."""
        sizes = {
            f"{names.latent_norm}.weight": self.rank,
            f"{names.query_down_norm}.weight": self.query_rank,
            f"{names.index_norm}.weight": self.index_dim,
            f"{names.index_norm}.bias": self.index_dim,
        }
        return [(names.of_layer(layer, name), it) for name, it in sizes.items() if it]


def _heads_of_latents(
    spec: LatentSpec, names: TensorNames, layer: int, num_heads: int
) -> tuple[LinearSpec, LinearSpec]:
    """Keys and values of heads, whose rows take turns in one tensor, or which have a tensor each."""
    rank, nope, value = spec.rank, spec.nope_dim, spec.value_dim
    role = LinearRole.LATENT_HEADS
    if names.key_up:
        placed = ((names.key_up, rank, nope), (names.value_up, value, rank))
        keys, values = (
            LinearSpec(tensor, num_heads * rows, inputs, role, StoredRows(tensor, shape, 0))
            for name, rows, inputs in placed
            for tensor, shape in [(names.of_layer(layer, name), (num_heads, rows, inputs))]
        )
        return keys, values
    tensor, shape = names.of_layer(layer, names.latent_up), (num_heads * (nope + value), rank)
    keys, values = (
        LinearSpec(
            f"{tensor}.{what}",
            num_heads * rows,
            rank,
            role,
            StoredRows(tensor, shape, first, group=nope + value),
        )
        for what, rows, first in (("keys", nope, 0), ("values", value, nope))
    )
    return keys, values
