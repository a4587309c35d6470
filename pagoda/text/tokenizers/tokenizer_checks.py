# SPDX-License-Identifier: Apache-2.0
"""Checks of a tokenizer.json: what the library that reads it would panic of, or fill memory with, is refused."""

from __future__ import annotations

import base64
import json
import re
import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tokenizers import Tokenizer as Backend

from pagoda.errors import ConfigError

_PROBES = ("", "a", "A tower, 5 pagodas: naïve 東京 🗼\n", " \t")
_PROBED_IDS = 512
_MOST_GROWTH = 512
"""Times by which a normalizer, or a pre-tokenizer, may lengthen a text. That of ALBERT reckons with 324."""
_FORMS = {"NFC": 3, "NFD": 4, "NFKC": 18, "NFKD": 18, "Lowercase": 2, "BertNormalizer": 12}
"""Characters that normal forms of Unicode may make of one."""
_LENGTHENING = {"ByteLevel": 5, "Metaspace": 2, "WordPiece": 2}
"""The same of other steps: four bytes and a space, or a space for each word."""
MAX_TOKEN_CHARS = 2**16
"""Characters that a token may become; of what was published the longest have some hundreds."""
_TAKES_A_CHARACTER = re.compile(
    r"(?:\[\^?(?:[^][\\]|\\[sSwWdDnrt])+\]|\\[sSwWdDnrt]|\\[pP]\{\^?\w+\}|[^][\\(){}|?*+^$.])"
    r"(?:\+|\{[1-9]\d*(?:,\d*)?\})?(?![?*+{])[^|]*\Z"
)
"""Expressions that begin with a character or a class of them which must be there, and have no alternatives."""


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


def check_backend(backend: Backend, source: str, longest_token_chars: int) -> None:
    """Raises ConfigError: the tokenizer cannot cut or join simple texts, or makes far longer ones of them or of a
    token, of which none has more than `longest_token_chars`."""
    parts = (("normalizer", backend.normalizer), ("pre-tokenizer", backend.pre_tokenizer))
    for name, part in parts:
        # Not the whole tokenizer as text: its vocabulary has tens of megabytes.
        spec = None if part is None else json.loads(part.__getstate__())
        if growth(spec) > _MOST_GROWTH:
            raise ConfigError(
                f"{source}: its {name} makes texts more than {_MOST_GROWTH} times as long."
            )
    decoder = None if backend.decoder is None else json.loads(backend.decoder.__getstate__())
    if longest_token_chars * growth(decoder) > MAX_TOKEN_CHARS:
        raise ConfigError(
            f"{source}: its decoder makes more than {MAX_TOKEN_CHARS} characters of a token."
        )
    try:
        with failures_told():
            for text in _PROBES:
                backend.decode(backend.encode(text).ids)
            for token_id in range(min(_PROBED_IDS, backend.get_vocab_size())):
                backend.decode([token_id])
    except TokenizerError as error:
        raise ConfigError(f"{source} cannot be used as a tokenizer: {error}.") from None


def growth(spec: Any) -> float:
    """Times by which a normalizer, a pre-tokenizer or a decoder may lengthen a text."""
    times, formed = 1.0, 1
    for step in _steps(spec):
        kind = step.get("type")
        if kind in _FORMS:
            # Of several forms only the largest counts, unless in between came something that they take apart.
            times *= max(1.0, _FORMS[kind] / formed)
            formed = max(formed, _FORMS[kind])
        elif kind == "Replace":
            content = step.get("content", "")
            times *= _growth_of_replace(step.get("pattern", {}), content)
            formed = formed if unicodedata.is_normalized("NFKD", content) else 1
        elif kind == "Prepend":
            prepended = step.get("prepend", "")
            times *= 1 + len(prepended)  # a text may be cut behind each character by added tokens
            formed = formed if unicodedata.is_normalized("NFKD", prepended) else 1
        elif kind == "Precompiled":
            times *= _longest_mapped(step.get("precompiled_charsmap") or "")
            formed = 1
        else:
            times *= _LENGTHENING.get(str(kind), 1)
    return times


def _steps(spec: Any) -> Iterator[dict[str, Any]]:
    """The steps of a sequence, of sequences within it too."""
    if not isinstance(spec, dict):
        return
    if spec.get("type") != "Sequence":
        yield spec
    for inner in ("normalizers", "pretokenizers", "decoders"):
        for step in spec.get(inner, ()):
            yield from _steps(step)


def _growth_of_replace(pattern: dict[str, str], content: str) -> float:
    text, expression = pattern.get("String", ""), pattern.get("Regex", "")
    least = len(text) or int(_TAKES_A_CHARACTER.match(expression) is not None)
    # An expression may match between any two characters, as the empty text does.
    return max(1.0, len(content) / least) if least else 1.0 + len(content)


def _longest_mapped(charsmap: str) -> int:
    """Characters of the longest text that SentencePiece's table puts in the place of one: behind a trie, whose
    size comes first, are all such texts."""
    data = base64.b64decode(charsmap)
    texts = data[4 + int.from_bytes(data[:4], "little") :].split(b"\0")
    return max(1, *(len(text.decode(errors="replace")) for text in texts))
