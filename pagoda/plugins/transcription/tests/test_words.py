# SPDX-License-Identifier: Apache-2.0
"""Words are those of transformers, and of openai-whisper where pauses are between them."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers.models.whisper import tokenization_whisper

from pagoda.plugins.transcription.words import Word, words_of

_LANGUAGES = {"en": "english", "ja": "japanese"}


def _tokenizer() -> Tokenizer:
    """A tokenizer whose tokens are bytes, but for some words."""
    alphabet = sorted(ByteLevel.alphabet())
    words = ("Ġa", "ab", "Ġ(", "...")
    vocabulary = {token: i for i, token in enumerate((*alphabet, "..", *words))}
    merges = [("Ġ", "a"), ("a", "b"), ("Ġ", "("), (".", "."), ("..", ".")]
    tokenizer = Tokenizer(BPE(vocabulary, merges))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = ByteLevelDecoder()
    return tokenizer


TOKENIZER = _tokenizer()


@given(
    st.text("ab  .,!?¿\"'([-é日本\N{REPLACEMENT CHARACTER}", max_size=24),
    st.sampled_from(["en", "ja"]),
    st.integers(0, 2),
)
def test_words_are_those_of_transformers(text: str, language: str, cut: int) -> None:
    """Texts may end within a character."""
    ids = TOKENIZER.encode(text).ids
    ids = ids[: len(ids) - cut]

    def decode(tokens: Sequence[int], **_: Any) -> str:
        return str(TOKENIZER.decode(tokens))

    shim = SimpleNamespace(decode=decode, eos_token_id=len(ids) + 1000)
    combine = vars(tokenization_whisper)["_combine_tokens_into_words"]
    words, _, places = combine(shim, ids, _LANGUAGES[language])
    own = words_of(ids, range(len(ids) + 1), TOKENIZER.decode, language)
    rest = decode(ids[max((at[-1] + 1 for at in places), default=0) :])
    expected = [word for word in words if word.strip()] + [rest] * bool(rest)
    assert "".join(word.text for word in own).strip() == "".join(expected).strip()
    if not rest:
        assert [word.text for word in own] == expected


@pytest.mark.parametrize(
    ("text", "times", "expected"),
    [
        # A word keeps its own times when punctuation joins it.
        ("ab ( ab)", [0, 1, 2, 3, 4, 5], [("ab", 0, 1), (" ( ab)", 2, 4)]),
        # A pause behind a sentence is no part of the mark, nor of the word that follows.
        ("ab. ab", [0.0, 0.2, 5.0, 5.1, 5.3], [("ab.", 0.0, 0.2), (" ab", 5.0, 5.3)]),
        ("a. ab", [0.0, 0.2, 0.3, 5.0, 5.2], [("a.", 0.0, 0.2), (" ab", 4.8, 5.2)]),
    ],
)
def test_times_are_those_of_openai_whisper(
    text: str, times: list[float], expected: list[tuple[str, float, float]]
) -> None:
    found = words_of(TOKENIZER.encode(text).ids, times, TOKENIZER.decode, "en")
    assert found == [Word(*each) for each in expected]
