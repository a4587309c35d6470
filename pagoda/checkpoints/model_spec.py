# SPDX-License-Identifier: Apache-2.0
"""Specification of a decoder model: its layers, and where its weights lie; no torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

from pagoda.checkpoints.audio import AudioSpec
from pagoda.checkpoints.draft_heads import DraftHeadSpec
from pagoda.checkpoints.filled_heads import filled_linears
from pagoda.checkpoints.latent_attention import LatentLinears, LatentSpec
from pagoda.checkpoints.layer_inputs import LayerInputs
from pagoda.checkpoints.layer_spec import (
    ExpertsSpec,
    LayerSpec,
    MlpSpec,
    NormSpec,
)
from pagoda.checkpoints.linears import (
    AttentionLinears,
    ExpertLinears,
    LinearRole,
    LinearSpec,
    MlpLinears,
    PlainMlpLinears,
    QueryLinears,
)
from pagoda.checkpoints.multipliers import Multipliers
from pagoda.checkpoints.pooling_spec import (
    ClassifierSpec,
    EncoderSpec,
    PositionTable,
    ScoreTokens,
    Task,
    VectorKind,
    VectorMap,
)
from pagoda.checkpoints.rope import RotarySpec, shorter_context
from pagoda.checkpoints.scan_layers import ScanLinears
from pagoda.checkpoints.shared_blocks import joined_linear, shared_linears
from pagoda.checkpoints.tensor_names import (
    HeadLayerNorm,
    StoredRows,
    TensorNames,
    head_order,
    places,
)
from pagoda.checkpoints.weight_formats import Quantization

if TYPE_CHECKING:
    from pagoda.checkpoints.family import Family
    from pagoda.checkpoints.text_encoder import TextEncoderSpec


@dataclass(frozen=True)
class ModelSpec:
    family: Family
    names: TensorNames
    vocab_size: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    layers: tuple[LayerSpec, ...]
    norm: NormSpec
    rotary: Mapping[str, RotarySpec]
    """Rotary tables by name."""
    max_position_embeddings: int
    """Tokens of the longest sequence that the model was made for, rotary scaling included."""
    tie_word_embeddings: bool
    dtype: str
    """Number format of the checkpoint; of a quantized one, that of activations."""
    quantization: Quantization | None
    """Format of the checkpoint's linear layers; None where all are dense."""
    multipliers: Multipliers = field(default_factory=Multipliers)
    beside: LayerInputs | None = None
    """Inputs of layers besides hidden states."""
    encoder: EncoderSpec | None = None
    """Tables of an encoder; None of a decoder."""
    cross_encoder: AudioSpec | TextEncoderSpec | None = None
    """Encoder of what a decoder hears or reads, to which half of its layers attend; None of a decoder alone."""
    position_table: PositionTable | None = None
    """Learned positions of a decoder, which are added to the embeddings of tokens."""
    norms_embedding: bool = False
    """A decoder's embeddings are normed (Bloom)."""
    norms_last: bool = True
    """Hidden states behind a decoder's last layer are normed; not where norms are of sums (BART)."""
    head_bias: bool = False
    norms_head: Literal["rows", "columns"] | None = None
    """Rows (Baichuan 2) or columns (Ling) of the head are brought to length one as it is loaded."""
    classifier: ClassifierSpec | None = None
    """Head that scores texts in place of one that gives logits."""
    vector_maps: Mapping[VectorKind, tuple[VectorMap, ...]] = field(default_factory=dict)
    """Layers behind hidden states of texts or tokens, besides those of the head that scores."""
    logit_bias: str = ""
    """Tensor that is added to logits of the layers `masked`; empty where there are none."""
    usual_length: int | None = None
    """Tokens of the longest sequence where nothing else is asked for; None for as many as there may be."""
    headless: bool = False
    """True of a decoder whose files have no head: it gives vectors alone."""
    score_tokens: ScoreTokens | None = None
    """Next tokens whose logits score a text, in a model that has no head for it."""
    next_token: DraftHeadSpec | None = None
    """The head that comes with the model, and guesses one more token (MTP); None where there is none."""
    draft_head: DraftHeadSpec | None = None
    """Parts of a head besides its layer, which is the only one; None of a model."""

    @property
    def kept_layers(self) -> list[tuple[str, int] | None]:
        """Kind and reach of what each layer keeps of a sequence; None of one that reads what another one keeps."""
        return [
            (layer.kv_kind, layer.attention.reach) if layer.attention.kv_layer is None else None
            for layer in self.layers
        ]

    @property
    def layer_runs(self) -> list[range]:
        """Layers that stay on one stage: of one input, and pairs in which one's experts count behind the other, or
        one sees what an encoder gives."""
        carried = self.experts is not None and self.experts.carried
        each = 2 if carried or self.cross_encoder is not None else 1
        follow = [layer.same_input or layer.joins_before for layer in self.layers]
        begins = [at for at in range(0, self.num_layers, each) if not follow[at]]
        return [*map(range, begins, [*begins[1:], self.num_layers])]

    @property
    def is_whole(self) -> bool:
        """True of a model whose later layers need what only the first ones have: stages cannot share them."""
        again = any(it.shared or it.begins_loop for it in self.layers)
        reads = again or any(it.attention.kv_layer is not None for it in self.layers)
        spans = self.beside is not None and self.beside.spans_layers
        return reads or spans

    @property
    def audio(self) -> AudioSpec | None:
        """The encoder of a model that hears."""
        return self.cross_encoder if isinstance(self.cross_encoder, AudioSpec) else None

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def gives_logits(self) -> bool:
        """False of a model for vectors or scores alone, which says nothing about a next token."""
        return self.encoder is None and self.classifier is None and not self.headless

    @property
    def task(self) -> Task:
        if self.classifier is not None:
            return self.classifier.task
        if self.score_tokens is not None:
            return "score"
        return "generate" if self.gives_logits else "embed"

    @property
    def experts(self) -> ExpertsSpec | None:
        """The experts, which are alike in all layers that have any; None where all layers are dense."""
        sparse = (layer.mlp for layer in self.layers if isinstance(layer.mlp, ExpertsSpec))
        return next(sparse, None)

    @property
    def kv_vectors(self) -> tuple[int, int]:
        """Vectors that a layer with attention keeps of a token for each KV head, and their numbers."""
        return (2, self.head_dim) if self.latent is None else (1, self.latent.kept)

    @property
    def latent(self) -> LatentSpec | None:
        """Sizes of latent attention, which all layers have or none."""
        return self.layers[0].attention.latent

    @property
    def short_context(self) -> int | None:
        """The longest context whose keys are other ones than this model's, as factors for long contexts rotate
        these; None where they do not."""
        return shorter_context(self.rotary.values(), self.max_position_embeddings)

    @property
    def embedding(self) -> LinearSpec:
        names, size = self.names, self.embedding_size
        bias = names.head_bias if self.tie_word_embeddings and self.head_bias else ""
        return LinearSpec(
            names.embedding, self.vocab_size, size, LinearRole.EMBEDDING, row_bias=bias
        )

    @property
    def embedding_size(self) -> int:
        """Elements of a token's embedding."""
        return (self.encoder and self.encoder.embedding_size) or self.hidden_size

    @property
    def head(self) -> LinearSpec:
        """The layer that computes logits; a tied head is the embedding table."""
        if self.tie_word_embeddings:
            return self.embedding
        outputs = self.vocab_size
        if self.draft_head is not None:
            outputs = self.draft_head.num_outputs or outputs
        names, hidden, unit = self.names, self.hidden_size, self.norms_head
        bias = names.head_bias
        return LinearSpec(names.head, outputs, hidden, LinearRole.HEAD, unit=unit, row_bias=bias)

    @property
    def outer_linears(self) -> list[LinearSpec]:
        """Tables and heads, which belong to no layer; a tied head is the embedding table."""
        draft = self.draft_head
        if draft is not None:
            own = [self.embedding] * draft.has_embedding + [self.head] * draft.has_head
            return [*own, *draft.linears(self.hidden_size)]
        beside = [] if self.beside is None else self.beside.outer_linears(self.hidden_size)
        return [self.embedding, self.head, *self.encoder_linears, *self.map_linears, *beside]

    @property
    def layer_inputs(self) -> range | None:
        """Inputs of a layer's queries, keys and values that are hidden states, where others are embeddings."""
        draft, size = self.draft_head, self.hidden_size
        return range(size, 2 * size) if draft is not None and draft.joins_in_attention else None

    def with_layers(self, change: Callable[[int, LayerSpec], LayerSpec]) -> ModelSpec:
        """The model whose layer `i` is `change(i, layer)`."""
        changed = (change(index, layer) for index, layer in enumerate(self.layers))
        return replace(self, layers=tuple(changed))

    def attention_linears(
        self, layer: int
    ) -> AttentionLinears | LatentLinears | QueryLinears | ScanLinears:
        kind = self.layers[layer].kind
        if kind is None:
            q, k, v, out = self.plain_linears(layer)
            spec = self.layers[layer].attention
            lent = spec.kv_layer is not None or spec.crosses
            return QueryLinears(q, out) if lent else AttentionLinears(q, k, v, out)
        return kind.linears(self.names, layer, self.hidden_size, self.num_heads)

    def plain_linears(self, layer: int) -> AttentionLinears:
        """Linear layers of plain attention, with those that another layer has in this one's place."""
        if self.layers[layer].attention.own_heads is not None:
            return filled_linears(self, layer)
        q_size, kv_size = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        names, hidden = self.names, self.hidden_size
        own = self.layer_inputs
        inputs = self.attention_input(layer) if own is None else own.stop
        sizes = {"query": q_size, "key": kv_size, "value": kv_size}
        roles = LinearRole.QUERY, LinearRole.KEY, LinearRole.VALUE
        q, k, v = self._linears(layer, (names.query, names.key, names.value), sizes, inputs, roles)
        k = replace(k, has_bias=self.layers[layer].attention.key_bias)
        if names.joins_by_head:
            q, k, v = self._joined_by_head((q, k, v))
        if self.layers[layer].attention.output_gate and not names.attention_gate:
            q = replace(q, name=f"{q.name}.query", rows=self._gated_rows(q.name, 0))
        out, order = names.of_layer(layer, names.attention_out), self.head_order(layer)
        if order is not None:
            q, k = replace(q, head_order=order), replace(k, head_order=order)
        back = LinearSpec(out, hidden, q_size, LinearRole.ATTENTION_OUT)
        return AttentionLinears(q, k, v, self._as_stored(back))

    def _joined_by_head(self, linears: Iterable[LinearSpec]) -> Iterator[LinearSpec]:
        """Queries, keys and values, of which those of each KV head lie together in tensors that hold several."""
        begun: dict[str, int] = {}
        for linear in linears:
            stored, own = linear.stored, linear.outputs // self.num_kv_heads
            first, group = begun.get(stored.tensor, 0), stored.shape[0] // self.num_kv_heads
            begun[stored.tensor] = first + own
            placed = replace(stored, first=first, group=group)
            yield linear if group == own else replace(linear, rows=placed)

    def _as_stored(self, linear: LinearSpec) -> LinearSpec:
        """A layer's linear map, whose inputs come before outputs in some files."""
        if not self.names.transposes:
            return linear
        return replace(linear, rows=replace(linear.stored, transposed=True))

    def _gated_rows(self, tensor: str, first: int) -> StoredRows:
        """Rows of queries, or of gates, which take turns head by head."""
        shape = (2 * self.num_heads * self.head_dim, self.hidden_size)
        return StoredRows(tensor, shape, first, group=2 * self.head_dim)

    def gate_linears(self, layer: int) -> list[LinearSpec]:
        """Gates of attention's outputs; of a delta rule its gates of outputs, then those of its state."""
        spec, names, hidden = self.layers[layer], self.names, self.hidden_size
        if spec.kind is not None:
            return spec.kind.gates(names, layer, hidden)
        if not spec.attention.output_gate:
            return []
        tensor, size = names.of_layer(layer, names.query), self.num_heads * self.head_dim
        if names.attention_gate:
            own = names.of_layer(layer, names.attention_gate)
            return [LinearSpec(own, size, hidden, LinearRole.QUERY)]
        rows = self._gated_rows(tensor, self.head_dim)
        return [LinearSpec(f"{tensor}.gate", size, hidden, LinearRole.QUERY, rows)]

    def head_order(self, layer: int) -> tuple[int, ...] | None:
        """Stored dimensions of the heads of queries and keys in the order in which they are computed."""
        rotary = self.rotary[self.layers[layer].attention.rotary]
        if self.names.permutes_heads:
            return head_order(self.head_dim, self.head_dim)
        if rotary.dim == 0 or not self.names.rotates_neighbours:
            return None
        return head_order(self.head_dim, rotary.dim)

    @property
    def positions(self) -> LinearSpec | None:
        """Learned positions, one for each token of a sequence (Gehring et al. 2017)."""
        table, name = self.encoder or self.position_table, self.names.positions
        size = self.embedding_size
        if table is None or table.num_positions == 0:
            return None
        rows = StoredRows(name, (table.num_positions, size), table.first_position)
        count = table.num_positions - table.first_position
        is_fixed = table.sinusoidal
        return LinearSpec(name, count, size, LinearRole.WHOLE, rows, sinusoidal=is_fixed)

    @property
    def token_types(self) -> LinearSpec | None:
        if self.encoder is None or self.encoder.num_token_types == 0:
            return None
        count = self.encoder.num_token_types
        return LinearSpec(self.names.token_types, count, self.embedding_size, LinearRole.WHOLE)

    @property
    def embedding_projection(self) -> LinearSpec | None:
        """The map of embeddings to hidden states, which has a bias."""
        if self.encoder is None or self.encoder.embedding_size is None:
            return None
        name = self.names.embedding_projection
        return LinearSpec(name, self.hidden_size, self.embedding_size, LinearRole.WHOLE)

    @property
    def encoder_linears(self) -> list[LinearSpec]:
        """Tables of a first stage besides that of tokens, the map behind them, and layers of a cross encoder."""
        heard = () if self.cross_encoder is None else self.cross_encoder.linears()
        tables = self.positions, self.token_types, self.embedding_projection
        return [*filter(None, tables), *heard]

    @property
    def maps(self) -> Mapping[VectorKind, tuple[VectorMap, ...]]:
        """Layers behind hidden states of texts or tokens, by what they are for."""
        if self.classifier is None:
            return self.vector_maps
        return {**self.vector_maps, "scores": self.classifier.layers(self.hidden_size)}

    @property
    def map_linears(self) -> list[LinearSpec]:
        return [it.linear for layers in self.maps.values() for it in layers]

    @property
    def map_vectors(self) -> list[tuple[str, int]]:
        """Names and sizes of the biases and norms of layers behind hidden states."""
        found = [(self.logit_bias, self.vocab_size)] if self.logit_bias else []
        for it in (layer for layers in self.maps.values() for layer in layers):
            found += [(f"{it.name}.bias", it.outputs)] * it.bias
            found += self._norm_tensors(it.norm, it.outputs) if it.norm else []
        return found

    def mlp_linears(self, layer: int) -> MlpLinears | PlainMlpLinears:
        """Linear layers of a dense layer's MLP."""
        mlp, names = self.layers[layer].mlp, self.names
        if mlp is None:
            raise TypeError("The layer has no MLP.")
        if isinstance(mlp, MlpSpec) and not mlp.gated:
            hidden, inner = self.hidden_size, mlp.intermediate_size
            up, down = (names.of_layer(layer, name) for name in (names.up, names.down))
            return PlainMlpLinears(
                self._as_stored(LinearSpec(up, inner, hidden, LinearRole.MLP_IN)),
                self._as_stored(LinearSpec(down, hidden, inner, LinearRole.MLP_OUT)),
            )
        spelled = (names.gate, names.up, names.down)
        found = self._mlp(
            layer, spelled, mlp.intermediate_size, (LinearRole.MLP_IN, LinearRole.MLP_OUT)
        )
        if (
            not isinstance(mlp, MlpSpec)
            or mlp.deviations is None
            or isinstance(found, PlainMlpLinears)
        ):
            return found
        # A rank's gates depend on those of others.
        return found._replace(gate=replace(found.gate, role=LinearRole.WHOLE_MAP))

    def mlp_biases(self, layer: int) -> list[LinearSpec]:
        """Linear layers of a dense layer's MLP that have biases."""
        mlp = self.layers[layer].mlp
        if not isinstance(mlp, MlpSpec):
            return []
        linears = self.mlp_linears(layer)
        return [*linears.into] * mlp.bias + [linears.down] * mlp.has_down_bias

    def expert_linears(
        self, layer: int, chosen: Iterable[int] | None = None
    ) -> ExpertLinears | None:
        """Router and experts of a layer, by default all; None where the layer is dense, and has `mlp_linears`
        instead."""
        experts = self.layers[layer].mlp
        return self.linears_of(layer, experts, chosen) if isinstance(experts, ExpertsSpec) else None

    def linears_of(
        self, layer: int, experts: ExpertsSpec, chosen: Iterable[int] | None = None
    ) -> ExpertLinears:
        """Router and experts of a layer that has these, by default all."""
        names = self.names
        spelled = (names.expert_gate, names.expert_up, names.expert_down)
        router = names.of_layer(layer, names.router)
        roles = LinearRole.EXPERT_IN, LinearRole.EXPERT_OUT
        inner, count = experts.intermediate_size, experts.routing.num_experts
        shared = shared_router = None
        if experts.shared_size:
            spelled_shared = (names.shared_gate, names.shared_up, names.shared_down)
            dense = (LinearRole.MLP_IN, LinearRole.MLP_OUT)
            shared = self._mlp(
                layer, spelled_shared, experts.shared_size, dense, gated=experts.gated
            )
        if experts.scores_shared:
            name = names.of_layer(layer, names.shared_router)
            shared_router = LinearSpec(name, 1, self.hidden_size, LinearRole.ROUTER)
        hidden = self.hidden_size
        own = experts.latent_size or hidden
        return ExpertLinears(
            LinearSpec(router, count, hidden, LinearRole.ROUTER),
            tuple(
                self._mlp(
                    layer, spelled, inner, roles, expert, count, gated=experts.gated, hidden=own
                )
                for expert in (range(experts.num_stored) if chosen is None else chosen)
            ),
            shared,
            shared_router,
            experts.latent_linears(names, layer, hidden),
        )

    def _mlp(
        self,
        layer: int,
        names: tuple[str, str, str],
        inner: int,
        roles: tuple[LinearRole, LinearRole],
        expert: int | None = None,
        experts: int = 0,
        *,
        gated: bool = True,
        hidden: int = 0,
    ) -> MlpLinears | PlainMlpLinears:
        """The MLP of `inner` channels whose linear layers have these names in a layer; it is given hidden states,
        or vectors of `hidden` elements."""
        (into, out), hidden = roles, hidden or self.hidden_size
        if not gated:
            found = (
                self._linears(layer, (name,), {what: size}, inputs, (role,), expert, experts)
                for name, what, size, inputs, role in (
                    (names[1], "up", inner, hidden, into),
                    (names[2], "down", hidden, inner, out),
                )
            )
            return PlainMlpLinears(*(linear for (linear,) in found))
        sizes = {"gate": inner, "up": inner}
        step = -1 if self.names.up_first else 1
        gate, up = self._linears(
            layer, names[:2], dict([*sizes.items()][::step]), hidden, (into, into), expert, experts
        )[::step]
        down = self._linears(layer, names[2:], {"down": hidden}, inner, (out,), expert, experts)
        return MlpLinears(gate, up, *down)

    def _linears(
        self,
        layer: int,
        names: tuple[str, ...],
        sizes: Mapping[str, int],
        inputs: int,
        roles: tuple[LinearRole, ...],
        expert: int | None = None,
        experts: int = 0,
    ) -> list[LinearSpec]:
        tensors = [self.names.of_layer(layer, name) for name in names]
        layout = self.names.expert_layout if expert is not None else "linear"
        placed = places(tensors, sizes, inputs, expert, experts, layout)
        return [
            self._as_stored(LinearSpec(name, outputs, inputs, role, rows))
            for (name, rows), outputs, role in zip(placed, sizes.values(), roles, strict=True)
        ]

    def norm_tensors(self, layer: int) -> list[tuple[str, int]]:
        """Names and sizes of a layer's vectors: of norms, sinks, its router's correction, its convolution."""
        names, spec = self.names, self.layers[layer]
        before = [names.attention_norm] * (spec.pre_norm and not spec.bare_attention)
        before += [names.mlp_norm] * spec.has_mlp_norm
        behind = [names.attention_post_norm] * spec.post_norm
        behind += [names.mlp_post_norm] * spec.has_mlp_post_norm
        size = self.attention_input(layer)
        found = [
            tensor
            for name in before + behind
            for tensor in self._norm_tensors(
                names.of_layer(layer, name), size if name == names.attention_norm else None
            )
        ]
        if spec.kind is not None:
            found += spec.kind.vectors(names, layer)
        elif spec.attention.qk_norm in ("head", "all"):
            of_heads = zip(
                (names.query_norm, names.key_norm), self.head_norm_sizes(layer), strict=True
            )
            found += [
                (f"{names.of_layer(layer, name)}.weight", size)
                for name, size in of_heads
                if name == names.query_norm or spec.attention.kv_layer is None
            ]
        elif spec.attention.qk_norm == "each":
            counts = {names.query_norm: self.num_heads, names.key_norm: self.num_kv_heads}
            found += [(names.of_layer(layer, it), n * self.head_dim) for it, n in counts.items()]
        elif spec.attention.qk_norm == "layer":
            for norm, heads in self.head_layer_norms(layer):
                found += [(name, math.prod(shape)) for name, shape in norm.tensors(heads)]
        if self.beside is not None:
            found += self.beside.layer_vectors(names, layer, self.hidden_size)
        found += spec.inner_norms(names, layer, self.num_heads * self.head_dim)
        if spec.attention.sinks:
            found.append((names.of_layer(layer, names.sinks), self.num_heads))
        if spec.mlp is not None:
            vectors = spec.mlp.vectors(names, self.hidden_size)
            found += [(names.of_layer(layer, name), it) for name, it in vectors]
        return found

    def attention_input(self, layer: int) -> int:
        """Elements of what is normed in front of attention."""
        return self.hidden_size * (1 if self.layers[layer].shared is None else 2)

    @property
    def last_norm_tensors(self) -> list[tuple[str, int]]:
        """Names and sizes of the tensors of the norm behind the last layer, which most encoders do not have."""
        return self._norm_tensors(self.names.norm) if self.norms_output else []

    @property
    def norms_output(self) -> bool:
        """Hidden states behind the last layer are normed."""
        return self.norms_last if self.encoder is None else self.encoder.norms_output

    @property
    def embedding_norm_tensors(self) -> list[tuple[str, int]]:
        """Names and sizes of a norm of embeddings, norms in front of a head, or of a cross encoder."""
        if self.norms_embedding or (self.encoder is not None and self.encoder.norms_embeddings):
            return self._norm_tensors(self.names.embedding_norm, self.embedding_size)
        names = self.draft_head.norms if self.draft_head else []
        found = [tensor for name in names for tensor in self._norm_tensors(name)]
        found += [] if self.beside is None else self.beside.outer_vectors
        return found if self.cross_encoder is None else [*found, *self.cross_encoder.vectors()]

    def _norm_tensors(self, name: str, size: int | None = None) -> list[tuple[str, int]]:
        ends = ["weight"] * self.norm.weight + ["bias"] * self.norm.bias
        return [(f"{name}.{end}", size or self.hidden_size) for end in ends]

    def head_layer_norms(self, layer: int) -> Iterator[tuple[HeadLayerNorm, int]]:
        """Layer norms of queries and of keys, and the number of heads that each is of."""
        layout = self.names.head_norms
        for name, heads in (
            (self.names.query_norm, self.num_heads),
            (self.names.key_norm, self.num_kv_heads),
        ):
            yield HeadLayerNorm(self.names.of_layer(layer, name), self.head_dim, layout), heads

    def head_norm_sizes(self, layer: int) -> tuple[int, int]:
        """Elements of the norms of queries and keys, if there are any."""
        if self.layers[layer].attention.qk_norm == "all":
            return self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        own = self.layers[layer].attention.own_heads
        return (own.head_dim if own else self.head_dim,) * 2

    def layer_linears(self, layer: int, experts: Iterable[int]) -> Iterator[LinearSpec]:
        """All linear layers of a layer; of its experts, if it has any, those that are named."""
        yield from filter(None, self.attention_linears(layer))
        if self.layers[layer].attention.crosses:
            yield from self.plain_linears(layer)[1:3]
        yield from self.gate_linears(layer)
        spec = self.layers[layer]
        if spec.shared is not None:
            yield from shared_linears(self, layer, spec.shared).all
        if spec.joins_before:
            yield joined_linear(self, layer)
        if self.beside is not None:
            yield from self.beside.layer_linears(self.names, layer, self.hidden_size)
        sparse = self.expert_linears(layer, experts)
        if sparse is None:
            yield from self.mlp_linears(layer) if self.layers[layer].mlp is not None else ()
        else:
            yield sparse.router
            yield from sparse.latent
            if sparse.shared_router is not None:
                yield sparse.shared_router
            yield from sparse.shared or ()
            for mlp in sparse.experts:
                yield from mlp

    def weights_per_token(self, layer: int) -> int:
        """Weights of a layer that one token is multiplied with."""
        mlp = self.layers[layer].mlp
        chosen = range(mlp.routing.experts_per_token if isinstance(mlp, ExpertsSpec) else 0)
        return sum(m.outputs * m.inputs for m in self.layer_linears(layer, chosen))
