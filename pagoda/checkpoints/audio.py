# SPDX-License-Identifier: Apache-2.0
"""The encoder of a model that hears: what a decoder's layers attend to besides their own text; no torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pagoda.checkpoints.linears import LinearSpec

if TYPE_CHECKING:
    from pagoda.checkpoints.model_spec import ModelSpec


@dataclass(frozen=True)
class AudioSpec:
    """Encoder of Whisper (Radford et al. 2022): two convolutions, learned positions, and layers that see all."""

    encoder: ModelSpec
    """The layers, the norm behind them and their names; it has no embeddings of tokens."""
    mel_bins: int
    """Features of a frame."""
    positions: int
    """Hidden states of an audio, each of two frames; those of every audio are as many."""

    @property
    def frames(self) -> int:
        return 2 * self.positions

    @property
    def feature_bytes(self) -> int:
        """Bytes of the features [mel_bins, frames] float32 of an audio."""
        return 4 * self.mel_bins * self.frames

    @property
    def convolutions(self) -> tuple[tuple[str, int], ...]:
        """Name and input channels of each convolution over three neighbours, the second of every other frame."""
        return ("model.encoder.conv1", self.mel_bins), (
            "model.encoder.conv2",
            self.encoder.hidden_size,
        )

    def linears(self) -> Iterator[LinearSpec]:
        """Linear layers of the encoder's layers."""
        for layer in range(self.encoder.num_layers):
            yield from self.encoder.layer_linears(layer, ())

    def vectors(self) -> Iterator[tuple[str, int]]:
        """Names and sizes of the encoder's tensors that are no linear layers, but for their biases."""
        hidden, encoder = self.encoder.hidden_size, self.encoder
        for name, channels in self.convolutions:
            yield f"{name}.weight", 3 * channels * hidden
            yield f"{name}.bias", hidden
        yield f"{encoder.names.positions}.weight", self.positions * hidden
        yield from encoder.last_norm_tensors
        for layer in range(encoder.num_layers):
            yield from encoder.norm_tensors(layer)
