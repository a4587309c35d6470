# SPDX-License-Identifier: Apache-2.0
"""The dispatcher: one endpoint over several replicas. It routes requests, and moves them when an engine dies.

A replica that loses a request says so, and the request goes on, with the tokens so far, at another replica or at
the same one when it is back; clients see a pause.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping, Sequence
from typing import cast

import msgspec

from pagoda.errors import (
    DeadlineError,
    EngineDeadError,
    EngineLostError,
    InvalidRequestError,
    OverloadedError,
    PagodaError,
    refuse,
)
from pagoda.fleet.admission import Admission
from pagoda.fleet.endpoint import Health, ReplicaState
from pagoda.fleet.offload import Offload
from pagoda.fleet.placement import (
    Counted,
    Placement,
    ReplicaSlot,
    TrackedRequest,
    TrackedState,
)
from pagoda.fleet.placer import Placer
from pagoda.fleet.policies import Policy
from pagoda.fleet.replica import Replica
from pagoda.fleet.replica_set import ReplicaSet
from pagoda.fleet.totals import sum_of_loads
from pagoda.ipc.clock import Clock, LoopClock
from pagoda.messages.frontend import (
    EngineReady,
    FinishReason,
    GenerateRequest,
    TokenChunk,
)
from pagoda.messages.load import LoadReport
from pagoda.messages.worker_config import Role
from pagoda.telemetry.tracer import Tracer

DEFAULT_NO_REPLICA_TIMEOUT_S = 30
"""Seconds that a router lets requests wait while it has no host that takes them."""
_MOVED_RETRY_S = 1
"""A replica that a request was moved from is not tried again within this time."""
_JUDGE_INTERVAL_S = 1.0
_log = logging.getLogger(__name__)


class Dispatcher:
    """Gives each request to the replica that `policy` chooses among those that take requests.

    Belongs to one event loop.
    """

    def __init__(
        self,
        replicas: Sequence[Replica],
        policy: Policy,
        offload: Offload | None = None,
        *,
        keeps_half: bool = True,
        tracer: Tracer | None = None,
        clock: Clock | None = None,
        no_replica_timeout_s: float = math.inf,
        max_requests: int | None = None,
    ) -> None:
        """`keeps_half` is as in `OutlierDetector`. `tracer` is that of this process. A request that finds no
        replica that takes requests for `no_replica_timeout_s` on `clock` (by default the event loop's) is
        refused, and so is one beyond `max_requests`, running and waiting; None takes as many as replicas do."""
        self._tracer = tracer or Tracer("frontend")
        self._clock = clock or LoopClock()
        self._offload = offload
        needs_prefixes = (lambda _: False) if offload is None else offload.needs_prefixes
        self.slots = ReplicaSet(
            policy, self._clock, keeps_half=keeps_half, needs_prefixes=needs_prefixes
        )
        """The replicas and what is known about them."""
        self._placer = Placer(self.slots, self._clock, no_replica_timeout_s)
        self.quarantine = self._placer.quarantine
        self.requests = self._placer.requests
        """The requests that have not ended, by id."""
        self._admission = Admission(self.slots.sums, self._clock, max_requests)
        self.on_end: Callable[[TrackedRequest], None] | None = None
        """The dispatcher calls this with every request that it had accepted, at the request's end."""
        self._judge_timer: asyncio.TimerHandle | None = None
        for replica in replicas:
            self.slots.add(replica)
        # Others answer for the dispatcher.
        self.add, self.remove = self.slots.join, self.slots.remove
        self.set_leaving, self.wait_failed = self.slots.set_leaving, self.slots.wait_failed
        self.watch, self.hold = self.slots.watch, self._admission.hold
        self.subscribe_cache = self.slots.subscribe_cache
        self.subscribe_steps, self.counted = self.slots.subscribe_steps, self._placer.counted

    # ---- replicas come and go

    @property
    def replicas(self) -> list[Replica]:
        return [slot.replica for slot in self.slots]

    @property
    def limits(self) -> EngineReady:
        return self.slots.sums.total

    async def start(self) -> None:
        """Starts all replicas at once; returns when all are ready. If one cannot start, none is left.

        Raises what `Replica.start` raises; of several replicas, the error names the one.
        """
        try:
            await self.slots.start()
        except BaseException:
            await self.close()
            raise

    async def emptied(self, replica: Replica) -> None:
        """Returns when a replica that leaves has no requests any more."""
        slot = self.slots[replica]
        while slot.requests:
            slot.left.clear()
            await slot.left.wait()

    def set_role(self, role: Role) -> None:
        """Lets those who send requests here see another role from now on; what runs goes on.

        Raises InvalidRequestError: the replicas cannot take this role, or have not started.
        """
        able = self.limits.roles if self.slots.sums.are_known else ()
        if role not in able:
            can = f"{', '.join(able)} at this host" if able else "left as it is at this host"
            hint = "" if Role.BOTH in able else ", which was started without --role-changes"
            refuse("role", f"must be {can}{hint}")
        self.slots.set_role(role)

    def num_requests(self, replica: Replica) -> int:
        return len(self.slots[replica].requests)

    # ---- Endpoint

    @property
    def state(self) -> ReplicaState:
        """The state of the best replica that takes requests; degraded without any, as requests wait for one."""
        if self.slots.failure is not None:
            return ReplicaState.FAILED
        if not self.slots.sums.are_known:
            return ReplicaState.STARTING
        return ReplicaState.READY if self.slots.takers.num_ready else ReplicaState.DEGRADED

    async def abort(self, request_id: str) -> None:
        tracked = self.requests.get(request_id)
        if tracked is None:
            return
        tracked.state = TrackedState.ABORTED
        if tracked.placement is not None:
            await tracked.placement.slot.replica.abort(request_id)
        else:
            tracked.wake()

    @contextlib.contextmanager
    def counted_prefill(self, request: GenerateRequest, there: Counted) -> Iterator[Counted | None]:
        """Counts the prompt of a request that `counted` counts `there`, as `Offload.counted`; gives None without
        an offload."""
        if self._offload is None:
            yield None
            return
        with self._offload.counted(request, there) as prefill:
            yield prefill

    def complain(self, request_id: str) -> None:
        """Counts that the request's replica does not do in time what takes no time."""
        tracked = self.requests.get(request_id)
        if tracked is not None and tracked.placement is not None:
            self.slots.on_unanswered(tracked.placement.slot)

    async def load(self) -> LoadReport:
        if self.slots.failure is not None:
            raise EngineDeadError(str(self.slots.failure))
        loads, counted = await self.slots.loads()
        num_unplaced = sum(tracked.placement is None for tracked in self.requests.values())
        return sum_of_loads(loads, num_unplaced=num_unplaced, counted=counted)

    def works(self) -> Mapping[str, int]:
        """The pending tokens of requests by the routers that sent them (`GenerateRequest.via`)."""
        return {sender: work.pending_tokens for sender, work in self._placer.senders.items()}

    async def health(self) -> Health:
        """Ready as soon as some of the replicas are; says why if none is."""
        if self.slots.failure is not None:
            return Health(False, str(self.slots.failure))
        if self._admission.is_draining:
            return Health(False, "the server is shutting down")
        return await self.slots.health()

    async def drain(self, timeout_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._admission.drain()
                await asyncio.gather(*(slot.replica.drain(timeout_s) for slot in self.slots))
        self._admission.end()
        for request_id in list(self.requests):
            await self.abort(request_id)

    async def close(self) -> None:
        if self._judge_timer is not None:
            self._judge_timer.cancel()
        await self._placer.close()
        await self.slots.close()

    # ---- the way of a request

    async def generate(self, request: GenerateRequest) -> AsyncIterator[TokenChunk]:
        tracked = self._accept(request)
        timer: asyncio.TimerHandle | None = None
        if request.timeout_s is not None:
            loop = asyncio.get_running_loop()
            timer = loop.call_later(request.timeout_s, self._end, tracked, DeadlineError())
        try:
            while tracked.is_held and not tracked.is_over:
                await tracked.wait()
            while (placement := await self._placer.place(tracked)) is not None:
                slot = placement.slot
                self._judge_soon()
                try:
                    async with self._stream(tracked, placement) as stream:
                        placement.waits_since = self._clock.now()
                        async for chunk in stream:
                            chunk = self._receive(tracked, placement, chunk)
                            yield chunk
                            if chunk.finish_reason is not None:
                                return
                            placement.waits_since = self._clock.now()
                except _MovedError:
                    tracked.refusals[slot.number] = _MOVED_RETRY_S
                    self._moves(tracked)
                except EngineLostError:
                    self._on_engine_lost(tracked, slot)
                except OverloadedError as error:
                    if tracked.ending is not None:
                        raise
                    tracked.refusals[slot.number] = error.retry_after_s
                    self._placer.leave(tracked)
                    self.slots.takers.on_full(slot, error.retry_after_s)
                finally:
                    self._placer.leave(tracked)
            if tracked.ending is not None:
                raise tracked.ending
            yield tracked.final_chunk()
        finally:
            if timer is not None:
                timer.cancel()
            self._admission.leave(tracked)
            self.quarantine.clear(tracked)
            if tracked.token_ids:
                # However it ended: at a stop string, and when the client has enough, no last chunk comes.
                self._placer.observe_length(len(tracked.token_ids))
            if self.on_end is not None:
                self.on_end(tracked)
            del self.requests[tracked.request_id]

    def _accept(self, request: GenerateRequest) -> TrackedRequest:
        """Admission control: an accepted request always gets a final chunk, whatever happens to engines, unless no
        replica comes in time, its deadline passes, or it gives up its place in the waiting queue to another key's.

        Raises EngineDeadError if all replicas are given up, OverloadedError if the server drains or its replicas
        have no room, DeadlineError if the deadline has passed, InvalidRequestError if a request with this id is
        running (which goes on undisturbed).
        """
        if self.slots.failure is not None:
            raise EngineDeadError(str(self.slots.failure))
        self._admission.check_open(request.body)
        if request.request_id in self.requests:
            raise InvalidRequestError(f"a request with id {request.request_id} is already running.")
        if request.timeout_s is not None and request.timeout_s <= 0:
            raise DeadlineError
        for request_id in self._admission.evictions_for(request):
            self._end(self.requests[request_id], self._admission.full())
        tracked = self.requests[request.request_id] = TrackedRequest(request, self._clock.now())
        self._admission.enter(tracked)
        return tracked

    def check_room(self, tenant: str, weight: float) -> None:
        """Raises OverloadedError if a request of this tenant is refused at the moment, however short it is. Costs
        next to nothing, where refusing a request that was tokenized first does not."""
        if (
            self.slots.failure is None
            and not self._admission.is_draining
            and self.slots.sums.are_known
        ):
            self._admission.check(tenant, weight)

    def _end(self, tracked: TrackedRequest, ending: PagodaError) -> None:
        """Ends a request with this error for its client."""
        if tracked.state is TrackedState.ABORTED:
            return
        tracked.ending, tracked.state = ending, TrackedState.ABORTED
        self._admission.give_up(tracked)
        self._placer.abort(tracked)

    @contextlib.asynccontextmanager
    async def _stream(
        self, tracked: TrackedRequest, placement: Placement
    ) -> AsyncIterator[AsyncGenerator[TokenChunk, None]]:
        """The chunks of the request at its replica, for as long as the context lasts.

        Raises _MovedError if the request was taken away before its replica had it.
        """
        async with contextlib.AsyncExitStack() as stack:
            value = tracked.value(placement.began_at)
            if self._offload is not None and not tracked.is_suspect:
                offload = self._offload.prepare(tracked, placement, self.slots)
                value = await stack.enter_async_context(offload)
                if tracked.state is not TrackedState.QUEUED or not placement.slot.replica.is_open:
                    raise _MovedError
                placement.fetches_kv = value.kv_source is not None
                if placement.fetches_kv:
                    placement.work.prompt_progress(placement.work.num_tokens)
            chunks = placement.slot.replica.generate(value)
            stream = cast(AsyncGenerator[TokenChunk, None], chunks)
            yield await stack.enter_async_context(contextlib.aclosing(stream))

    def _receive(
        self, tracked: TrackedRequest, placement: Placement, chunk: TokenChunk
    ) -> TokenChunk:
        """Takes a chunk into account and returns it as the client sees it. In the path of each token.

        Raises _MovedError if the replica has given the request up, and the reason if it was ended for one.
        """
        if chunk.finish_reason is FinishReason.ABORT:
            if tracked.ending is not None:
                raise tracked.ending
            if tracked.moves_if_aborted:
                raise _MovedError
        if chunk.timed_out:
            raise DeadlineError
        tracked.received_ns = chunk.received_ns
        slot, token_ids, num_computed = placement.slot, chunk.token_ids, 0
        if chunk.prompt_logprobs is not None:
            tracked.num_scored_tokens = chunk.prompt_logprobs.end
        if tracked.state is TrackedState.QUEUED and chunk.kv_source is None:
            tracked.state = TrackedState.COMPUTING
            self._admission.begin(tracked)
        if chunk.queue_time_s is not None and not tracked.token_ids:
            before_s = placement.began_at - tracked.accepted_at
            chunk = msgspec.structs.replace(chunk, queue_time_s=before_s + chunk.queue_time_s)
        # The first token may be that of the engine which computes the prompt.
        is_fetching = placement.fetches_kv and placement.num_tokens <= 1
        if token_ids:
            num_computed = placement.work.output_progress(len(token_ids))
            if not tracked.token_ids:
                slot.num_streams += 1
            tracked.token_ids += token_ids
            placement.num_tokens += len(token_ids)
            if tracked.crash_count:
                # It got on: whatever killed engines before, this request did not.
                tracked.crash_count = 0
                self.quarantine.clear(tracked)
        elif chunk.num_computed_tokens is not None:
            num_computed = placement.work.prompt_progress(chunk.num_computed_tokens)
        if chunk.received_ns > slot.latest_ns:  # a slow client takes old chunks
            slot.received(chunk.received_ns)
        if chunk.finish_reason is not FinishReason.ERROR and len(self.slots) > 1:
            now, since = self._clock.now(), placement.waits_since
            waited_s = None if is_fetching else 0.0 if since is None else now - since
            slot.health.progress(tracked.request_id, num_computed, now, waited_s)
        placement.waits_since = None
        if token_ids or chunk.finish_reason is not None:
            if tracked.num_cached_tokens is None:
                tracked.num_cached_tokens = chunk.num_cached_tokens
            elif chunk.num_cached_tokens != tracked.num_cached_tokens:
                chunk = msgspec.structs.replace(chunk, num_cached_tokens=tracked.num_cached_tokens)
            if chunk.finish_reason is not None:
                self._placer.leave(tracked)
        return chunk

    # ---- requests move

    def _moves(self, tracked: TrackedRequest) -> None:
        tracked.returns = True
        tracked.count_crash()
        self._tracer.instant("request moved", {"request": tracked.request_id})

    def _on_engine_lost(self, tracked: TrackedRequest, slot: ReplicaSlot) -> None:
        tracked.refusals.clear()
        self._moves(tracked)
        _log.info(
            "%slost it; it goes on with the %d tokens that it has",
            self.slots.prefix(slot),
            len(tracked.token_ids),
            extra={"request_id": tracked.request_id},
        )

    # ---- replicas that do worse than others

    @property
    def is_judging(self) -> bool:
        """True while replicas are compared once a second: as long as there are requests."""
        return self._judge_timer is not None

    def _judge_soon(self) -> None:
        if self._judge_timer is None and len(self.slots) > 1:
            loop = asyncio.get_running_loop()
            self._judge_timer = loop.call_later(_JUDGE_INTERVAL_S, self._judge_again)

    def _judge_again(self) -> None:
        self._judge_timer = None
        if self.requests:
            self._judge_soon()
            self.slots.judge()


class _MovedError(Exception):
    """The request is not at its replica any more, and no engine died of it."""
