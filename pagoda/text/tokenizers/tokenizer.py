# SPDX-License-Identifier: Apache-2.0
"""Text to token ids and back, with the files of a Hugging Face model directory and without transformers."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

from tokenizers import AddedToken, decoders, pre_tokenizers
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE

from pagoda.errors import ConfigError, InvalidRequestError, PagodaError, refuse
from pagoda.files import read_regular
from pagoda.text.tokenizers.detokenizer import (
    ByteLevelDecoder,
    IncrementalDecoder,
    SentencePieceDecoder,
    WindowDecoder,
    byte_level_alphabet,
    byte_level_piece,
    sentencepiece_piece,
)
from pagoda.text.tokenizers.tokenizer_checks import TokenizerError, check_backend, failures_told

IM_START, IM_END = "<|im_start|>", "<|im_end|>"

_CONVERSION_S = 300.0
"""Seconds in which transformers makes a tokenizer.json; the largest vocabularies take some ten."""

P = TypeVar("P")


class PairTokens(NamedTuple):
    """Token ids of two texts in one prompt."""

    ids: list[int]
    second: int
    """Place of the first token that belongs to the second text by its type; 0 where types do not tell."""


class Tokenizer:
    """Encodes and decodes with a `tokenizers` pipeline."""

    def __init__(
        self, backend: Backend, *, render_unknown: Callable[[int], str] | None = None
    ) -> None:
        """`render_unknown` gives the text of ids that are not in the vocabulary; without it they have none."""
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._render_unknown = render_unknown
        self.longest_token_chars = max(map(len, backend.get_vocab(with_added_tokens=True)))
        """No token stands for more characters of a text than this."""
        added = backend.get_added_tokens_decoder()
        self._special_ids = frozenset(i for i, token in added.items() if token.special)
        self._added_ids = frozenset(added)
        self._family, self._strips_space = _decoder_kind(backend)
        self._tables: dict[tuple[object, frozenset[int]], _Table[Any]] = {}
        """Pieces by the function that makes them and the ids that have none."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of `text`; `add_special_tokens` adds what the model expects around a text (such as BOS).
        Raises InvalidRequestError: the text has half of a surrogate pair, so it is no Unicode text."""
        try:
            with failures_told():
                [encoding] = self._backend.encode_batch_fast(
                    [text], add_special_tokens=add_special_tokens
                )
        except (UnicodeEncodeError, TypeError):
            raise InvalidRequestError(
                "the text holds half of a surrogate pair, which is not valid Unicode."
            ) from None
        except TokenizerError as error:
            raise InvalidRequestError(
                f"the model's tokenizer fails with this text: {error}."
            ) from None
        ids: list[int] = encoding.ids
        return ids

    def encode_pair(
        self, first: str, second: str, *, add_special_tokens: bool, most: int | None = None
    ) -> PairTokens:
        """Token ids of two texts and what stands around them; the longer is cut first, down to `most` tokens.
        Raises InvalidRequestError: a text has half of a surrogate pair, or `most` leaves no room for any."""
        try:
            with failures_told():
                one, other = self._backend.encode_batch([first, second], add_special_tokens=False)
        except (UnicodeEncodeError, TypeError):
            raise InvalidRequestError(
                "a text holds half of a surrogate pair, which is not valid Unicode."
            ) from None
        except TokenizerError as error:
            raise InvalidRequestError(
                f"the model's tokenizer fails with these texts: {error}."
            ) from None
        if most is not None:
            around = self._backend.num_special_tokens_to_add(is_pair=True) * add_special_tokens
            if most < around:
                refuse(
                    "truncate_prompt_tokens", f"must be at least {around}, the tokens around texts"
                )
            shorter, longer = sorted((one, other), key=len)
            kept = min(len(shorter), (most - around) // 2)
            longer.truncate(min(len(longer), most - around - kept))
            shorter.truncate(kept)
        both = self._backend.post_process(one, other, add_special_tokens)
        types: list[int] = both.type_ids
        return PairTokens(both.ids, types.index(1) if 1 in types else 0)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of tokens. Raises PagodaError: the library fails with them."""
        if self._render_unknown is None:
            try:
                with failures_told():
                    text: str = self._backend.decode(
                        token_ids, skip_special_tokens=skip_special_tokens
                    )
            except TokenizerError as error:
                raise PagodaError(
                    f"the model's tokenizer fails with tokens of this text: {error}."
                ) from None
            return text
        decoder = self.incremental((), skip_special_tokens=skip_special_tokens)
        return "".join(map(decoder.push, token_ids)) + decoder.flush()

    def incremental(
        self,
        prompt_token_ids: Sequence[int],
        *,
        skip_special_tokens: bool,
        shown_tokens: Sequence[str] = (),
    ) -> IncrementalDecoder:
        """A decoder of the text behind a prompt. `shown_tokens` have text where other special tokens have none."""
        skipped = self._skipped_ids(shown_tokens) if skip_special_tokens else frozenset()
        if self._family == "byte_level":
            return ByteLevelDecoder(self._table(byte_level_piece, skipped))
        if self._family == "sentencepiece":
            pieces = self._table(sentencepiece_piece, skipped)
            begins_text = all(pieces[i] == "" for i in prompt_token_ids)
            return SentencePieceDecoder(pieces, strip_space=self._strips_space and begins_text)
        return WindowDecoder(
            lambda ids: self.decode([i for i in ids if i not in skipped], skip_special_tokens=False)
        )

    def added_token_id(self, token: str) -> int | None:
        """The id of a token beside those of texts, special or not; None if `token` is none."""
        token_id = self.token_id(token)
        return token_id if token_id in self._added_ids else None

    def special_token_in(self, text: str) -> str | None:
        """A special token that is written out in a text; None if there is none.
        Raises InvalidRequestError: as `encode`."""
        ids = self._special_ids.intersection(self.encode(text, add_special_tokens=False))
        found = (self._backend.id_to_token(token_id) for token_id in sorted(ids))
        # Signs that the vocabulary lacks are a special token too, which is not written there.
        return next((token for token in found if token and token in text), None)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token by itself, special tokens included; what log-probabilities are labelled with."""
        if self._family == "byte_level":
            return self._table(byte_level_piece, frozenset())[token_id]
        if self._family == "sentencepiece":
            piece = self._table(sentencepiece_piece, frozenset())[token_id]
            return bytes([piece]) if isinstance(piece, int) else piece.encode()
        return self.decode([token_id], skip_special_tokens=False).encode()

    def spec(self) -> str:
        """The tokenizer as the text of a tokenizer.json."""
        text: str = self._backend.to_str()
        return text

    def added_tokens(self) -> dict[int, tuple[str, bool]]:
        """Tokens besides those of the vocabulary's model: the text of each, and True if it is special."""
        added = self._backend.get_added_tokens_decoder()
        return {token_id: (token.content, token.special) for token_id, token in added.items()}

    def token_id(self, token: str) -> int | None:
        token_id: int | None = self._backend.token_to_id(token)
        return token_id

    def token(self, token_id: int) -> str:
        token: str | None = self._backend.id_to_token(token_id)
        if token is None:
            return self._render_unknown(token_id) if self._render_unknown else ""
        return token

    def _skipped_ids(self, shown_tokens: Sequence[str]) -> frozenset[int]:
        shown = {self.token_id(token) for token in shown_tokens}
        return self._special_ids - shown if shown else self._special_ids

    def _table(self, make: Callable[[str], P], skipped: frozenset[int]) -> _Table[P]:
        """The pieces that `make` makes of tokens; those that are `skipped` have no text."""
        table: _Table[P] | None = self._tables.get((make, skipped))
        if table is None:
            table = _Table(
                lambda token_id: make("" if token_id in skipped else self.token(token_id))
            )
            self._tables[make, skipped] = table
        return table


class _Table(dict[int, P], Generic[P]):
    """Pieces by token id, each made when first asked for; holds at most the vocabulary."""

    def __init__(self, make: Callable[[int], P]) -> None:
        self._make = make

    def __missing__(self, token_id: int) -> P:
        piece = self[token_id] = self._make(token_id)
        return piece


def _decoder_kind(backend: Backend) -> tuple[str, bool]:
    """The family of `detokenizer` that renders exactly what the decoder of this pipeline renders.

    The second value is True if the first space of a text is stripped.
    """
    if backend.decoder is None:
        return "window", False
    spec = json.loads(backend.decoder.__getstate__())
    if spec["type"] == "ByteLevel":
        return "byte_level", False
    steps = spec.get("decoders", [])
    if [step["type"] for step in steps[:3]] == ["Replace", "ByteFallback", "Fuse"]:
        replaces = (steps[0]["pattern"], steps[0]["content"]) == ({"String": "▁"}, " ")
        strip = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
        if replaces and steps[3:] in ([], [strip]):
            return "sentencepiece", bool(steps[3:])
    return "window", False


def load_tokenizer(directory: Path) -> Tokenizer:
    """Reads `tokenizer.json`; without one, transformers (an optional extra) makes it in a process of its own.
    Raises ConfigError: there is no tokenizer, or its file cannot be read."""
    path = directory / "tokenizer.json"
    is_there = path.exists()
    converted = "" if is_there else _converted(directory)
    source = repr(str(path)) if is_there else f"the tokenizer.json made of {str(directory)!r}"
    try:
        with failures_told():
            backend = Backend.from_buffer(read_regular(path) if is_there else converted.encode())
            tokenizer = Tokenizer(backend)
    except OSError as error:
        raise ConfigError(f"{source} cannot be read: {error.strerror}.") from None
    except TokenizerError as error:
        raise ConfigError(f"{source} is not a tokenizer.json that can be read: {error}.") from None
    check_backend(backend, source, tokenizer.longest_token_chars)
    return tokenizer


def _converted(directory: Path) -> str:
    """A tokenizer.json made of whatever tokenizer files the directory has."""
    command = [sys.executable, "-m", "pagoda.text.tokenizers.convert_tokenizer", str(directory)]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=_CONVERSION_S
        )
    except subprocess.TimeoutExpired:
        raise ConfigError(
            f"{str(directory)!r} has no tokenizer.json, and none was made of its files within "
            f"{_CONVERSION_S:g} s."
        ) from None
    if done.returncode != 0:
        reason = (done.stderr.strip().splitlines() or ["it ended without a word"])[-1]
        raise ConfigError(
            f"{str(directory)!r} has no tokenizer.json, and it could not be made: {reason}"
        )
    return done.stdout


def byte_tokenizer() -> Tokenizer:
    """A tokenizer for models without files: token ids 0 to 255 are bytes, and the others render as ` 4711`."""
    # Whole texts are words here: the cache of 10,000 words would keep 65 MiB of texts, and save no merge.
    backend = Backend(BPE(vocab=byte_level_alphabet(), merges=[], cache_capacity=0))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(
        [AddedToken(token, normalized=False) for token in (IM_START, IM_END)]
    )
    return Tokenizer(backend, render_unknown=lambda token_id: f"Ġ{token_id}")
