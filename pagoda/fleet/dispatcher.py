# SPDX-License-Identifier: Apache-2.0
"""One endpoint over several replicas: chooses who takes which request, and moves requests when an engine dies.

A replica that loses a request says so, and the request goes on, with the tokens so far, at another replica or at
the same one when it is back; clients see a pause.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Sequence
from functools import partial
from typing import Any, cast

import msgspec

from pagoda.concurrency.async_utils import cancel_all
from pagoda.errors import (
    ConfigError,
    DeadlineError,
    EngineDeadError,
    EngineLostError,
    InvalidRequestError,
    OverloadedError,
    PagodaError,
)
from pagoda.fleet.admission import Admission
from pagoda.fleet.drain import Drain
from pagoda.fleet.endpoint import CacheListener, Health, ReplicaState, StepListener
from pagoda.fleet.fleet_health import health_of
from pagoda.fleet.offload import Offload
from pagoda.fleet.outliers import Ejection, OutlierDetector
from pagoda.fleet.placement import Placement, ReplicaSlot, RequestState, TrackedRequest
from pagoda.fleet.placer import Placer
from pagoda.fleet.policies import Policy
from pagoda.fleet.prefix_index import CacheUnion
from pagoda.fleet.replica import Replica
from pagoda.fleet.replica_set import ReplicaSet
from pagoda.fleet.totals import sum_of_loads
from pagoda.ipc.clock import Clock, LoopClock
from pagoda.messages.frontend import (
    EngineReady,
    FinishReason,
    GenerateRequest,
    StepStatistics,
    TokenChunk,
)
from pagoda.messages.load import LoadReport, ReplicaLoad
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
    ) -> None:
        """`keeps_half` is as in `OutlierDetector`. `tracer` is that of this process. A request that finds no
        replica that takes requests for `no_replica_timeout_s` on `clock` (by default the event loop's) is
        refused."""
        self._tracer = tracer or Tracer("frontend")
        self._clock = clock or LoopClock()
        self._offload = offload
        self._cache = CacheUnion()
        self._outliers = OutlierDetector(self._clock, keeps_half=keeps_half)
        self.slots = ReplicaSet(policy, self._cache, self._outliers, self._clock)
        """The replicas and what is known about them."""
        self._placer = Placer(self.slots, self._clock, no_replica_timeout_s, self._uses_prefixes)
        self.quarantine = self._placer.quarantine
        self.slots.on_room = self._placer.wake
        self._admission = Admission(self.slots, self._clock)
        self.requests: dict[str, TrackedRequest] = {}
        """The requests that have not ended, by id."""
        self._judge_timer: asyncio.TimerHandle | None = None
        self.is_subscribed = False
        """True while replicas tell what they have cached."""
        self._tasks: set[asyncio.Task[object]] = set()
        self._num_failed = 0
        self._drain = Drain()
        self._failed = asyncio.Event()
        self._listeners: list[Callable[[], None]] = []
        for replica in replicas:
            self._new_slot(replica)

    # ---- replicas come and go

    def _new_slot(self, replica: Replica) -> ReplicaSlot:
        slot = self.slots.new_slot(replica)
        slot.unwatch = replica.watch(partial(self._on_change, slot))
        return slot

    @property
    def replicas(self) -> list[Replica]:
        return [slot.replica for slot in self.slots]

    @property
    def limits(self) -> EngineReady:
        return self.slots.limits

    async def start(self) -> None:
        """Starts all replicas at once; returns when all are ready. If one cannot start, none is left.

        Raises what `Replica.start` raises; of several replicas, the error names the one.
        """
        starts = [asyncio.create_task(self._start(slot)) for slot in self.slots]
        try:
            await asyncio.gather(*starts)
        except BaseException:
            await cancel_all(starts)
            await self.close()
            raise
        for slot in self.slots:
            self._take_in(slot)
            self._spawn(self._watch(slot))
        self.update_subscriptions()

    async def _start(self, slot: ReplicaSlot) -> None:
        try:
            await slot.replica.start()
        except (ConfigError, EngineDeadError) as error:
            raise type(error)(f"{self.slots.prefix(slot)}{error}") from error

    def add(self, replica: Replica) -> None:
        """Takes in a replica that has started. The caller watches whether it fails, and removes it then."""
        slot = self._new_slot(replica)
        self._take_in(slot)
        self.update_subscriptions()
        self._on_change(slot)

    def _take_in(self, slot: ReplicaSlot) -> None:
        self.slots.take_limits(slot)
        if self.is_subscribed:
            self._subscribe(slot)

    def set_leaving(self, replica: Replica, is_leaving: bool) -> None:
        """Gives a replica that leaves no new requests; those that it has go on there."""
        slot = self.slots[replica]
        if slot.is_leaving is not is_leaving:
            slot.is_leaving = is_leaving
            self.slots.refit(slot)
            self._notify()

    async def emptied(self, replica: Replica) -> None:
        """Returns when a replica that leaves has no requests any more."""
        slot = self.slots[replica]
        while slot.requests:
            slot.left.clear()
            await slot.left.wait()

    def remove(self, replica: Replica) -> None:
        """Forgets a replica. What it still has goes on elsewhere when its streams end with EngineLostError."""
        slot = self.slots.get(replica)
        if slot is not None:
            slot.unwatch()
            self._unsubscribe(slot)
            self.slots.remove(slot)
            self.update_subscriptions()
            self._notify()

    def num_requests(self, replica: Replica) -> int:
        return len(self.slots[replica].requests)

    def _on_change(self, slot: ReplicaSlot) -> None:
        if slot not in self.slots:
            return  # it was removed by another who was told the same
        is_ready = slot.replica.state is ReplicaState.READY
        is_end = self._placer.failure is not None  # of all replicas; none was lost
        had_engine, slot.had_engine = slot.had_engine, slot.replica.is_open
        was_ready, slot.was_ready = slot.was_ready, is_ready
        if had_engine and not slot.replica.is_open and not is_end:
            slot.num_losses += 1
            if slot.replica.blames_requests:
                self.quarantine.blame_requests_of(slot)
        if was_ready and not is_ready and not is_end:
            self._eject(self._outliers.on_loss(slot.health))
        if is_ready and not was_ready:
            slot.health.heard_at = self._clock.now()  # it could not get on before
        if not is_ready:
            slot.prefixes.clear()
        if slot.limits is not None:
            self.slots.take_limits(slot)
        self.slots.refit(slot)
        if slot.replica.state is ReplicaState.DEGRADED and self.slots.others_may_help(slot):
            self.quarantine.on_worker_lost(slot)
            self._move_requests_of(slot)
        self._notify()

    def _notify(self) -> None:
        for listener in list(self._listeners):
            listener()

    def update_subscriptions(self) -> None:
        """Subscribes to what replicas have cached as long as that matters: to the choice of a replica, to the
        offload of prompts, or to listeners."""
        matters = self._uses_prefixes() or bool(self._cache.listeners)
        if matters is not self.is_subscribed:
            self.is_subscribed = matters
            for slot in self.slots:
                (self._subscribe if matters else self._unsubscribe)(slot)

    def _uses_prefixes(self) -> bool:
        is_choice = self.slots.policy.uses_prefixes and len(self.slots) > 1
        return is_choice or (self._offload is not None and self._offload.needs_prefixes(self.slots))

    def _subscribe(self, slot: ReplicaSlot) -> None:
        slot.unsubscribe = slot.replica.subscribe_cache(slot.prefixes.apply)

    def _unsubscribe(self, slot: ReplicaSlot) -> None:
        if slot.unsubscribe is not None:
            slot.unsubscribe()
            slot.unsubscribe = None
        slot.prefixes.clear()

    async def _watch(self, slot: ReplicaSlot) -> None:
        failure = await slot.replica.wait_failed()
        self._num_failed += 1
        if self._num_failed >= len(self.slots):
            self._fail(EngineDeadError(f"{self.slots.prefix(slot)}{failure}"))
        else:
            _log.error(
                "%s%s; %d of %d replicas go on",
                self.slots.prefix(slot),
                str(failure).removesuffix("."),
                len(self.slots) - self._num_failed,
                len(self.slots),
            )

    async def wait_failed(self) -> EngineDeadError:
        """Returns when all replicas are given up (or this is closed), with the reason."""
        await self._failed.wait()
        return self._placer.failure or EngineDeadError("The engine was closed.")

    def _fail(self, error: EngineDeadError) -> None:
        if self._placer.failure is None:
            self._placer.failure = error
            self._failed.set()
            for tracked in self.requests.values():
                tracked.wake()

    def _spawn(self, work: Coroutine[Any, Any, object]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # ---- Endpoint

    @property
    def state(self) -> ReplicaState:
        """The state of the best replica that takes requests; degraded without any, as requests wait for one."""
        if self._placer.failure is not None:
            return ReplicaState.FAILED
        if not self.slots.has_limits:
            return ReplicaState.STARTING
        return ReplicaState.READY if self.slots.num_ready else ReplicaState.DEGRADED

    def watch(self, listener: Callable[[], None]) -> Callable[[], None]:
        self._listeners.append(listener)
        return partial(self._listeners.remove, listener)

    async def abort(self, request_id: str) -> None:
        tracked = self.requests.get(request_id)
        if tracked is None:
            return
        tracked.state = RequestState.ABORTED
        if tracked.placement is not None:
            await tracked.placement.slot.replica.abort(request_id)
        else:
            tracked.wake()

    def complain(self, request_id: str) -> None:
        """Counts that the request's replica does not do in time what takes no time."""
        tracked = self.requests.get(request_id)
        if tracked is not None and tracked.placement is not None:
            self._eject(self._outliers.on_failure(tracked.placement.slot.health))

    async def load(self) -> LoadReport:
        if self._placer.failure is not None:
            raise EngineDeadError(str(self._placer.failure))
        slots = list(self.slots)
        reports = await asyncio.gather(*(slot.load() for slot in slots))
        loads = tuple(map(self._load_of, slots, reports))
        num_waiting = sum(tracked.placement is None for tracked in self.requests.values())
        both = zip(slots, reports, strict=True)
        counted = [slot.replica.counters for slot, report in both if report is None]
        return sum_of_loads(loads, num_held=num_waiting, counted=counted)

    def _load_of(self, slot: ReplicaSlot, report: LoadReport | None) -> ReplicaLoad:
        state = slot.replica.state
        is_ejected = state is ReplicaState.READY and self.slots.share(slot) == 0
        return ReplicaLoad(
            name=slot.name,
            state="ejected" if is_ejected else state,
            num_requests=len(slot.requests),
            weighed_tokens=slot.work.pending_tokens,
            num_losses=slot.num_losses + slot.replica.counters.num_engine_restarts,
            report=report,
        )

    def subscribe_cache(self, listener: CacheListener) -> Callable[[], None]:
        ends = contextlib.ExitStack()
        ends.callback(self.update_subscriptions)
        ends.callback(self._cache.listen(listener))
        self.update_subscriptions()
        return ends.close

    def subscribe_steps(self, listener: StepListener) -> Callable[[], None]:
        """Subscribes to the steps of the replicas that there are. Replicas that come later are hosts, whose steps
        are told there."""

        def pass_on(replica: str, steps: StepStatistics) -> None:
            listener(msgspec.structs.replace(steps, replica=replica))

        ends = contextlib.ExitStack()
        for slot in self.slots:
            ends.callback(slot.replica.subscribe_steps(partial(pass_on, slot.name)))
        return ends.close

    async def health(self) -> Health:
        """Ready as soon as some of the replicas are; says why if none is."""
        if self._placer.failure is not None:
            return Health(False, str(self._placer.failure))
        if self._drain.has_begun:
            return Health(False, "the server is shutting down")
        return await health_of(self.slots)

    def hold(self, body: str) -> contextlib.AbstractContextManager[None]:
        return self._drain.hold(body)

    async def drain(self, timeout_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._drain.run()
                await asyncio.gather(*(slot.replica.drain(timeout_s) for slot in self.slots))
        self._drain.end()
        for request_id in list(self.requests):
            await self.abort(request_id)

    async def close(self) -> None:
        if self._judge_timer is not None:
            self._judge_timer.cancel()
        await cancel_all(list(self._tasks))
        self._fail(EngineDeadError("The engine was closed."))
        closes = (slot.replica.close() for slot in self.slots)
        for end in await asyncio.gather(*closes, return_exceptions=True):
            if isinstance(end, BaseException):
                raise end

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
                    self.slots.on_full(slot, error.retry_after_s)
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
            del self.requests[tracked.request_id]
            self._drain.leave(request.body)

    def _accept(self, request: GenerateRequest) -> TrackedRequest:
        """Admission control: an accepted request always gets a final chunk, whatever happens to engines, unless no
        replica comes in time, its deadline passes, or it gives up its place in the waiting queue to another key's.

        Raises EngineDeadError if all replicas are given up, OverloadedError if the server drains or its replicas
        have no room, DeadlineError if the deadline has passed, InvalidRequestError if a request with this id is
        running (which goes on undisturbed).
        """
        if self._placer.failure is not None:
            raise EngineDeadError(str(self._placer.failure))
        self._drain.check(request.body)
        if request.request_id in self.requests:
            raise InvalidRequestError(f"a request with id {request.request_id} is already running.")
        if request.timeout_s is not None and request.timeout_s <= 0:
            raise DeadlineError
        for request_id in self._admission.evictions_for(request):
            self._end(self.requests[request_id], self._admission.full())
        tracked = self.requests[request.request_id] = TrackedRequest(request, self._clock.now())
        self._admission.enter(tracked)
        self._drain.enter(request.body)
        return tracked

    def check_room(self, tenant: str, weight: float) -> None:
        """Raises OverloadedError if a request of this tenant is refused at the moment, however short it is. Costs
        next to nothing, where refusing a request that was tokenized first does not."""
        if self._placer.failure is None and not self._drain.has_begun and self.slots.has_limits:
            self._admission.check(tenant, weight)

    def _end(self, tracked: TrackedRequest, ending: PagodaError) -> None:
        """Ends a request with this error for its client."""
        if tracked.state is RequestState.ABORTED:
            return
        tracked.ending, tracked.state = ending, RequestState.ABORTED
        self._admission.give_up(tracked)
        if tracked.placement is not None:
            self._spawn(tracked.placement.slot.replica.abort(tracked.request_id))
        else:
            tracked.wake()

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
                if tracked.state is not RequestState.QUEUED or not placement.slot.replica.is_open:
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
        if tracked.state is RequestState.QUEUED and chunk.kv_source is None:
            tracked.state = RequestState.COMPUTING
            self._admission.begin(tracked)
        if chunk.queue_time_s is not None and not tracked.token_ids:
            before_s = placement.began_at - tracked.accepted_at
            chunk = msgspec.structs.replace(chunk, queue_time_s=before_s + chunk.queue_time_s)
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
            waited_s = 0.0 if since is None else now - since
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

    def _move_requests_of(self, slot: ReplicaSlot) -> None:
        """Moves requests of a replica that computes nothing, or will do so without their KV, to others that have
        their tokens sooner."""
        for tracked in slot.requests:
            is_moved = tracked.state in (RequestState.MOVING, RequestState.ABORTED)
            stays = is_moved or slot.held_for is tracked
            if not stays and self.slots.has_other(slot, tracked.request):
                tracked.state = RequestState.MOVING
                self._spawn(slot.replica.abort(tracked.request_id))

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
            self.judge()

    def judge(self) -> None:
        """Compares all replicas once. New requests avoid the worst, and requests that hang there are moved."""
        ejected, stuck = self._outliers.check(lambda number: self.slots.by_number(number).waiting())
        for ejection in ejected:
            self._eject(ejection)
        for number in stuck:
            self._move_requests_of(self.slots.by_number(number))

    def _eject(self, ejection: Ejection | None) -> None:
        if ejection is None:
            return
        slot = self.slots.by_number(ejection.replica)
        self.slots.refit(slot)
        _log.warning(
            "%sgets no new requests for %g s: %s",
            self.slots.prefix(slot),
            ejection.duration_s,
            ejection.reason,
        )


class _MovedError(Exception):
    """The request is not at its replica any more, and no engine died of it."""
