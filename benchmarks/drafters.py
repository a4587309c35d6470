# SPDX-License-Identifier: Apache-2.0
"""Drafters of any quality, and costs by which all that they propose is computed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pagoda.engine.drafting.drafter import Proposal
from pagoda.engine.drafting.step_costs import StepCosts
from pagoda.engine.request import Request


class FunctionDrafter:
    """Proposes what a function says."""

    num_asked = num_bytes = 0
    prior: Sequence[float] = (0.9,) * 7

    def __init__(self, function: Callable[[Request], list[int]]) -> None:
        self._function = function

    def take(self, request: Request, token_ids: list[int]) -> None:
        raise AssertionError(f"Nobody has asked for {token_ids} behind {request}.")

    def begin_step(self, requests: Sequence[Request]) -> None:
        pass

    def propose(self, request: Request, most: int) -> Proposal:
        token_ids = self._function(request)[:most]
        return Proposal(token_ids, 64, [1.0] * len(token_ids))

    def finished(self, request: Request) -> None:
        pass


class AlwaysPays(StepCosts):
    """Every draft is worth its time."""

    def most_worthwhile(self, num_tokens: int, num_requests: int, gains: Sequence[float]) -> int:  # noqa: ARG002
        return len(gains)

    def most_worth_asking(self, num_tokens: int, num_requests: int, gains: Sequence[float]) -> int:  # noqa: ARG002
        return len(gains)
