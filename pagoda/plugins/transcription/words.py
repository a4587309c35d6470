# SPDX-License-Identifier: Apache-2.0
"""Words of a transcript and their times, as openai-whisper's `timing.py` and `tokenizer.py` make them."""

from __future__ import annotations

import string
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

_WITHOUT_SPACES = frozenset({"zh", "ja", "th", "lo", "my", "yue"})
"""Languages whose characters are taken for words."""
_OPENING, _CLOSING = "\"'“¿([{-", "\"'.。,，!！?？:：”)]}、"
"""Punctuation that belongs to the word behind it, and to the one in front of it."""
_SENTENCE_ENDS = ".。!！?？"
_USUAL_S = 0.7
"""Seconds that a word usually takes, at most."""
_UNKNOWN = "\N{REPLACEMENT CHARACTER}"


@dataclass
class Word:
    text: str
    start: float
    """Seconds, from the beginning of a piece."""
    end: float


def words_of(
    token_ids: Sequence[int],
    times: Sequence[float],
    decode: Callable[[Sequence[int]], str],
    language: str | None,
) -> list[Word]:
    """Words of a text, with their punctuation. `times` [tokens + 1] are those at which each token begins, and at
    which the last one ends."""
    parts: Iterable[tuple[str, int]] = _characters(token_ids, decode)
    if language not in _WITHOUT_SPACES:
        parts = _spaced(parts)
    words, first = list[Word](), 0
    for text, count in parts:
        words.append(Word(text, times[first], times[first + count]))
        first += count
    _shorten(words)
    return [word for word in _closed(_opened(words)) if word.text.strip()]


def _characters(
    token_ids: Sequence[int], decode: Callable[[Sequence[int]], str]
) -> Iterator[tuple[str, int]]:
    """Parts of a text that are whole characters, and how many tokens each has."""
    whole, place, part = decode(token_ids), 0, list[int]()
    for token_id in token_ids:
        part.append(token_id)
        text = decode(part)
        at = text.find(_UNKNOWN)
        if at < 0 or whole[place + at : place + at + 1] in ("", _UNKNOWN):
            yield text, len(part)
            place, part = place + len(text), []
    if part:
        yield decode(part), len(part)


def _spaced(parts: Iterable[tuple[str, int]]) -> Iterator[tuple[str, int]]:
    """Parts that begin with a space or are punctuation, each with what follows up to the next one."""
    text, count = "", 0
    for more, further in parts:
        begins = more.startswith(" ") or more.strip() in string.punctuation
        if begins and count:
            yield text, count
            text, count = "", 0
        text, count = text + more, count + further
    if count:
        yield text, count


def _shorten(words: Sequence[Word]) -> None:
    """Takes pauses between sentences from the words around them."""
    lengths = [word.end - word.start for word in words if word.end > word.start]
    most = 2 * min(_USUAL_S, median(lengths)) if lengths else 0.0
    for before, word in pairwise(words):
        if word.end - word.start <= most:
            continue
        if word.text in _SENTENCE_ENDS:
            word.end = word.start + most
        elif before.text in _SENTENCE_ENDS:
            word.start = word.end - most


def _opened(words: Iterable[Word]) -> Iterator[Word]:
    """Words with what opens them."""
    opening = ""
    for word in words:
        if word.text.startswith(" ") and word.text.strip() in _OPENING:
            opening += word.text
            last = word
            continue
        word.text, opening = opening + word.text, ""
        yield word
    if opening:
        last.text = opening
        yield last


def _closed(words: Iterable[Word]) -> list[Word]:
    """Words with what closes them."""
    found = list[Word]()
    for word in words:
        if found and not found[-1].text.endswith(" ") and word.text in _CLOSING:
            found[-1].text += word.text
        else:
            found.append(word)
    return found
