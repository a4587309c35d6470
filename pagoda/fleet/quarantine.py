# SPDX-License-Identifier: Apache-2.0
"""Requests that may have killed engines or workers, and which of them did."""

from __future__ import annotations

from collections import OrderedDict

from pagoda.fleet.endpoint import ReplicaState
from pagoda.fleet.placement import LONE_CRASHES, MAX_CRASHES, ReplicaSlot, TrackedRequest
from pagoda.fleet.replica_set import ReplicaSet


class Quarantine:
    """Tells requests that kill engines from requests that were only near: tries one suspect after the other, in
    the order in which they came, until it gets a token or ends."""

    def __init__(self, slots: ReplicaSet) -> None:
        self._slots = slots
        self._suspects: OrderedDict[TrackedRequest, None] = OrderedDict()

    @property
    def suspect(self) -> TrackedRequest | None:
        """The request that is being tried."""
        return next(iter(self._suspects), None)

    async def enter(self, tracked: TrackedRequest) -> bool:
        """Waits for the request's turn; False if the request was woken for another reason."""
        self._suspects.setdefault(tracked)
        if self.suspect is not tracked:
            await tracked.wait()
        return self.suspect is tracked

    def clear(self, tracked: TrackedRequest) -> None:
        """Ends the trial of the request, or its wait for one: it got on or ended. May be called twice."""
        was_tried = self.suspect is tracked
        self._suspects.pop(tracked, None)
        self._slots.release(tracked)
        if was_tried and self.suspect is not None:
            self.suspect.wake()

    def blame_requests_of(self, slot: ReplicaSlot) -> None:
        """Any of the requests that a lost engine or worker may have computed may have caused the loss. A request
        fails for it only if it was the only one, or with a replica that does not come back. So the suspect that
        was tried beside others has the replica for itself from now on."""
        may_have_done_it = slot.may_have_computed()
        comes_back = slot.replica.state is not ReplicaState.FAILED
        is_sure = len(may_have_done_it) == 1 or not comes_back
        for tracked in may_have_done_it:
            tracked.blamed_up_to = MAX_CRASHES if is_sure else LONE_CRASHES
        suspect = self.suspect
        if suspect in may_have_done_it:
            if is_sure:
                self._slots.release(suspect)
            else:
                self._slots.hold(slot, suspect)

    def on_worker_lost(self, slot: ReplicaSlot) -> None:
        """Does the same for an engine that goes on without its worker. A suspect that has the replica for itself
        stays, and the engine tries by itself whether it kills workers; the others are to move."""
        self.blame_requests_of(slot)
        if slot.held_for is not None:
            slot.held_for.count_crash()
