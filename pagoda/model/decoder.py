# SPDX-License-Identifier: Apache-2.0
"""The decoder of all families: what a `ModelSpec` says of each layer is recorded once, as a graph.

Of several ranks each computes its part (`pagoda.model.sharding`): some of the layers, and of those some of the
heads and channels. Hidden states are whole, and the same on all ranks of a stage.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic

import torch
from torch import Tensor

from pagoda.backend.base import (
    Backend,
    Compiled,
    FutureTokens,
    KVCache,
    LatentCache,
    LinearT,
    MetadataT,
    StateCache,
    StepInput,
    TokenBatch,
    check_operations,
)
from pagoda.backend.decoder_operations import scaled
from pagoda.backend.graph import Graph, Value
from pagoda.backend.operation import Operation, WeightNames
from pagoda.backend.operations import GraphBuilder
from pagoda.backend.overlap import OverlapBackend
from pagoda.backend.own_rows import gather_rows
from pagoda.backend.row_sampling import SamplesRows
from pagoda.checkpoints.draft_heads import DraftHeadSpec
from pagoda.checkpoints.pooling_spec import VectorKind
from pagoda.model.adapters import AdaptedLayer, Adapters
from pagoda.model.attention import attend
from pagoda.model.caches import LayerCache
from pagoda.model.cross_encoder import ENCODED, CrossEncoder, across
from pagoda.model.draft_heads import fused_input, load_joint, load_token_offsets
from pagoda.model.embedding import embed
from pagoda.model.layer_inputs import load_beside
from pagoda.model.loaded_layers import Layer
from pagoda.model.loader import WeightLoader
from pagoda.model.mlp import carried_part, early_input, own_part, whole_mlp
from pagoda.model.own_tokens import OwnTokens
from pagoda.model.recording import (
    added,
    normed,
    residual,
    through,
    with_adapters,
)
from pagoda.model.rotary import rotary_frequencies
from pagoda.model.shared_blocks import attention_source
from pagoda.model.state_layers import state_caches
from pagoda.model.weight_names import weight_names
from pagoda.parallel.collectives import Collectives

LAST_HIDDEN = "last_hidden"
"""Result of a stage: hidden states behind its last layer, normed on the last stage."""
PASSED_HIDDEN = "passed_hidden"
"""Result of a head: hidden states for its row behind."""
FUSED_HIDDEN = "fused_hidden"
"""Result of a head: hidden states that it makes of several of the model's."""
_PLAN = Operation("plan", "plan")
"""Preparation of a step, before the operations of its forward pass."""


def layer_input(layer: int) -> str:
    """Name of the result of a stage that are the hidden states in front of a layer (`captured`)."""
    return f"input_{layer}"


@dataclass(frozen=True)
class PlannedBatch(Generic[MetadataT]):
    """A step's tokens, with what depends on their places alone: ids may be written later."""

    batch: TokenBatch
    metadata: Mapping[int, MetadataT]
    """Metadata of attention by KV group."""
    own: OwnTokens | None = None
    """This rank's part of the tokens, where each attends to its own."""


class Decoder(Generic[LinearT, MetadataT]):
    """One stage: tokens or hidden states in, hidden states and at last logits out; K and V go to the caches."""

    def __init__(
        self,
        loader: WeightLoader[LinearT],
        backend: Backend[LinearT, MetadataT],
        caches: Sequence[LayerCache],
        *,
        has_adapters: bool = False,
        batch_invariant: bool = True,
        lent: Decoder[LinearT, MetadataT] | None = None,
        captured: Sequence[int] = (),
        context: Collectives | None = None,
    ) -> None:
        """Loads the weights of the loader's shard; `caches` has one entry for each of its layers.

        A head takes tables that it lacks from its model, `lent`. `captured` are layers whose inputs are results;
        `context` are the ranks on which contexts lie, if they are several.
        With `has_adapters`, tokens of a step may have adapters of `adapters`; see `Graph.batch_invariant`.
        """
        shard, config, tracer = loader.shard, loader.shard.config, loader.tracer
        self._tracer = tracer
        self._shard = shard
        self._batch_invariant = batch_invariant
        self.backend = backend
        self._layers = [loader.layer(index) for index in shard.layers]
        self._expert_counts = loader.expert_counts
        self._ahead = backend if isinstance(backend, OverlapBackend) else None
        has_norm = shard.is_last and config.norms_output
        self._norm = loader.norm(config.names.norm) if has_norm else None
        draft = config.draft_head
        self._captured, self._context = captured, context
        self._joint = load_joint(loader)
        self.token_offsets = load_token_offsets(loader)
        """Numbers [outputs] that make a head's tokens the model's; None where they are the same."""
        self._embedding: LinearT | None = None
        if draft is not None and not draft.has_embedding:
            self._embedding = None if lent is None else lent._embedding
        elif shard.is_first:
            table = config.embedding
            self._embedding = loader.linear([table], bias=bool(table.row_bias))
        self._tables = loader.input_tables()
        self._beside = load_beside(loader)
        self._vector_layers = loader.vector_layers()
        self._logit_bias: Tensor | None = None
        if "masked" in self._vector_layers:
            self._logit_bias = loader.vector(config.logit_bias, config.vocab_size)
        self.head: LinearT | None = None
        if draft is not None and not draft.has_head:
            self.head = None if lent is None else lent.head
        elif shard.is_last and (config.gives_logits or self._logit_bias is not None):
            tied = config.tie_word_embeddings and shard.is_first
            own = None if tied else loader.linear([config.head], bias=config.head_bias)
            self.head = self._embedding if own is None else own
        self._rotary = {
            name: rotary_frequencies(rotary, config.max_position_embeddings)
            for name, rotary in config.rotary.items()
            if rotary.dim
        }
        factor = torch.tensor(config.multipliers.embedding)
        self._embedding_multiplier = factor.to(loader.dtype).item()
        self.adapters = Adapters(shard, backend, loader.dtype) if has_adapters else None
        shared = self._embedding, self._embedding_multiplier
        self.encoder = CrossEncoder(loader, *shared) if config.cross_encoder else None
        self.use_caches(caches)

    def use_caches(self, caches: Sequence[LayerCache]) -> None:
        """Computes steps over these caches from now on, one for each layer of the shard, as the others were."""
        began = self._tracer.e2e()
        self.caches = caches
        self._states = [
            state_caches(held.cache, held.block_size, self._shard.states(index))
            for index, held in zip(self._shard.layers, caches, strict=True)
        ]
        """Caches of the states of each layer, none of one with attention."""
        self._groups: dict[int, KVCache | LatentCache | StateCache] = {
            held.group: states[0] if states else held.cache
            for held, states in zip(caches, self._states, strict=True)
        }
        """A cache of each group that the stage has layers of."""
        if self.encoder is not None:
            self.encoder.use_caches(dict(zip(self._shard.layers, caches, strict=True)))
        self._compiled = compiled = self._compile(embeds_spans=False)
        self._compiled_with_spans: Compiled[MetadataT] | None = None
        """The graph of steps with embedded spans; the first of them compiles it."""
        self.row_sampler = compiled if isinstance(compiled, SamplesRows) else None
        """The compiled graph, where it samples from hidden states by itself."""
        self._tracer.span("compile", began)

    def _compile(self, *, embeds_spans: bool) -> Compiled[MetadataT]:
        graph = self._record(embeds_spans=embeds_spans)
        check_operations(
            {node.op for node in graph.nodes}, self.backend.capabilities, self.backend.arithmetic
        )
        return self.backend.compile(graph, self._weight_names())

    def _graph_of(self, batch: TokenBatch) -> Compiled[MetadataT]:
        """The graph that computes a step."""
        if batch.embedded is None or self._embedding is None:
            return self._compiled
        if self._compiled_with_spans is None:
            self._compiled_with_spans = self._compile(embeds_spans=True)
        return self._compiled_with_spans

    def plan(self, batch: TokenBatch) -> PlannedBatch[MetadataT]:
        """Prepares a step; this may be done while another one is computed."""
        heads, plan = len(self._shard.heads), self.backend.attention_metadata
        own = None
        if self._shard.dp_attention:
            own = OwnTokens.of(batch, self._shard.tp_rank, self._shard.tp_size)
        attended = batch if own is None else own.batch
        metadata = {
            group: plan(attended, heads, cache, group) for group, cache in self._groups.items()
        }
        if self.encoder is not None:
            cache, group = self.caches[0].cache, self.caches[0].group
            metadata[ENCODED] = plan(across(batch, self.encoder.positions), heads, cache, group)
        return PlannedBatch(batch, metadata, own)

    def forward(
        self,
        planned: PlannedBatch[MetadataT],
        hidden: Tensor | None,
        rows: Sequence[int] | None = None,
        future_tokens: Sequence[FutureTokens] = (),
    ) -> Tensor:
        """Hidden states behind the stage's last layer, [n, hidden]; those of the last stage are normed.

        `hidden` [n, hidden] float32 is what the stage before this one gave, None for the first stage. The last
        stage gives those of the tokens `rows` only, [m, hidden], by default of all; in its last layer, others are
        computed as far as their keys and values need it. `future_tokens` are tokens that the device alone knows.
        """
        return self.compute(planned, hidden, rows, future_tokens)[0]

    def compute(
        self,
        planned: PlannedBatch[MetadataT],
        hidden: Tensor | None,
        rows: Sequence[int] | None = None,
        future_tokens: Sequence[FutureTokens] = (),
        results: Sequence[str] = (LAST_HIDDEN,),
    ) -> tuple[Tensor, ...]:
        """`results` of the pass that `forward` makes; a head needs `hidden` [n, hidden] of its model as well."""
        if self.encoder is not None:
            self.encoder.encode(planned.batch)
        tracer, began = self._tracer, self._tracer.e2e()
        step = self._input(planned, hidden, rows, future_tokens)
        compiled = self._graph_of(planned.batch)
        ready = tracer.kernel()
        if not ready:
            computed = compiled(step, results)
            if began:
                tracer.span("forward", began)
            return self._in_order(planned.own, rows, computed)
        computed, times = compiled.traced(step, results, tracer)
        if times and compiled is self._compiled:  # whose operations the trace names
            tracer.span("forward", began, {"ops_ns": [ready - began, *times]})
        else:
            tracer.span(_PLAN.name, began, {"kind": _PLAN.kind}, ended=ready)
            tracer.span("forward", began)
        return self._in_order(planned.own, rows, computed)

    def _in_order(
        self, own: OwnTokens | None, rows: Sequence[int] | None, computed: tuple[Tensor, ...]
    ) -> tuple[Tensor, ...]:
        """Results in the order of the `rows` that were asked for, if these are rows of the last stage."""
        if own is None or rows is None or not self._shard.is_last:
            return computed
        return own.in_order(rows, computed)

    def profile(self, batch: TokenBatch) -> int:
        """Bytes of memory that `forward` takes at most for a step like this, of which all rows are wanted.

        Blocks that the step names may be written to.
        """
        hidden = None
        if not self._shard.is_first or self._joint is not None:
            hidden = torch.zeros(len(batch.token_ids), self._shard.config.hidden_size)
        step = self._input(self.plan(batch), hidden, None)
        num_bytes = self._compiled.profile(step, [LAST_HIDDEN])
        if self._embedding is not None and self.backend.capabilities.embeds_spans:
            # The embeddings that are given, of all tokens, and their sum with those of tokens.
            hidden_size = self._shard.config.hidden_size
            num_bytes += 2 * len(batch.token_ids) * hidden_size * torch.float32.itemsize
        return num_bytes if self.encoder is None else self.encoder.profile(num_bytes)

    def _input(
        self,
        planned: PlannedBatch[MetadataT],
        hidden: Tensor | None,
        rows: Sequence[int] | None,
        future_tokens: Sequence[FutureTokens] = (),
    ) -> StepInput[MetadataT]:
        """A step as the graph takes it; arguments are those of `forward`."""
        batch, own_tokens = planned.batch, planned.own
        own_rows = slice(None) if own_tokens is None else own_tokens.rows
        tensors = {"token_ids": batch.token_ids, "positions": batch.positions[own_rows]}
        if hidden is not None:
            tensors["hidden"] = hidden[own_rows]
        if batch.embedded is not None and self._embedding is not None:
            config, (own, vectors) = self._shard.config, batch.embedded
            given = torch.zeros(len(batch.token_ids), config.hidden_size)
            tensors["embedded"] = given.index_copy_(0, own, vectors)[own_rows]
            tensors["token_ids"] = batch.token_ids.index_fill(0, own, config.vocab_size)
        if batch.adapters is not None:
            tensors["adapters"] = batch.adapters
        if self._tables is not None and self._tables.token_types is not None:
            types = batch.token_types if self._tables.token_types.outputs > 1 else None
            tensors["token_types"] = torch.zeros_like(batch.token_ids) if types is None else types
        if self._shard.is_last:
            wanted = range(len(batch.token_ids)) if rows is None else rows
            tensors["rows"] = torch.tensor(wanted, dtype=torch.int64)
        if own_tokens is not None:
            tensors |= own_tokens.inputs(wanted if self._shard.is_last else None)
        return StepInput(tensors, planned.metadata, future_tokens)

    @property
    def operations(self) -> Sequence[Operation]:
        """Operations whose times are `ops_ns` in a trace; empty where operations have spans of their own."""
        recorded = self._compiled.operations([LAST_HIDDEN])
        return [_PLAN, *recorded] if recorded else ()

    @property
    def vocab_size(self) -> int:
        return self._shard.config.vocab_size

    @property
    def hidden_size(self) -> int:
        return self._shard.config.hidden_size

    @property
    def draft_head(self) -> DraftHeadSpec | None:
        """The specification of a head; None of a model."""
        return self._shard.config.draft_head

    @property
    def num_experts(self) -> int:
        """Experts of a layer; 0 for a model that has none."""
        return len(self._expert_counts)

    def take_expert_tokens(self) -> Callable[[], list[int]]:
        """Drains the counts of tokens that went to each expert, in all layers of the stage together.

        They are those of all that was launched since the last call; what is returned waits for them. Experts of
        other ranks count as well.
        """
        if not self.num_experts:
            return list
        if self._ahead is not None:
            drained = self._ahead.launch_drain(self._expert_counts)
            return lambda: drained().tolist()
        counts = self._expert_counts
        if self._shard.dispatches:  # each rank counts its own tokens
            counts = self.backend.group.all_gather(counts).sum(0)
        taken: list[int] = counts.tolist()
        self._expert_counts.zero_()
        return lambda: taken

    def fuse(self, hidden: Sequence[Tensor]) -> Tensor:
        """A head's hidden states, of those of its model's layers, each [n, hidden]."""
        tensors = {fused_input(place): each for place, each in enumerate(hidden)}
        (fused,) = self._compiled(StepInput(tensors), [FUSED_HIDDEN])
        return fused

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [m, vocab] float32 of normed hidden states [m, hidden], on all ranks of the last stage."""
        (logits,) = self._compiled(StepInput({LAST_HIDDEN: hidden}), ["logits"])
        return logits

    def scores(self, hidden: Tensor) -> Tensor:
        """Scores [m, labels] float32 that the model's head gives hidden states [m, hidden]."""
        tokens = self._shard.config.score_tokens
        if tokens is None:
            return self.through("scores", hidden)
        logits = self.logits(hidden)
        scores = logits[:, tokens.yes]
        return (scores if tokens.no is None else scores - logits[:, tokens.no])[:, None]

    def through(self, kind: VectorKind, hidden: Tensor) -> Tensor:
        """Hidden states [m, hidden] of texts or tokens behind the layers of a kind: [m, d] float32."""
        if kind not in self._vector_layers:
            return hidden
        (found,) = self._compiled(StepInput({LAST_HIDDEN: hidden}), [kind])
        return found if kind != "masked" or self._logit_bias is None else found + self._logit_bias

    @property
    def has_argmax(self) -> bool:
        """True if `argmax` surely gives the token of the highest of `logits`."""
        return self._shard.config.multipliers.keep_order

    def argmax(self, hidden: Tensor) -> Tensor:
        """The likeliest tokens after hidden states [m, hidden]: [m, 3] int64.

        The token, the bits of its logit in float32, and 1 if all logits are finite (`GraphBuilder.linear_argmax`).
        """
        (found,) = self._compiled(StepInput({LAST_HIDDEN: hidden}), ["argmax"])
        return found

    def _weight_names(self) -> WeightNames:
        """Names of the weights in traces: `embedding`, `layers.3.qkv`."""
        outer: dict[str, object] = {"embedding": self._embedding, "norm": self._norm}
        if self.head is not self._embedding:
            outer["head"] = self.head
        if self._joint is not None:
            outer |= self._joint.named()
        layers = zip(self._shard.layers, self._layers, strict=True)
        return weight_names(outer, self._tables, self._vector_layers, layers)

    def _record(self, *, embeds_spans: bool) -> Graph:
        """The stage's forward pass; on the last stage with logits and their argmax."""
        config = self._shard.config
        ops = GraphBuilder(
            self.backend.group, batch_invariant=self._batch_invariant, context=self._context
        )
        multipliers, eps = config.multipliers, config.norm.eps
        tables_in = self._embedding, self._tables, self._embedding_multiplier
        x = embed(ops, self._shard, *tables_in, embeds_spans=embeds_spans)
        frame = None
        if self._beside is not None:
            frame = self._beside.open(ops, self._shard, x, embeds_spans=embeds_spans)
        attention_input: Value | None = None
        beside: Value | None = None
        if self._joint is not None:
            hidden = ops.input("hidden", config.hidden_size)
            first_norm = self._layers[0].attention_norm
            if self._joint.fused:
                ops.result(FUSED_HIDDEN, self._joint.record_fused(ops))
            x, attention_input, beside = self._joint.record(ops, x, hidden, first_norm, eps)
        spreads = self.adapters is None and not self.num_experts and self._joint is None
        if spreads:  # counts of experts, and numbers of adapters, are those of all rows
            x = ops.own_rows(x)
        tables = {
            name: ops.rotary_table(
                ops.input("positions"), frequencies.to(self.backend.device), scale
            )
            for name, (frequencies, scale) in self._rotary.items()
        }
        adapted: Sequence[AdaptedLayer | None] = [None] * len(self._layers)
        adapters: Value | None = None
        carried: Value | None = None
        embedded, passed = x, carried
        mixed_in = {source for it in self._layers for source, _ in it.spec.mixed_with}
        inputs: dict[int, Value] = {}
        if self.adapters is not None:
            adapters, adapted = ops.input("adapters"), self.adapters.layers
        for index, layer, maps, cache, states in zip(
            self._shard.layers, self._layers, adapted, self.caches, self._states, strict=True
        ):
            if index in self._captured:
                ops.result(layer_input(index), ops.share_rows(x))
            if index in mixed_in:
                inputs[index] = x
            for source, share in layer.spec.mixed_with:
                x = ops.add(ops.scale(inputs[source], share), ops.scale(x, 1 - share))
            if layer.spec.begins_loop:
                x = normed(ops, x, self._norm, eps)
            if frame is not None and layer.beside is not None:
                x = frame.enter(ops, layer.beside, x)
            if not layer.spec.same_input:
                given = attention_source(ops, layer, x, embedded, passed)
                mixed = attention_input or normed(ops, given, layer.attention_norm, eps)
            early = early_input(ops, layer, x, eps)
            x = residual(ops, layer, 0, x, mixed)
            if frame is not None and layer.beside is not None:
                frame.attend(ops, layer.beside, mixed)
            h = scaled(ops, mixed, layer.spec.input_factor)
            table = tables.get(layer.spec.attention.rotary)
            own_beside = beside if layer.block is None else layer.block.added(ops, h)
            attended = attend(
                ops,
                self._shard,
                index,
                layer,
                maps,
                (cache, states),
                table,
                h,
                adapters,
                own_beside,
            )
            if layer is self._layers[-1] and self._shard.is_last:
                # Only what is wanted goes on from here: of a prompt, the last token.
                rows = ops.input("rows")
                if attended is not None:
                    attended = ops.select_rows(ops.share_rows(attended), rows)
                x = ops.select_rows(ops.share_rows(x), rows)
                if early is not None:
                    early = ops.select_rows(ops.share_rows(early), rows)
                if carried is not None:
                    carried = ops.select_rows(ops.share_rows(carried), rows)
                if frame is not None:
                    frame.select(ops, rows)
                if layer.spec.parallel and not layer.spec.parallel_norms:
                    h = ops.select_rows(ops.share_rows(h), rows)
                if adapters is not None:
                    adapters = ops.select_rows(adapters, rows)
            if attended is not None:
                out = self._mapped_back(ops, layer, maps, attended, h, adapters, x)
                if layer.block is not None:
                    h = normed(ops, out, layer.mlp_norm, eps)
                    passed = whole_mlp(ops, self._shard, layer, maps, h, adapters, x)
                    continue
                x = added(ops, config, layer, x, out, layer.attention_post_norm)
            x = x if frame is None else frame.attended(ops, x)
            if layer.spec.parallel or layer.mlp is None:
                continue
            h = normed(ops, x, layer.mlp_norm, eps)
            x = residual(ops, layer, 1, x, h)
            before, carried = carried, carried_part(ops, layer, h)
            out = whole_mlp(ops, self._shard, layer, maps, h, adapters, x, early)
            x = added(ops, config, layer, x, out, layer.mlp_post_norm)
            x = x if before is None else ops.add(x, before)
            if frame is not None and layer.beside is not None:
                x = frame.leave(ops, index, layer.beside, x)
        x = x if frame is None else frame.close(ops, x)
        h = normed(ops, x, self._norm, eps)
        h = gather_rows(ops, h) if self._shard.dp_attention else ops.share_rows(h)
        ops.result(LAST_HIDDEN, h)
        if self.passed_hidden == PASSED_HIDDEN:
            ops.result(PASSED_HIDDEN, x)
        for kind, layers in self._vector_layers.items():
            found = through(ops, h, layers, eps)
            if kind == "masked" and self.head is not None:
                logits = ops.linear(found, self.head)
                found = ops.all_gather(logits, self._shard.vocabulary_shares)
            ops.result(kind, found)
        if not config.gives_logits or self.head is None:
            return ops.build()
        logits = scaled(ops, ops.linear(h, self.head), multipliers.logits)
        if multipliers.logits_softcap is not None:
            logits = ops.softcap(logits, multipliers.logits_softcap)
        ops.result("logits", ops.all_gather(logits, self._shard.vocabulary_shares))
        first_id = self._shard.channels(config.head.outputs).start
        ops.result("argmax", ops.all_gather_argmax(ops.linear_argmax(h, self.head, first_id)))
        return ops.build()

    def _mapped_back(
        self,
        ops: GraphBuilder,
        layer: Layer[LinearT],
        maps: AdaptedLayer | None,
        attended: Value,
        h: Value,
        adapters: Value | None,
        x: Value,
    ) -> Value:
        """Sum that attention, and an MLP beside it, add to hidden states x [n, hidden], which are normed in h."""
        out = ops.linear(attended, layer.back)
        own = None if maps is None else maps.attention_out
        out = with_adapters(ops, out, attended, own, adapters)
        if layer.spec.parallel:
            eps = self._shard.config.norm.eps
            h = normed(ops, x, layer.mlp_norm, eps) if layer.spec.parallel_norms else h
            if self._shard.dp_attention:
                mlp = whole_mlp(ops, self._shard, layer, maps, h, adapters, x)
            else:
                mlp = own_part(ops, self._shard, layer, maps, h, adapters)
            out = ops.add(out, mlp)
        if not self._shard.dp_attention:
            out = ops.all_reduce(out)
        return scaled(ops, out, layer.spec.output_factor)

    @property
    def passed_hidden(self) -> str:
        """Name of the result that a head takes as hidden states of its row behind."""
        draft = self._shard.config.draft_head
        return LAST_HIDDEN if draft is None or draft.passes_normed else PASSED_HIDDEN
