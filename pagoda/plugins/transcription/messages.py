# SPDX-License-Identifier: Apache-2.0
"""Messages between the server and the process that decodes audio."""

from __future__ import annotations

import msgspec

from pagoda.messages.audio import FeatureSpec


class ChildOptions(msgspec.Struct, frozen=True):
    features: FeatureSpec
    max_s: int
    """Seconds of the longest audio."""
    search_s: int
    """Seconds at the end of a piece in which the quietest place is looked for."""


class Piece(msgspec.Struct, frozen=True, array_like=True):
    """Samples from `first` on, up to `end`."""

    first: int
    end: int


class Heard(msgspec.Struct, frozen=True):
    """First message about an audio: its length and its pieces, or what is wrong with it."""

    seconds: float = 0.0
    pieces: list[Piece] = []
    error: str = ""
    """Rule that the file breaks; empty if none."""
