# SPDX-License-Identifier: Apache-2.0
"""Linear layers of a model: their places, sizes and names; no torch."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Literal, NamedTuple

from pagoda.checkpoints.tensor_names import StoredRows


class LinearRole(enum.Enum):
    """The place of a linear layer in the model: tensor parallelism and quantization depend on it."""

    EMBEDDING = enum.auto()
    HEAD = enum.auto()
    QUERY = enum.auto()
    KEY = enum.auto()
    VALUE = enum.auto()
    ATTENTION_OUT = enum.auto()
    LATENT_IN = enum.auto()
    """Map of hidden states to a latent vector, whole on every rank."""
    LATENT_HEADS = enum.auto()
    """Keys or values of all heads of a latent vector: dense, as every head computes with its own."""
    STATE_IN = enum.auto()
    """Maps of hidden states of a layer with a state."""
    STATE_GATE = enum.auto()
    """Numbers of each head, which say what its state forgets and takes up."""
    STATE_OUT = enum.auto()
    MLP_IN = enum.auto()
    """Gate or up projection of a dense MLP."""
    MLP_OUT = enum.auto()
    ROUTER = enum.auto()
    """Scores of the experts, or of the shared one; weights of an indexer's heads."""
    EXPERT_IN = enum.auto()
    """Gate or up projection of an expert."""
    EXPERT_OUT = enum.auto()
    WHOLE = enum.auto()
    """Table of positions or token types, or layer of a head that scores: dense, and whole on every rank."""
    WHOLE_MAP = enum.auto()
    """Map that is whole on every rank, quantized where a file has it so."""


NEVER_ROUNDED = frozenset(
    {LinearRole.LATENT_HEADS, LinearRole.ROUTER, LinearRole.STATE_GATE, LinearRole.WHOLE}
    | {LinearRole.WHOLE_MAP}
)
"""Roles of layers that stay dense when a model is quantized."""


class HeadFill(NamedTuple):
    """Heads in a file that are narrower, or fewer, than those that are computed."""

    stored_heads: int
    stored_dim: int
    heads: int
    dim: int
    groups: int = 0
    """Groups of heads, each of which is filled up; 0 where heads are repeated instead."""


@dataclass(frozen=True)
class LinearSpec:
    """One linear layer of the model, whole."""

    name: str
    """Name without suffix, such as `model.layers.0.mlp.up_proj`; no other layer has it."""
    outputs: int
    inputs: int
    role: LinearRole
    rows: StoredRows | None = None
    """Place in a tensor that holds several layers; None where the weight is the tensor `<name>.weight`."""
    head_order: tuple[int, ...] | None = None
    """Stored rows of each head in the order in which they are computed; None if that is their own."""
    value_order: tuple[int, ...] | None = None
    """Stored heads of values of a delta rule in the order in which they are computed; None if that is their own.
    They are the outputs of its maps, and the inputs of the one back to hidden states."""
    unit: Literal["rows", "columns"] | None = None
    """Stored rows, or columns, are brought to length one."""
    fill: HeadFill | None = None
    """Heads of the outputs, or of the inputs of a map back to hidden states, that are not as they are stored."""
    has_bias: bool = True
    """False of a map that has no bias where those of the same input do (Whisper's keys)."""
    row_bias: str = ""
    """Tensor [1, outputs] of its bias; empty where that is named after the weight."""
    sinusoidal: bool = False
    """Weights are sines and cosines of positions, and in no file."""
    grain: int = 1
    """Outputs, or inputs, of a layer with a state that stay on one rank; 0 for one number of each head."""

    @property
    def stored(self) -> StoredRows:
        """Place of the weight, be it a part of a tensor or all of it."""
        return self.rows or StoredRows(self.name, (self.outputs, self.inputs), 0)


class AttentionLinears(NamedTuple):
    """Linear layers of attention, or of what a layer has in its place: b, c and x of a gated convolution."""

    q: LinearSpec
    k: LinearSpec
    v: LinearSpec
    out: LinearSpec

    @property
    def into(self) -> tuple[LinearSpec, ...]:
        """Layers that hidden states go through."""
        return self.q, self.k, self.v


class QueryLinears(NamedTuple):
    """Linear layers of attention to the keys and values of another layer, or of an encoder."""

    q: LinearSpec
    out: LinearSpec

    @property
    def into(self) -> tuple[LinearSpec, ...]:
        """Layers that hidden states go through."""
        return (self.q,)


class ReplacedLinears(NamedTuple):
    """The map of hidden states in the place of attention; None where there is nothing."""

    out: LinearSpec | None

    @property
    def into(self) -> tuple[LinearSpec, ...]:
        """Layers that hidden states go through in front of the map."""
        return ()


class MlpLinears(NamedTuple):
    """Linear layers of one MLP, be it a layer's own or an expert."""

    gate: LinearSpec
    up: LinearSpec
    down: LinearSpec

    @property
    def into(self) -> tuple[LinearSpec, ...]:
        """Layers that the inputs of the MLP go through."""
        return self.gate, self.up


class PlainMlpLinears(NamedTuple):
    """Linear layers of an MLP without a gate."""

    up: LinearSpec
    down: LinearSpec

    @property
    def into(self) -> tuple[LinearSpec, ...]:
        """Layers that the inputs of the MLP go through."""
        return (self.up,)


class ExpertLinears(NamedTuple):
    router: LinearSpec
    experts: tuple[MlpLinears | PlainMlpLinears, ...]
    shared: MlpLinears | PlainMlpLinears | None
    """The MLP that every token goes through besides."""
    shared_router: LinearSpec | None
    latent: tuple[LinearSpec, ...] = ()
    """Map of hidden states to what experts are given, and the one back, where that is not hidden states."""
