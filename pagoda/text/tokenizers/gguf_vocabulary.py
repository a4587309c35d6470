# SPDX-License-Identifier: Apache-2.0
"""The vocabulary in the metadata of a GGUF file."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NoReturn, TypeVar

from tokenizers import AddedToken

from pagoda.checkpoints.fields import Fields
from pagoda.errors import ConfigError

T = TypeVar("T")

TOKENS, TYPES = "tokenizer.ggml.tokens", "tokenizer.ggml.token_type"
SCORES, MERGES = "tokenizer.ggml.scores", "tokenizer.ggml.merges"
MODEL, PRE = "tokenizer.ggml.model", "tokenizer.ggml.pre"

NORMAL, UNKNOWN_TYPE, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
SPACE_MARK = "▁"
_MAX_TOKEN_CHARS = 4096
"""Finding the merges of a token takes the square of its length."""

BOS, EOS = "tokenizer.ggml.bos_token_id", "tokenizer.ggml.eos_token_id"
UNKNOWN = "tokenizer.ggml.unknown_token_id"

_ROLES = {
    "bos_token": BOS,
    "eos_token": EOS,
    "unk_token": UNKNOWN,
    "pad_token": "tokenizer.ggml.padding_token_id",
}
_SENTENCEPIECE_DEFAULTS = {UNKNOWN: 0, BOS: 1, EOS: 2}
_END_KEYS = (EOS, "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")
_END_TOKENS = (
    "<|im_end|>",
    "<|endoftext|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end_of_text|>",
    "<|end|>",
    "<end_of_turn>",
    "<turn|>",
)
"""Control tokens that end an answer. A file names one end token, where generation_config.json names them all."""


class GGUFVocabulary:
    def __init__(self, metadata: Fields) -> None:
        """Raises ConfigError: a key is missing or wrong."""
        self.metadata = metadata
        self.tokens = metadata.texts(TOKENS)
        if max(map(len, self.tokens), default=0) > _MAX_TOKEN_CHARS:
            self._refuse(f"has a token of more than {_MAX_TOKEN_CHARS} characters")
        self.types = [NORMAL] * len(self.tokens)
        if TYPES in metadata:
            self.types = self.of_each(TYPES, metadata.integers(TYPES))
        # The places of unused tokens are filled with names that stand for no text.
        self.ids = {
            token: i
            for i, (token, kind) in enumerate(zip(self.tokens, self.types, strict=True))
            if token and kind != UNUSED
        }
        if not self.ids:
            self._refuse("has no token that is used")
        self._defaults = _SENTENCEPIECE_DEFAULTS if metadata.text(MODEL, "gpt2") == "llama" else {}

    def special_tokens(self) -> dict[str, str]:
        ids = {role: self.named(key) for role, key in _ROLES.items()}
        return {role: self.tokens[i] for role, i in ids.items() if i is not None}

    def end_token_ids(self) -> tuple[int, ...]:
        named = map(self.named, _END_KEYS)
        spelled = (self.ids.get(token) for token in _END_TOKENS)
        controls = {i for i in spelled if i is not None and self.types[i] == CONTROL}
        return tuple(sorted(controls.union(i for i in named if i is not None)))

    def named(self, key: str) -> int | None:
        if key not in self.metadata:
            usual = self._defaults.get(key, len(self.tokens))
            return usual if usual < len(self.tokens) else None
        token_id = self.metadata.count(key)
        if token_id >= len(self.tokens):
            self.metadata.refuse(key, f"must be below {len(self.tokens)}, the number of tokens")
        return token_id

    def token(self, key: str, usual: str) -> str:
        """The token that a key names, or else the `usual` one. Raises ConfigError: there is neither."""
        named = self.named(key)
        if named is None and usual not in self.ids:
            self._refuse(f"lacks the token {usual}, and {key} names none")
        return usual if named is None else self.tokens[named]

    def added(self) -> Iterator[AddedToken]:
        """Tokens that are found in a text before it is cut into words."""
        for token, i in self.ids.items():
            kind = self.types[i]
            if kind in (CONTROL, UNKNOWN_TYPE) or (
                kind == USER_DEFINED and SPACE_MARK not in token
            ):
                yield AddedToken(token, normalized=False, special=kind != USER_DEFINED)

    def of_each(self, key: str, values: list[T]) -> list[T]:
        """Returns `values`, those under `key`, if each token has one."""
        if len(values) != len(self.tokens):
            self._refuse(f"has {len(self.tokens)} tokens, but {key} has {len(values)} values")
        return values

    def _refuse(self, fault: str) -> NoReturn:
        raise ConfigError(f"{self.metadata.source}: {TOKENS} {fault}.")
