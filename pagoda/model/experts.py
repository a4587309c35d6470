"""The MLP of a decoder layer: one for all tokens, or experts of which each token goes through a few.

Of several tensor-parallel ranks each holds some channels of every MLP, be it an expert or not; or, under expert
parallelism, some experts whole. Both ways what the ranks compute adds up to the layer's output, and as all have
the same hidden states, all send a token to the same experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, Protocol

from torch import Tensor

from pagoda.backend.base import (
    ExpertRouting,
    Experts,
    LinearT,
    LinearT_co,
    MetadataT,
    Operations,
    ValueT,
)
from pagoda.checkpoints.model_config import ExpertLinears, ExpertsConfig, LinearSpec


@dataclass(frozen=True)
class DenseMlp(Generic[LinearT]):
    gate_up: LinearT
    down: LinearT


@dataclass(frozen=True)
class SparseMlp(Generic[LinearT]):
    router: LinearT
    experts: Experts[LinearT]


class LoadLinear(Protocol[LinearT_co]):
    def __call__(self, linears: Sequence[LinearSpec], *, bias: bool) -> LinearT_co:
        """This rank's parts of linear layers of the same input, as one."""
        ...


def load_experts(
    config: ExpertsConfig,
    maps: ExpertLinears,
    first: int,
    counts: Tensor,
    linear: LoadLinear[LinearT],
) -> SparseMlp[LinearT]:
    """The experts `maps` of a layer, from number `first` on; see `Experts` for `counts`.

    Raises:
        ConfigError: a weight is missing or has the wrong shape.
    """
    routing = ExpertRouting(config.num_experts, config.experts_per_token, config.renormalize)
    router = linear([maps.router], bias=False)
    gate: list[LinearT] = []
    up: list[LinearT] = []
    down: list[LinearT] = []
    for expert in maps.experts:
        # One expert after the other, in the order in which a step will read them.
        for prepared, spec in zip((gate, up, down), expert, strict=True):
            prepared.append(linear([spec], bias=False))
    return SparseMlp(router, Experts(routing, first, tuple(gate), tuple(up), tuple(down), counts))


def compute_mlp(
    ops: Operations[ValueT, LinearT, MetadataT],
    h: ValueT,
    mlp: DenseMlp[LinearT] | SparseMlp[LinearT],
) -> ValueT:
    """This rank's part of the MLP's output [n, hidden], from normed hidden states [n, hidden]."""
    if isinstance(mlp, DenseMlp):
        return ops.linear(ops.silu_and_mul(ops.linear(h, mlp.gate_up)), mlp.down)
    return ops.experts(h, ops.linear(h, mlp.router), mlp.experts)
