"""The decoder that Llama, Mistral, Mixtral, Qwen2 and Qwen3 share.

The families differ in switches only: biases, norms of queries and keys, sliding windows, rotary scaling, experts.
Of several ranks each computes its part (`pagoda.model.sharding`): some of the layers, and of those some of the
heads and channels. Hidden states are whole, and the same on all ranks of a stage.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic

import torch
from torch import Tensor

from pagoda.backend.base import (
    Backend,
    HeadNorms,
    KVCache,
    LinearT,
    MetadataT,
    Operations,
    StepInput,
    TokenBatch,
    ValueT,
)
from pagoda.backend.operation import Operation, WeightNames
from pagoda.backend.weights import GroupedWeight, LinearWeight, weight_bytes
from pagoda.checkpoints.model_config import LinearSpec
from pagoda.errors import ConfigError
from pagoda.model.experts import DenseMlp, SparseMlp, compute_mlp, load_experts
from pagoda.model.rotary import rotary_frequencies
from pagoda.model.sharding import PartialWeights, Shard
from pagoda.telemetry.tracer import Tracer

_PLAN = Operation("plan", "plan")
"""Preparation of a step, before the operations of its forward pass."""


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


class Decoder(Generic[LinearT, MetadataT]):
    """One stage: tokens or hidden states in, hidden states and at last logits out; K and V go to the caches."""

    def __init__(
        self,
        shard: Shard,
        backend: Backend[LinearT, MetadataT],
        source: PartialWeights,
        dtype: torch.dtype,
        caches: Sequence[KVCache],
        tracer: Tracer,
        on_loaded: Callable[[int], None],
    ) -> None:
        """Takes the weights of `shard` out of `source`; `caches` has one entry for each of its layers.

        `on_loaded` is told the bytes of each linear layer when it is packed.

        Raises:
            ConfigError: a weight is missing or has the wrong shape.
        """
        config = shard.config
        loader = _Loader(shard, backend, source, dtype, tracer, on_loaded)
        self._tracer = tracer
        self._shard = shard
        self.backend = backend
        self._layers = [loader.layer(index) for index in shard.layers]
        self._expert_counts = loader.expert_counts
        self._norm = (
            loader.tensor(f"{config.names.norm}.weight", config.hidden_size)
            if shard.is_last
            else None
        )
        self._embedding = loader.linear([config.embedding], bias=False) if shard.is_first else None
        self.head: LinearT | None = None
        if shard.is_last:
            tied = config.tie_word_embeddings and shard.is_first
            self.head = self._embedding if tied else loader.linear([config.head], bias=False)
        frequencies, self._rotary_scale = rotary_frequencies(config)
        self._frequencies = frequencies.to(backend.device)
        self.caches = caches
        began = tracer.e2e()
        self._compiled = backend.compile(
            self._compute,
            hidden=None if shard.is_first else (config.hidden_size, dtype),
            names=self._weight_names(),
        )
        tracer.span("compile", began)

    def forward(self, batch: TokenBatch, hidden: Tensor | None) -> Tensor:
        """Hidden states behind the stage's last layer, [n, hidden]; those of the last stage are normed.

        `hidden` [n, hidden] is what the stage before this one gave, None for the first stage.
        """
        backend, tracer = self.backend, self._tracer
        began = tracer.e2e()
        plan = backend.attention_metadata(batch, self._shard.num_heads, self.caches[0])
        table = backend.rotary_table(batch.positions, self._frequencies, self._rotary_scale)
        step = StepInput(batch.token_ids, table, plan, hidden)
        planned = tracer.kernel()
        if not planned:
            computed = self._compiled(step)
            if began:
                tracer.span("forward", began)
            return computed
        computed, times = self._compiled.traced(step, tracer)
        if times:
            tracer.span("forward", began, {"ops_ns": [planned - began, *times]})
        else:
            tracer.span(_PLAN.name, began, {"kind": _PLAN.kind}, ended=planned)
            tracer.span("forward", began)
        return computed

    @property
    def operations(self) -> Sequence[Operation]:
        """Operations whose times are `ops_ns` in a trace; empty where operations have spans of their own."""
        recorded = self._compiled.operations
        return [_PLAN, *recorded] if recorded else ()

    def take_expert_tokens(self) -> list[int]:
        """Drains the counts of tokens that went to each expert, in all layers of the stage together.

        Experts of other ranks count as well; empty for a model that has none.
        """
        taken: list[int] = self._expert_counts.tolist()
        self._expert_counts.zero_()
        return taken

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [m, vocab] float32 of normed hidden states [m, hidden], on all ranks of the last stage."""
        own = self.backend.logits(hidden, self._require_head())
        if self.backend.group.size == 1:
            return own
        sizes = self._shard.vocabulary_shares
        # Ranks hold up to a few tokens more or less, and gather rows of one length.
        padded = torch.nn.functional.pad(own, (0, max(sizes) - own.shape[1]))
        shares = self.backend.group.all_gather(padded)
        return torch.cat([share[:, :n] for share, n in zip(shares, sizes, strict=True)], dim=1)

    def argmax(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """The likeliest tokens [m] after hidden states [m, hidden], and a flag [m] that all logits are finite."""
        own, highest, finite = self.backend.argmax(hidden, self._require_head())
        if self.backend.group.size == 1:
            return own, finite
        own += self._shard.vocabulary.start
        # In one message: floats as their bits.
        shares = self.backend.group.all_gather(
            torch.stack([own, highest.view(torch.int32).long(), finite.long()])
        )
        tokens, bits, all_finite = shares.unbind(1)
        values = bits.int().view(torch.float32)
        # Of equal ones the lowest token, which the lowest rank has.
        winner = (values == values.amax(dim=0)).int().argmax(dim=0)
        return tokens.gather(0, winner[None])[0], all_finite.bool().all(dim=0)

    def _weight_names(self) -> WeightNames:
        """Names of the weights in traces: `embedding`, `layers.3.qkv`."""
        named: dict[str, object] = {"embedding": self._embedding, "norm": self._norm}
        for index, layer in zip(self._shard.layers, self._layers, strict=True):
            for name, weight in (vars(layer) | vars(layer.mlp)).items():
                named[f"layers.{index}.{name}"] = weight
        return {id(weight): name for name, weight in named.items()}

    def _require_head(self) -> LinearT:
        if self.head is None:
            raise RuntimeError("Only the last stage has a head.")
        return self.head

    def _compute(
        self, ops: Operations[ValueT, LinearT, MetadataT], step: StepInput[ValueT, MetadataT]
    ) -> ValueT:
        eps = self._shard.config.rms_norm_eps
        x = self._embed(ops, step)
        h = ops.rms_norm(x, self._layers[0].attention_norm, eps)
        # The norm in front of a layer is taken together with the sum behind the one before.
        norms = [layer.attention_norm for layer in self._layers[1:]] + [self._norm]
        for layer, cache, next_norm in zip(self._layers, self.caches, norms, strict=True):
            attended = ops.all_reduce(self._attention(ops, step, layer, cache, h))
            x, h = ops.add_rms_norm(x, attended, layer.mlp_norm, eps)
            mixed = ops.all_reduce(compute_mlp(ops, h, layer.mlp))
            if next_norm is None:
                return ops.add(x, mixed)
            x, h = ops.add_rms_norm(x, mixed, next_norm, eps)
        return h

    def _embed(
        self, ops: Operations[ValueT, LinearT, MetadataT], step: StepInput[ValueT, MetadataT]
    ) -> ValueT:
        if self._embedding is not None:
            ids = self._shard.vocabulary.start, self._shard.config.vocab_size
            return ops.all_reduce(ops.embedding(step.token_ids, self._embedding, *ids))
        if step.hidden is None:
            raise ValueError("This stage starts from hidden states.")
        return step.hidden

    def _attention(
        self,
        ops: Operations[ValueT, LinearT, MetadataT],
        step: StepInput[ValueT, MetadataT],
        layer: Layer[LinearT],
        cache: KVCache,
        h: ValueT,
    ) -> ValueT:
        qkv = ops.linear(h, layer.qkv)
        queries = ops.rotate_and_cache(qkv, cache, step.plan, step.rotary_table, layer.head_norms)
        scale = self._shard.config.head_dim**-0.5
        attended = ops.attention(queries, cache, step.plan, scale=scale, window=layer.window)
        return ops.linear(attended, layer.attention_out)


class _Loader(Generic[LinearT]):
    """Loads and prepares weights by their names and shapes."""

    def __init__(
        self,
        shard: Shard,
        backend: Backend[LinearT, MetadataT],
        source: PartialWeights,
        dtype: torch.dtype,
        tracer: Tracer,
        on_loaded: Callable[[int], None],
    ) -> None:
        self._shard = shard
        self._tracer = tracer
        self._on_loaded = on_loaded
        self._prepare_linear = backend.prepare_linear
        self._source = source
        self._dtype = dtype
        self._device = backend.device
        experts = shard.config.experts
        self.expert_counts = torch.zeros(
            0 if experts is None else experts.num_experts, dtype=torch.int64, device=backend.device
        )
        """Tokens that went to each expert, of all layers together."""

    def layer(self, index: int) -> Layer[LinearT]:
        config, names = self._shard.config, self._shard.config.names
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

    def _mlp(self, index: int) -> DenseMlp[LinearT] | SparseMlp[LinearT]:
        config, maps = self._shard.config, self._shard.expert_linears(index)
        if config.experts is not None and maps is not None:
            first = self._shard.experts.start
            return load_experts(config.experts, maps, first, self.expert_counts, self.linear)
        mlp = config.mlp_linears(index)
        return DenseMlp(
            gate_up=self.linear([mlp.gate, mlp.up], bias=config.mlp_bias),
            down=self.linear([mlp.down], bias=config.mlp_bias),
        )

    def tensor(self, name: str, size: int) -> Tensor:
        out = torch.empty(size, dtype=self._dtype, device=self._device)
        self._source.read_into(name, out)
        return out

    def linear(self, linears: Sequence[LinearSpec], *, bias: bool) -> LinearT:
        """This rank's parts of linear layers of the same input, as one."""
        began = self._tracer.e2e()
        parts = [(linear, self._shard.part_of(linear)) for linear in linears]
        weights = [self._source.linear(linear, part, self._dtype) for linear, part in parts]
        _check_act_orders([linear.name for linear in linears], weights)
        biases = [self._bias(linear) for linear in linears] if bias else []
        loaded = self._tracer.e2e()
        prepared = self._prepare_linear(weights, torch.cat(biases) if biases else None, self._dtype)
        num_bytes = sum(weight_bytes(weight, self._dtype) for weight in weights)
        said = {"first": linears[0].name, "bytes": num_bytes}
        self._tracer.span("load weights", began, said, ended=loaded)
        self._tracer.span("pack weights", loaded, said)
        self._on_loaded(num_bytes)
        return prepared

    def _bias(self, linear: LinearSpec) -> Tensor:
        values = self.tensor(f"{linear.name}.bias", linear.outputs)
        part = self._shard.part_of(linear)
        if len(part.inputs) < linear.inputs and self._shard.tp_rank > 0:
            return torch.zeros_like(values)  # what the ranks compute is added up: one adds the bias
        return values[part.outputs.start : part.outputs.stop]

    def _head_norms(self, index: int) -> HeadNorms:
        config = self._shard.config
        queries = self._norm(index, config.names.query_norm, config.head_dim)
        keys = self._norm(index, config.names.key_norm, config.head_dim)
        return HeadNorms(queries, keys, config.rms_norm_eps)

    def _norm(self, index: int, name: str, size: int) -> Tensor:
        return self.tensor(f"{self._shard.config.names.of_layer(index, name)}.weight", size)


def _check_act_orders(names: Sequence[str], weights: Sequence[LinearWeight]) -> None:
    """Maps of the same input are computed together, so they must take its elements in one order."""
    orders = [
        (name, weight.act_order)
        for name, weight in zip(names, weights, strict=True)
        if isinstance(weight, GroupedWeight)
    ]
    for name, order in orders[1:]:
        first_name, first = orders[0]
        same = order is first or (
            order is not None and first is not None and torch.equal(order, first)
        )
        if not same:
            raise ConfigError(
                f"{first_name} and {name} have the same inputs but group them in different orders (act-order); "
                "quantize them with one order."
            )
