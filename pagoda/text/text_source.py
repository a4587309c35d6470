# SPDX-License-Identifier: Apache-2.0
"""Text that comes in pieces, read by a generator that waits at each `yield` for more.

A reader is written as if it had the whole text. Text stays unread only while it could be part of a tag, so work is
linear in the text, however it is cut.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from typing import TypeVar

T = TypeVar("T")

_SPACES = re.compile(r"\s*")
_MAX_PIECE_CHARS = 4096
"""Characters that are taken at a time, so that a long text is not copied again and again."""

Steps = Generator[None, None, T]
"""Work that stops at each `yield` until the source has more text, or has ended."""

Emit = Callable[[str], None]


def ignore(text: str) -> None:
    """Takes text that is no part of the answer."""
    del text


class Tags:
    """Strings of which the first one in a text is looked for."""

    def __init__(self, *tags: str) -> None:
        self._pattern = re.compile("|".join(map(re.escape, sorted(tags, key=len, reverse=True))))
        self._prefixes = frozenset(tag[:n] for tag in tags for n in range(1, len(tag)))
        self._longest = max(map(len, tags)) - 1

    def search(self, text: str, begin: int, limit: int | None) -> re.Match[str] | None:
        """The first tag in `text` from `begin` on; with a `limit`, one that begins within so many characters."""
        if limit is None:
            return self._pattern.search(text, begin)
        return self._pattern.search(text, begin, begin + limit + self._longest)

    def num_held(self, text: str, begin: int) -> int:
        """Characters at the end of `text`, from `begin` on, with which a tag may begin."""
        lengths = range(min(self._longest, len(text) - begin), 0, -1)
        return next((n for n in lengths if text[-n:] in self._prefixes), 0)


class TextSource:
    """The text of an answer that has not been read."""

    def __init__(self) -> None:
        self.ended = False
        """No more text follows."""
        self.is_cut = False
        """The end is none that the writer chose: more was to come."""
        self._text = ""
        self._at = 0
        """Index in `_text` of the first character that has not been read."""
        self._num_before = 0
        """Characters in front of `_text`."""

    @property
    def num_read(self) -> int:
        """Characters that have been read and not been put back."""
        return self._num_before + self._at

    def feed(self, text: str) -> None:
        self._num_before += self._at
        self._text = self._text[self._at :] + text
        self._at = 0

    def end(self, *, is_cut: bool = False) -> None:
        """Notes that no more text follows."""
        self.ended = True
        self.is_cut = is_cut

    def put_back(self, text: str) -> None:
        begin = self._at - len(text)
        if begin >= 0 and self._text.startswith(text, begin):
            self._at = begin
        else:
            self._num_before += begin
            self._text = text + self._text[self._at :]
            self._at = 0

    @property
    def _is_empty(self) -> bool:
        return self._at == len(self._text)

    def take_some(self, most: int = _MAX_PIECE_CHARS) -> Steps[str]:
        """Takes text that is there, one to `most` characters; empty at the end."""
        while self._is_empty and not self.ended:
            yield
        text = self._text[self._at : self._at + most]
        self._at += len(text)
        return text

    def peek(self) -> Steps[str]:
        """The next character, which stays; empty at the end."""
        while self._is_empty and not self.ended:
            yield
        return self._text[self._at : self._at + 1]

    def spaces(self) -> Steps[str]:
        """Takes white space."""
        return (yield from self.run(_SPACES))

    def run(self, pattern: re.Pattern[str]) -> Steps[str]:
        """Takes the characters that `pattern`, any number of a class of characters, matches."""
        taken: list[str] = []
        while text := (yield from self.take_some()):
            found = pattern.match(text)
            end = 0 if found is None else found.end()
            taken.append(text[:end])
            if end < len(text):
                self.put_back(text[end:])
                break
        return "".join(taken)

    def accept(self, tag: str) -> Steps[bool]:
        """Takes `tag` if it is next."""
        while len(rest := self._text[self._at : self._at + len(tag)]) < len(tag):
            if self.ended or not tag.startswith(rest):
                return False
            yield
        if rest == tag:
            self._at += len(tag)
        return rest == tag

    def until(self, tags: Tags, emit: Emit, *, limit: int | None = None) -> Steps[str | None]:
        """Passes the text up to the first tag to `emit`, takes the tag and returns it.

        Returns None at the end of the text, and where the first `limit` characters have no tag.
        """
        left = limit
        while True:
            found = tags.search(self._text, self._at, left)
            end = len(self._text) if found is None else found.start()
            if found is None and not self.ended:
                end -= tags.num_held(self._text, self._at)
            if left is not None:
                end = min(end, self._at + left)
                left -= end - self._at
            before, self._at = self._text[self._at : end], end
            if before:
                emit(before)
            if found is not None and left != 0:
                self._at = found.end()
                return found.group()
            if self.ended or left == 0:
                return None
            yield

    def collect(self, tags: Tags, *, limit: int | None = None) -> Steps[tuple[str, str | None]]:
        """Takes the text up to the first tag, and the tag, as `until`."""
        parts: list[str] = []
        tag = yield from self.until(tags, parts.append, limit=limit)
        return "".join(parts), tag
