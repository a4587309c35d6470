# SPDX-License-Identifier: Apache-2.0
"""Embeddings of tokens for every layer, and hidden states of several streams (Gemma 3n and 4); no torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pagoda.checkpoints.linears import LinearRole, LinearSpec
from pagoda.checkpoints.tensor_names import StoredRows, TensorNames


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

    @property
    def table(self) -> LinearSpec:
        """Embeddings of tokens for all layers, side by side."""
        name, width = "model.embed_tokens_per_layer", self.num_layers * self.size
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
            name, width = "model.per_layer_model_projection", self.num_layers * self.size
            yield self.table
            yield LinearSpec(name, width, hidden, LinearRole.WHOLE)
        yield from self.openings(hidden)
        yield from self.closings(hidden)

    def openings(self, hidden: int) -> list[LinearSpec]:
        """Maps of embeddings to streams behind the first."""
        return self._maps("model.altup_projections", hidden)

    def closings(self, hidden: int) -> list[LinearSpec]:
        """Maps back of streams behind the first."""
        return self._maps("model.altup_unembed_projections", hidden)

    def _maps(self, name: str, hidden: int) -> list[LinearSpec]:
        behind = 0 if self.streams is None else self.streams.count - 1
        return [LinearSpec(f"{name}.{i}", hidden, hidden, LinearRole.WHOLE) for i in range(behind)]

    @property
    def outer_vectors(self) -> list[tuple[str, int]]:
        """Names and sizes of vectors that belong to no layer."""
        return [("model.per_layer_projection_norm.weight", self.size)] if self.size else []

    def layer_linears(self, names: TensorNames, layer: int, hidden: int) -> list[LinearSpec]:
        """Maps of a layer: gate and projection of its embedding, then those of streams."""
        sizes: list[tuple[str, int, int]] = []
        if self.size:
            sizes += [("per_layer_input_gate", self.size, hidden)]
            sizes += [("per_layer_projection", hidden, self.size)]
        if self.streams is not None:
            count, rank = self.streams.count, self.streams.laurel_rank
            sizes += [("altup.modality_router", count, hidden)]
            sizes += [("altup.prediction_coefs", count * count, count)]
            sizes += [("altup.correction_coefs", count, count)]
            sizes += [("laurel.linear_left", rank, hidden), ("laurel.linear_right", hidden, rank)]
        return [
            LinearSpec(names.of_layer(layer, name), outputs, inputs, LinearRole.WHOLE)
            for name, outputs, inputs in sizes
        ]

    def layer_vectors(self, names: TensorNames, layer: int, hidden: int) -> list[tuple[str, int]]:
        """Names and sizes of a layer's vectors: norms, the scale of corrected states, and of its output."""
        found = [("post_per_layer_input_norm.weight", hidden)] * (self.size > 0)
        if self.streams is not None:
            found += [
                ("altup.router_norm.weight", hidden),
                ("laurel.post_laurel_norm.weight", hidden),
            ]
            found += [("altup.correct_output_scale", hidden)] * self.streams.scales_corrected
        found += [("layer_scalar", 1)] * self.scaled
        return [(names.of_layer(layer, name), size) for name, size in found]
