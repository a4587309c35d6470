# SPDX-License-Identifier: Apache-2.0
"""The planner of drafts: whom the batcher asks which requests get drafts, and whether a plan waits for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from pagoda.engine.plans import InFlightStep, Scheduled
from pagoda.engine.request import Request
from pagoda.messages.worker import StepResult


class StepSize(NamedTuple):
    """Size of a step."""

    num_tokens: int
    num_requests: int


class DraftPlanner(Protocol):
    """Sets `Request.drafts` before plans are made."""

    size: StepSize
    """The step that is planned next, without drafts; set by the batcher."""

    @property
    def num_bytes(self) -> int:
        """Memory in which drafts are looked up, at most."""

    @property
    def num_ahead(self) -> int:
        """Tokens behind those of a step for which the worker wants blocks, so that it can propose."""

    def holds_back(self, running: Sequence[Request], room: int) -> bool:
        """True if the next step is better planned with some of `room` drafts, once that under way has ended."""

    def draft(self, running: Sequence[Request], room: int) -> None:
        """Gives requests drafts for the plan that is made next, all together at most `room`."""

    def ask(self, scheduled: Sequence[Scheduled]) -> dict[int, int]:
        """Numbers of tokens that the worker is to propose behind what a step samples, by slot."""

    def observe(self, step: InFlightStep, result: StepResult) -> None:
        """Learns what a step took, whose result has been applied, and what it proposes."""

    def finished(self, request: Request) -> None:
        """Forgets a request."""
