"""The bounded waiting queue: by requests, by tokens, and fair to the keys whose requests wait."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from pagoda.admission.drain_rate import DrainRate
from pagoda.ipc.clock import Clock


class Newcomer(NamedTuple):
    """A request that asks for a place."""

    request_id: str
    tenant: str
    """Name of its API key; empty without keys."""
    weight: float
    num_tokens: int
    """Tokens of its prompt."""


class Bounds(NamedTuple):
    """The most that may wait."""

    num_requests: int
    num_tokens: int


@dataclass(slots=True)
class _Line:
    """Requests of one tenant, oldest first, and their tokens."""

    weight: float
    requests: dict[str, int] = field(default_factory=dict)
    num_tokens: int = 0

    @property
    def sizes(self) -> tuple[int, int]:
        """Requests and tokens."""
        return len(self.requests), self.num_tokens


class WaitingRoom:
    """Requests that wait and have not begun.

    Where there is no room for another, the tenant that has most of the room beside its weight gives up its newest
    requests, as long as it still has no less than the newcomer's tenant then. So a tenant that fills the queue
    does not keep others out, and without keys nobody gives up anything.
    """

    def __init__(self, clock: Clock) -> None:
        self._rate = DrainRate(clock)
        self._lines: dict[str, _Line] = {}
        self._tenants: dict[str, str] = {}
        """Tenants by request id."""
        self.num_tokens = 0

    @property
    def num_requests(self) -> int:
        return len(self._tenants)

    @property
    def retry_after_s(self) -> int:
        """Whole seconds in which all that waits now drains."""
        return self._rate.retry_after_s(self.num_tokens)

    def evictions_for(self, newcomer: Newcomer, bounds: Bounds) -> list[str] | None:
        """Ids of the requests that give up their places to the newcomer, mostly none; None if it is refused.

        A newcomer finds room in an empty queue, however long its prompt is.
        """
        num_over = len(self._tenants) + 1 - bounds.num_requests
        tokens_over = self.num_tokens + newcomer.num_tokens - bounds.num_tokens
        if num_over <= 0 and (tokens_over <= 0 or not self._tenants):
            return []
        if len(self._lines) < 1 + (newcomer.tenant in self._lines):
            return None
        return self._evict(newcomer, num_over, tokens_over)

    def _evict(self, newcomer: Newcomer, num_over: int, tokens_over: int) -> list[str] | None:
        own = self._lines.get(newcomer.tenant)
        own_requests = (len(own.requests) if own else 0) + 1
        own_tokens = (own.num_tokens if own else 0) + newcomer.num_tokens
        if num_over > self._most_to_give(newcomer, 0, own_requests) or (
            tokens_over > self._most_to_give(newcomer, 1, own_tokens)
        ):
            return None
        newest: dict[str, Iterator[str]] = {}
        left = {
            tenant: line.sizes for tenant, line in self._lines.items() if tenant != newcomer.tenant
        }
        evicted: list[str] = []
        while num_over > 0 or tokens_over > 0:
            measure, own_size = (0, own_requests) if num_over > 0 else (1, own_tokens)
            heaviest = max(
                left, key=lambda tenant: left[tenant][measure] / self._lines[tenant].weight
            )
            line = self._lines[heaviest]
            victim = next(newest.setdefault(heaviest, reversed(line.requests)), None)
            if victim is None:
                return None
            num_requests, num_tokens = left[heaviest]
            rest = num_requests - 1, num_tokens - line.requests[victim]
            if rest[measure] / line.weight < own_size / newcomer.weight:
                return None
            left[heaviest] = rest
            evicted.append(victim)
            num_over -= 1
            tokens_over -= line.requests[victim]
        return evicted

    def _most_to_give(self, newcomer: Newcomer, measure: int, own_size: int) -> float:
        """Bound of the requests (measure 0) or tokens (1) that other tenants give up to one of `own_size`, so that
        a refusal costs one look at each tenant, not at each request."""
        return sum(
            max(0.0, line.sizes[measure] - own_size / newcomer.weight * line.weight)
            for tenant, line in self._lines.items()
            if tenant != newcomer.tenant
        )

    def add(self, newcomer: Newcomer) -> None:
        if not self._tenants:
            self._rate.restart()
        line = self._lines.get(newcomer.tenant)
        if line is None:
            line = self._lines[newcomer.tenant] = _Line(newcomer.weight)
        line.weight = newcomer.weight
        line.requests[newcomer.request_id] = newcomer.num_tokens
        line.num_tokens += newcomer.num_tokens
        self._tenants[newcomer.request_id] = newcomer.tenant
        self.num_tokens += newcomer.num_tokens

    def remove(self, request_id: str, *, has_begun: bool) -> None:
        """Forgets a request; one that has begun counts as drained. Unknown ids are ignored."""
        tenant = self._tenants.pop(request_id, None)
        if tenant is None:
            return
        line = self._lines[tenant]
        num_tokens = line.requests.pop(request_id)
        line.num_tokens -= num_tokens
        self.num_tokens -= num_tokens
        if not line.requests:
            del self._lines[tenant]
        if has_begun:
            self._rate.drained(num_tokens)
