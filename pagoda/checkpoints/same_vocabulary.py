# SPDX-License-Identifier: Apache-2.0
"""Comparison of vocabularies: two models can say the same tokens if equal ids are equal texts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pagoda.checkpoints.gguf.reader import is_gguf, read_gguf

_TOKENIZER = "tokenizer.json"
_GGUF_TOKENS = "tokenizer.ggml.tokens"


def vocabulary_problem(models: tuple[str, str], sizes: tuple[int, int], load_format: str) -> str:
    """A clause that says in what the vocabularies of two models differ; empty where tokens of one are the other's.

    One may have more tokens behind those of the other, as rows of a table are often padded. Where files do not say
    what ids mean, `sizes`, the numbers of ids, are compared.
    """
    one, other = ({} if load_format == "dummy" else token_texts(Path(model)) for model in models)
    if not one or not other:
        return "" if sizes[0] == sizes[1] else f"{sizes[1]:,} tokens, not {sizes[0]:,}"
    for token_id in sorted(one.keys() & other.keys()):
        if one[token_id] != other[token_id]:
            return f"token {token_id} is {other[token_id]!r}, not {one[token_id]!r}"
    return ""


def token_texts(model: Path) -> Mapping[int, str]:
    """Tokens by id as the files of a model spell them; empty where these do not say."""
    if is_gguf(model):
        found = read_gguf(model).metadata.values.get(_GGUF_TOKENS)
        return dict(enumerate(map(str, found))) if isinstance(found, list | tuple) else {}
    try:
        told = json.loads((model / _TOKENIZER).read_bytes())
        return _texts(told)
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def _texts(told: Any) -> Mapping[int, str]:
    """Tokens of a tokenizer.json: a table of ids by text, or a list of texts with their scores."""
    vocabulary = told["model"]["vocab"]
    if isinstance(vocabulary, dict):
        found = {token_id: text for text, token_id in vocabulary.items()}
    else:
        found = {token_id: text for token_id, (text, *_) in enumerate(vocabulary)}
    return found | {added["id"]: added["content"] for added in told.get("added_tokens", [])}
