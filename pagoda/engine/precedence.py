# SPDX-License-Identifier: Apache-2.0
"""Precedence of requests: priorities that age, shares of tenants, and the requests that make way for others."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from itertools import chain, islice, takewhile

from pagoda.engine.candidates import Candidates
from pagoda.engine.plans import Demand, DemandBehind, PlanBuilder
from pagoda.engine.request import Request
from pagoda.engine.request_queue import RequestQueue

AGEING_STEPS = 8
"""Full steps, for every so many of whose tokens that go to higher priorities one waiting request of a lower one,
the first to have come, is raised to the front of all that wait."""

_MAX_OTHERS = 16
"""Requests in line of whose tokens a long prompt of another tenant takes account."""


class Precedence:
    """Puts requests in order before a step is planned, and says who yields tokens and blocks to whom.

    Of one tenant and one priority, the first to have come goes first, and nothing here changes that.
    """

    def __init__(self, budget: int, block_size: int, queue: RequestQueue, candidates: Candidates):
        """`budget` is the most tokens of a step."""
        self._most_overtaking = AGEING_STEPS * budget
        self._block_size = block_size
        self._queue = queue
        self._running, self._waiting = queue.running, queue.waiting
        self._candidates = candidates
        self._num_overtaking_tokens = 0
        """Tokens given to requests of higher priorities since an overtaken request was last raised."""

    # ---- ageing

    def count_overtaking(self, plan: PlanBuilder) -> None:
        """Counts the tokens of the plan that went to higher priorities than that of a request without any."""
        lowest = self._lowest_without_tokens(plan)
        if lowest is None or lowest == self._top_priority():
            self._num_overtaking_tokens = 0
            return
        self._num_overtaking_tokens += sum(
            part.num_tokens for part in plan.scheduled if part.request.order_key[0] < lowest
        )

    def _lowest_without_tokens(self, plan: PlanBuilder) -> int | None:
        """The lowest priority in line, or of the last running request if it could have had tokens of the plan and
        has none; None if all have some."""
        lasts = [] if self._waiting.last is None else [self._waiting.last]
        lasts += [
            last
            for last in self._running[-1:]
            if last.num_schedulable_tokens
            and all(part.request is not last for part in plan.scheduled)
        ]
        return max((last.order_key[0] for last in lasts), default=None)

    def _top_priority(self) -> int:
        """The highest priority of all requests in line and running, of which there are some."""
        firsts = [*self._running[:1], *islice(self._waiting, 1)]
        return min(request.order_key[0] for request in firsts)

    def raise_the_overtaken(self) -> None:
        """Ageing: of the requests with lower priorities that wait, or run and could have tokens, puts the first to
        have come before all others."""
        if self._num_overtaking_tokens < self._most_overtaking:
            return
        if not (self._waiting or self._running):
            return
        self._num_overtaking_tokens = 0
        top = self._top_priority()
        able = (request for request in self._running if request.num_schedulable_tokens)
        overtaken = [it for it in chain(self._waiting, able) if it.order_key[0] > top]
        if overtaken:
            chosen = min(overtaken, key=lambda request: request.order_key[2])
            self._queue.reorder(chosen, (top, -math.inf, chosen.order_key[2]))

    # ---- room for the first in line

    def make_way(self, preempt: Callable[[Request], None]) -> None:
        """Makes room for the first waiting request: running requests of lower priorities give way, and the newest
        of a tenant that has more than its share while the first one's tenant has less, in sequences if these are
        all taken, else in tokens."""
        counts = not self._queue.has_slot or self._queue.is_full
        while self._running and (first := self._candidates.first()) is not None:
            if self._candidates.fitting_prefix(first) is not None:
                return
            last, victim = self._running[-1], None
            if not first.num_pending_samples:  # else it can only wait for these
                if first.order_key[0] < last.order_key[0]:
                    preempt(last)
                    continue
                victim = self._over_served(first, counts=counts)
            if victim is None:
                other = self._first_of_others(first)
                victim = None if other is None else self._over_served(other, counts=counts)
                if other is None or victim is None:
                    return
                priority, start, _ = first.order_key
                before = math.nextafter(start, -math.inf)
                self._queue.reorder(other, (priority, before, other.order_key[2]))
                first = other
            preempt(victim)
            priority, start, arrival = victim.order_key
            behind = max(start, math.nextafter(first.order_key[1], math.inf))
            self._queue.reorder(victim, (priority, behind, arrival))

    def _first_of_others(self, first: Request) -> Request | None:
        """The first in line behind `first` that is of its priority and of another tenant. Its tenant may have less
        than its share of what runs although it has had its share of tokens, for slots become free in bursts."""
        priority, start, _ = first.order_key
        if start == -math.inf or not self._waiting.has_others(first.tenant):
            return None
        others = self._waiting.others_after(first.order_key, first.tenant)
        equals = takewhile(lambda request: request.order_key[0] == priority, others)
        hooks = self._candidates.hooks
        return hooks.first_ready(one for one in equals if not one.num_pending_samples)

    def _over_served(self, first: Request, *, counts: bool) -> Request | None:
        """The newest running request of the tenant that has most beside its weight, in sequences (`counts`) or
        tokens; None unless it has no less than the tenant of `first` when the two have changed places. A request
        that was preempted before gets on by as much as it computed again first, lest two tenants preempt each
        other again and again."""
        if not self._queue.has_tenants:
            return None
        priority = first.order_key[0]
        equals = [request for request in self._running if request.order_key[0] == priority]
        if not equals:
            return None
        sizes = _sizes(equals, counts=counts)
        heaviest = max(sizes, key=sizes.__getitem__)
        own = [one for one in equals if one.tenant == heaviest and one.has_made_up]
        if heaviest == first.tenant or not own:
            return None
        rest = sizes[heaviest] - _size(own[-1], counts=counts)
        return own[-1] if rest >= sizes[first.tenant] + _size(first, counts=counts) else None

    def victim_for(self, request: Request) -> Request:
        """The request to preempt for blocks that `request` needs: one of the lowest priority, of several tenants
        the one with the most tokens beside its weight, the last in line; `request` itself if none is behind it.
        Requests of others that have not made up for their last preemption go last. Only those of its rank have its
        blocks."""
        rank = request.table.rank
        last = next(other for other in reversed(self._running) if other.table.rank == rank)
        if last is request or not self._queue.has_tenants:
            return last
        sizes = _sizes(self._running, counts=False)
        behind = self._running[self._queue.index_of(request) + 1 :]
        equals = [
            other
            for other in reversed(behind)
            if other.order_key[0] == last.order_key[0] and other.table.rank == rank
        ]
        return max(
            equals,
            key=lambda it: (it.tenant == request.tenant or it.has_made_up, sizes[it.tenant]),
        )

    # ---- tokens of a step

    def behind(self, request: Request, plan: PlanBuilder) -> DemandBehind:
        """Tokens wanted by requests behind this running one that are of its priority: a token for each that
        decodes, and for prompts of other tenants a share by their weights."""
        priority, tenant, weight = request.order_key[0], request.tenant, request.charge.weight
        demand = plan.demand = plan.demand or Demand(self._running)
        place = len(self._running) - 1 - self._queue.index_of(request)
        num_decodes, num_tokens, others = demand.behind(place)
        has_others = num_tokens > 0
        if plan.is_mixed:
            num_tokens += min(num_decodes, plan.decodes_left)
        first = plan.first
        if first is not None and first.tenant != tenant and first.order_key[0] == priority:
            hit = self._candidates.fitting_prefix(first)
            if hit is not None:
                waiting = [first]
                num_tokens += first.num_tokens - hit.num_blocks * self._block_size
                for other in islice(self._waiting.after(first.order_key), _MAX_OTHERS):
                    if other.tenant != tenant and other.order_key[0] == priority:
                        num_tokens += other.num_tokens
                        waiting.append(other)
                new = {one.tenant: one.charge.weight for one in waiting}
                others += sum(
                    its_weight
                    for name, its_weight in new.items()
                    if not demand.has_prompt_behind(place, priority, name)
                )
                has_others = True
        share = weight / (weight + others) if has_others else 0.5
        return DemandBehind(num_tokens, min(0.5, share))


def _size(request: Request, *, counts: bool) -> float:
    """Sequences (`counts`) or tokens of the request over the weight of its tenant."""
    return (1 if counts else request.num_tokens) / request.charge.weight


def _sizes(requests: list[Request], *, counts: bool) -> defaultdict[str, float]:
    """Sizes of the tenants' requests, added up."""
    sizes: defaultdict[str, float] = defaultdict(float)
    for request in requests:
        sizes[request.tenant] += _size(request, counts=counts)
    return sizes
