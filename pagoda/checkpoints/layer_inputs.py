# SPDX-License-Identifier: Apache-2.0
"""Embeddings of tokens for every layer, and hidden states of several streams (Gemma 3n and 4); no torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pagoda.checkpoints.linears import LinearRole, LinearSpec
from pagoda.checkpoints.tensor_names import StoredRows, TensorNames


@dataclass(frozen=True)
class BesideNames:
    """Names of tensors of layer inputs; by default those of Hugging Face checkpoints."""

    table: str = "model.embed_tokens_per_layer"
    model_projection: str = "model.per_layer_model_projection"
    model_norm: str = "model.per_layer_projection_norm"
    openings: str = "model.altup_projections"
    closings: str = "model.altup_unembed_projections"
    stacked: bool = False
    """Openings are one tensor [maps, hidden, hidden], and closings another one."""
    gate: str = "per_layer_input_gate"
    projection: str = "per_layer_projection"
    norm: str = "post_per_layer_input_norm"
    router: str = "altup.modality_router"
    router_norm: str = "altup.router_norm"
    predictions: str = "altup.prediction_coefs"
    corrections: str = "altup.correction_coefs"
    output_scale: str = "altup.correct_output_scale"
    """Name in full, as that of the factor."""
    laurel_in: str = "laurel.linear_left"
    laurel_out: str = "laurel.linear_right"
    laurel_norm: str = "laurel.post_laurel_norm"
    factor: str = "layer_scalar"


GGUF_BESIDE = BesideNames(
    table="per_layer_token_embd",
    model_projection="per_layer_model_proj",
    model_norm="per_layer_proj_norm",
    openings="altup_proj",
    closings="altup_unembd_proj",
    stacked=True,
    gate="inp_gate",
    projection="proj",
    norm="post_norm",
    router="altup_router",
    router_norm="altup_router_norm",
    predictions="altup_predict_coef",
    corrections="altup_correct_coef",
    output_scale="altup_correct_scale.weight",
    laurel_in="laurel_l",
    laurel_out="laurel_r",
    laurel_norm="laurel_post_norm",
    factor="layer_output_scale.weight",
)
"""Names in GGUF files (gguf-py/gguf/constants.py of llama.cpp)."""


@dataclass(frozen=True)
class StreamsSpec:
    """Several hidden states of a token, of which a layer computes one and predicts others (Baykal et al. 2023).

    A low-rank map of its input is added to the output of attention (LAuReL, Menghani et al. 2024).
    """

    count: int
    laurel_rank: int
    scales_corrected: bool
    """The state that a layer's own embeddings count for is times a vector."""


@dataclass(frozen=True)
class LayerInputs:
    """Inputs of layers besides hidden states."""

    size: int
    """Elements of a token's embedding for each layer; 0 where there are none."""
    rows: int
    """Tokens that have such embeddings; others have the first one's."""
    vocab_size: int
    num_layers: int
    streams: StreamsSpec | None = None
    scaled: bool = False
    """The output of a layer is times a number (Gemma 4)."""
    names: BesideNames = BesideNames()

    @property
    def table(self) -> LinearSpec:
        """Embeddings of tokens for all layers, side by side."""
        name, width = self.names.table, self.num_layers * self.size
        rows = StoredRows(name, (self.rows, width), 0)
        return LinearSpec(name, self.vocab_size, width, LinearRole.EMBEDDING, rows)

    @property
    def operations(self) -> set[str]:
        """Operations that layers without it may not need."""
        found = {"scale"} if self.scaled else set()
        if self.size:
            found |= {"rms_norm_heads", "columns", "gelu_tanh", "mul", "scale"}
        if self.streams is not None:
            found |= {
                "match_magnitude",
                "mix_streams",
                "correct_streams",
                "join_columns",
                "softcap",
            }
        return found

    @property
    def spans_layers(self) -> bool:
        """True if all layers need what is made of embeddings."""
        return self.size > 0 or self.streams is not None

    def width(self, hidden: int) -> int:
        """Numbers of a token that go past all layers, and what they are made of."""
        streams = 0 if self.streams is None else self.streams.count
        return 3 * self.num_layers * self.size + 3 * streams * hidden

    def outer_linears(self, hidden: int) -> Iterator[LinearSpec]:
        """Maps and tables that belong to no layer."""
        if self.size:
            width = self.num_layers * self.size
            yield self.table
            yield LinearSpec(self.names.model_projection, width, hidden, LinearRole.WHOLE)
        yield from self.openings(hidden)
        yield from self.closings(hidden)

    def openings(self, hidden: int) -> list[LinearSpec]:
        """Maps of embeddings to streams behind the first."""
        return self._maps(self.names.openings, hidden)

    def closings(self, hidden: int) -> list[LinearSpec]:
        """Maps back of streams behind the first."""
        return self._maps(self.names.closings, hidden)

    def _maps(self, name: str, hidden: int) -> list[LinearSpec]:
        behind = 0 if self.streams is None else self.streams.count - 1
        shape = behind, hidden, hidden
        return [
            LinearSpec(
                f"{name}.{i}",
                hidden,
                hidden,
                LinearRole.WHOLE,
                StoredRows(name, shape, i * hidden) if self.names.stacked else None,
            )
            for i in range(behind)
        ]

    @property
    def outer_vectors(self) -> list[tuple[str, int]]:
        """Names and sizes of vectors that belong to no layer."""
        return [(f"{self.names.model_norm}.weight", self.size)] if self.size else []

    def layer_linears(self, names: TensorNames, layer: int, hidden: int) -> list[LinearSpec]:
        """Maps of a layer: gate and projection of its embedding, then those of streams."""
        sizes: list[tuple[str, int, int]] = []
        own = self.names
        if self.size:
            sizes += [(own.gate, self.size, hidden), (own.projection, hidden, self.size)]
        if self.streams is not None:
            count, rank = self.streams.count, self.streams.laurel_rank
            sizes += [(own.router, count, hidden), (own.predictions, count * count, count)]
            sizes += [(own.corrections, count, count)]
            sizes += [(own.laurel_in, rank, hidden), (own.laurel_out, hidden, rank)]
        return [
            LinearSpec(names.of_layer(layer, name), outputs, inputs, LinearRole.WHOLE)
            for name, outputs, inputs in sizes
        ]

    def layer_vectors(self, names: TensorNames, layer: int, hidden: int) -> list[tuple[str, int]]:
        """Names and sizes of a layer's vectors: norms, the scale of corrected states, and of its output."""
        own = self.names
        found = [(f"{own.norm}.weight", hidden)] * (self.size > 0)
        if self.streams is not None:
            found += [(f"{it}.weight", hidden) for it in (own.router_norm, own.laurel_norm)]
            found += [(own.output_scale, hidden)] * self.streams.scales_corrected
        found += [(own.factor, 1)] * self.scaled
        return [(names.of_layer(layer, name), size) for name, size in found]
