# SPDX-License-Identifier: Apache-2.0
"""Inputs of the encoder of a request's model, beside the tokens that its decoder goes on from."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from typing import Annotated

import msgspec
from msgspec import Meta

MAX_INPUT_BYTES = 2**24
"""Bytes of an input: features of 30 s of Whisper's audio have 1.5 MB."""
TOKEN_BYTES = 4
"""Bytes of the id of a token of a text."""
_Digest = Annotated[bytes, Meta(min_length=32, max_length=32)]


class EncoderInput(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Features of audio, or tokens of a text, which an encoder makes keys and values of."""

    digest: _Digest
    """SHA-256 of the values: tokens of requests with other ones never share KV. Who makes the values computes
    it (`encoder_input`), and hands on none of a client's."""
    values: Annotated[bytes, Meta(max_length=MAX_INPUT_BYTES)]
    """Features [mel_bins, frames] float32, or ids [n] int32 of tokens, little-endian."""
    positions: Annotated[int, Meta(ge=0, le=2**20)] = 0
    """Positions that the encoder computes of them, which are as much work as tokens of a prompt."""

    @property
    def num_tokens(self) -> int:
        """Tokens of a text; 0 of audio, whose features take more bytes for a position."""
        return self.positions if len(self.values) == TOKEN_BYTES * self.positions else 0


def encoder_input(values: bytes, positions: int = 0) -> EncoderInput:
    """An input with its digest."""
    return EncoderInput(hashlib.sha256(values).digest(), values, positions)


def text_input(token_ids: Sequence[int]) -> EncoderInput:
    """A text as an encoder reads it."""
    return encoder_input(array("i", token_ids).tobytes(), len(token_ids))
