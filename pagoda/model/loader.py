# SPDX-License-Identifier: Apache-2.0
"""Loading of one rank's weights, by their names and shapes, in the form that a backend computes with."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Generic

import torch
from torch import Tensor
from torch.nn.functional import pad, softplus

from pagoda.backend.base import (
    Backend,
    ExpertActivation,
    Experts,
    HeadNorms,
    LinearT,
)
from pagoda.backend.weights import (
    DenseWeight,
    GroupedWeight,
    LinearWeight,
    same_order,
    weight_bytes,
)
from pagoda.checkpoints.latent_attention import LatentSpec
from pagoda.checkpoints.layer_spec import (
    XIELU,
    ExpertsSpec,
    MlpSpec,
)
from pagoda.checkpoints.linears import LinearSpec, MlpLinears, PlainMlpLinears
from pagoda.checkpoints.pooling_spec import VectorKind, VectorMap
from pagoda.checkpoints.scan_layers import LightningSpec, Mamba2Spec, MambaSpec
from pagoda.checkpoints.shared_blocks import joined_linear
from pagoda.checkpoints.state_layers import ChannelDeltaSpec, GatedDeltaSpec, ShortConvSpec
from pagoda.errors import ConfigError
from pagoda.model.alibi import alibi_slopes
from pagoda.model.distances import load_distances
from pagoda.model.latent_attention import load_latent_attention
from pagoda.model.layer_inputs import load_layer_beside
from pagoda.model.loaded_layers import (
    ApartMlp,
    DenseMlp,
    InnerNorm,
    InputTables,
    Layer,
    Norm,
    PartNorm,
    SparseGate,
    SparseMlp,
    VectorLayer,
)
from pagoda.model.quantization import QuantizationOnLoad
from pagoda.model.scan_layers import (
    load_lightning,
    load_mamba,
    load_mamba2,
)
from pagoda.model.sharding import LinearShard, Shard, take_part
from pagoda.model.shared_blocks import load_block_use
from pagoda.model.sinusoids import sinusoids
from pagoda.model.state_layers import (
    load_channel_delta,
    load_conv,
    load_delta_rule,
)
from pagoda.model.weights import WeightSource, in_head_order, own_rows
from pagoda.telemetry.tracer import Tracer

KINDS: Mapping[type, Callable[[Any, int, Any], Any]] = {
    LatentSpec: load_latent_attention,
    ShortConvSpec: load_conv,
    GatedDeltaSpec: load_delta_rule,
    ChannelDeltaSpec: load_channel_delta,
    Mamba2Spec: load_mamba2,
    MambaSpec: load_mamba,
    LightningSpec: load_lightning,
}
"""Functions of a loader that load weights of a layer of a kind, by its number and its specification."""


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
        self.source = source
        self._quantization = quantization
        self._layers: dict[tuple[str, object], Layer[LinearT]] = {}
        """Layers that are loaded, by their places in files and their kinds."""
        self.on_loaded = on_loaded
        experts = shard.config.experts
        self.expert_counts = torch.zeros(
            0 if experts is None else experts.routing.num_experts,
            dtype=torch.int64,
            device=backend.device,
        )
        """Tokens that went to each expert, of all layers together."""

    def of_shard(self, shard: Shard) -> WeightLoader[LinearT]:
        """A loader of the weights of another shard of the same files."""
        own = copy.copy(self)
        own.shard = shard
        return own

    def layer(self, index: int) -> Layer[LinearT]:
        """Weights of a layer; those that several layers have in a file are loaded once for all of them."""
        config = self.shard.config
        spec = config.layers[index]
        place = config.names.of_layer(index, "{part}{half}"), spec.kind  # Falcon-H1 has two in one
        if place not in self._layers:
            self._layers[place] = self._layer(index)
        layer = replace(self._layers[place], spec=spec)
        if spec.shared is None:
            return layer
        block, mlp = load_block_use(self, index, spec.shared), layer.mlp
        if isinstance(mlp, DenseMlp):
            mlp = replace(mlp, added=block.gate_up)
        return replace(layer, mlp=mlp, block=block)

    def _layer(self, index: int) -> Layer[LinearT]:
        config, names = self.shard.config, self.shard.config.names
        linears, spec = config.attention_linears(index), config.layers[index]
        attention = spec.attention

        def norm(name: str, *, has: bool, size: int | None = None) -> Norm | None:
            return self.norm(names.of_layer(index, name), size) if has else None

        return Layer(
            attention_norm=norm(
                names.attention_norm,
                has=spec.pre_norm and not spec.bare_attention,
                size=config.attention_input(index),
            ),
            qkv=self.linear(linears.into, bias=attention.qkv_bias, inputs=config.layer_inputs)
            if linears.into
            else None,
            gate=self._output_gate(index),
            of_kind=None if spec.kind is None else KINDS[type(spec.kind)](self, index, spec.kind),
            head_norms=None
            if attention.qk_norm in (None, "layer", "each")
            or spec.kind is not None
            or attention.kv_layer is not None
            else self._head_norms(index),
            part_norm=self._part_norm(index),
            beside=load_layer_beside(self, index),
            head_layer_norms=self._head_layer_norms(index)
            if attention.qk_norm == "layer"
            else None,
            slopes=self._slopes() if attention.alibi else None,
            sinks=self._sinks(index) if attention.sinks else None,
            distances=load_distances(self, index, attention.distances),
            output_norm=self._inner_norm(index, names.output_norm, linears.out)
            if attention.output_norm and linears.out is not None
            else None,
            attention_out=None
            if linears.out is None
            else self.linear([linears.out], bias=attention.output_bias),
            attention_post_norm=norm(names.attention_post_norm, has=spec.post_norm),
            mlp_norm=norm(names.mlp_norm, has=spec.has_mlp_norm),
            mlp=self._mlp(index),
            mlp_post_norm=norm(names.mlp_post_norm, has=spec.has_mlp_post_norm),
            block=None,
            joined=self.linear([joined_linear(config, index)]) if spec.joins_before else None,
            spec=spec,
        )

    def input_tables(self) -> InputTables[LinearT] | None:
        """The tables of a first stage, the norm of their sum, and the map behind it."""
        config = self.shard.config
        if not self.shard.is_first:
            return None
        has_norm = config.norms_embedding or (config.encoder and config.encoder.norms_embeddings)
        norm = self.norm(config.names.embedding_norm, config.embedding_size) if has_norm else None
        positions, token_types = (
            None if table is None else self.linear([table])
            for table in (config.positions, config.token_types)
        )
        back = config.embedding_projection
        projection = None if back is None else self.linear([back], bias=True)
        return InputTables(positions, token_types, norm, projection)

    def vector_layers(self) -> dict[VectorKind, list[VectorLayer[LinearT]]]:
        """The layers behind hidden states of texts or tokens, if there are any on this stage."""
        maps = self.shard.config.maps if self.shard.is_last else {}
        return {kind: [self._vector_layer(it) for it in layers] for kind, layers in maps.items()}

    def _vector_layer(self, it: VectorMap) -> VectorLayer[LinearT]:
        norm = None if it.norm is None else self.norm(it.norm, it.outputs)
        return VectorLayer(self.linear([it.linear], bias=it.bias), it.activation, norm)

    def norm(self, name: str, size: int | None = None) -> Norm:
        """The norm `name` of hidden states, or of vectors of `size` elements."""
        size, norm = size or self.shard.config.hidden_size, self.shard.config.norm
        ones = torch.ones(size, device=self.backend.device)
        weight = self.norm_weight(name, size) if norm.weight else ones
        if norm.kind == "rms":
            return Norm(weight, None)
        if not norm.bias:
            return Norm(weight, torch.zeros_like(weight))
        return Norm(weight, self._tensor(f"{name}.bias", size, torch.float32))

    def norm_weight(self, name: str, size: int) -> Tensor:
        """Weight [size] float32 of a norm."""
        weight = self._tensor(f"{name}.weight", size, torch.float32)
        offset = self.shard.config.names.offset_of(name)
        return weight + offset if offset else weight

    def vector(self, name: str, size: int | tuple[int, ...]) -> Tensor:
        """The tensor `name` of a size, or of a shape, in float32."""
        return self._tensor(name, size, torch.float32)

    def _tensor(self, name: str, shape: int | tuple[int, ...], dtype: torch.dtype) -> Tensor:
        out = torch.empty(shape, dtype=dtype, device=self.backend.device)
        self.source.read_into(name, out)
        return out

    def linear(
        self,
        linears: Sequence[LinearSpec],
        *,
        bias: bool = False,
        inputs: range | None = None,
    ) -> LinearT:
        """This rank's parts of linear layers of the same input, as one; of some `inputs` where these are given."""
        began = self.tracer.e2e()
        weights = [self.weight(linear, inputs) for linear in linears]
        _check_act_orders(linears, weights)
        biases = torch.cat([self.bias(linear) for linear in linears]) if bias else None
        loaded = self.tracer.e2e()
        prepared = self.backend.prepare_linear(weights, biases, self.dtype)
        num_bytes = sum(weight_bytes(weight, self.dtype) for weight in weights)
        said = {"first": linears[0].name, "bytes": num_bytes}
        self.tracer.span("load weights", began, said, ended=loaded)
        self.tracer.span("pack weights", loaded, said)
        self.on_loaded(num_bytes)
        return prepared

    def weight(self, linear: LinearSpec, inputs: range | None = None) -> LinearWeight:
        part = self.shard.part_of(linear)
        if inputs is not None:
            part = LinearShard(part.outputs, inputs)
        if linear.sinusoidal:
            return DenseWeight(sinusoids(linear.outputs, linear.inputs).to(self.dtype))
        weight = self.source.linear(linear, self.dtype)
        if self._quantization is not None:
            # Outputs are rounded whole, so that ranks which share their inputs have the codes of one alone.
            rows = LinearShard(part.outputs, range(linear.inputs))
            weight = take_part(linear, weight, rows, self.dtype)
            weight = self._quantization.quantize(linear, rows, weight, self.backend)
            part = LinearShard(range(len(part.outputs)), part.inputs)
        return take_part(linear, weight, part, self.dtype)

    def bias(self, linear: LinearSpec) -> Tensor:
        """This rank's part of the bias of a linear layer, in the dtype of dense layers."""
        stored, part = linear.stored, self.shard.part_of(linear)
        if not linear.has_bias:
            return torch.zeros(len(part.outputs), dtype=self.dtype, device=self.backend.device)
        shape = (1, linear.outputs) if linear.row_bias else stored.shape[:-1]
        whole = torch.empty(shape, dtype=self.dtype, device=self.backend.device)
        self.source.read_into(linear.row_bias or stored.bias, whole)
        values = own_rows(whole.flatten(), linear)
        if len(part.inputs) < linear.inputs and self.shard.tp_rank > 0:
            return torch.zeros_like(values)  # what the ranks compute is added up: one adds the bias
        return values[part.outputs.start : part.outputs.stop]

    def _mlp(self, index: int) -> DenseMlp[LinearT] | SparseMlp[LinearT] | None:
        config, spec = self.shard.config, self.shard.config.layers[index].mlp
        if spec is None:
            return None
        if isinstance(spec, MlpSpec):
            return self._dense(index, config.mlp_linears(index), spec)
        sparse = config.linears_of(index, spec)
        router = self.linear([sparse.router], bias=spec.bias)
        shared = shared_router = None
        if sparse.shared is not None and spec.shared is not None:
            shared = self._dense(index, sparse.shared, spec.shared)
        if sparse.shared_router is not None:
            shared_router = self.linear([sparse.shared_router])
        # One expert after the other, in the order in which a step will read them.
        held = self.shard.experts
        own = sparse.experts[held.start : held.stop]
        prepared = [[self.linear([it], bias=spec.bias) for it in expert] for expert in own]
        *gate_up, down = zip(*prepared, strict=True)
        gate, up = gate_up[0], gate_up[-1]
        correction = None
        if spec.correction:
            name = config.names.of_layer(index, config.names.correction)
            count = spec.routing.num_experts
            shape = (1, count) if config.names.correction_rows else count
            correction = self._tensor(name, shape, torch.float32).flatten()
        experts = Experts(
            spec.routing,
            held.start,
            gate,
            up,
            down,
            self.expert_counts,
            _activation(spec),
            correction,
        )
        identity = None
        if spec.identities:
            identity = torch.full((spec.routing.num_experts,), spec.routing.scaling_factor)
            identity = identity.to(self.backend.device)
        apart = self._apart(index) if spec.apart else None
        early = config.names.of_layer(index, config.names.experts_norm)
        latent, back = [*(self.linear([it]) for it in sparse.latent), None, None][:2]
        return SparseMlp(
            router,
            experts,
            shared,
            shared_router,
            identity,
            self.norm(early) if spec.early else None,
            apart,
            latent,
            back,
            spec.jitter,
        )

    def _apart(self, index: int) -> ApartMlp:
        """Norms of experts and of what is beside them; the router's input is over the root of its size."""
        config = self.shard.config
        hidden, names = config.hidden_size, config.names
        of_layer = names.of_layer
        found = [self.vector(of_layer(index, name), hidden) for name in names.apart_norms]
        count = len(self.expert_counts)
        factors = self.vector(of_layer(index, names.expert_factors), count)
        return ApartMlp(found[0] * hidden**-0.5, found[1], found[2], found[3], factors)

    def _dense(
        self, index: int, linears: MlpLinears | PlainMlpLinears, spec: MlpSpec
    ) -> DenseMlp[LinearT]:
        return DenseMlp(
            gate_up=self.linear(linears.into, bias=spec.bias),
            down=self.linear([linears.down], bias=spec.has_down_bias),
            activation=spec.activation,
            gated=spec.gated,
            numbers=self._xielu(index, spec.numbers) if spec.activation == "xielu" else {},
            sparse=None
            if spec.deviations is None
            else SparseGate(
                spec.deviations,
                self.shard.channels(spec.intermediate_size),
                spec.intermediate_size,
            ),
            gate_factor=spec.gate_factor,
            down_factor=spec.down_factor,
            limit=spec.limit,
            inner_norm=self._inner_norm(index, self.shard.config.names.inner_norm, linears.down)
            if spec.inner_norm
            else None,
        )

    def _inner_norm(self, index: int, name: str, back: LinearSpec) -> InnerNorm:
        """This rank's part of the norm in front of a layer's map `back`."""
        config, part = self.shard.config, self.shard.part_of(back).inputs
        weight = self.norm_weight(config.names.of_layer(index, name), back.inputs)
        return InnerNorm(weight[part.start : part.stop].clone(), back.inputs, config.norm.eps)

    def _xielu(self, index: int, told: Sequence[float]) -> Mapping[str, float]:
        """Numbers of xIELU: files have those in front of squares and of exponentials before a softplus."""
        names = self.shard.config.names
        stem = names.of_layer(index, names.activation)
        positive, negative, beta, eps = [torch.tensor(it) for it in told] or (
            self._tensor(f"{stem}.{name}", shape, torch.float32)
            for name, shape in zip(XIELU, ((1,), (1,), (), ()), strict=True)
        )
        found = {
            "positive": softplus(positive),
            "negative": beta + softplus(negative),
            "beta": beta,
            "eps": eps,
        }
        return {name: number.item() for name, number in found.items()}

    def _output_gate(self, index: int) -> LinearT | None:
        config = self.shard.config
        if config.layers[index].kind is not None:
            return None
        gates = config.gate_linears(index)
        return self.linear(gates, bias=config.layers[index].attention.qkv_bias) if gates else None

    def _sinks(self, index: int) -> Tensor:
        names, heads = self.shard.config.names, self.shard.heads
        whole = self.vector(names.of_layer(index, names.sinks), self.shard.config.num_heads)
        return whole[heads.start : heads.stop].clone()

    def _slopes(self) -> Tensor:
        """Slopes [heads] float32 of this rank's heads."""
        heads = self.shard.heads
        slopes = alibi_slopes(self.shard.config.num_heads)
        return slopes[heads.start : heads.stop].clone().to(self.backend.device)

    def _head_layer_norms(self, index: int) -> tuple[Tensor, Tensor]:
        """Weights and biases of layer norms of this rank's heads of queries, then of keys."""
        config, own = self.shard.config, (self.shard.heads, self.shard.kv_heads)
        order, parts = config.head_order(index), []
        for (norm, count), heads in zip(config.head_layer_norms(index), own, strict=True):
            tensors = norm.tensors(count)
            found = [self._tensor(name, shape, torch.float32) for name, shape in tensors]
            if norm.layout == "shared":
                weight, bias = (it.expand(count, -1) for it in found)
            else:
                weight = torch.stack(found) if norm.layout == "listed" else found[0]
                bias = torch.zeros_like(weight)
            parts.append([it[heads.start : heads.stop].flatten() for it in (weight, bias)])
        weight, bias = (in_head_order(torch.cat(part), order) for part in zip(*parts, strict=True))
        return weight, bias

    def _head_norms(self, index: int) -> HeadNorms:
        config = self.shard.config
        names, order = config.names, config.head_order(index)
        sizes = config.head_norm_sizes(index)
        if config.layers[index].attention.qk_norm == "unit":
            ones = torch.ones(config.head_dim, device=self.backend.device)
            return HeadNorms(ones, ones, config.norm.eps)
        # A layer without keys has queries alone to be normed.
        key_norm = names.key_norm
        if config.layers[index].attention.kv_layer is not None:
            key_norm = names.query_norm
        queries, keys = (
            in_head_order(self.norm_weight(names.of_layer(index, name), size), order)
            for name, size in zip((names.query_norm, key_norm), sizes, strict=True)
        )
        if config.layers[index].attention.qk_norm == "all":
            linears = config.plain_linears(index)
            own = [self.shard.part_of(linear).outputs for linear in (linears.q, linears.k)]
            queries, keys = (
                norm[part.start : part.stop].clone()
                for norm, part in zip((queries, keys), own, strict=True)
            )
        width = config.head_dim / sizes[0]
        if width == 1 or config.layers[index].attention.qk_norm == "all":
            return HeadNorms(queries, keys, config.norm.eps)
        # The mean of squares is that of fewer elements, the others being zeros.
        wide = [pad(it * width**-0.5, (0, config.head_dim - len(it))) for it in (queries, keys)]
        return HeadNorms(wide[0], wide[1], config.norm.eps / width)

    def _part_norm(self, index: int) -> PartNorm | None:
        """The norm of values; of queries and keys of which each head has weights; or of queries alone."""
        config, spec, shard = self.shard.config, self.shard.config.layers[index], self.shard
        if spec.attention.qk_norm == "each" and spec.kind is None:
            names, head_dim = config.names, config.head_dim
            parts = [
                self.vector(names.of_layer(index, name), (count, head_dim))[own.start : own.stop]
                for name, count, own in (
                    (names.query_norm, config.num_heads, shard.heads),
                    (names.key_norm, config.num_kv_heads, shard.kv_heads),
                )
            ]
            return PartNorm(torch.cat(parts).flatten(), 0, config.norm.eps)
        if spec.attention.kv_layer is not None:
            norms = self._head_norms(index)
            return PartNorm(norms.queries.repeat(len(shard.heads)), 0, norms.eps)
        if not spec.attention.value_norm:
            return None
        own = spec.attention.own_heads
        width = config.head_dim / (own.value_dim if own else config.head_dim)
        weight = torch.full((shard.num_kv_heads * config.head_dim,), width**-0.5)
        first = (len(shard.heads) + shard.num_kv_heads) * config.head_dim
        return PartNorm(weight.to(self.backend.device), first, config.norm.eps / width)


def _activation(spec: ExpertsSpec) -> ExpertActivation:
    if spec.clamp is not None:
        return ExpertActivation("swiglu_oai", spec.clamp.alpha, spec.clamp.limit)
    if spec.limit is not None:
        return ExpertActivation("clamped_silu", limit=spec.limit)
    return ExpertActivation(spec.activation if spec.gated else "relu")


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
