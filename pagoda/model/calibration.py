# SPDX-License-Identifier: Apache-2.0
"""Rounding of a whole model by the inputs that its maps have on a text.

The windows of the text go through the model once, all together. A map is read and rounded when its inputs arrive,
and is computed with what it became, so that the maps behind it see the inputs that they will have.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Generic, cast

import torch
from torch import Tensor

from pagoda.backend.base import (
    UNNAMED,
    Backend,
    Compiled,
    ExpertActivation,
    Experts,
    LinearT,
    MetadataT,
    TokenBatch,
)
from pagoda.backend.graph import Graph, Node, Value
from pagoda.backend.interpreter import InterpretedGraph
from pagoda.backend.operation import WeightNames
from pagoda.backend.operations import GraphBuilder
from pagoda.backend.reference.experts import routed
from pagoda.backend.relative_attention import columns
from pagoda.backend.single import compute, compute_node
from pagoda.backend.weights import DenseWeight, LinearWeight
from pagoda.checkpoints.linears import LinearRole, LinearSpec
from pagoda.checkpoints.model_spec import ModelSpec
from pagoda.errors import ConfigError
from pagoda.model.caches import LayerCache, allocate_cache
from pagoda.model.decoder import Decoder
from pagoda.model.gptq import (
    Grid,
    InputProducts,
    Rounded,
    RoundedT,
    dequantized,
    grid_of,
    one_above_the_other,
    round_by_outputs,
    with_codes,
)
from pagoda.model.loader import WeightLoader
from pagoda.model.mlp import clamped
from pagoda.model.sharding import least_block_size, whole
from pagoda.model.weights import WeightSource
from pagoda.telemetry.tracer import Tracer

LEAST_EXPERT_TOKENS = 256
"""An expert that gets fewer tokens of the text is rounded by all tokens that reach its layer."""
_OUTPUTS_AT_ONCE = 256
"""Outputs of a layer whose grids a thread looks for at a time."""
_BLOCK_SIZE = 16
"""Tokens of a block of the KV cache."""

ReadValues = Callable[[LinearSpec], Tensor]
"""Gives the numbers [out, in] of a linear layer."""
RoundToGrids = Callable[[LinearSpec, Tensor, Tensor], RoundedT]
"""Rounds numbers [out, in] to grids of their own, weighing inputs by their mean squares [in]."""
OnRounded = Callable[[LinearSpec, RoundedT], None]
"""Takes each linear layer that was rounded."""


@dataclass(frozen=True)
class CalibratedWeights:
    """Weights that were rounded by a text; all others are as `others` has them, rounded without one."""

    others: WeightSource
    rounded: Mapping[str, LinearWeight]
    """Weights by the names of their layers."""
    round_other: Callable[[LinearSpec, LinearWeight], LinearWeight]

    def read_into(self, name: str, out: Tensor) -> None:
        self.others.read_into(name, out)

    def linear(self, linear: LinearSpec, dtype: torch.dtype) -> LinearWeight:
        rounded = self.rounded.get(linear.name)
        if rounded is not None:
            return rounded
        return self.round_other(linear, self.others.linear(linear, dtype))


@dataclass(frozen=True, eq=False)
class _Unread:
    """Linear layers of the same inputs, which are read and rounded when their inputs are known."""

    linears: tuple[LinearSpec, ...]
    bias: Tensor | None

    @property
    def inputs(self) -> int:
        return self.linears[0].inputs

    @property
    def outputs(self) -> int:
        return sum(linear.outputs for linear in self.linears)


def calibrate(
    config: ModelSpec,
    source: WeightSource,
    backend: Backend[Any, Any],
    dtype: torch.dtype,
    windows: Sequence[Sequence[int]],
    *,
    read: ReadValues,
    rounds: Callable[[LinearSpec], bool],
    round_to_grids: RoundToGrids[RoundedT],
    on_rounded: OnRounded[RoundedT],
) -> None:
    """Rounds the linear layers of a whole model, but for head and embedding table.

    `source` gives norms and biases, `read` linear layers. The model computes in `dtype`. Layers stay dense that
    `rounds` says no to.

    Raises ConfigError: the windows have tokens that the model lacks, or activations are not finite.
    """
    vocab_size = config.vocab_size
    if max(map(max, windows)) >= vocab_size:
        raise ConfigError(
            f"the calibration text has tokens beyond the model's vocabulary of {vocab_size}."
        )
    block_size = max(_BLOCK_SIZE, least_block_size(config, dtype.itemsize))
    batch = _as_batch(windows, block_size)
    rounding = _RoundingBackend(backend, dtype, read, rounds, round_to_grids, on_rounded)
    loader = WeightLoader(
        whole(config),
        cast("Backend[_Unread, Any]", rounding),
        _Placeholders(source, rounding),
        None,
        dtype,
        Tracer("calibrate"),
        lambda _: None,
    )
    # Every layer writes the keys and values of all tokens before it reads them, and no state is read, so one cache
    # does for all. Layers with a state are a group of their own, with the same blocks.
    num_blocks = int(batch.block_tables[0].max()) + 1
    cache = allocate_cache(backend, whole(config), num_blocks, block_size, dtype)
    caches = [
        LayerCache(int(layer.state is not None), cache, block_size) for layer in config.layers
    ]
    decoder = Decoder(loader, rounding, caches)
    decoder.forward(decoder.plan(batch), None)


def _as_batch(windows: Sequence[Sequence[int]], block_size: int) -> TokenBatch:
    """All windows in one step, each from an empty context."""
    lens = torch.tensor([len(window) for window in windows])
    blocks = -(-lens // block_size)
    first_blocks = blocks.cumsum(0) - blocks
    table = (first_blocks[:, None] + torch.arange(int(blocks.max()))).clamp_(
        max=int(blocks.sum()) - 1
    )
    return TokenBatch(
        token_ids=torch.tensor([token for window in windows for token in window]),
        positions=torch.cat([torch.arange(int(n)) for n in lens]),
        sequence_ids=torch.arange(len(windows)).repeat_interleave(lens),
        query_lens=lens,
        context_lens=lens,
        block_tables=(table, table),
    )


class _Placeholders:
    """A source whose linear layers have a shape only; the backend learns their names."""

    def __init__(self, source: WeightSource, rounding: _RoundingBackend[Any, Any, Any]) -> None:
        self._source = source
        self._rounding = rounding

    def read_into(self, name: str, out: Tensor) -> None:
        self._source.read_into(name, out)

    def linear(self, linear: LinearSpec, dtype: torch.dtype) -> LinearWeight:
        if linear.role is LinearRole.LATENT_HEADS:
            return self._source.linear(linear, dtype)
        shape = (linear.outputs, linear.inputs)
        weight = DenseWeight(torch.empty(shape, dtype=dtype, device="meta"))
        self._rounding.linears[id(weight)] = linear
        return weight


class _RoundingBackend(Generic[LinearT, MetadataT, RoundedT]):
    """A backend that rounds a linear layer when it first computes with it."""

    def __init__(
        self,
        inner: Backend[LinearT, MetadataT],
        dtype: torch.dtype,
        read: ReadValues,
        rounds: Callable[[LinearSpec], bool],
        round_to_grids: RoundToGrids[RoundedT],
        on_rounded: OnRounded[RoundedT],
    ) -> None:
        self._inner = inner
        self._dtype = dtype
        self._read = read
        self._rounds = rounds
        self._round_to_grids = round_to_grids
        self._on_rounded = on_rounded
        self.linears: dict[int, LinearSpec] = {}
        """Linear layers by the identities of their placeholders."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def prepare_linear(
        self,
        parts: Sequence[LinearWeight],
        bias: Tensor | None,
        dtype: torch.dtype,
    ) -> _Unread | LinearT:
        if id(parts[0]) not in self.linears:
            return self._inner.prepare_linear(parts, bias, dtype)
        return _Unread(tuple(self.linears.pop(id(part)) for part in parts), bias)

    def compile(self, graph: Graph, names: WeightNames = UNNAMED) -> Compiled[MetadataT]:
        def outputs(node: Node, inputs: Sequence[Any]) -> Any:
            weights: list[Any] = [graph.weights[weight] for weight in node.weights]
            if node.op == "embedding":
                return self._read(weights[0].linears[0])[inputs[0]].float()
            if node.op == "linear":
                return self._linear(*inputs, *weights)
            if node.op == "experts":
                return self._experts(*inputs, *weights)
            return compute_node(self._inner, graph, node, inputs)

        return InterpretedGraph(graph, outputs, names)

    def _linear(self, x: Tensor, weight: _Unread) -> Tensor:
        return self._product(x, self._rounded(weight, x))

    def _product(self, x: Tensor, prepared: LinearT) -> Tensor:
        out: Tensor = compute(self._inner, lambda ops, x: ops.linear(x, prepared), {"x": x})
        return out

    def _experts(self, x: Tensor, logits: Tensor, experts: Experts[_Unread]) -> Tensor:
        routing = experts.routing
        chosen, shares = routed(logits, routing, experts.correction)
        total = torch.zeros_like(x)
        for index, (gate, up, down) in enumerate(
            zip(experts.gate, experts.up, experts.down, strict=True)
        ):
            tokens, places = (chosen == index).nonzero(as_tuple=True)
            given, share, few = x, shares[tokens, places, None], len(tokens) < LEAST_EXPERT_TOKENS
            if routing.weighs_inputs:
                given = x.index_copy(0, tokens, x[tokens] * share)
            if not few:
                given = given[tokens]
            bias = None if gate.bias is None or up.bias is None else torch.cat((gate.bias, up.bias))
            gate_up = self._linear(given, _Unread(gate.linears + up.linears, bias))
            out = self._linear(self._gated(gate_up, experts.activation), down)
            if few:
                out = out[tokens]
            total[tokens] += out if routing.weighs_inputs else out * share
        return total

    def _gated(self, gate_up: Tensor, activation: ExpertActivation) -> Tensor:
        """Gates [n, d] with their activation times what is beside them."""

        def record(ops: GraphBuilder, gate_up: Value) -> Value:
            if activation.kind == "swiglu_oai":
                return ops.swiglu_oai(gate_up, alpha=activation.alpha, limit=activation.limit)
            if activation.kind == "clamped_silu":
                return clamped(ops, gate_up, activation.limit)
            if activation.kind == "relu":
                size = gate_up.width // 2
                gate, up = (columns(ops, gate_up, first, size) for first in (0, size))
                return ops.mul(ops.relu(gate), up)
            if activation.kind == "gelu_tanh":
                return ops.gelu_and_mul(gate_up)
            return ops.silu_and_mul(gate_up)

        if activation.kind == "swiglu_oai":  # takes pairs
            gate_up = torch.stack(gate_up.chunk(2, dim=1), dim=2).flatten(1)
        gated: Tensor = compute(self._inner, record, {"gate_up": gate_up})
        return gated

    def _rounded(self, weight: _Unread, x: Tensor) -> LinearT:
        """The map as it is after rounding, prepared; its inputs are x [n, in]."""
        parts = [self._read(linear) for linear in weight.linears]
        if all(map(self._rounds, weight.linears)):
            products = self._products(x)
            if not bool(products.isfinite().all()):
                raise ConfigError(
                    f"the inputs of {weight.linears[0].name} are not finite on the calibration text; "
                    "take another --dtype."
                )
            parts = self._rounded_parts(weight.linears, parts, InputProducts.of(products))
        dense = [DenseWeight(part.to(self._dtype)) for part in parts]
        return self._inner.prepare_linear(dense, weight.bias, self._dtype)

    def _products(self, x: Tensor) -> Tensor:
        """Mean products [in, in] of elements of rows x [n, in]."""
        columns = x.t().contiguous()
        weight = DenseWeight(columns.to(self._dtype))
        prepared = self._inner.prepare_linear([weight], None, self._dtype)
        return self._product(columns, prepared).div_(len(x))

    def _rounded_parts(
        self, linears: Sequence[LinearSpec], values: Sequence[Tensor], inputs: InputProducts
    ) -> list[Tensor]:
        """Numbers [out, in] of layers after rounding; those with grids of one shape are rounded together."""
        with _threads() as pool:
            rounded = [
                (linear, own, self._round_in_pieces(pool, linear, own, inputs.mean_squares))
                for linear, own in zip(linears, values, strict=True)
            ]
        parts = []
        for (_, lowest, highest), run in groupby(rounded, lambda it: _shape_of_grid(it[2])):
            alike = [*run]
            grids = [grid_of(it) for _, _, it in alike]
            joined = Grid(
                torch.cat([grid.steps for grid in grids]),
                torch.cat([grid.bases for grid in grids]),
                lowest,
                highest,
            )
            codes = round_by_outputs(torch.cat([own for _, own, _ in alike]), joined, inputs)
            sizes = [len(own) for _, own, _ in alike]
            for (linear, _, it), its in zip(alike, torch.split(codes, sizes), strict=True):
                self._on_rounded(linear, with_codes(it, its))
            parts.append(dequantized(joined, codes))
        return parts

    def _round_in_pieces(
        self, pool: ThreadPoolExecutor, linear: LinearSpec, values: Tensor, mean_squares: Tensor
    ) -> RoundedT:
        """The layer rounded to grids, some of its outputs by each thread."""

        def round_piece(piece: Tensor) -> RoundedT:
            return self._round_to_grids(linear, piece, mean_squares)

        pieces = pool.map(round_piece, torch.split(values, _OUTPUTS_AT_ONCE))
        return one_above_the_other([*pieces])


@contextlib.contextmanager
def _threads() -> Iterator[ThreadPoolExecutor]:
    """Threads, as many as torch uses; each computes its operations alone, as this one does meanwhile."""
    count = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with ThreadPoolExecutor(count) as pool:
            yield pool
    finally:
        torch.set_num_threads(count)


def _shape_of_grid(rounded: Rounded) -> tuple[int, int, int]:
    """Groups, lowest and highest code."""
    grid = grid_of(rounded)
    return grid.steps.shape[1], grid.lowest, grid.highest
