# SPDX-License-Identifier: Apache-2.0
"""Latent attention: all heads make their keys and values of one short vector a token (Liu et al. 2024)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from pagoda.checkpoints.linears import LinearSpec, Role
from pagoda.checkpoints.tensor_names import StoredRows, TensorNames, head_order

NORM_EPS = 1e-6
"""Epsilon of the norms of latent vectors, whatever that of the model's other norms is."""


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

    @property
    def kept(self) -> int:
        """Numbers that a layer keeps of a token."""
        return self.rank + self.rope_dim


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

    @property
    def into(self) -> tuple[LinearSpec, ...]:
        """Maps of hidden states to what is kept of a token."""
        return (self.latents,)


def latent_linears(
    names: TensorNames, layer: int, spec: LatentSpec, num_heads: int, hidden_size: int
) -> LatentLinears:
    """The linear layers of a layer of `num_heads`."""
    turned = head_order(spec.rope_dim, spec.rope_dim) if names.rotates_neighbours else None
    query_down, inputs = None, hidden_size
    tensor = names.of_layer(layer, names.query)
    if spec.query_rank is not None:
        inputs, tensor = spec.query_rank, names.of_layer(layer, names.query_up)
        down = names.of_layer(layer, names.query_down)
        query_down = LinearSpec(down, inputs, hidden_size, Role.LATENT_IN)

    def rows(of: str, count: int, first: int, together: int, width: int) -> StoredRows:
        return StoredRows(of, (count * together, width), first, group=together)

    both = spec.nope_dim + spec.rope_dim
    nope, rope = (rows(tensor, num_heads, first, both, inputs) for first in (0, spec.nope_dim))
    latents = LinearSpec(
        names.of_layer(layer, names.latents),
        spec.kept,
        hidden_size,
        Role.LATENT_IN,
        head_order=None
        if turned is None
        else (*range(spec.rank), *(spec.rank + place for place in turned)),
    )
    values = num_heads * spec.value_dim
    return LatentLinears(
        latents,
        query_down,
        LinearSpec(f"{tensor}.nope", num_heads * spec.nope_dim, inputs, Role.QUERY, nope),
        LinearSpec(f"{tensor}.rope", num_heads * spec.rope_dim, inputs, Role.QUERY, rope, turned),
        *_heads_of_latents(names, layer, spec, num_heads),
        LinearSpec(
            names.of_layer(layer, names.attention_out), hidden_size, values, Role.ATTENTION_OUT
        ),
    )


def _heads_of_latents(
    names: TensorNames, layer: int, spec: LatentSpec, num_heads: int
) -> tuple[LinearSpec, LinearSpec]:
    """Keys and values of heads, whose rows take turns in one tensor, or which have a tensor each."""
    rank, nope, value = spec.rank, spec.nope_dim, spec.value_dim
    role = Role.LATENT_HEADS
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
