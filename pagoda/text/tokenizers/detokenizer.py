# SPDX-License-Identifier: Apache-2.0
"""Token ids to text, one token at a time.

The deltas that a decoder returns add up to exactly what the tokenizer's own `decode` makes of all the tokens at
once, and no delta ever ends inside a character. Two families of tokenizers cover the supported models; each has a
table from token id to piece, so a token costs O(1) whatever came before it:

- byte level (GPT-2, Qwen, Llama 3): a token is a string of bytes, and the text is their UTF-8;
- SentencePiece (Llama 2, Mistral): a token is text with `▁` for a space, or one byte `<0xE4>`.

Any other decoder is served by decoding a short window of tokens again at every step.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable
from typing import Protocol

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"

_MAX_WINDOW = 16
"""Tokens that may wait for the rest of a character in a `WindowDecoder`."""


class IncrementalDecoder(Protocol):
    def push(self, token_id: int) -> str:
        """The text that became certain with this token; may be empty."""
        ...

    def flush(self) -> str:
        """The text that was held back, as the tokenizer renders an unfinished end. Called once, at the end."""
        ...


def byte_level_alphabet() -> dict[str, int]:
    """The printable character that stands for each byte in byte-level BPE (Radford et al. 2019), to the byte."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    table = {chr(byte): byte for byte in printable}
    table.update({chr(256 + index): byte for index, byte in enumerate(others)})
    return table


_ALPHABET = byte_level_alphabet()


def byte_level_piece(token: str) -> bytes:
    """The bytes of a byte-level token; a token with other characters stands for itself."""
    try:
        return bytes([_ALPHABET[character] for character in token])
    except KeyError:
        return token.encode("utf-8", errors="replace")


def sentencepiece_piece(token: str) -> str | int:
    """The text of a SentencePiece token, or its byte if it is a byte token such as `<0xE4>`."""
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return int(token[3:5], 16)
        except ValueError:
            pass
    return token.replace("▁", " ")


class ByteLevelDecoder:
    """Concatenates bytes and decodes complete characters; malformed bytes become U+FFFD as in Unicode ch. 3.9."""

    __slots__ = ("_decode", "_pieces")

    def __init__(self, pieces: dict[int, bytes]) -> None:
        self._pieces = pieces
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode

    def push(self, token_id: int) -> str:
        return self._decode(self._pieces[token_id])

    def flush(self) -> str:
        return self._decode(b"", True)


class SentencePieceDecoder:
    """Text pieces as they come; a run of byte tokens is held until it ends.

    The tokenizer takes a run of byte tokens as text only if the run as a whole is valid UTF-8, and else as one
    U+FFFD per byte, so nothing about a run is certain before its end.
    """

    __slots__ = ("_pieces", "_run", "_strip_space")

    def __init__(self, pieces: dict[int, str | int], *, strip_space: bool) -> None:
        """`strip_space`: the text begins here, and its first space is only the mark of a word's beginning."""
        self._pieces = pieces
        self._run = bytearray()
        self._strip_space = strip_space

    def push(self, token_id: int) -> str:
        piece = self._pieces[token_id]
        if isinstance(piece, int):
            self._run.append(piece)
            return ""
        if not piece:
            return ""
        return self._strip(self._end_run() + piece if self._run else piece)

    def flush(self) -> str:
        return self._strip(self._end_run())

    def _end_run(self) -> str:
        try:
            text = self._run.decode("utf-8")
        except UnicodeDecodeError:
            text = REPLACEMENT * len(self._run)
        self._run.clear()
        return text

    def _strip(self, text: str) -> str:
        if self._strip_space and text:
            self._strip_space = False
            return text.removeprefix(" ")
        return text


class WindowDecoder:
    """A decoder of unknown kind: a token adds the difference that it makes to a short window of tokens."""

    __slots__ = ("_context", "_decode", "_fresh")

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode = decode
        self._context: list[int] = []
        self._fresh: list[int] = []

    def push(self, token_id: int) -> str:
        self._fresh.append(token_id)
        text = self._new_text()
        if not text or (text.endswith(REPLACEMENT) and len(self._fresh) < _MAX_WINDOW):
            return ""
        self._context, self._fresh = self._fresh, []
        return text

    def flush(self) -> str:
        return self._new_text() if self._fresh else ""

    def _new_text(self) -> str:
        return self._decode(self._context + self._fresh)[len(self._decode(self._context)) :]
