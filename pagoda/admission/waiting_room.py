# SPDX-License-Identifier: Apache-2.0
"""Admission control: the bound of the waiting queue in requests and tokens, shared out fairly among API keys."""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
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
class _TenantQueue:
    """Requests of one tenant, oldest first, and their tokens."""

    weight: float
    requests: dict[str, int] = field(default_factory=dict)
    num_tokens: int = 0

    @property
    def sizes(self) -> tuple[int, int]:
        """Requests and tokens."""
        return len(self.requests), self.num_tokens


class _Ranking:
    """Tenants by their sizes over their weights, the heaviest first. A change takes O(log tenants) comparisons."""

    def __init__(self) -> None:
        self._order: list[tuple[float, str]] = []
        self._entries: dict[str, tuple[float, str]] = {}

    def __iter__(self) -> Iterator[tuple[float, str]]:
        """Sizes below zero, and their tenants; the ranking must not change meanwhile."""
        return iter(self._order)

    def set(self, tenant: str, size: float) -> None:
        """A tenant of size 0 is forgotten."""
        before = self._entries.pop(tenant, None)
        if before is not None:
            del self._order[bisect_left(self._order, before)]
        if size:
            entry = self._entries[tenant] = -size, tenant
            insort(self._order, entry)


class WaitingRoom:
    """Requests that wait and have not begun.

    Where there is no room for another, the tenant that has most of the room beside its weight gives up its newest
    requests, as long as it still has no less than the newcomer's tenant then. So a tenant that fills the queue
    does not keep others out, and without keys nobody gives up anything.
    """

    def __init__(self, clock: Clock) -> None:
        self._rate = DrainRate(clock)
        self._lines: dict[str, _TenantQueue] = {}
        self._rankings = _Ranking(), _Ranking()
        """The lines by requests, and by tokens."""
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
        """Requests that give up their places, as `evictions_for` says; `num_over` and `tokens_over` are too many.

        Looks at the tenants that give up something and one more. A refusal takes no longer: a newcomer that needs
        the tokens of many requests has as many itself.
        """
        own = self._lines.get(newcomer.tenant)
        own_requests, own_tokens = (0, 0) if own is None else own.sizes
        own_sizes = own_requests + 1, own_tokens + newcomer.num_tokens
        over = [num_over, tokens_over]
        newest: dict[str, Iterator[str]] = {}
        left: dict[str, tuple[int, int]] = {}
        evicted: list[str] = []
        for measure, ranking in enumerate(self._rankings):
            others = ((size, one) for size, one in ranking if one != newcomer.tenant)
            untouched = ((size, one) for size, one in others if one not in left)
            heaviest = [
                (-sizes[measure] / self._lines[one].weight, one) for one, sizes in left.items()
            ]
            heaviest += islice(untouched, 1)
            heapq.heapify(heaviest)
            while over[measure] > 0:
                if not heaviest:
                    return None
                _, tenant = heapq.heappop(heaviest)
                line = self._lines[tenant]
                if tenant not in left:
                    left[tenant], newest[tenant] = line.sizes, reversed(line.requests)
                    for entry in islice(untouched, 1):
                        heapq.heappush(heaviest, entry)
                victim = next(newest[tenant], None)
                if victim is None:
                    return None
                num_requests, num_tokens = left[tenant]
                rest = num_requests - 1, num_tokens - line.requests[victim]
                if rest[measure] / line.weight < own_sizes[measure] / newcomer.weight:
                    return None
                left[tenant] = rest
                heapq.heappush(heaviest, (-rest[measure] / line.weight, tenant))
                evicted.append(victim)
                over = [over[0] - 1, over[1] - line.requests[victim]]
        return evicted

    def add(self, newcomer: Newcomer) -> None:
        if not self._tenants:
            self._rate.restart()
        line = self._lines.get(newcomer.tenant)
        if line is None:
            line = self._lines[newcomer.tenant] = _TenantQueue(newcomer.weight)
        line.weight = newcomer.weight
        line.requests[newcomer.request_id] = newcomer.num_tokens
        line.num_tokens += newcomer.num_tokens
        self._rank(newcomer.tenant, line)
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
        self._rank(tenant, line)
        if not line.requests:
            del self._lines[tenant]
        if has_begun:
            self._rate.drained(num_tokens)

    def _rank(self, tenant: str, line: _TenantQueue) -> None:
        for ranking, size in zip(self._rankings, line.sizes, strict=True):
            ranking.set(tenant, size / line.weight)
