# SPDX-License-Identifier: Apache-2.0
"""JSON as models write it, made valid JSON as it comes.

Models break lines within strings, escape what JSON does not and forget what it does, take Python's quotes and
constants, set one comma too many or too few, and forget closing braces.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from contextlib import suppress

from pagoda.text.text_source import Emit, Steps, TextSource, ignore

_CONSTANTS = {"True": "true", "False": "false", "None": "null"}
_SCALAR = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?|true|false|null")
_CLOSING = {"{": "}", "[": "]"}
_WORD = re.compile(r"[^\s\"'{}\[\],:<`]+")
_PLAIN = re.compile(r"[^\"'\\\x00-\x1f]+")
_MAX_HELD = 64
"""Characters of white space that wait for what follows them."""
_MAX_WORD = 4300
"""Characters of a number or a name; Python reads no longer numbers."""
_HEX_DIGITS = {"u": 4, "x": 2}


class JsonMender:
    """Follows one JSON object or list to the brace that closes it. Work is linear in the text."""

    def __init__(self, within: str = "", *, takes_words: bool = True) -> None:
        """`within` are opening braces in front of the text. `takes_words`: values without quotes are strings."""
        self._takes_words = takes_words
        self._open = list(within)
        self._num_open = Counter(within)
        self._quote = ""
        """The quote that ends the string that has begun."""
        self._ending = ""
        """A quote that ends the string if what follows it and white space does so, too."""
        self._escape = ""
        """An escape that has begun, from its backslash on."""
        self._word = ""
        """A number or a name that may go on."""
        self._comma = ""
        """A comma, and white space behind it, that a closing brace may follow."""
        self._wants_value = False
        """A colon was last."""
        self._follows_item = False
        """A value or a name was last, and no comma or colon has come behind it."""
        self._out: list[str] = []

    @property
    def is_open(self) -> bool:
        """The value goes on."""
        return bool(self._open)

    def push(self, text: str) -> tuple[str, int | None]:
        """Valid JSON for the text that comes next, and the index in it at which the value ends, or None.

        Outside of strings, `<` and a code fence end a value too: they belong to what is around it.
        """
        at = 0
        while at < len(text):
            at, ends = self._in_string(text, at) if self._quote else self._between(text, at)
            if ends:
                return self._drain(), at
        return self._drain(), None

    def finish(self, *, is_cut: bool) -> str:
        """The rest of a value that its text ends in: closing braces, unless it was cut off, or within an item."""
        if self._ending:
            self._end_string(is_end=True)
        if is_cut or self._quote or (self._wants_value and not self._word):
            self._out += (self._comma, self._word, self._escape)
        else:
            self._close_all()
        return self._drain()

    def _drain(self) -> str:
        text = "".join(self._out)
        self._out.clear()
        return text

    def _between(self, text: str, at: int) -> tuple[int, bool]:
        """Takes text outside of strings. Returns the index behind it, and whether the value ends there."""
        word = _WORD.match(text, at)
        if word is not None:
            self._word += word[0]
            if len(self._word) > _MAX_WORD:
                self._end_word(is_key=False)
            return word.end(), False
        character = text[at]
        self._end_word(is_key=character == ":")
        self._wants_value = character == ":" or (self._wants_value and character.isspace())
        if character.isspace():
            if 0 < len(self._comma) <= _MAX_HELD:
                self._comma += character
            elif not self._comma:
                self._out.append(character)
        elif character in "}]":
            return self._close(character, at)
        elif character in "<`":
            self._close_all()
            return at, True
        elif character in ",:":
            self._end_comma()
            self._follows_item = False
            if character == ",":
                self._comma = character
            else:
                self._out.append(character)
        else:
            self._begin_item()
            if character in "{[":
                self._out.append(character)
                self._open.append(character)
                self._num_open[character] += 1
            else:
                self._out.append('"')
                self._quote = character
        return at + 1, False

    def _close(self, brace: str, at: int) -> tuple[int, bool]:
        """Closes down to the brace that `brace` belongs to; one that belongs to none is behind the value."""
        self._comma = ""
        opening = "{" if brace == "}" else "["
        if not self._num_open[opening]:
            self._close_all()
            return at, True
        while (last := self._open.pop()) != opening:
            self._num_open[last] -= 1
            self._out.append(_CLOSING[last])
        self._num_open[opening] -= 1
        self._out.append(brace)
        self._follows_item = True
        return at + 1, not self._open

    def _close_all(self) -> None:
        self._end_word(is_key=False)
        self._comma = ""
        self._out += [_CLOSING[brace] for brace in reversed(self._open)]
        self._open.clear()
        self._num_open.clear()

    def _begin_item(self) -> None:
        self._end_comma()
        if self._follows_item:
            self._out.append(",")
        self._follows_item = False

    def _end_comma(self) -> None:
        self._out.append(self._comma)
        self._comma = ""

    def _end_word(self, *, is_key: bool) -> None:
        if self._word:
            self._begin_item()
            self._follows_item = True
            word = json.dumps(self._word) if is_key else self._value(self._word)
            self._out.append(word)
            self._word = ""
            self._wants_value = False

    def _value(self, word: str) -> str:
        """The JSON of a value without quotes: a number, a constant, or else a string."""
        if _SCALAR.fullmatch(word) or word in _CONSTANTS or not self._takes_words:
            return _CONSTANTS.get(word, word)
        with suppress(ValueError):
            return json.dumps(int(word))
        with suppress(ValueError):
            return json.dumps(float(word), allow_nan=False)
        return json.dumps(word)

    def _in_string(self, text: str, at: int) -> tuple[int, bool]:
        """Takes text within a string. Returns the index behind it; no value ends there."""
        if self._escape:
            return self._in_escape(text, at), False
        if self._ending:
            return self._behind_quote(text, at), False
        plain = _PLAIN.match(text, at)
        if plain is not None:
            self._out.append(plain[0])
            return plain.end(), False
        character = text[at]
        if character == "\\":
            self._escape = character
        elif character == self._quote:
            self._ending = character
        elif character == "'":
            self._out.append(character)
        else:
            self._out.append(json.dumps(character)[1:-1])
        return at + 1, False

    def _behind_quote(self, text: str, at: int) -> int:
        """Takes white space behind a quote. Models forget to escape quotes within strings: one ends the string if
        a comma, a colon, a brace or a tag follows."""
        character = text[at]
        if character.isspace() and len(self._ending) <= _MAX_HELD:
            self._ending += character
            return at + 1
        self._end_string(is_end=character in ",:}]<`" or character.isspace())
        return at

    def _end_string(self, *, is_end: bool) -> None:
        quote, space = self._ending[0], self._ending[1:]
        self._ending = ""
        if is_end:
            self._quote = ""
            self._follows_item = True
            self._out += ('"', space)
        else:
            self._out.append(json.dumps(quote + space)[1:-1])

    def _in_escape(self, text: str, at: int) -> int:
        """Takes a character of an escape; the backslash of one that JSON does not know is itself escaped."""
        character = text[at]
        kind, digits = self._escape[1:2], self._escape[2:]
        if not kind and character in _HEX_DIGITS:
            self._escape += character
            return at + 1
        if kind and character in "0123456789abcdefABCDEF":
            self._escape += character
            if len(digits) + 1 == _HEX_DIGITS[kind]:
                self._out.append("\\u" + self._escape[2:].rjust(4, "0"))
                self._escape = ""
            return at + 1
        escape, self._escape = self._escape, ""
        if kind or character not in "\"'\\/bfnrt":
            self._out.append("\\" + escape)
            return at
        self._out.append(character if character == "'" else escape + character)
        return at + 1


def read_json(
    source: TextSource, emit: Emit, *, within: str = "", raw: Emit = ignore
) -> Steps[bool]:
    """Passes the object or list that is next to `emit`, as valid JSON, and its own text to `raw`. Returns False if
    it does not end."""
    mender = JsonMender(within)
    while text := (yield from source.take_some()):
        part, end = mender.push(text)
        emit(part)
        raw(text[:end])
        if end is not None:
            source.put_back(text[end:])
            return True
    emit(mender.finish(is_cut=source.is_cut))
    return not mender.is_open


def mended(text: str, *, takes_words: bool = True) -> str | None:
    """The JSON of a whole text; None if it is more than one object or list. `takes_words` as in `JsonMender`."""
    mender = JsonMender(takes_words=takes_words)
    part, end = mender.push(text)
    if end is None:
        return part + mender.finish(is_cut=False)
    return None if text[end:].strip() else part


def dumped(value: object) -> str:
    """The JSON text of a value; halves of surrogate pairs are escaped. Raises ValueError: JSON has none."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, RecursionError) as error:
        raise ValueError(str(error)) from None
    try:
        text.encode()
    except UnicodeEncodeError:
        return json.dumps(value)
    return text
