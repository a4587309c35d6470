# SPDX-License-Identifier: Apache-2.0
"""Continuous batching at its plainest, to be read first: chunked prefill, prefix cache, preemption, steps ahead.

`pagoda.engine` makes the same plans where there are one tenant and one priority, and neither tiers, grammars nor
windows. A request has tokens and computed tokens; a step computes some of the rest, and samples behind the last.
"""

from __future__ import annotations

import heapq
from bisect import insort
from collections import deque
from dataclasses import dataclass, field
from operator import attrgetter

from plain_blocks import Blocks, InFlightPrefixes, Prefix, Sequence

BLOCKED_STEPS = 16
"""Steps after which a request that did not fit is looked at again, when nothing became free."""
ARRIVAL = attrgetter("arrival")


@dataclass(eq=False)
class Request:
    name: str
    arrival: int
    tokens: list[int]
    max_tokens: int
    """The most tokens of prompt and answer together."""
    stops: frozenset[int] = frozenset()
    blocks: list[int] = field(default_factory=list)
    slot: int | None = None
    admission: int = 0
    num_scheduled: int = 0
    """Leading tokens that are computed once all steps in flight are."""
    num_computed: int = 0
    num_pending: int = 0
    """Steps in flight that sample a token of the request."""
    is_finished: bool = False
    num_published: int = 0
    provides: Prefix | None = None
    provider: tuple[Sequence, int] | None = None

    @property
    def num_wanted(self) -> int:
        """Tokens that the next step may compute; 0 when the last sample that counts is pending."""
        expected = len(self.tokens) + self.num_pending
        return (
            0 if self.num_pending and expected >= self.max_tokens else expected - self.num_scheduled
        )


@dataclass
class Plan:
    scheduled: list[tuple[Request, int, int, int, bool]] = field(default_factory=list)
    """Request, its admission, slot, number of tokens, and whether it samples behind them."""
    starts: list[tuple[str, int, int, list[int]]] = field(default_factory=list)
    """Name, slot, computed tokens and blocks of requests that are admitted."""
    new_blocks: list[tuple[int, list[int]]] = field(default_factory=list)
    freed_slots: list[int] = field(default_factory=list)


class PlainScheduler:
    def __init__(self, blocks: Blocks, max_num_seqs: int, budget: int, max_chunk: int) -> None:
        self.blocks, self.in_flight_prefixes = blocks, InFlightPrefixes(blocks.size)
        self.budget, self.max_chunk = budget, max_chunk
        self.waiting, self.running = list[Request](), list[Request]()
        self.free_slots, self.freed_slots = list(range(max_num_seqs)), list[int]()
        self.in_flight: deque[Plan] = deque()
        self.step = 0
        self.blocked: tuple[Request, int, int, int] | None = None
        """The last request that did not fit; the step, blocks to spare and number of running requests then."""

    def add(self, request: Request) -> None:
        insort(self.waiting, request, key=ARRIVAL)

    def schedule(self) -> Plan | None:
        """The next step; None if nothing can be computed now."""
        plan, budget, may_admit = Plan(), self.budget, True
        if self.running and self.waiting:
            self.fitting_prefix(
                self.waiting[0]
            )  # of a higher priority, others would now make way for it

        # running requests: decode, or a further chunk of the prompt
        for request in list(self.running):
            wanted = request.num_wanted
            if request.slot is None or wanted == 0 or budget == 0:
                continue
            count = min(wanted, budget, self.max_chunk)
            if (
                count > 1
            ):  # a chunk takes half of what is left, or all but a token for each that decodes behind it
                behind = self.running[self.running.index(request) + 1 :]
                num_decodes = sum(other.num_wanted == 1 for other in behind)
                count = min(count, max(1, budget - num_decodes, budget // 2))
            missing = self.num_missing(request, request.num_scheduled + count)
            while missing > self.blocks.num_available and request.slot is not None:
                self.preempt(self.running[-1])
                may_admit = False
            if request.slot is None:
                continue
            if missing > 0:
                plan.new_blocks.append((request.slot, self.blocks.take(missing)))
                request.blocks += plan.new_blocks[-1][1]
            budget -= self.compute(plan, request, count, wanted)

        # waiting requests: the first chunk of the prompt, behind its cached prefix
        for request in list(self.waiting):
            if budget == 0 or not may_admit:
                break
            if self.in_flight_prefixes.is_awaiting(request):
                continue
            prefix = self.fitting_prefix(request)
            if prefix is None:
                break
            if self.in_flight_prefixes.should_wait(request, len(prefix)):
                continue
            self.admit(request, prefix)
            wanted = request.num_wanted
            count = min(wanted, budget, self.max_chunk)
            request.blocks += self.blocks.take(
                self.num_missing(request, request.num_scheduled + count)
            )
            assert request.slot is not None
            start = (request.name, request.slot, request.num_computed, list(request.blocks))
            plan.starts.append(start)
            budget -= self.compute(plan, request, count, wanted)

        if not plan.scheduled:
            return None
        plan.freed_slots, self.freed_slots = self.freed_slots, []
        self.in_flight.append(plan)
        self.step += 1
        return plan

    def compute(self, plan: Plan, request: Request, count: int, wanted: int) -> int:
        assert request.slot is not None
        request.num_scheduled += count
        request.num_pending += count == wanted
        part = (request, request.admission, request.slot, count, count == wanted)
        plan.scheduled.append(part)
        return count

    def update(self, sampled: dict[int, int]) -> None:
        """Applies the oldest step in flight, which has sampled these tokens by slot."""
        for request, admission, slot, count, samples in self.in_flight.popleft().scheduled:
            request.num_pending -= samples
            if request.is_finished:
                continue
            if request.slot is not None and admission == request.admission:
                request.num_computed += count
                self.publish(request)
            if samples:
                request.tokens.append(sampled[slot])
                if sampled[slot] in request.stops or len(request.tokens) == request.max_tokens:
                    self.finish(request)

    def finish(self, request: Request) -> None:
        """The answer is complete, or nobody wants it any more."""
        request.is_finished, self.blocked = True, None
        if request.slot is None:
            self.waiting.remove(request)
        else:
            self.leave(request)

    def preempt(self, request: Request) -> None:
        """The request waits again, with all its tokens, none of which is computed."""
        self.leave(request)
        self.add(request)

    def admit(self, request: Request, prefix: list[int]) -> None:
        request.blocks, request.num_published = self.blocks.hold(prefix), len(prefix)
        request.num_scheduled = request.num_computed = len(prefix) * self.blocks.size
        request.slot = heapq.heappop(self.free_slots)
        request.admission += 1
        self.waiting.remove(request)
        insort(self.running, request, key=ARRIVAL)
        self.in_flight_prefixes.advance(request)

    def leave(self, request: Request) -> None:
        assert request.slot is not None
        self.in_flight_prefixes.leave(request)
        self.blocks.give_back(request.blocks)
        self.running.remove(request)
        heapq.heappush(self.free_slots, request.slot)
        self.freed_slots.append(request.slot)
        request.slot = None
        request.num_scheduled = request.num_computed = request.num_published = 0

    def num_missing(self, request: Request, num_tokens: int) -> int:
        return max(0, -(-num_tokens // self.blocks.size) - len(request.blocks))

    def fitting_prefix(self, request: Request) -> list[int] | None:
        """The cached prefix of a request that can be admitted now: its tokens fit besides what all running ones
        need for theirs, and one more block of each."""
        if request.num_pending or not self.free_slots:
            return None
        reserved = sum(self.num_missing(it, len(it.tokens)) + 1 for it in self.running)
        to_spare, num_running = self.blocks.num_available - reserved, len(self.running)
        if self.blocked is not None:  # to look at a long prompt costs time
            blocked, step, had_to_spare, had_running = self.blocked
            is_early = blocked is request and self.step < step + BLOCKED_STEPS
            if is_early and to_spare <= had_to_spare and num_running == had_running > 0:
                return None
        prefix = self.blocks.find(request.tokens)
        num_shared = sum(self.blocks.num_holders[block] > 0 for block in prefix)
        if self.num_missing(request, len(request.tokens)) - num_shared > to_spare:
            self.blocked = (request, self.step, to_spare, num_running)
            return None
        return prefix

    def publish(self, request: Request) -> None:
        """Others can find the blocks that are full of computed tokens."""
        num_full = request.num_computed // self.blocks.size
        if num_full > request.num_published:
            for index in range(request.num_published, num_full):
                prefix = tuple(request.tokens[: (index + 1) * self.blocks.size])
                self.blocks.publish(request.blocks[index], prefix)
            request.num_published = num_full
            self.in_flight_prefixes.advance(request)
