# SPDX-License-Identifier: Apache-2.0
"""The places of requests: waits for a replica that takes them, keeps count of what each has, moves requests of
replicas that compute nothing, and tells requests that kill engines from others."""

from __future__ import annotations

import asyncio
import math
from collections import OrderedDict
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from itertools import islice
from operator import attrgetter

from pagoda.concurrency.async_utils import cancel_all
from pagoda.errors import EngineDeadError, NoReplicaError, OverloadedError
from pagoda.fleet.answer_lengths import AnswerLeft, AnswerLengths
from pagoda.fleet.endpoint import ReplicaState
from pagoda.fleet.load_tracker import RequestWork, SenderWork
from pagoda.fleet.placement import (
    LONE_CRASHES,
    MAX_CRASHES,
    Counted,
    Placement,
    ReplicaSlot,
    TrackedRequest,
    TrackedState,
)
from pagoda.fleet.prefix_index import short_keys
from pagoda.fleet.replica_set import ReplicaSet
from pagoda.fleet.takers import Takers
from pagoda.ipc.clock import Clock
from pagoda.kv.block_keys import prefix_keys
from pagoda.messages.frontend import GenerateRequest

MAX_PREFIX_BLOCKS = 1024
"""Leading blocks of a prompt that are looked up: digests of a longer one would hold up other streams."""
_RETRY_S = 1
"""Delay told to clients while all replicas count as full."""


class Placer:
    """Enters requests at replicas and takes them off again. The `ReplicaListener` of the replicas."""

    def __init__(self, slots: ReplicaSet, clock: Clock, no_replica_timeout_s: float) -> None:
        self._slots = slots
        self._takers = slots.takers
        slots.listener = self
        slots.takers.on_room = self._on_room
        self._clock = clock
        self._no_replica_timeout_s = no_replica_timeout_s
        self._lengths = AnswerLengths()
        self.senders: dict[str, SenderWork] = {}
        """The work of requests at replicas by `GenerateRequest.via`, as long as there is some."""
        self.requests: dict[str, TrackedRequest] = {}
        """The requests that have not ended, by id."""
        self.quarantine = SuspectQuarantine(slots.takers)
        self._aborts: set[asyncio.Task[None]] = set()
        self._waiting: dict[TrackedRequest, None] = {}
        """Requests that wait for a replica, longest first."""

    async def place(self, tracked: TrackedRequest) -> Placement | None:
        """Enters the request at a replica, waiting until one takes requests; None if its end is known already.

        Raises OverloadedError if all replicas are full, NoReplicaError if none has taken requests for too long,
        EngineDeadError if all replicas are given up.
        """
        waits_until = math.inf
        while not tracked.is_over:
            if self._slots.failure is not None:
                raise EngineDeadError(str(self._slots.failure))
            if tracked.is_suspect:
                is_admitted = await self.quarantine.enter(tracked)
                if not is_admitted or tracked.is_over:
                    continue
            chosen = self._takers.choose(tracked, self._keys_of(tracked))
            if chosen is not None:
                return self._enter(tracked, *chosen)
            now = self._clock.now()
            if self._takers.num_takers:
                waits_until = math.inf
                retry_after_s = min(tracked.refusals.values(), default=_RETRY_S)
                if not (tracked.has_waited or tracked.returns):
                    raise OverloadedError("The waiting queue is full.", retry_after_s=retry_after_s)
                # An engine took it before, or none ran; now replicas held too many back for those that do.
                await self._wait(tracked, retry_after_s)
            else:
                tracked.has_waited = True
                waits_until = min(waits_until, now + self._no_replica_timeout_s)
                if now >= waits_until or not await self._wait(tracked, waits_until - now):
                    timeout_s = self._no_replica_timeout_s
                    tracked.problem = f"No replica has taken requests for {timeout_s:g} s."
                    if not tracked.token_ids:  # else an error chunk ends the answer
                        raise NoReplicaError(
                            tracked.problem, retry_after_s=max(1, round(timeout_s))
                        )
            tracked.refusals.clear()
        return None

    async def _wait(self, tracked: TrackedRequest, timeout_s: float) -> bool:
        """Returns when something may be different for a request without a replica; False after `timeout_s`."""
        self._waiting[tracked] = None
        try:
            return await tracked.wait(None if timeout_s == math.inf else timeout_s)
        finally:
            self._waiting.pop(tracked, None)

    # ---- replicas change

    def _on_room(self, num_requests: int) -> None:
        """Lets requests that wait for a replica look again, as many as may find one."""
        if num_requests < len(self._waiting):
            woken = list(islice(self._waiting, num_requests))
        else:
            woken = sorted(self._waiting, key=attrgetter("return_order"))
        for tracked in woken:
            del self._waiting[tracked]
            tracked.wake()

    def on_engine_lost(self, slot: ReplicaSlot) -> None:
        self.quarantine.blame_requests_of(slot)

    def on_worker_lost(self, slot: ReplicaSlot) -> None:
        # Without another replica that may take requests, they wait for the worker.
        if any(self._takers.has_other(slot, tracked.request) for tracked in slot.requests):
            self.quarantine.on_worker_lost(slot)
            self.on_stuck(slot)

    def on_stuck(self, slot: ReplicaSlot) -> None:
        """Moves requests of a replica that computes nothing, or will do so without their KV, to others that have
        their tokens sooner."""
        for tracked in slot.requests:
            is_moved = tracked.state in (TrackedState.MOVING, TrackedState.ABORTED)
            stays = is_moved or slot.quarantined_for is tracked
            if not stays and self._takers.has_other(slot, tracked.request):
                tracked.state = TrackedState.MOVING
                self.abort(tracked)

    def on_end(self) -> None:
        for tracked in self.requests.values():
            tracked.wake()

    def abort(self, tracked: TrackedRequest) -> None:
        """Ends the request at its replica, or its wait for one."""
        if tracked.placement is None:
            tracked.wake()
            return
        task = asyncio.create_task(tracked.placement.slot.replica.abort(tracked.request_id))
        self._aborts.add(task)
        task.add_done_callback(self._aborts.discard)

    async def close(self) -> None:
        await cancel_all(list(self._aborts))

    # ---- requests come and go

    def _enter(
        self, tracked: TrackedRequest, slot: ReplicaSlot, num_cached_tokens: int
    ) -> Placement:
        request, keys = tracked.request, self._keys_of(tracked)
        sender = self.senders.setdefault(request.via, SenderWork())
        sender.num_requests += 1
        tracked.state = TrackedState.QUEUED
        placement = tracked.placement = slot.requests[tracked] = Placement(
            slot,
            RequestWork(
                slot.work,
                tracked.num_tokens,
                num_cached_tokens=num_cached_tokens,
                answer=self._answer(tracked),
                sender=sender,
            ),
            began_at=self._clock.now(),
            keys=keys,
            number=slot.prefixes.add(keys) if keys else 0,
            num_told_tokens=slot.prefixes.num_told(keys) * self._slots.sums.total.block_size
            if keys
            else 0,
            after_ns=slot.latest_ns,
            fetches_kv=request.kv_source is not None,
        )
        slot.num_streams += bool(tracked.token_ids)
        return placement

    def _answer(self, tracked: TrackedRequest) -> AnswerLeft:
        sampling = tracked.request.work.sampling
        longest = sampling.max_tokens or 1
        ends_early = sampling.stop_token_ids or not sampling.ignore_eos
        least = sampling.min_tokens if ends_early else longest
        return AnswerLeft(self._lengths, len(tracked.token_ids), longest, least)

    @contextmanager
    def counted(
        self, request: GenerateRequest, excluded: Collection[int] = ()
    ) -> Iterator[Counted | None]:
        """Chooses a replica, but for those with the numbers `excluded`, for a request that somebody else brings
        there, and counts its work there as long as the context lasts. Nothing is known of how it gets on, so the
        replica is not judged by it. None if no replica takes it."""
        tracked = TrackedRequest(request, self._clock.now())
        tracked.refusals = dict.fromkeys(excluded, _RETRY_S)
        keys = self._keys_of(tracked) if self._takers.num_takers else []
        chosen = self._takers.choose(tracked, keys)
        if chosen is None or chosen[0].number in tracked.refusals:
            yield None
            return
        slot, num_cached_tokens = chosen
        work = RequestWork(
            slot.work,
            tracked.num_tokens,
            num_cached_tokens=num_cached_tokens,
            answer=self._answer(tracked),
        )
        number = slot.prefixes.add(keys) if keys else 0
        try:
            yield Counted(slot, work)
        finally:
            if keys:
                slot.prefixes.end(number, keys)
            work.close()

    def observe_length(self, num_output_tokens: int) -> None:
        """Takes note of the length of an answer that has ended."""
        self._lengths.observe(num_output_tokens)

    def _keys_of(self, tracked: TrackedRequest) -> list[int]:
        if not self._slots.uses_prefixes():
            return []
        if tracked.keys is None:
            request, block_size = tracked.request, self._slots.sums.total.block_size
            keys = prefix_keys(
                request.prompt_token_ids,
                block_size,
                request.salt,
                MAX_PREFIX_BLOCKS,
                request.work.adapter,
                request.work.spans,
            )
            tracked.keys = short_keys(keys)
        return tracked.keys

    def leave(self, tracked: TrackedRequest) -> None:
        """Takes the request off its replica. May be called twice."""
        placement, tracked.placement = tracked.placement, None
        if placement is None:
            return
        slot = placement.slot
        if placement.keys:
            slot.prefixes.end(placement.number, placement.keys)
        if slot.health.probe == tracked.request_id:
            slot.health.probe = None
        del slot.requests[tracked]
        slot.num_streams -= bool(tracked.token_ids)
        slot.left.set()
        self._takers.on_leave(slot)
        placement.work.close()
        sender = placement.work.sender
        sender.num_requests -= 1
        if not sender.num_requests:
            del self.senders[tracked.request.via]


class SuspectQuarantine:
    """Tells requests that kill engines from requests that were only near: tries one suspect after the other, in
    the order in which they came, until it gets a token or ends."""

    def __init__(self, takers: Takers) -> None:
        self._takers = takers
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
        self._takers.release(tracked)
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
                self._takers.release(suspect)
            else:
                self._takers.hold(slot, suspect)

    def on_worker_lost(self, slot: ReplicaSlot) -> None:
        """Does the same for an engine that goes on without its worker. A suspect that has the replica for itself
        stays, and the engine tries by itself whether it kills workers; the others are to move."""
        self.blame_requests_of(slot)
        if slot.quarantined_for is not None:
            slot.quarantined_for.count_crash()
