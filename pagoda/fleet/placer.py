# SPDX-License-Identifier: Apache-2.0
"""Puts requests at replicas: waits for one that takes them, and keeps count of what each replica has."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import islice
from operator import attrgetter

from pagoda.errors import EngineDeadError, NoReplicaError, OverloadedError
from pagoda.fleet.load_tracker import RequestWork
from pagoda.fleet.placement import Placement, ReplicaSlot, RequestState, TrackedRequest
from pagoda.fleet.prefix_index import short_keys
from pagoda.fleet.quarantine import Quarantine
from pagoda.fleet.replica_set import ReplicaSet
from pagoda.ipc.clock import Clock
from pagoda.kv.block_keys import prefix_keys

MAX_PREFIX_BLOCKS = 1024
"""Leading blocks of a prompt that are looked up: digests of a longer one would hold up other streams."""
_USUAL_WEIGHT = 0.02
"""Weight of the latest answer in the moving average of answer lengths."""
_RETRY_S = 1
"""Delay told to clients while all replicas count as full."""


class Placer:
    """Enters requests at replicas and takes them off again."""

    def __init__(
        self,
        slots: ReplicaSet,
        clock: Clock,
        no_replica_timeout_s: float,
        uses_prefixes: Callable[[], bool],
    ) -> None:
        """`uses_prefixes` says whether it matters what replicas have cached."""
        self._slots = slots
        self._clock = clock
        self._no_replica_timeout_s = no_replica_timeout_s
        self._uses_prefixes = uses_prefixes
        self._usual_output_tokens = 64.0
        self.quarantine = Quarantine(slots)
        self.failure: EngineDeadError | None = None
        """The reason that no replica will ever take requests again; None as long as one may."""
        self._waiting: dict[TrackedRequest, None] = {}
        """Requests that wait for a replica, longest first."""

    async def place(self, tracked: TrackedRequest) -> Placement | None:
        """Enters the request at a replica, waiting until one takes requests; None if its end is known already.

        Raises OverloadedError if all replicas are full, NoReplicaError if none has taken requests for too long,
        EngineDeadError if all replicas are given up.
        """
        waits_until = math.inf
        while not tracked.is_over:
            if self.failure is not None:
                raise EngineDeadError(str(self.failure))
            if tracked.is_suspect:
                is_admitted = await self.quarantine.enter(tracked)
                if not is_admitted or tracked.is_over:
                    continue
            chosen = self._slots.choose(tracked, self._keys_of(tracked))
            if chosen is not None:
                return self._enter(tracked, *chosen)
            now = self._clock.now()
            if self._slots.num_takers:
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

    def wake(self, num_requests: int) -> None:
        """Lets requests that wait for a replica look again, as many as may find one."""
        if num_requests < len(self._waiting):
            woken = list(islice(self._waiting, num_requests))
        else:
            woken = sorted(self._waiting, key=attrgetter("return_order"))
        for tracked in woken:
            del self._waiting[tracked]
            tracked.wake()

    def _enter(
        self, tracked: TrackedRequest, slot: ReplicaSlot, num_cached_tokens: int
    ) -> Placement:
        request, keys = tracked.request, self._keys_of(tracked)
        num_left = (request.work.sampling.max_tokens or 1) - len(tracked.token_ids)
        tracked.state = RequestState.QUEUED
        placement = tracked.placement = slot.requests[tracked] = Placement(
            slot,
            RequestWork(
                slot.work,
                tracked.num_tokens,
                num_cached_tokens=num_cached_tokens,
                output_tokens=min(num_left, self._usual_output_tokens),
            ),
            began_at=self._clock.now(),
            keys=keys,
            number=slot.prefixes.add(keys) if keys else 0,
            num_told_tokens=slot.prefixes.num_told(keys) * self._slots.limits.block_size
            if keys
            else 0,
            after_ns=slot.latest_ns,
            fetches_kv=request.kv_source is not None,
        )
        slot.num_streams += bool(tracked.token_ids)
        return placement

    def observe_length(self, num_output_tokens: int) -> None:
        """Takes the length of an answer that has ended into the average."""
        self._usual_output_tokens += _USUAL_WEIGHT * (num_output_tokens - self._usual_output_tokens)

    def _keys_of(self, tracked: TrackedRequest) -> list[int]:
        if not self._uses_prefixes():
            return []
        if tracked.keys is None:
            request, block_size = tracked.request, self._slots.limits.block_size
            keys = prefix_keys(
                request.prompt_token_ids,
                block_size,
                request.cache_salt,
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
        self._slots.on_leave(slot)
        placement.work.close()
