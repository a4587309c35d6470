# SPDX-License-Identifier: Apache-2.0
"""Tokens of an answer that are still to come: the conditional expectation, from the lengths of answers seen.

Lengths are counted in buckets, four to each doubling. An answer of n tokens that has not ended is one of those
that are longer, and so its rest grows with n where some answers are very long; it never is next to nothing because
the usual answer would have ended. Beyond all that was seen, lengths count as scale-free (density 1/length²): what
has lasted long will last long.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

_EXACT = 8
"""Lengths below have a bucket each."""
_NUM_BUCKETS = _EXACT + 4 * 28
_MEMORY = 64
"""Answers that count, about: the weight of one falls to 1/e when as many have come after it."""
_PRIOR = 0.5
"""Weight of the scale-free lengths, in answers."""
_PRIOR_FROM = 24
"""The shortest of these lengths: the usual answer is a few times as long, before any is seen."""
_HIGHEST_GAIN = 1e100


def _bucket(length: int) -> int:
    if length < _EXACT:
        return max(0, length)
    octave = length.bit_length() - 1
    return min(_NUM_BUCKETS - 1, _EXACT + 4 * (octave - 3) + (length >> (octave - 2) & 3))


def _edge(bucket: int) -> int:
    """The shortest length in a bucket."""
    if bucket < _EXACT:
        return bucket
    octave, quarter = divmod(bucket - _EXACT, 4)
    return (4 + quarter) << (octave + 1)


_EDGES = [_edge(bucket) for bucket in range(_NUM_BUCKETS + 1)]


def _prior() -> tuple[list[float], list[float]]:
    """Weight and sum of the scale-free lengths in each bucket."""
    weights, sums = [0.0] * _NUM_BUCKETS, [0.0] * _NUM_BUCKETS
    for bucket in range(_bucket(_PRIOR_FROM), _NUM_BUCKETS):
        low, high = _EDGES[bucket], _EDGES[bucket + 1]
        weights[bucket] = _PRIOR * _PRIOR_FROM * (1 / low - 1 / high)
        sums[bucket] = weights[bucket] * (low + high) / 2
    return weights, sums


_PRIOR_WEIGHTS, _PRIOR_SUMS = _prior()


class AnswerLengths:
    """The lengths of the latest answers. An answer costs a look at all buckets, a question costs a look at two."""

    def __init__(self) -> None:
        self._weights = [0.0] * _NUM_BUCKETS
        self._sums = [0.0] * _NUM_BUCKETS
        self._highest = _EDGES[:-1]
        """The greatest length in each bucket."""
        self._gain = 1.0
        """Weight of the next answer: that of earlier ones falls by comparison."""
        self._weights_above: list[float] = []
        """Weight of each bucket and all above it; empty when it has to be made anew."""
        self._sums_above: list[float] = []

    def observe(self, length: int) -> None:
        """Counts an answer that has ended."""
        bucket = _bucket(length)
        self._weights[bucket] += self._gain
        self._sums[bucket] += self._gain * length
        self._highest[bucket] = max(self._highest[bucket], length)
        self._gain *= 1 + 1 / _MEMORY
        self._weights_above = []
        if self._gain > _HIGHEST_GAIN:
            self._weights = [weight / self._gain for weight in self._weights]
            self._sums = [one / self._gain for one in self._sums]
            self._gain = 1.0

    def expected_left(self, num_tokens: int, most_left: int, least: int = 0) -> int:
        """The tokens that an answer of `num_tokens` so far still gets: 1 to `most_left`, which is 1 at least.
        Answers shorter than `least` are out of the question."""
        longest = num_tokens + most_left
        reached = max(num_tokens, least - 1)
        if reached + 1 >= longest:
            return most_left
        if not self._weights_above:
            self._accumulate()
        own, last = _bucket(reached + 1), _bucket(longest)
        if own == last:
            return max(1, (reached + 1 + longest) // 2 - num_tokens)
        # The rest of the bucket that the answer is in counts by its share, with lengths spread evenly.
        low, high, highest = _EDGES[own], _EDGES[own + 1], self._highest[own]
        seen = self._weights[own] / self._gain * max(0, highest - reached) / (highest + 1 - low)
        unseen = _PRIOR_WEIGHTS[own] * (high - 1 - reached) / (high - low)
        weight = seen + unseen + self._weights_above[own + 1]
        lengths = (seen * (reached + 1 + highest) + unseen * (reached + high)) / 2
        lengths += self._sums_above[own + 1] - self._sums_above[last]
        lengths += self._weights_above[last] * longest
        if not weight > 0:
            return most_left
        return min(
            most_left, max(1, reached + 1 - num_tokens, round(lengths / weight) - num_tokens)
        )

    def _accumulate(self) -> None:
        gain = self._gain
        weights = [w / gain + p for w, p in zip(self._weights, _PRIOR_WEIGHTS, strict=True)]
        sums = [s / gain + p for s, p in zip(self._sums, _PRIOR_SUMS, strict=True)]
        self._weights_above = [*accumulate(reversed(weights)), 0.0]
        self._sums_above = [*accumulate(reversed(sums)), 0.0]
        for above in (self._weights_above, self._sums_above):
            above[:-1] = above[-2::-1]


@dataclass(slots=True)
class AnswerLeft:
    """The rest of one answer, looked up again whenever the answer has grown by an eighth."""

    lengths: AnswerLengths
    num_tokens: int
    """Tokens so far."""
    longest: int
    least: int = 0
    """The fewest tokens of the answer; `longest` where it ends nowhere else."""
    next_look: int = 0

    def after(self, num_tokens: int, left: int) -> int:
        """The tokens to come after `num_tokens` more, where `left` were to come before."""
        self.num_tokens += num_tokens
        if self.num_tokens < self.next_look:
            return max(1, left - num_tokens)
        return self.look()

    def look(self) -> int:
        self.next_look = self.num_tokens + 1 + self.num_tokens // 8
        most_left = max(1, self.longest - self.num_tokens)
        return self.lengths.expected_left(self.num_tokens, most_left, self.least)
