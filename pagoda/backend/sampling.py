# SPDX-License-Identifier: Apache-2.0
"""Rules by which a backend samples from rows of logits, and tokens as it gives them back.

`pagoda.backend.sampling_table` holds the rules of all requests by slot.

**The distribution.** A token's *power* is `(logit - highest) * scale` in float32, where `scale` is `log2(e)`
over the temperature: 2 to this power is how likely the token is against the likeliest one. Its *weight* is that
number as a multiple of 2^-`WEIGHT_BITS`, so sums of weights are sums of whole numbers and exact in any order. A
token is drawn by inversion: the first one, in the order of the vocabulary, up to which weights add up to more
than the random number times their total.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property

from torch import Tensor

from pagoda.messages.frontend import TokenLogprobs
from pagoda.messages.sampling_params import SamplingParams

WEIGHT_BITS = 40
LOWEST_POWER = -40.0
CERTAIN = 1 << 53
"""A probability of one in the units in which random numbers and shares of weights are given."""


def share_of(probability: float) -> int:
    """A probability in units of 2^-53, up to `CERTAIN`."""
    return int(math.ldexp(probability, 53))


class SampleOutcome(IntEnum):
    """Results of sampling a row; the numbers are those of csrc/sampler.h."""

    DRAWN = 0
    NOT_FINITE = 1
    """The model's logits are not all finite."""
    OVERFLOWN = 2
    """The penalties have driven the highest logit to infinity."""
    NOTHING_ALLOWED = 3
    """All tokens are forbidden."""


@dataclass(frozen=True, eq=False)
class SamplingRules:
    """Parameters of a request, as they count at every position."""

    sampling: SamplingParams
    allowed: Tensor | None
    """[ceil(vocab / 32)] int32: bit `i % 32` of word `i // 32` is set if token `i` may ever be sampled."""
    stops: array[int]
    """Tokens that are not sampled before `min_tokens`; int64."""
    bias_ids: array[int]
    biases: array[float]
    """Amounts that are added to the logits of `bias_ids`; float32."""

    @cached_property
    def scale(self) -> float:
        """Factor that turns differences of logits into powers of two."""
        return math.log2(math.e) / self.sampling.temperature

    @cached_property
    def lowest_power(self) -> float:
        min_p = self.sampling.min_p
        return max(LOWEST_POWER, math.log2(min_p)) if min_p > 0 else LOWEST_POWER


@dataclass(frozen=True, eq=False)
class SamplingRow:
    """A row of logits that a token is sampled from: the rules, and what was said before."""

    rules: SamplingRules
    position: int
    """Number of tokens sampled before; with the seed it determines the random number."""
    allowed: Tensor | None
    """Tokens that may be sampled here, as `SamplingRules.allowed`, which they are among; None: all."""
    holds_back_stops: bool
    seen: array[int]
    """Tokens that penalties are for, each once; int64."""
    counts: array[float]
    """Occurrences of each of `seen` in the output; float32."""

    @property
    def changes_logits(self) -> bool:
        rules = self.rules
        return self.forbids_tokens or len(rules.bias_ids) > 0 or len(self.seen) > 0

    @property
    def forbids_tokens(self) -> bool:
        return self.allowed is not None or self.holds_back_stops


@dataclass(frozen=True)
class SampledRow:
    outcome: SampleOutcome
    token_id: int = -1
    """The token, if the outcome is that one was drawn."""
    logprobs: TokenLogprobs | None = None


@dataclass(frozen=True, eq=False)
class SampledRows:
    """Results of the rows of a step, as arrays. Elements that a row does not have may be anything."""

    outcomes: Tensor
    """[rows] int64, numbers of `SampleOutcome`."""
    token_ids: Tensor
    """[rows] int64, of rows that are drawn."""
    ranks: Tensor
    """[rows] int64, from 1 on, of rows that are drawn and report log-probabilities."""
    top_token_ids: Tensor
    """[rows, k] int64, the likeliest tokens, of these rows; k is as large as any row wants."""
    logprobs: Tensor
    """[rows, 1 + k] float32, of the token that is drawn, then of the likeliest, of these rows."""

    def token_logprobs(self, rows: Sequence[int], counts: Sequence[int]) -> list[TokenLogprobs]:
        """Reports of some rows that are drawn, with `counts[i]` likeliest tokens of `rows[i]` at most."""
        ranks, top = self.ranks.tolist(), self.top_token_ids.tolist()
        logprobs = self.logprobs.tolist()
        return [
            TokenLogprobs(
                logprobs[row][0], ranks[row], top[row][:count], logprobs[row][1 : 1 + count]
            )
            for row, count in zip(rows, counts, strict=True)
        ]


@dataclass(frozen=True, eq=False)
class ScoredRows:
    """Reports on one given token of each of some rows of logits, as of tokens that are sampled."""

    finite: bool
    """All logits are finite; without that the rest means nothing."""
    ranks: Tensor
    """[rows] int64, from 1 on."""
    top_token_ids: Tensor
    """[rows, k] int64, the likeliest tokens."""
    logprobs: Tensor
    """[rows, 1 + k] float32, of the given token, then of the likeliest."""


def check_logits(logits: Tensor, rows: Sequence[int] | Tensor) -> None:
    """Raises ValueError unless logits are [rows, vocab]."""
    if logits.ndim != 2 or len(logits) != len(rows):
        raise ValueError(f"Logits of {list(logits.shape)} are not of {len(rows)} rows.")
