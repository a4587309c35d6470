# SPDX-License-Identifier: Apache-2.0
"""Audio of a request: the features that an encoder is given, and what a transcript may say."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import msgspec
from msgspec import Meta

from pagoda.messages.ranges import Place, Size
from pagoda.messages.sampling_params import MAX_TOKEN_LIST, TokenId


@dataclass(frozen=True)
class FeatureSpec:
    """Log-mel features of audio, as `WhisperFeatureExtractor` of transformers makes them."""

    mel_bins: int
    frames: int
    """Frames of a piece of audio, which is padded with silence."""
    rate: int
    """Samples a second."""
    window: int
    """Samples of a Fourier transform."""
    hop: int
    """Samples from one frame to the next."""

    @property
    def positions(self) -> int:
        """Positions that an encoder makes of a piece: two frames are one."""
        return self.frames // 2

    @property
    def samples(self) -> int:
        """Samples of a whole piece."""
        return self.frames * self.hop


class Alignment(msgspec.Struct, frozen=True, array_like=True):
    """Tokens of a prompt whose places in its audio are wanted, and heads that look there (`Pooling.PLACES`)."""

    heads: Annotated[tuple[tuple[Place, Place], ...], Meta(min_length=1, max_length=1024)]
    """Layers that attend to audio, counted from 0, and heads of them."""
    first: Place
    """Place of the first of the tokens; all behind it follow."""
    positions: Size
    """Positions of the encoder that have audio; silence follows them."""


class SpeechRules(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """Tokens that a transcript may not have where (Radford et al. 2022)."""

    suppressed: Annotated[tuple[TokenId, ...], Meta(max_length=MAX_TOKEN_LIST)] = ()
    """Tokens that are never said."""
    begin_suppressed: Annotated[tuple[TokenId, ...], Meta(max_length=MAX_TOKEN_LIST)] = ()
    """Tokens that are not said first."""
    suppressed_from: TokenId | None = None
    """Tokens from this one on are never said."""
    end: TokenId = 0
    """Token that ends a transcript; those of text lie before it."""
    first_timestamp: TokenId | None = None
    """Token of the time 0, behind which those of later times lie; None of a transcript without times."""
    last_initial: TokenId | None = None
    """The latest time that a transcript may begin with."""
