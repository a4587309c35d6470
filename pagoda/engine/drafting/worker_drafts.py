# SPDX-License-Identifier: Apache-2.0
"""Drafts that the worker's drafter proposed behind the last step, and what proposing takes."""

from __future__ import annotations

from collections.abc import Sequence

from pagoda.engine.drafting.drafter import NOTHING, Proposal
from pagoda.engine.drafting.step_costs import StepCosts
from pagoda.engine.request import Request

MATCH = 64
"""`Proposal.length` of all that models propose: they are judged together."""
_FIRST = 4
"""Drafts that are asked for while nobody knows what they take."""
_TRIAL_STEPS = 64
"""Steps after which drafts are asked for although they did not pay: they may by now."""
_WEIGHT = 0.125


class WorkerDrafts:
    """Gives what came with a request's last tokens, and decides how many drafts to ask for."""

    def __init__(self) -> None:
        self._found: dict[Request, tuple[int, list[int]]] = {}
        """Tokens of the request when its drafts came, and the drafts."""
        self._pass_s = 0.0
        """Seconds of a draft of all requests; 0 before one was seen."""
        self._num_idle = 0
        """Steps since drafts were asked for."""

    def begin_step(self, requests: Sequence[Request]) -> None:
        """Everything is there already."""

    def propose(self, request: Request, most: int) -> Proposal:
        begin, token_ids = self._found.get(request, (-1, []))
        if begin != request.num_tokens:
            return NOTHING
        return Proposal(token_ids[:most], MATCH, [1.0] * len(token_ids))

    def take(self, request: Request, token_ids: list[int]) -> None:
        """Drafts behind all that is known of the request."""
        self._found[request] = request.num_tokens, token_ids

    def finished(self, request: Request) -> None:
        self._found.pop(request, None)

    def observe(self, num_passes: int, seconds: float) -> None:
        """Proposing `num_passes` drafts of each request took so many seconds."""
        seconds /= num_passes
        self._pass_s += (_WEIGHT if self._pass_s else 1.0) * (seconds - self._pass_s)

    def num_ahead(
        self, chances: Sequence[float], most: int, num_tokens: int, costs: StepCosts
    ) -> int:
        """How many drafts of each request are best proposed behind the next step, at most `most`, where each is
        right with the request's one of `chances`. The step has `num_tokens` tokens without drafts."""
        self._num_idle += 1
        if not chances or most < 1:
            return 0
        ahead = costs.best_ahead(num_tokens, chances, most, self._pass_s)
        if not ahead and (not self._pass_s or self._num_idle >= _TRIAL_STEPS):
            ahead = min(most, _FIRST)
        if ahead:
            self._num_idle = 0
        return ahead
