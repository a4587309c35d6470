# SPDX-License-Identifier: Apache-2.0
"""Parts of the specification of models that give vectors or scores of texts; no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

Task = Literal["generate", "embed", "score"]
"""Purpose of a model: text, vectors of texts, or scores of pairs of texts."""


@dataclass(frozen=True)
class PositionTable:
    """Learned positions (Gehring et al. 2017)."""

    num_positions: int
    """Rows of the table."""
    first_position: int = 0
    """Row of the first token's position."""


@dataclass(frozen=True)
class EncoderSpec:
    """Tables that an encoder adds to the embeddings of tokens, before the sum is normed (Devlin et al. 2018)."""

    num_positions: int
    """Rows of the table of positions."""
    first_position: int
    """Row of the first token's position."""
    num_token_types: int
    """Rows of the table of token types; the second of two texts has type 1, others 0."""


class ScoreTokens(NamedTuple):
    """Answers of a decoder that is asked whether two texts go together; its score is the difference of logits."""

    yes: int
    no: int | None
    """None where the logit of `yes` alone is the score."""


@dataclass(frozen=True)
class ClassifierSpec:
    """Head that scores a text, or a pair of them."""

    out: str
    """Name of the layer that gives the score."""
    dense: str | None = None
    """Name of the layer in front of it, whose outputs go through tanh."""
    bias: bool = True
    first_token: bool = True
    """The hidden state of the first token is scored, else that of the last one."""
    sigmoid: bool = True
    """Scores are meant to be brought between 0 and 1."""
