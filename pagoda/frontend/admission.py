"""Admission of requests to the replicas of a dispatcher, before any of them is asked."""

from __future__ import annotations

from pagoda.admission.waiting_room import Bounds, Newcomer, WaitingRoom
from pagoda.errors import OverloadedError
from pagoda.frontend.placement import TrackedRequest
from pagoda.frontend.replica_set import ReplicaSet
from pagoda.ipc.clock import Clock
from pagoda.messages.frontend import GenerateRequest
from pagoda.messages.sampling_params import SamplingParams

_ANY_REQUEST = GenerateRequest(request_id="", prompt_token_ids=[], sampling=SamplingParams())


class Admission:
    """Bounds the requests of a dispatcher to what its replicas can run and queue: more would be refused by all
    replicas in turn, or wait for one without end."""

    def __init__(self, slots: ReplicaSet, clock: Clock) -> None:
        self._slots = slots
        self._room = WaitingRoom(clock)
        """Requests that no engine has begun to compute."""
        self._num_begun = 0

    def evictions_for(self, request: GenerateRequest) -> list[str]:
        """Ids of requests that make room for another, mostly none. Raises OverloadedError: there is no room."""
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
        """Counts an accepted request."""
        if tracked.has_begun:
            self._num_begun += 1
        else:
            self._room.add(_newcomer(tracked.request))

    def begin(self, tracked: TrackedRequest) -> None:
        """Notes that an engine computes the request. May be called again."""
        if not tracked.has_begun:
            tracked.has_begun = True
            self._num_begun += 1
            self._room.remove(tracked.request_id, has_begun=True)

    def give_up(self, tracked: TrackedRequest) -> None:
        """Frees the place of a request that is being ended."""
        self._room.remove(tracked.request_id, has_begun=False)

    def leave(self, tracked: TrackedRequest) -> None:
        """Forgets a request that has ended."""
        self._room.remove(tracked.request_id, has_begun=False)
        self._num_begun -= tracked.has_begun


def _newcomer(request: GenerateRequest) -> Newcomer:
    num_tokens = len(request.prompt_token_ids)
    return Newcomer(request.request_id, request.tenant, request.weight, num_tokens)
