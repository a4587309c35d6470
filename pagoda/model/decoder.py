"""The decoder that Llama, Mistral, Mixtral, Qwen2 and Qwen3 share.

The families differ in switches only: biases, norms of queries and keys, sliding windows, rotary scaling, experts.
Of several ranks each computes its part (`pagoda.model.sharding`): some of the layers, and of those some of the
heads and channels. Hidden states are whole, and the same on all ranks of a stage.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic

import torch
from torch import Tensor

from pagoda.backend.base import (
    Backend,
    KVCache,
    LinearT,
    MetadataT,
    Operations,
    StepInput,
    TokenBatch,
    ValueT,
)
from pagoda.backend.low_rank import LowRankMaps
from pagoda.backend.operation import Operation, WeightNames
from pagoda.model.adapters import AdaptedLayer, Adapters
from pagoda.model.loader import DenseMlp, Layer, WeightLoader
from pagoda.model.rotary import rotary_frequencies

_PLAN = Operation("plan", "plan")
"""Preparation of a step, before the operations of its forward pass."""


class Decoder(Generic[LinearT, MetadataT]):
    """One stage: tokens or hidden states in, hidden states and at last logits out; K and V go to the caches."""

    def __init__(
        self,
        loader: WeightLoader[LinearT],
        backend: Backend[LinearT, MetadataT],
        caches: Sequence[KVCache],
        *,
        has_adapters: bool = False,
    ) -> None:
        """Loads the weights of the loader's shard; `caches` has one entry for each of its layers.

        With `has_adapters`, tokens of a step may have adapters of `adapters`.
        """
        shard, config, tracer = loader.shard, loader.shard.config, loader.tracer
        self._tracer = tracer
        self._shard = shard
        self.backend = backend
        self._layers = [loader.layer(index) for index in shard.layers]
        self._expert_counts = loader.expert_counts
        self._norm = loader.norm(config.names.norm, config.hidden_size) if shard.is_last else None
        self._embedding = loader.linear([config.embedding]) if shard.is_first else None
        self.head: LinearT | None = None
        if shard.is_last:
            tied = config.tie_word_embeddings and shard.is_first
            self.head = self._embedding if tied else loader.linear([config.head])
        frequencies, self._rotary_scale = rotary_frequencies(config)
        self._frequencies = frequencies.to(backend.device)
        self.caches = caches
        self.adapters = Adapters(shard, backend, loader.dtype) if has_adapters else None
        began = tracer.e2e()
        self._compiled = backend.compile(
            self._compute,
            hidden=None if shard.is_first else config.hidden_size,
            names=self._weight_names(),
        )
        tracer.span("compile", began)

    def forward(
        self, batch: TokenBatch, hidden: Tensor | None, rows: Sequence[int] | None = None
    ) -> Tensor:
        """Hidden states behind the stage's last layer, [n, hidden]; those of the last stage are normed.

        `hidden` [n, hidden] float32 is what the stage before this one gave, None for the first stage. The last
        stage gives those of the tokens `rows` only, [m, hidden], by default of all; in its last layer, others are
        computed as far as their keys and values need it.
        """
        backend, tracer = self.backend, self._tracer
        began = tracer.e2e()
        plan = backend.attention_metadata(batch, len(self._shard.heads), self.caches[0])
        table = backend.rotary_table(batch.positions, self._frequencies, self._rotary_scale)
        wanted = None
        if self._shard.is_last:
            wanted = torch.tensor(range(len(batch.token_ids)) if rows is None else rows).long()
        step = StepInput(batch.token_ids, table, plan, hidden, wanted, batch.adapters)
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
        if taken:
            self._expert_counts.zero_()
        return taken

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [m, vocab] float32 of normed hidden states [m, hidden], on all ranks of the last stage."""
        own = self.backend.linear(hidden, self._require_head())
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
        adapters = step.adapters
        adapted: Sequence[AdaptedLayer | None] = [None] * len(self._layers)
        if self.adapters is not None and adapters is not None:
            adapted = self.adapters.layers
        for layer, maps, cache, next_norm in zip(
            self._layers, adapted, self.caches, norms, strict=True
        ):
            attended = self._attention(ops, step, layer, maps, cache, h)
            if layer is self._layers[-1] and self._shard.is_last and step.rows is not None:
                # Only what is wanted goes on from here: of a prompt, the last token.
                attended, x = ops.select_rows(attended, step.rows), ops.select_rows(x, step.rows)
                if adapters is not None:
                    adapters = ops.select_rows(adapters, step.rows)
            out = ops.linear(attended, layer.attention_out)
            if maps is not None:
                out = _adapted(ops, out, attended, maps.attention_out, adapters)
            x, h = ops.add_rms_norm(x, ops.all_reduce(out), layer.mlp_norm, eps)
            mixed = ops.all_reduce(self._mlp(ops, layer, maps, h, adapters))
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

    def _mlp(
        self,
        ops: Operations[ValueT, LinearT, MetadataT],
        layer: Layer[LinearT],
        maps: AdaptedLayer | None,
        h: ValueT,
        adapters: ValueT | None,
    ) -> ValueT:
        """This rank's part of the MLP's output [n, hidden], from normed hidden states [n, hidden]."""
        mlp = layer.mlp
        if isinstance(mlp, DenseMlp):
            if maps is None:
                return ops.linear(ops.gated_linear(h, mlp.gate_up), mlp.down)
            inner = ops.gated_linear(h, mlp.gate_up, maps.gate_up, adapters)
            return _adapted(ops, ops.linear(inner, mlp.down), inner, maps.down, adapters)
        return ops.experts(h, ops.linear(h, mlp.router), mlp.experts)

    def _attention(
        self,
        ops: Operations[ValueT, LinearT, MetadataT],
        step: StepInput[ValueT, MetadataT],
        layer: Layer[LinearT],
        maps: AdaptedLayer | None,
        cache: KVCache,
        h: ValueT,
    ) -> ValueT:
        qkv = ops.linear(h, layer.qkv)
        if maps is not None:
            qkv = _adapted(ops, qkv, h, maps.qkv, step.adapters)
        queries = ops.rotate_and_cache(qkv, cache, step.plan, step.rotary_table, layer.head_norms)
        scale = self._shard.config.head_dim**-0.5
        return ops.attention(queries, cache, step.plan, scale=scale, window=layer.window)


def _adapted(
    ops: Operations[ValueT, LinearT, MetadataT],
    out: ValueT,
    x: ValueT,
    maps: LowRankMaps | None,
    adapters: ValueT | None,
) -> ValueT:
    """`out` [n, out] of a layer with what adapters make of its inputs x."""
    return out if maps is None or adapters is None else ops.add_low_rank(out, x, maps, adapters)
