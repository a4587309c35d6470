# SPDX-License-Identifier: Apache-2.0
"""Admission of requests to the replicas of a dispatcher, before any of them is asked.

A body may have many requests, as inputs of embeddings or `n` copies. One that meets an empty queue is taken as a
whole, however much that is, as a long prompt is; engines get so much of it at a time as may wait there.
"""

from __future__ import annotations

from collections import OrderedDict

from pagoda.admission.waiting_room import Bounds, Newcomer, WaitingRoom
from pagoda.errors import OverloadedError
from pagoda.fleet.placement import TrackedRequest
from pagoda.fleet.replica_set import ReplicaSet
from pagoda.ipc.clock import Clock
from pagoda.messages.frontend import GenerateRequest, Work
from pagoda.messages.sampling_params import SamplingParams

_ANY_REQUEST = GenerateRequest(request_id="", prompt_token_ids=[], work=Work(SamplingParams()))


class Admission:
    """Bounds the requests of a dispatcher to what its replicas can run and queue: more would be refused by all
    replicas in turn, or wait for one without end."""

    def __init__(self, slots: ReplicaSet, clock: Clock) -> None:
        self._slots = slots
        self._room = WaitingRoom(clock)
        """Requests that no engine has begun to compute."""
        self._num_begun = 0
        self._bodies: dict[str, set[TrackedRequest]] = {}
        """Bodies that met an empty queue, which are taken as a whole, and their requests that are here."""
        self._held: OrderedDict[TrackedRequest, None] = OrderedDict()
        """Requests of these that go on to engines when there is room, oldest first."""

    def evictions_for(self, request: GenerateRequest) -> list[str]:
        """Ids of requests that make room for another, mostly none. Raises OverloadedError: there is no room."""
        if request.body in self._bodies:
            return []
        return self._evictions(_newcomer(request), self._slots.room_for(request))

    def check(self, tenant: str, weight: float) -> None:
        """Raises OverloadedError if there is no room for a request of the tenant, however short it is."""
        self._evictions(Newcomer("", tenant, weight, 0), self._slots.room_for(_ANY_REQUEST))

    def _evictions(self, newcomer: Newcomer, room: int) -> list[str]:
        bounds = Bounds(room - self._num_begun, self._slots.max_queued_tokens)
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
        num_tokens = room.num_tokens + len(request.prompt_token_ids)
        most_tokens = self._slots.limits.max_num_waiting_tokens // 2
        return num_tokens <= most_tokens and num_requests <= self._slots.room_for(request)

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
        self._num_begun -= tracked.has_begun
        self.give_up(tracked)
        body = tracked.request.body
        if body in self._bodies:
            self._bodies[body].discard(tracked)
            if not self._bodies[body]:
                del self._bodies[body]


def _newcomer(request: GenerateRequest) -> Newcomer:
    num_tokens = len(request.prompt_token_ids)
    return Newcomer(request.request_id, request.tenant, request.weight, num_tokens)
