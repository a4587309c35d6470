# SPDX-License-Identifier: Apache-2.0
"""Weights of layers, as they are loaded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Generic, NamedTuple

from torch import Tensor

from pagoda.backend.base import (
    Experts,
    HeadNorms,
    LinearT,
)
from pagoda.checkpoints.layer_spec import (
    Activation,
    LayerSpec,
)
from pagoda.checkpoints.pooling_spec import VectorActivation
from pagoda.model.distances import DisentangledMaps, Distances
from pagoda.model.latent_attention import LatentAttention
from pagoda.model.layer_inputs import LayerBeside
from pagoda.model.scan_layers import (
    Lightning,
    Mamba,
    Mamba2,
)
from pagoda.model.shared_blocks import BlockUse, LowRankMap
from pagoda.model.state_layers import (
    ChannelDelta,
    DeltaRule,
    GatedConv,
)


class SparseGate(NamedTuple):
    """Gates of all ranks, of which those far above their mean count."""

    deviations: float
    channels: range
    """This rank's own ones."""
    num_gates: int


class InnerNorm(NamedTuple):
    """RMS norm of the inputs of a map back, of which every rank has some."""

    weight: Tensor
    """[inputs] float32, of this rank's ones."""
    all_inputs: int
    """Inputs of all ranks."""
    eps: float


@dataclass(frozen=True)
class DenseMlp(Generic[LinearT]):
    gate_up: LinearT
    """Gate and up, one above the other; of a plain MLP, up alone."""
    down: LinearT
    activation: Activation
    gated: bool
    numbers: Mapping[str, float]
    """Numbers of an activation that has weights."""
    sparse: SparseGate | None = None
    added: LowRankMap[LinearT] | None = None
    """Maps whose outputs are added to those of gate and up, in one use of an MLP that layers share."""
    gate_factor: float = 1.0
    """Multiplier of gates, and of what the map back gives."""
    down_factor: float = 1.0
    inner_norm: InnerNorm | None = None
    limit: float | None = None
    """Limit of activated gates and of ups."""


class Norm(NamedTuple):
    """Norm of hidden states [hidden]."""

    weight: Tensor
    """[hidden] float32."""
    bias: Tensor | None
    """[hidden] float32 of layer norms, None of RMS norms."""


class ApartMlp(NamedTuple):
    """Vectors of experts that stand beside the shared MLP, [hidden] float32 all but the last."""

    router_norm: Tensor
    experts_norm: Tensor
    shared_post_norm: Tensor
    experts_post_norm: Tensor
    factors: Tensor
    """[num_experts] float32, of the weights of experts."""


@dataclass(frozen=True)
class SparseMlp(Generic[LinearT]):
    """Experts of which each token goes through a few.

    Each tensor-parallel rank holds some channels of every expert or, under expert parallelism, some experts whole.
    What the ranks compute adds up to the layer's output.
    """

    router: LinearT
    experts: Experts[LinearT]
    shared: DenseMlp[LinearT] | None
    """MLP that every token goes through as well, times a sigmoid of `shared_router` if there is one."""
    shared_router: LinearT | None
    identity: Tensor | None
    """[num_experts] float32, factors of weights, where some experts give back what they are given."""
    early_norm: Norm | None
    """Norm of what attention is given, where experts are given the same."""
    apart: ApartMlp | None
    latent: LinearT | None
    """Map of hidden states to what experts are given, and `latent_back`, where that is not hidden states."""
    latent_back: LinearT | None
    jitter: float | None
    """Reach of sparse mixing, which makes weights of scores; None where experts choose by scores."""


class PartNorm(NamedTuple):
    """RMS norm of some of the heads in a row of queries, keys and values."""

    weight: Tensor
    """[heads head_dim] float32."""
    first: int
    """Element that the first of these heads begins with."""
    eps: float


@dataclass(frozen=True)
class Layer(Generic[LinearT]):
    attention_norm: Norm | None
    qkv: LinearT | None
    """Queries, keys and values, one above the other; of a layer with a state, its three maps.

    Of latent attention, the vector that is kept of a token. None where attention is replaced."""
    gate: LinearT | None
    """Gate of attention's outputs."""
    of_kind: (
        LatentAttention[LinearT]
        | GatedConv
        | DeltaRule[LinearT]
        | ChannelDelta[LinearT]
        | Mamba2[LinearT]
        | Mamba[LinearT]
        | Lightning[LinearT]
        | None
    )
    """Other weights of a layer that has none of plain attention."""
    head_norms: HeadNorms | None
    part_norm: PartNorm | None
    """Norm of the heads of a part of queries, keys and values."""
    beside: LayerBeside[LinearT] | None
    """Weights besides those of attention and MLP."""
    head_layer_norms: tuple[Tensor, Tensor] | None
    """Weights and biases of layer norms of the heads of queries, then of keys: [heads head_dim] float32."""
    slopes: Tensor | None
    """[heads] float32, of scores by distance."""
    sinks: Tensor | None
    """[heads] float32."""
    distances: Distances | DisentangledMaps[LinearT] | None
    """Weights of what distances of tokens add to scores."""
    output_norm: InnerNorm | None
    """Norm of what tokens attended to."""
    attention_out: LinearT | None
    """Map back to hidden states; None of a layer that has nothing in the place of attention."""
    attention_post_norm: Norm | None
    mlp_norm: Norm | None
    mlp: DenseMlp[LinearT] | SparseMlp[LinearT] | None
    mlp_post_norm: Norm | None
    block: BlockUse[LinearT] | None
    """Weights that a layer has of its own, which shares all others."""
    joined: LinearT | None
    """Map of what the layer in front gives."""
    spec: LayerSpec

    @property
    def into(self) -> LinearT:
        """Queries, keys and values. Raises TypeError: attention is replaced."""
        if self.qkv is None:
            raise TypeError("The layer has no attention.")
        return self.qkv

    @property
    def back(self) -> LinearT:
        """The map back to hidden states. Raises TypeError: there is nothing in the place of attention."""
        if self.attention_out is None:
            raise TypeError("The layer is an MLP alone.")
        return self.attention_out


@dataclass(frozen=True)
class InputTables(Generic[LinearT]):
    """Tables that are added to the embeddings of tokens, and the norm of the sum."""

    positions: LinearT | None
    token_types: LinearT | None
    norm: Norm | None
    projection: LinearT | None
    """Map of the normed sum to hidden states."""


@dataclass(frozen=True)
class VectorLayer(Generic[LinearT]):
    """A layer behind hidden states of texts or tokens."""

    weight: LinearT
    activation: VectorActivation
    norm: Norm | None
    """Norm behind the activation."""
