# SPDX-License-Identifier: Apache-2.0
"""Drafters of any quality, and costs by which all that they propose is computed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pagoda.engine.drafting.drafter import Proposal
from pagoda.engine.drafting.step_costs import StepCosts
from pagoda.engine.request import Request


class FunctionDrafter:
    """Proposes what a function says."""

    def __init__(self, function: Callable[[Request], list[int]]) -> None:
        self._function = function

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

    def best_ahead(
        self, num_tokens: int, chances: Sequence[float], most: int, pass_s: float
    ) -> int:
        return most
