# SPDX-License-Identifier: Apache-2.0
"""The cost model of speculation: what a step of so many tokens takes, and how many drafts are worth it.

Drafts pay while they add more tokens to the answers than time to the step: the number is chosen that maximises
(requests + drafts that are expected to be right) / time. Times are those of steps that have ended, so the model
knows the machine, its load, and contexts that grow, without a measurement of its own. No token depends on it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

_WEIGHT = 0.125
"""Weight of the newest step in a moving average."""
_MOST_FACTOR = 3.0
"""A step that takes longer than this many times the average was held up by something else."""
_UNSEEN_SLOPE = 0.02
"""Part of a step by which a token more is thought to lengthen it, where no larger step was seen yet: little, so
that it is tried; no more than in proportion to the tokens."""
FRESH_STEPS = 1024
"""Steps after which a time counts as unknown."""
LEAST_GAIN = 1.02
"""Drafts that win less are not computed: times are not that certain."""


class _Seen:
    """Steps of about one size."""

    def __init__(self, num_tokens: int, seconds: float, step: int) -> None:
        self.num_tokens = float(num_tokens)
        self.seconds = seconds
        self.step = step


class StepCosts:
    """Times of steps by the tokens that they compute.

    With `repeats`, drafts that were right are computed again by the next step, which is a cost of this one.
    """

    def __init__(self, *, repeats: bool = False) -> None:
        self._repeats = repeats
        self._seen: dict[int, _Seen] = {}
        """Steps by size class: exact to 16, then eighths of powers of two."""
        self._sizes: list[int] = []
        """The classes, in order."""
        self._num_steps = 0
        self._gap_s = 0.0
        self._draft_s = 0.0

    def observe(self, num_tokens: int, seconds: float) -> None:
        """A step of `num_tokens` took so many seconds."""
        self._num_steps += 1
        size = _size_class(num_tokens)
        seen = self._seen.get(size)
        if seen is None or self._num_steps - seen.step > FRESH_STEPS:
            self._seen[size] = _Seen(num_tokens, seconds, self._num_steps)
            self._sizes = sorted(self._seen)
            return
        seconds = min(seconds, _MOST_FACTOR * seen.seconds)
        seen.seconds += _WEIGHT * (seconds - seen.seconds)
        seen.num_tokens += _WEIGHT * (num_tokens - seen.num_tokens)
        seen.step = self._num_steps

    def observe_gap(self, seconds: float) -> None:
        """The worker waited so long for a plan that needed the result before it."""
        if self._gap_s:
            seconds = min(seconds, _MOST_FACTOR * self._gap_s)
        self._gap_s += _WEIGHT * (seconds - self._gap_s)

    def observe_proposals(self, count: int, seconds: float) -> None:
        """The worker took so many seconds to propose `count` tokens of some requests, all at once."""
        seconds /= count
        if self._draft_s:
            seconds = min(seconds, _MOST_FACTOR * self._draft_s)
        self._draft_s += (_WEIGHT if self._draft_s else 1.0) * (seconds - self._draft_s)

    def most_worth_asking(self, num_tokens: int, num_requests: int, gains: Sequence[float]) -> int:
        """Number of drafts of one request that the worker is best asked to propose, with as many of all others.

        The arguments are as for `most_worthwhile`."""
        most = self.most_worthwhile(num_tokens, num_requests, gains)
        plain, share = self.seconds(num_tokens), self._draft_s / max(1, num_requests)
        best, best_rate, expected = 0, LEAST_GAIN * num_requests, float(num_requests)
        for count, gain in enumerate(gains[:most], start=1):
            expected += gain
            seconds = self._drafted_seconds(num_tokens + count, expected - num_requests)
            seconds += count * share
            if expected * plain / seconds > best_rate:
                best, best_rate = count, expected * plain / seconds
        return best

    def _drafted_seconds(self, num_tokens: int, num_right: float) -> float:
        """The time of a step with drafts, of which so many are expected to be right."""
        repeated = round(num_right) if self._repeats else 0
        return self.seconds(num_tokens + repeated) + self._gap_s

    def knows(self, num_tokens: int) -> bool:
        """True if a step of about this size was seen of late."""
        seen = self._seen.get(_size_class(num_tokens))
        return seen is not None and self._num_steps - seen.step <= FRESH_STEPS

    def seconds(self, num_tokens: int) -> float:
        """The time of a step of so many tokens, between those of the next smaller and the next larger ones that
        were seen; 0 before any was."""
        size = _size_class(num_tokens)
        place = bisect_left(self._sizes, size)
        if size in self._seen and self._seen[size].num_tokens < num_tokens:
            place += 1
        above = self._fresh(self._sizes[place:])
        below = self._fresh(self._sizes[:place][::-1])
        if above is None:
            if below is None:
                return 0.0
            slope = min(_UNSEEN_SLOPE, 1 / below.num_tokens)
            return below.seconds * (1 + slope * max(0.0, num_tokens - below.num_tokens))
        if below is None or above.num_tokens <= below.num_tokens:
            return above.seconds
        share = (num_tokens - below.num_tokens) / (above.num_tokens - below.num_tokens)
        return below.seconds + min(1.0, max(0.0, share)) * max(0.0, above.seconds - below.seconds)

    def _fresh(self, sizes: Sequence[int]) -> _Seen | None:
        for size in sizes:
            seen = self._seen[size]
            if self._num_steps - seen.step <= FRESH_STEPS:
                return seen
        return None

    def most_worthwhile(self, num_tokens: int, num_requests: int, gains: Sequence[float]) -> int:
        """Number of drafts, of those with the highest `gains`, that is best for a step of `num_tokens` tokens that
        carries `num_requests` answers on by a token each.

        `gains` are the probabilities that each draft is right, with all of its answer before it; they fall.
        """
        plain = self.seconds(num_tokens)
        if not gains or plain <= 0.0 or not self.knows(num_tokens):
            return 0
        best, best_rate, expected = 0, LEAST_GAIN * num_requests / plain, float(num_requests)
        for count, gain in enumerate(gains, start=1):
            expected += gain
            if count > 16 and count % 8:  # times in between lie in between
                continue
            rate = expected / self._drafted_seconds(num_tokens + count, expected - num_requests)
            if rate > best_rate:
                best, best_rate = count, rate
        return best


def _size_class(num_tokens: int) -> int:
    """Numbers to 16 each by themselves, then eighths of powers of two; classes rise with the numbers."""
    shift = max(0, num_tokens.bit_length() - 4)
    return num_tokens if num_tokens <= 16 else (shift << 3) + (num_tokens >> shift)
