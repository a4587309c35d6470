"""What becomes of requests in the scheduler, for whoever wants to know."""

from __future__ import annotations

from typing import Protocol

from pagoda.engine.request import Request
from pagoda.messages.frontend import FinishReason


class SchedulerObserver(Protocol):
    """Is told at once; must not raise, nor change anything."""

    def queued(self, request: Request) -> None:
        """It waits for a step: it is new, or waits for KV no longer."""
        ...

    def awaits_kv(self, request: Request) -> None:
        """It waits for KV. May be told again."""
        ...

    def admitted(self, request: Request) -> None:
        """It has a slot."""
        ...

    def sampled(self, request: Request) -> None:
        """It has one more token."""
        ...

    def preempted(self, request: Request) -> None:
        """It has no slot any more, and waits for a step."""
        ...

    def lost(self, request: Request) -> None:
        """Its KV, or what was on its way to it, is lost with the workers; it waits for a step."""
        ...

    def ended(self, request: Request, reason: FinishReason) -> None: ...
