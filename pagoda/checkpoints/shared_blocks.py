# SPDX-License-Identifier: Apache-2.0
"""Blocks of attention and an MLP that layers share, each with low-rank maps of its own (Zamba2); no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from pagoda.checkpoints.linears import LinearRole, LinearSpec
from pagoda.checkpoints.tensor_names import StoredRows

if TYPE_CHECKING:
    from pagoda.checkpoints.model_spec import ModelSpec


@dataclass(frozen=True)
class SharedSpec:
    """A use of a block, which is given hidden states and embeddings side by side."""

    use: int
    """Number of the use among those of all blocks."""
    rank: int
    """Numbers between the two maps of each pair."""
    adapts_attention: bool
    """Queries, keys and values have such maps, as gates and ups always have."""


class LowRankPair(NamedTuple):
    """Two maps, one behind the other, that add to what others of the same outputs give."""

    low: LinearSpec
    high: tuple[LinearSpec, ...]


class SharedLinears(NamedTuple):
    """Low-rank maps of one use of a block."""

    qkv: tuple[LowRankPair, ...]
    gate_up: LowRankPair

    @property
    def all(self) -> list[LinearSpec]:
        return [it for pair in (*self.qkv, self.gate_up) for it in (pair.low, *pair.high)]


def shared_linears(config: ModelSpec, layer: int, spec: SharedSpec) -> SharedLinears:
    """Low-rank maps of a layer that is a use of a block."""
    qkv: tuple[LowRankPair, ...] = ()
    if spec.adapts_attention:
        qkv = tuple(
            _pair(config, layer, spec, f"self_attn.linear_{what}_adapter_list", (linear,))
            for what, linear in zip("qkv", config.attention_linears(layer).into, strict=True)
        )
    into = config.mlp_linears(layer).into
    return SharedLinears(
        qkv, _pair(config, layer, spec, "feed_forward.gate_up_proj_adapter_list", into)
    )


def joined_linear(config: ModelSpec, layer: int) -> LinearSpec:
    """Map of what the layer in front gives, whole on every rank."""
    name, hidden = config.names.of_layer(layer, config.names.joined), config.hidden_size
    return LinearSpec(name, hidden, hidden, LinearRole.WHOLE_MAP)


def _pair(
    config: ModelSpec, layer: int, spec: SharedSpec, name: str, beside: tuple[LinearSpec, ...]
) -> LowRankPair:
    """The pair that adds to the maps `beside`, whose outputs its second one has one behind the other."""
    stem = config.names.of_layer(layer, f"{{part}}{name}.{spec.use}")
    low = LinearSpec(f"{stem}.0", spec.rank, beside[0].inputs, LinearRole.WHOLE_MAP)
    tensor, shape = f"{stem}.1", (sum(it.outputs for it in beside), spec.rank)
    high = []
    for place, linear in enumerate(beside):
        first = sum(it.outputs for it in beside[:place])
        rows = StoredRows(tensor, shape, first) if len(beside) > 1 else None
        own = tensor if rows is None else f"{tensor}.{place}"
        high.append(LinearSpec(own, linear.outputs, spec.rank, linear.role, rows))
    return LowRankPair(low, tuple(high))
