# SPDX-License-Identifier: Apache-2.0
"""The encoder of a model that reads: texts to which a decoder's layers attend besides their own; no torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pagoda.checkpoints.distances import distance_tensors
from pagoda.checkpoints.linears import LinearSpec

if TYPE_CHECKING:
    from pagoda.checkpoints.model_spec import ModelSpec


@dataclass(frozen=True)
class TextEncoderSpec:
    """Encoder of an encoder-decoder of texts (Vaswani et al. 2017; Raffel et al. 2020; Lewis et al. 2019)."""

    encoder: ModelSpec
    """The layers, the tables and norms around them, and their names; the decoder has the table of tokens."""

    @property
    def positions(self) -> int:
        """Tokens of the longest text."""
        return self.encoder.max_position_embeddings

    def linears(self) -> Iterator[LinearSpec]:
        """The table of positions, if there is one, and linear layers of the encoder's layers."""
        if self.encoder.positions is not None:
            yield self.encoder.positions
        for layer in range(self.encoder.num_layers):
            yield from self.encoder.layer_linears(layer, ())

    def vectors(self) -> Iterator[tuple[str, int]]:
        """Names and sizes of the encoder's tensors that are no linear layers, but for their biases."""
        encoder = self.encoder
        yield from encoder.embedding_norm_tensors
        yield from encoder.last_norm_tensors
        for name, (buckets, heads) in distance_tensors(encoder):
            yield name, buckets * heads
        for layer in range(encoder.num_layers):
            yield from encoder.norm_tensors(layer)
