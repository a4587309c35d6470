# SPDX-License-Identifier: Apache-2.0
"""Admission of requests to the replicas of a dispatcher, before any of them is asked.

A body may have many requests: inputs of embeddings and `n` copies, which come together, or the steps of a beam
search, which come one after the other. A server that ends finishes accepted bodies. One that meets an empty queue
is taken as a whole, however much that is, as a long prompt is; engines get so much of it as may wait there.
"""

from __future__ import annotations

import asyncio
import sys
from collections import Counter, OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager

from pagoda.admission.waiting_room import Bounds, Newcomer, WaitingRoom
from pagoda.errors import OverloadedError
from pagoda.fleet.limits import LimitSums
from pagoda.fleet.placement import TrackedRequest
from pagoda.ipc.clock import Clock
from pagoda.messages.frontend import GenerateRequest, Work
from pagoda.messages.sampling_params import SamplingParams

_DRAINING_RETRY_S = 10
_ANY_REQUEST = GenerateRequest(request_id="", prompt_token_ids=[], work=Work(SamplingParams()))


class Admission:
    """Bounds the requests of a dispatcher to what its replicas can run and queue: more would be refused by all
    replicas in turn, or wait for one without end."""

    def __init__(self, sums: LimitSums, clock: Clock, max_requests: int | None = None) -> None:
        """Lets in `max_requests` at most, running and waiting, besides what the replicas bound."""
        self._sums = sums
        self._max_requests = sys.maxsize if max_requests is None else max_requests
        self._room = WaitingRoom(clock)
        """Requests that no engine has begun to compute."""
        self._num_begun = 0
        self._bodies: dict[str, set[TrackedRequest]] = {}
        """Bodies that met an empty queue, which are taken as a whole, and their requests that are here."""
        self._held: OrderedDict[TrackedRequest, None] = OrderedDict()
        """Requests of these that go on to engines when there is room, oldest first."""
        self._accepted: Counter[str] = Counter()
        """Accepted requests, and those who may send more of them, by body; "" is for requests of their own."""
        self._idle = asyncio.Event()
        """Set while nothing is accepted."""
        self._idle.set()
        self.is_draining = False
        """Only what belongs to an accepted body is accepted."""
        self._is_over = False

    # ---- the end of a server

    def check_open(self, body: str) -> None:
        """Raises OverloadedError: the server shuts down, and no work on this body has been accepted."""
        is_known = bool(body) and body in self._accepted and not self._is_over
        if self.is_draining and not is_known:
            raise OverloadedError("The server is shutting down.", retry_after_s=_DRAINING_RETRY_S)

    @contextmanager
    def hold(self, body: str) -> Iterator[None]:
        """Accepts a body that sends its requests one after the other, until the block ends.
        Raises OverloadedError: as `check_open`."""
        self.check_open(body)
        self._count(body, 1)
        try:
            yield
        finally:
            self._count(body, -1)

    def _count(self, body: str, change: int) -> None:
        self._accepted[body] += change
        if not self._accepted[body]:
            del self._accepted[body]
        if self._accepted:
            self._idle.clear()
        else:
            self._idle.set()

    async def drain(self) -> None:
        """Takes no new work, and returns when all that was accepted has ended."""
        self.is_draining = True
        await self._idle.wait()

    def end(self) -> None:
        """Takes nothing any more, whatever it belongs to."""
        self.is_draining = self._is_over = True

    # ---- room

    def evictions_for(self, request: GenerateRequest) -> list[str]:
        """Ids of requests that make room for another, mostly none. Raises OverloadedError: there is no room."""
        if request.body in self._bodies:
            return []
        return self._evictions(_newcomer(request), self._room_for(request))

    def _room_for(self, request: GenerateRequest) -> int:
        return min(self._sums.room_for(request), self._max_requests)

    def check(self, tenant: str, weight: float) -> None:
        """Raises OverloadedError if there is no room for a request of the tenant, however short it is."""
        self._evictions(Newcomer("", tenant, weight, 0), self._room_for(_ANY_REQUEST))

    def _evictions(self, newcomer: Newcomer, room: int) -> list[str]:
        bounds = Bounds(room - self._num_begun, self._sums.max_queued_tokens)
        evicted = self._room.evictions_for(newcomer, bounds)
        if evicted is None:
            raise self.full()
        return evicted

    def full(self) -> OverloadedError:
        """The refusal of a request for which there is no room."""
        retry_after_s = self._room.retry_after_s
        return OverloadedError("The waiting queue is full.", retry_after_s=retry_after_s)

    def enter(self, tracked: TrackedRequest) -> None:
        """Counts an accepted request. One that `is_held` then is woken when it may go to an engine."""
        self._count(tracked.request.body, 1)
        if tracked.has_begun:
            self._num_begun += 1
            return
        body = tracked.request.body
        if body and (body in self._bodies or not (self._room.num_requests or self._held)):
            self._bodies.setdefault(body, set()).add(tracked)
            tracked.is_held = not self._has_turn(tracked.request)
        if tracked.is_held:
            self._held[tracked] = None
        else:
            self._room.add(_newcomer(tracked.request))

    def _has_turn(self, request: GenerateRequest) -> bool:
        """True if a request of a body that is taken may go to an engine. Half of the queue is left to others."""
        room = self._room
        if not room.num_requests:
            return True
        num_requests = self._num_begun + room.num_requests + 1
        num_tokens = room.num_tokens + request.num_prompt_positions
        most_tokens = self._sums.total.max_num_waiting_tokens // 2
        return num_tokens <= most_tokens and num_requests <= self._room_for(request)

    def _let_go(self) -> None:
        """Lets requests that are held go to engines, as many as have room."""
        while self._held:
            first = next(iter(self._held))
            if not self._has_turn(first.request):
                return
            del self._held[first]
            first.is_held = False
            # Engines that refuse it nevertheless, for what others have sent them, are asked again.
            first.has_waited = True
            self._room.add(_newcomer(first.request))
            first.wake()

    def begin(self, tracked: TrackedRequest) -> None:
        """Notes that an engine computes the request. May be called again."""
        if not tracked.has_begun:
            tracked.has_begun = True
            self._num_begun += 1
            self._room.remove(tracked.request_id, has_begun=True)
            self._let_go()

    def give_up(self, tracked: TrackedRequest) -> None:
        """Frees the place of a request that is being ended."""
        self._held.pop(tracked, None)
        self._room.remove(tracked.request_id, has_begun=False)
        self._let_go()

    def leave(self, tracked: TrackedRequest) -> None:
        """Forgets a request that has ended."""
        self._count(tracked.request.body, -1)
        self._num_begun -= tracked.has_begun
        self.give_up(tracked)
        body = tracked.request.body
        if body in self._bodies:
            self._bodies[body].discard(tracked)
            if not self._bodies[body]:
                del self._bodies[body]


def _newcomer(request: GenerateRequest) -> Newcomer:
    num_tokens = request.num_prompt_positions
    return Newcomer(request.request_id, request.tenant, request.weight, num_tokens)
