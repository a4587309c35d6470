# SPDX-License-Identifier: Apache-2.0
"""Tokenizers of encoders in GGUF files: WordPiece, `bert` in the metadata, and Unigram, which is `t5` there."""

from __future__ import annotations

import re

from tokenizers import Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import Unigram, WordPiece

from pagoda.text.tokenizers.gguf_vocabulary import (
    CONTROL,
    SCORES,
    SPACE_MARK,
    UNKNOWN,
    GGUFVocabulary,
)

CHARS_MAP = "tokenizer.ggml.precompiled_charsmap"
_SEPARATOR = "tokenizer.ggml.seperator_token_id"
_CLS = "tokenizer.ggml.cls_token_id"
_CONTINUES = "##"
_CAPITAL = re.compile("[A-Z]")


def wordpiece(vocabulary: GGUFVocabulary) -> Tokenizer:
    """The tokenizer of BERT; a text stands between CLS and SEP, and a second one is behind with types of 1.

    Files mark beginnings of words where BERT marks what continues them. They do not say whether texts become lower
    case: they do if no token has a capital letter. Raises ConfigError: a token is missing.
    """
    spelled = {
        _marked(token) if vocabulary.types[i] != CONTROL else token: i
        for token, i in vocabulary.ids.items()
    }
    words = (token for token in vocabulary.ids if not token.startswith((f"{SPACE_MARK}[", "[")))
    has_case = any(map(_CAPITAL.search, words))
    unknown, cls, sep = (
        vocabulary.token(key, usual)
        for key, usual in ((UNKNOWN, "[UNK]"), (_CLS, "[CLS]"), (_SEPARATOR, "[SEP]"))
    )
    backend = Tokenizer(WordPiece(spelled, unk_token=unknown, max_input_chars_per_word=100))
    backend.normalizer = normalizers.BertNormalizer(lowercase=not has_case)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece(prefix=_CONTINUES)
    ids = [(token, vocabulary.ids[token]) for token in (cls, sep)]
    backend.post_processor = processors.TemplateProcessing(
        single=f"{cls} $A {sep}", pair=f"{cls} $A {sep} $B:1 {sep}:1", special_tokens=ids
    )
    return backend


def _marked(token: str) -> str:
    """A token as BERT's vocabulary has it."""
    begins = token.startswith(SPACE_MARK)
    return token.removeprefix(SPACE_MARK) if begins else f"{_CONTINUES}{token}"


def unigram(vocabulary: GGUFVocabulary) -> Tokenizer:
    """The tokenizer of XLM-RoBERTa: SentencePiece with the likeliest of all cuts (Kudo 2018).
    Raises ConfigError: a token has no score."""
    metadata = vocabulary.metadata
    scores = vocabulary.of_each(SCORES, metadata.numbers(SCORES))
    pieces = list(zip(vocabulary.tokens, scores, strict=True))
    backend = Tokenizer(Unigram(pieces, unk_id=vocabulary.named(UNKNOWN), byte_fallback=False))
    if CHARS_MAP in metadata:
        charsmap = bytes(byte % 256 for byte in metadata.integers(CHARS_MAP))
        backend.normalizer = normalizers.Precompiled(charsmap)
    spaces = pre_tokenizers.Metaspace(SPACE_MARK, prepend_scheme="always")
    backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), spaces])
    backend.decoder = decoders.Metaspace(SPACE_MARK, prepend_scheme="always")
    return backend
