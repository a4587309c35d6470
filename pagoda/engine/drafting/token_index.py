# SPDX-License-Identifier: Apache-2.0
"""An index of the places where tokens have come before: hash chains, as coders of the family of LZ77 have them.

A suffix automaton finds the longest match too, but holds a table of several hundred bytes for each token, and is
built token by token; a chain costs 12 bytes and some tenths of a microsecond.
"""

from __future__ import annotations

from array import array
from typing import NamedTuple

MAX_MATCH = 64
"""The most tokens of a match that are compared."""
_MIX = 2654435761
_SPREAD = 40503


class Match(NamedTuple):
    """The longest match of a text's end, and where it is followed by what."""

    length: int
    """Tokens that agree; `MAX_MATCH` stands for any more."""
    tokens: list[int]
    places: list[int]
    """Places in `tokens` behind matches of this length, newest first; each has a token."""


class TokenIndex:
    """Places of each token, or each pair of tokens (`order`), in a list that others append to.

    `_newest` and `_before` take 12 bytes a token at most: the number of buckets is fixed at the beginning.
    """

    def __init__(self, tokens: list[int], order: int, num_expected: int) -> None:
        self.tokens = tokens
        self.num_indexed = 0
        self._order = order
        num_buckets = 1 << max(8, (num_expected - 1).bit_length())
        self._mask = num_buckets - 1
        self._newest = array("i", [-1]) * num_buckets
        """Place of the last token of the newest n-gram, by hash."""
        self._before = array("i")
        """Place before each one with the same hash."""

    def catch_up(self, most: int) -> int:
        """Indexes at most so many further tokens of the list; returns how many."""
        tokens, newest, before, mask = self.tokens, self._newest, self._before, self._mask
        begin, end = self.num_indexed, min(len(tokens), self.num_indexed + most)
        scale = _SPREAD if self._order > 1 else 0
        last = tokens[begin - 1] if begin else -1
        for place in range(begin, end):
            token = tokens[place]
            bucket = ((last * scale + token) * _MIX >> 9) & mask
            before.append(newest[bucket])
            newest[bucket] = place
            last = token
        self.num_indexed = end
        return end - begin

    def longest_match(self, text: list[int], num_looks: int, longest: int = MAX_MATCH) -> Match:
        """The longest matches of the end of `text`, at most `longest` tokens, among the `num_looks` newest places
        of its last tokens. Where `text` is the indexed list, its end itself is none."""
        tokens, order, end = self.tokens, self._order, len(text)
        length, places = order, list[int]()
        if end < order:
            return Match(0, tokens, places)
        scale = _SPREAD if order > 1 else 0
        pair = (text[-2] if order > 1 else 0) * scale + text[-1]
        place = self._newest[(pair * _MIX >> 9) & self._mask]
        last, num_tokens = text[-1], len(tokens)
        while place >= 0 and num_looks > 0:
            num_looks -= 1
            # Only where the token agrees that a longer match would have, it can be as long as the longest so far.
            if (
                place + 1 < num_tokens
                and place + 1 >= length
                and tokens[place] == last
                and tokens[place + 1 - length] == text[-length]
            ):
                found, most = 1, min(longest, end, place + 1)
                while found < most and tokens[place - found] == text[-1 - found]:
                    found += 1
                if found > length:
                    length, places = found, [place + 1]
                elif found == length:
                    places.append(place + 1)
            place = self._before[place]
        return Match(length if places else 0, tokens, places)
