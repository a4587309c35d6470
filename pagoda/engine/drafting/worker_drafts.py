# SPDX-License-Identifier: Apache-2.0
"""Drafts of a worker that has a drafter with weights: a smaller model, or heads of the model itself.

A plan asks for them (`StepPlan.proposals`), and the result brings what may follow the tokens that it says
(`StepResult.proposals`). All else is as with drafters of the engine.
"""

from __future__ import annotations

from collections.abc import Sequence

from pagoda.engine.drafting.drafter import NOTHING, Proposal
from pagoda.engine.request import Request


class WorkerDrafter:
    """Keeps what the last result proposed of each request."""

    num_bytes = 0
    prior: Sequence[float] = (0.7, 0.6, 0.5, 0.5, 0.5, 0.5)
    """Shares by the place of the draft: 1, 2 to 3, 4 to 7 and so on."""

    def __init__(self, most: int) -> None:
        self.num_asked = most
        self._proposals: dict[Request, tuple[int, list[int]]] = {}
        """Tokens of the request at the time, and what may follow."""

    def take(self, request: Request, token_ids: list[int]) -> None:
        """A result proposes what may follow all tokens that are known of a request."""
        self._proposals[request] = request.num_tokens, token_ids

    def begin_step(self, requests: Sequence[Request]) -> None:
        """Nothing is to be done: the worker has done it."""

    def propose(self, request: Request, most: int) -> Proposal:
        num_tokens, token_ids = self._proposals.get(request, (-1, []))
        if num_tokens != request.num_tokens:
            return NOTHING
        token_ids = token_ids[:most]
        return Proposal(token_ids, 1, [1.0] * len(token_ids))

    def finished(self, request: Request) -> None:
        self._proposals.pop(request, None)
