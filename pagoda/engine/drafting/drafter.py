# SPDX-License-Identifier: Apache-2.0
"""Drafters and their proposals."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from pagoda.engine.request import Request


class Proposal(NamedTuple):
    """Tokens that may follow all that are known of a request."""

    token_ids: list[int]
    length: int
    """Tokens of the match that the first draft comes from; every further draft is one behind a longer match."""
    shares: list[float]
    """Shares of such matches that go on with each draft."""


NOTHING = Proposal([], 0, [])


class Drafter(Protocol):
    """Proposes drafts. Its work for a step is bounded, however many requests there are."""

    prior: Sequence[float]
    """Shares of its drafts that are right, as of `MatchRates`, before any was judged."""
    num_asked: int
    """The most tokens of a request that plans ask the worker to propose; 0 of a drafter of the engine."""

    @property
    def num_bytes(self) -> int:
        """Memory in which drafts are looked up, at most."""

    def take(self, request: Request, token_ids: list[int]) -> None:
        """The worker proposes what may follow all known tokens of a request."""

    def begin_step(self, requests: Sequence[Request]) -> None:
        """The step to come may ask for these, some of whose prompts are not computed yet."""

    def propose(self, request: Request, most: int) -> Proposal:
        """Proposes at most so many tokens behind those that are known of a request."""

    def finished(self, request: Request) -> None:
        """The request has ended."""
