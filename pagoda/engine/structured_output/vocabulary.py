# SPDX-License-Identifier: Apache-2.0
"""The model's tokens, as grammars see them: texts read by a process of its own, and masks of the model's width."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import msgspec

from pagoda.errors import PagodaError

if TYPE_CHECKING:
    from llguidance import LLTokenizer


class TokenTexts(msgspec.Struct, frozen=True):
    """Texts of a model's tokens."""

    tokenizer: str
    """Contents of a tokenizer.json."""
    eos_token_ids: tuple[int, ...]


class TokenTextsOrder(msgspec.Struct, frozen=True):
    """The model whose `TokenTexts` are wanted, named as in `WorkerConfig`."""

    model: str
    load_format: str
    simulated: bool


def load_token_texts(order: TokenTextsOrder) -> TokenTexts:
    """Reads a model's tokenizer in a process of its own: engines handle no text, and stay small.
    Raises PagodaError: there is no tokenizer that can be read."""
    command = [sys.executable, "-m", "pagoda.text.token_texts"]
    encoded = msgspec.msgpack.encode(order)
    done = subprocess.run(command, input=encoded, capture_output=True, check=False)
    if done.returncode != 0:
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        raise PagodaError((lines or ["the process that reads it ended without a word."])[-1])
    return msgspec.msgpack.decode(done.stdout, type=TokenTexts)


class Vocabulary:
    """The model's tokens, as grammars see them."""

    def __init__(self, texts: TokenTexts, vocab_size: int) -> None:
        """Raises PagodaError: the model has no end-of-sequence token; ValueError: its tokenizer is not one that
        grammars work with."""
        from llguidance import LLTokenizer

        ends = tuple(i for i in texts.eos_token_ids if i < vocab_size)
        if not ends:
            raise PagodaError("the model has no end-of-sequence token, which must follow an answer")
        self.tokenizer: LLTokenizer = LLTokenizer(texts.tokenizer, eos_token=list(ends))
        self.eos_token_ids = frozenset(ends)
        self.end_token_id = ends[0]
        self._num_bytes = -(-vocab_size // 32) * 4
        self._is_cut = self.tokenizer.vocab_size > vocab_size
        self._kept = (1 << vocab_size) - 1

    def fitted(self, bits: bytes) -> bytes:
        """The mask for the model's vocabulary, which may be larger or smaller than the tokenizer's."""
        if self._is_cut:
            bits = (int.from_bytes(bits, "little") & self._kept).to_bytes(len(bits), "little")
        return bits[: self._num_bytes].ljust(self._num_bytes, b"\0")
