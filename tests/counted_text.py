# SPDX-License-Identifier: Apache-2.0
"""A text that counts how many characters are copied when it is added to other text."""

from __future__ import annotations

from collections.abc import Callable, Iterable


class _Piece(str):
    __slots__ = ("counter",)
    counter: TextCopies

    def __add__(self, other: str) -> str:
        return self.counter.joined(str(self), other)

    def __radd__(self, other: str) -> str:
        return self.counter.joined(other, str(self))


class TextCopies:
    """Makes pieces of text and counts the characters of every sum that a piece is a part of.

    A parser that adds each piece to all that came before copies the square of the text.
    """

    def __init__(self) -> None:
        self.count = 0

    def joined(self, first: str, second: str) -> str:
        self.count += len(first) + len(second)
        return str.__add__(str(first), str(second))

    def pieces(self, text: str) -> Iterable[str]:
        """The characters of `text`, one at a time."""
        for character in text:
            piece = _Piece(character)
            piece.counter = self
            yield piece


def assert_linear_copies(feed: Callable[[Iterable[str]], object], text: str) -> None:
    """Fails if twice the text costs more than 2.4 times the copied characters. `feed` takes the pieces."""
    counts = []
    for times in (1, 2):
        copies = TextCopies()
        feed(copies.pieces(text * times))
        counts.append(copies.count)
    assert counts[1] <= 2.4 * counts[0], f"{counts[0]} characters copied, {counts[1]} for twice"
