"""Loading of one rank's weights, by their names and shapes, in the form that a backend computes with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic

import torch
from torch import Tensor

from pagoda.backend.base import Backend, ExpertRouting, Experts, HeadNorms, LinearT
from pagoda.backend.weights import GroupedWeight, LinearWeight, same_order, weight_bytes
from pagoda.checkpoints.model_config import LinearSpec
from pagoda.errors import ConfigError
from pagoda.model.quantization import QuantizationOnLoad
from pagoda.model.sharding import Part, Shard, take_part
from pagoda.model.weights import WeightSource
from pagoda.telemetry.tracer import Tracer


@dataclass(frozen=True)
class DenseMlp(Generic[LinearT]):
    gate_up: LinearT
    down: LinearT


@dataclass(frozen=True)
class SparseMlp(Generic[LinearT]):
    """Experts of which each token goes through a few.

    Each tensor-parallel rank holds some channels of every expert or, under expert parallelism, some experts whole.
    What the ranks compute adds up to the layer's output.
    """

    router: LinearT
    experts: Experts[LinearT]


@dataclass(frozen=True)
class Layer(Generic[LinearT]):
    attention_norm: Tensor
    qkv: LinearT
    """Queries, keys and values, one above the other."""
    head_norms: HeadNorms | None
    attention_out: LinearT
    window: int | None
    mlp_norm: Tensor
    mlp: DenseMlp[LinearT] | SparseMlp[LinearT]


class WeightLoader(Generic[LinearT]):
    """Gives the weights of a shard. Where one is missing or has the wrong shape, it raises ConfigError."""

    def __init__(
        self,
        shard: Shard,
        backend: Backend[LinearT, Any],
        source: WeightSource,
        quantization: QuantizationOnLoad | None,
        dtype: torch.dtype,
        tracer: Tracer,
        on_loaded: Callable[[int], None],
    ) -> None:
        """`dtype` is that of dense layers; `on_loaded` is told the bytes of each layer when it is packed."""
        self.shard = shard
        self.backend = backend
        self.dtype = dtype
        self.tracer = tracer
        self._source = source
        self._quantization = quantization
        self._on_loaded = on_loaded
        experts = shard.config.experts
        self.expert_counts = torch.zeros(
            0 if experts is None else experts.num_experts, dtype=torch.int64, device=backend.device
        )
        """Tokens that went to each expert, of all layers together."""

    def layer(self, index: int) -> Layer[LinearT]:
        config, names = self.shard.config, self.shard.config.names
        attention = config.attention_linears(index)
        return Layer(
            attention_norm=self._norm(index, names.attention_norm, config.hidden_size),
            qkv=self.linear([attention.q, attention.k, attention.v], bias=config.qkv_bias),
            head_norms=self._head_norms(index) if config.qk_norm else None,
            attention_out=self.linear([attention.out], bias=config.output_bias),
            window=config.sliding_windows[index],
            mlp_norm=self._norm(index, names.mlp_norm, config.hidden_size),
            mlp=self._mlp(index),
        )

    def norm(self, name: str, size: int) -> Tensor:
        """Weight [size] float32 of a norm."""
        return self._tensor(f"{name}.weight", size, torch.float32)

    def _tensor(self, name: str, size: int, dtype: torch.dtype) -> Tensor:
        out = torch.empty(size, dtype=dtype, device=self.backend.device)
        self._source.read_into(name, out)
        return out

    def linear(self, linears: Sequence[LinearSpec], *, bias: bool = False) -> LinearT:
        """This rank's parts of linear layers of the same input, as one."""
        began = self.tracer.e2e()
        weights = [self._weight(linear) for linear in linears]
        _check_act_orders(linears, weights)
        biases = torch.cat([self._bias(linear) for linear in linears]) if bias else None
        loaded = self.tracer.e2e()
        prepared = self.backend.prepare_linear(weights, biases, self.dtype)
        num_bytes = sum(weight_bytes(weight, self.dtype) for weight in weights)
        said = {"first": linears[0].name, "bytes": num_bytes}
        self.tracer.span("load weights", began, said, ended=loaded)
        self.tracer.span("pack weights", loaded, said)
        self._on_loaded(num_bytes)
        return prepared

    def _weight(self, linear: LinearSpec) -> LinearWeight:
        part = self.shard.part_of(linear)
        weight = self._source.linear(linear, self.dtype)
        if self._quantization is not None:
            # Outputs are rounded whole, so that ranks which share their inputs have the codes of one alone.
            rows = Part(part.outputs, range(linear.inputs))
            weight = take_part(linear, weight, rows, self.dtype)
            weight = self._quantization.quantize(linear, rows, weight, self.backend)
            part = Part(range(len(part.outputs)), part.inputs)
        return take_part(linear, weight, part, self.dtype)

    def _bias(self, linear: LinearSpec) -> Tensor:
        values = self._tensor(f"{linear.name}.bias", linear.outputs, self.dtype)
        part = self.shard.part_of(linear)
        if len(part.inputs) < linear.inputs and self.shard.tp_rank > 0:
            return torch.zeros_like(values)  # what the ranks compute is added up: one adds the bias
        return values[part.outputs.start : part.outputs.stop]

    def _mlp(self, index: int) -> DenseMlp[LinearT] | SparseMlp[LinearT]:
        config, sparse = self.shard.config, self.shard.config.expert_linears(index)
        experts = config.experts
        if experts is None or sparse is None:
            mlp = config.mlp_linears(index)
            return DenseMlp(
                gate_up=self.linear([mlp.gate, mlp.up], bias=config.mlp_bias),
                down=self.linear([mlp.down], bias=config.mlp_bias),
            )
        router = self.linear([sparse.router])
        # One expert after the other, in the order in which a step will read them.
        held = self.shard.experts
        own = sparse.experts[held.start : held.stop]
        prepared = [[self.linear([spec]) for spec in expert] for expert in own]
        gate, up, down = zip(*prepared, strict=True)
        routing = ExpertRouting(experts.num_experts, experts.experts_per_token, experts.renormalize)
        return SparseMlp(router, Experts(routing, held.start, gate, up, down, self.expert_counts))

    def _head_norms(self, index: int) -> HeadNorms:
        config = self.shard.config
        queries = self._norm(index, config.names.query_norm, config.head_dim)
        keys = self._norm(index, config.names.key_norm, config.head_dim)
        return HeadNorms(queries, keys, config.rms_norm_eps)

    def _norm(self, index: int, name: str, size: int) -> Tensor:
        return self.norm(self.shard.config.names.of_layer(index, name), size)


def _check_act_orders(linears: Sequence[LinearSpec], weights: Sequence[LinearWeight]) -> None:
    """Maps of the same input are computed together, so they must take its elements in one order."""
    grouped = [
        (linear, weight)
        for linear, weight in zip(linears, weights, strict=True)
        if isinstance(weight, GroupedWeight)
    ]
    for linear, weight in grouped[1:]:
        first, first_weight = grouped[0]
        if not same_order(first_weight, weight):
            raise ConfigError(
                f"{first.name} and {linear.name} have the same inputs but group them in different orders "
                "(act-order); quantize them with one order."
            )
