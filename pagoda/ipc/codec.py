# SPDX-License-Identifier: Apache-2.0
"""Messages as msgpack. One codec per direction of a wire; the decoder checks types as it reads."""

from __future__ import annotations

from typing import Generic, TypeVar

import msgspec

T = TypeVar("T")


class Codec(Generic[T]):
    """Encodes and decodes one union of message types.

    `decode` raises `msgspec.DecodeError` (or its subclass `ValidationError`) for bytes that are not such a
    message.
    """

    def __init__(self, message_type: object) -> None:
        self.encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder[T](message_type).decode

    def decode(self, payload: bytes) -> T:
        try:
            message: T = self._decode(payload)
        except (UnicodeDecodeError, RecursionError) as error:
            raise msgspec.DecodeError(f"it cannot be read: {error}") from None
        return message
