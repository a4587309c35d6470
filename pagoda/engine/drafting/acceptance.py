# SPDX-License-Identifier: Apache-2.0
"""Shares of right drafts: rates by the length of the match that they come from, and each request's own.

Every draft is judged by the tokens that come, also one that was not computed: so an estimate costs no row of a
step, and a request whose drafts have become good is noticed at once.
"""

from __future__ import annotations

from collections.abc import Sequence

_PRIOR_WEIGHT = 8.0
_MOST_WEIGHT = 512.0
"""Drafts that an estimate remembers."""
_OWN_WEIGHT = 2.0
_MOST_OWN_WEIGHT = 48.0
_MOST = 0.98


class MatchRates:
    """Shares of right drafts by the length of the match in front of them, over all requests."""

    def __init__(self, prior: Sequence[float]) -> None:
        """`prior` are the shares behind matches of 1, 2 to 3, 4 to 7 tokens and so on, before any was judged."""
        self._right = [_PRIOR_WEIGHT * share for share in prior]
        self._judged = [_PRIOR_WEIGHT] * len(prior)

    def rate(self, length: int) -> float:
        """The share of right drafts behind a match of so many tokens, at least 1."""
        place = min(length.bit_length(), len(self._right)) - 1
        return self._right[place] / self._judged[place]

    def judge(self, length: int, *, is_right: bool) -> None:
        place = min(length.bit_length(), len(self._right)) - 1
        self._right[place] += is_right
        self._judged[place] += 1
        if self._judged[place] > _MOST_WEIGHT:
            self._right[place] /= 2
            self._judged[place] /= 2


class OwnRate:
    """Right drafts of one request against those that were to be expected."""

    def __init__(self) -> None:
        self._right = self._expected = _OWN_WEIGHT

    def chance(self, expected: float) -> float:
        """The probability that a draft is right of which others would be with probability `expected`."""
        return min(_MOST, expected * self._right / self._expected)

    def judge(self, expected: float, *, is_right: bool) -> None:
        self._right += is_right
        self._expected += expected
        if self._expected > _MOST_OWN_WEIGHT:
            self._right /= 2
            self._expected /= 2
