"""Checks of a tokenizer.json: what the library that reads it would panic of, or fill memory with, is refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tokenizers import Tokenizer as Backend

from pagoda.errors import ConfigError

_PROBES = ("", "a", "A tower, 5 pagodas: naïve 東京 🗼\n", " \t")
_PROBED_IDS = 512
_MOST_GROWTH = 256
"""Times by which a normalizer may lengthen a text."""


class TokenizerError(Exception):
    """The library failed; the text is its own."""


@contextmanager
def failures_told() -> Iterator[None]:
    """Turns whatever the library raises into a TokenizerError, panics of Rust among it; texts that are no Unicode
    raise what they raise."""
    try:
        yield
    except (UnicodeEncodeError, TypeError):
        raise
    except Exception as error:  # the library raises bare Exception
        raise TokenizerError(str(error)) from None
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise TokenizerError(str(error)) from None


def check_backend(backend: Backend, source: str) -> None:
    """Raises ConfigError: the tokenizer cannot cut or join simple texts, or makes far longer ones of them."""
    growth = _growth(json.loads(backend.to_str()).get("normalizer"))
    if growth > _MOST_GROWTH:
        raise ConfigError(
            f"{source}: its normalizer makes texts more than {_MOST_GROWTH} times as long."
        )
    try:
        with failures_told():
            for text in _PROBES:
                backend.decode(backend.encode(text).ids)
            for token_id in range(min(_PROBED_IDS, backend.get_vocab_size())):
                backend.decode([token_id])
    except TokenizerError as error:
        raise ConfigError(f"{source} cannot be used as a tokenizer: {error}.") from None


def _growth(normalizer: Any) -> float:
    """Times by which the steps of a normalizer may lengthen a text."""
    if not isinstance(normalizer, dict):
        return 1.0
    growth = 1.0
    for step in normalizer.get("normalizers", ()):
        growth *= _growth(step)
    if normalizer.get("type") == "Replace":
        replaced = normalizer.get("pattern", {}).get("String")
        content = len(normalizer.get("content", ""))
        # An expression may match between any two characters, as the empty text does.
        growth *= max(1.0, content / len(replaced)) if replaced else 1.0 + content
    return growth
