"""One endpoint over several replicas: who takes which request, and what becomes of it when an engine dies.

The dispatcher holds the value of every request until the client has the last byte. A replica that loses a
request says so, and the request is admitted again, with the tokens so far, on another replica or on the same
one when it is back; clients see a pause. It is in the path also for one replica.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from functools import partial
from typing import cast

import msgspec

from pagoda.errors import (
    ConfigError,
    EngineDeadError,
    EngineLostError,
    InvalidRequestError,
    OverloadedError,
)
from pagoda.frontend.async_utils import cancel_all
from pagoda.frontend.cache_union import CacheUnion
from pagoda.frontend.endpoint import CacheListener, Health, Replica, ReplicaState, StepListener
from pagoda.frontend.load_tracker import Account, LoadTracker
from pagoda.frontend.outliers import (
    REMOTE_KV_S,
    TIER_KV_S,
    Ejection,
    OutlierDetector,
    Waiting,
)
from pagoda.frontend.policies import Arrival, Candidate, Policy
from pagoda.frontend.prefill_offload import Place, PrefillOffload
from pagoda.frontend.prefix_index import PrefixIndex, short_keys
from pagoda.frontend.totals import counters_of, sum_of_limits, sum_of_loads
from pagoda.ipc.clock import LoopClock
from pagoda.kv.block_keys import prefix_keys
from pagoda.messages.frontend import (
    EngineReady,
    FinishReason,
    GenerateRequest,
    StepStatistics,
    TokenChunk,
)
from pagoda.messages.load import LoadReport, ReplicaLoad
from pagoda.messages.worker_config import Role
from pagoda.telemetry.tracer import Tracer

SOLO_DEATHS = 2
"""From this many engine deaths in a row on, a request is tried while no other such request is, so that one that
kills engines is told from those that were only near it."""
MAX_DEATHS = 3
"""A request that was running when this many engines died, without a token in between, is not tried again."""
MAX_PREFIX_BLOCKS = 1024
"""Leading blocks of a prompt that are looked up: digests of a longer one would hold up other streams."""
_LOAD_TIMEOUT_S = 2.0
_LET_GO_RETRY_S = 1
_JUDGE_INTERVAL_S = 1.0
_EVENLY = 0.6180339887
"""Multiples of it, without their whole parts, lie evenly between 0 and 1 however many there are."""

_log = logging.getLogger(__name__)


class _LetGoError(Exception):
    """The replica does not have the request, and no engine died of it."""


class Dispatcher:
    """Gives each request to the replica that `policy` chooses among those that take requests.

    Belongs to one event loop.
    """

    def __init__(
        self,
        replicas: Sequence[Replica],
        policy: Policy,
        preparation: PrefillOffload | None = None,
        *,
        keeps_half: bool = True,
        tracer: Tracer | None = None,
    ) -> None:
        """`keeps_half` as `OutlierDetector` says it. `tracer` is that of this process."""
        self._tracer = tracer or Tracer("frontend")
        self._members: list[_Member] = []
        self._policy = policy
        self._preparation = preparation
        self._ledger = LoadTracker(0)
        self._cache = CacheUnion()
        self._clock = LoopClock()
        self._outliers = OutlierDetector(self._clock, keeps_half=keeps_half)
        self._judging: asyncio.TimerHandle | None = None
        self._limits: EngineReady | None = None
        self._requests: dict[str, _Held] = {}
        self._num_placed = 0
        self._on_trial: _Held | None = None
        self._waiting: dict[_Held, asyncio.Future[None]] = {}
        self._watchers: list[asyncio.Task[None]] = []
        self._moves: set[asyncio.Future[None]] = set()
        self._draining = False
        self._idle = asyncio.Event()
        self._idle.set()
        self._failure: EngineDeadError | None = None
        self._failed = asyncio.Event()
        self._listeners: list[Callable[[], None]] = []
        for replica in replicas:
            self._new_member(replica)

    def _new_member(self, replica: Replica) -> _Member:
        index = self._ledger.add_replica()
        name = replica.name or str(index)
        if any(member.name == name for member in self._members):
            name = f"{name}#{index}"
        member = _Member(index, name, replica)
        self._members.append(member)
        member.unwatch = replica.watch(partial(self._on_change, member))
        return member

    @property
    def replicas(self) -> list[Replica]:
        return [member.replica for member in self._members]

    @property
    def ledger(self) -> LoadTracker:
        """The work that each replica has."""
        return self._ledger

    @property
    def limits(self) -> EngineReady:
        if self._limits is None:
            raise RuntimeError("The replicas have not started.")
        return self._limits

    @property
    def least_pending_tokens(self) -> int | None:
        """Of the replicas that take requests, compute and are not left out; None where there is none."""
        return min(
            (
                self._ledger.pending_tokens[member.index]
                for member in self._members
                if member.takes_requests
                and member.replica.state is ReplicaState.READY
                and self._outliers.share(member.index) > 0
            ),
            default=None,
        )

    async def start(self) -> None:
        """Starts all replicas at once; returns when all are ready. If one cannot start, none is left.

        Raises:
            ConfigError, EngineDeadError: as `Replica.start`; of several replicas it names the one.
        """
        starts = [asyncio.create_task(member.replica.start()) for member in self._members]
        try:
            await asyncio.wait(starts, return_when=asyncio.FIRST_EXCEPTION)
            for member, start in zip(self._members, starts, strict=True):
                if start.done():
                    self._check_start(member, start)
        except BaseException:
            for start in starts:
                start.cancel()
            await asyncio.gather(*starts, return_exceptions=True)
            await self.close()
            raise
        for member in self._members:
            self._take_in(member)
        self._add_limits()
        self._follow_caches()
        self._watchers = [asyncio.create_task(self._watch(member)) for member in self._members]

    def add(self, replica: Replica) -> None:
        """One more replica, which has started. Whoever adds it watches whether it fails, and removes it then."""
        member = self._new_member(replica)
        self._take_in(member)
        self._add_limits()
        self._follow_caches()
        self._on_change(member)

    def _take_in(self, member: _Member) -> None:
        """It has started."""
        limits = member.limits = member.replica.limits
        member.prefixes = PrefixIndex(limits.num_blocks)
        self._outliers.add(member.index, limits.role)

    def release(self, replica: Replica) -> None:
        """The replica gets no new requests; those that it has go on there."""
        self._member(replica).is_leaving = True
        self._notify()

    def take_back(self, replica: Replica) -> None:
        """A replica that was released gets requests again."""
        self._member(replica).is_leaving = False
        self._notify()

    async def emptied(self, replica: Replica) -> None:
        """Returns when a replica that was released has no requests any more."""
        member = self._member(replica)
        while self._ledger.num_requests[member.index]:
            member.left.clear()
            await member.left.wait()

    def remove(self, replica: Replica) -> None:
        """Forgets a replica. What it still has goes on elsewhere when its streams end with EngineLostError."""
        for member in [member for member in self._members if member.replica is replica]:
            self._members.remove(member)
            member.unwatch()
            self._unfollow_cache(member)
            self._outliers.remove(member.index)
        self._add_limits()
        self._follow_caches()
        self._notify()

    def _member(self, replica: Replica) -> _Member:
        return next(member for member in self._members if member.replica is replica)

    def num_requests(self, replica: Replica) -> int:
        """That the replica has."""
        return self._ledger.num_requests[self._member(replica).index]

    def _add_limits(self) -> None:
        """Without any replica those of the last ones hold: requests wait for another of the same kind."""
        if self._members:
            self._limits = sum_of_limits([member.replica.limits for member in self._members])

    def _check_start(self, member: _Member, start: asyncio.Task[None]) -> None:
        try:
            start.result()
        except (ConfigError, EngineDeadError) as error:
            raise type(error)(f"{self._prefix(member)}{error}") from error

    async def wait_failed(self) -> EngineDeadError:
        """Returns when all replicas are given up (or this is closed), with the reason."""
        await self._failed.wait()
        return self._failure or EngineDeadError("The engine was closed.")

    # ---- Endpoint

    @property
    def state(self) -> ReplicaState:
        """That of the best replica which takes requests. Without any they wait for one: it is degraded."""
        if self._failure is not None:
            return ReplicaState.FAILED
        if self._limits is None:
            return ReplicaState.STARTING
        states = {member.replica.state for member in self._members if member.takes_requests}
        return ReplicaState.READY if ReplicaState.READY in states else ReplicaState.DEGRADED

    def watch(self, listener: Callable[[], None]) -> Callable[[], None]:
        self._listeners.append(listener)
        return partial(self._listeners.remove, listener)

    async def generate(self, request: GenerateRequest) -> AsyncIterator[TokenChunk]:
        held = self._accept(request)
        try:
            while True:
                member = await self._place(held)
                if member is None:
                    yield held.ending()
                    return
                try:
                    async with (
                        self._prepared(held, member) as request,
                        contextlib.aclosing(_chunks_of(member.replica, request)) as chunks,
                    ):
                        held.waits_since = self._clock.now()
                        async for chunk in chunks:
                            if chunk.is_news:
                                yield self._hear(held, member, chunk)
                                held.waits_since = self._clock.now()
                                continue
                            if chunk.finish_reason is FinishReason.ABORT and held.is_let_go:
                                raise _LetGoError("The replica has let go of the request.")
                            chunk = self._take(held, member, chunk)
                            yield chunk
                            if chunk.finish_reason is not None:
                                return
                            held.waits_since = self._clock.now()
                except _LetGoError:
                    held.was_let_go(member)
                    self._tracer.instant("request moved", {"request": held.request_id})
                except EngineLostError:
                    held.lost_an_engine()
                    self._tracer.instant("request moved", {"request": held.request_id})
                    _log.info(
                        "%slost it; it goes on with the %d tokens that it has",
                        self._prefix(member),
                        len(held.token_ids),
                        extra={"request_id": held.request_id},
                    )
                except OverloadedError as error:
                    held.refusals[member.index] = error.retry_after_s
                finally:
                    self._leave(held)
        finally:
            if held.token_ids:
                # However it ended: at a stop string, and when the client has enough, no last chunk comes.
                self._ledger.learn(len(held.token_ids))
            del self._requests[held.request_id]
            if not self._requests:
                self._idle.set()

    async def abort(self, request_id: str) -> None:
        held = self._requests.get(request_id)
        if held is None:
            return
        held.aborted = True
        if held.member is not None:
            await held.member.replica.abort(request_id)
        else:
            self._wake()

    def complain(self, request_id: str) -> None:
        """The replica that has the request does not do in time what takes no time."""
        held = self._requests.get(request_id)
        if held is not None and held.member is not None:
            self._tell(self._outliers.fail(held.member.index))

    async def load(self) -> LoadReport:
        if self._failure is not None:
            raise self._failure
        members = list(self._members)
        reports = await asyncio.gather(*map(_load_of, members))
        held = sum(held.member is None for held in self._requests.values())
        replicas = tuple(
            ReplicaLoad(
                name=member.name,
                state=self._state_of(member),
                num_requests=self._ledger.num_requests[member.index],
                weighed_tokens=self._ledger.pending_tokens[member.index],
                num_losses=member.num_losses + member.last_report.num_engine_restarts,
                report=report,
            )
            for member, report in zip(members, reports, strict=True)
        )
        counted = [
            counters_of(member.last_report)
            for member, report in zip(members, reports, strict=True)
            if report is None
        ]
        return sum_of_loads(replicas, num_held=held, counted=counted)

    def _state_of(self, member: _Member) -> str:
        state = member.replica.state
        is_ejected = state is ReplicaState.READY and self._outliers.share(member.index) == 0
        return "ejected" if is_ejected else state

    def subscribe_cache(self, listener: CacheListener) -> Callable[[], None]:
        unfollow = self._cache.follow(listener)
        self._follow_caches()

        def end() -> None:
            unfollow()
            self._follow_caches()

        return end

    def subscribe_steps(self, listener: StepListener) -> Callable[[], None]:
        """Replicas that come later are hosts, of which no steps are told."""
        ends = [
            member.replica.subscribe_steps(partial(_pass_on, member.name, listener))
            for member in self._members
        ]

        def end() -> None:
            for unfollow in ends:
                unfollow()

        return end

    def reconsider(self) -> None:
        """The preparation may need other things than before."""
        self._follow_caches()

    async def health(self) -> Health:
        if self._failure is not None:
            return Health(False, str(self._failure))
        if self._draining:
            return Health(False, "the server is shutting down")
        members = list(self._members)
        if not members:
            return Health(False, "there is no replica")
        answers = await asyncio.gather(*(member.replica.health() for member in members))
        if any(health.ready for health in answers):
            return Health(True)
        reasons = [
            f"{self._prefix(member)}{health.reason}"
            for member, health in zip(members, answers, strict=True)
        ]
        return Health(False, "; ".join(reasons))

    async def drain(self, timeout_s: float) -> None:
        self._draining = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
                await asyncio.gather(*(m.replica.drain(timeout_s) for m in self._members))
        for request_id in list(self._requests):
            await self.abort(request_id)

    async def close(self) -> None:
        if self._judging is not None:
            self._judging.cancel()
        await cancel_all([*self._watchers, *self._moves])
        self._fail(EngineDeadError("The engine was closed."))
        ends = await asyncio.gather(
            *(member.replica.close() for member in self._members), return_exceptions=True
        )
        for end in ends:
            if isinstance(end, BaseException):
                raise end

    # ---- the way of a request

    def _accept(self, request: GenerateRequest) -> _Held:
        """At the door. Behind it a request is answered, whatever happens to engines."""
        if self._failure is not None:
            raise self._failure
        if self._draining:
            raise OverloadedError("The server is shutting down.", retry_after_s=10)
        if request.request_id in self._requests:
            raise InvalidRequestError(f"a request with id {request.request_id} is already running.")
        # More would be refused by all replicas in turn, or wait for one without end.
        if len(self._requests) >= self._room_for(request):
            raise OverloadedError("The waiting queue is full.")
        held = self._requests[request.request_id] = _Held(request, self._clock)
        self._idle.clear()
        return held

    def _room_for(self, request: GenerateRequest) -> int:
        """How many requests those have room for whose part such ones are."""
        limits = [m.replica.limits for m in _with_a_part(self._members, request)] or [self.limits]
        return sum(limit.max_num_seqs + limit.max_num_waiting for limit in limits)

    async def _place(self, held: _Held) -> _Member | None:
        """Enters `held` at a replica, waiting until one takes requests; None when its end is known already.

        Raises:
            OverloadedError: all replicas are full.
            EngineDeadError: all replicas are given up.
        """
        while not (held.aborted or held.is_given_up):
            if self._failure is not None:
                raise self._failure
            if held.is_suspect and self._on_trial is not None:
                await self._change(held)
                continue
            candidates = self._candidates(held)
            if candidates:
                return self._enter(held, candidates)
            if not any(member.takes_requests for member in self._members):
                held.has_waited = True
                await self._change(held)
                held.refusals.clear()
                continue
            retry_after_s = min(held.refusals.values())
            if not (held.has_waited or held.returns):
                raise OverloadedError("The waiting queue is full.", retry_after_s=retry_after_s)
            # It was taken before, by an engine or when none ran; now too many were held back for those that do.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(retry_after_s):
                    await self._change(held)
            held.refusals.clear()
        return None

    def _candidates(self, held: _Held) -> list[_Member]:
        """Of those that have not refused it: those that compute, else those that will with a new worker.

        Those that were left out for doing worse than others get some of the first requests after that.

        Those whose part it is not get it only where nobody else takes requests; one that is full still does.
        """
        takers = _with_a_part([m for m in self._members if m.takes_requests], held.request)
        open_members = [member for member in takers if member.index not in held.refusals]
        ready = [m for m in open_members if m.replica.state is ReplicaState.READY]
        draw = self._num_placed * _EVENLY % 1
        fit = [m for m in ready if self._outliers.share(m.index) > draw]
        return fit or ready or open_members

    def _enter(self, held: _Held, candidates: Sequence[_Member]) -> _Member:
        keys = self._keys_of(held)
        block_size = self.limits.block_size
        choices = []
        for member in candidates:
            pending_tokens = self._ledger.pending_tokens[member.index]
            num_cached = member.prefixes.num_cached(keys)
            num_sharing = member.prefixes.num_sharing(keys[num_cached - 1]) if num_cached else 0
            choices.append(
                Candidate(member.name, pending_tokens, num_cached * block_size, num_sharing)
            )
        num_tokens = len(held.request.prompt_token_ids) + len(held.token_ids)
        arrival = Arrival(held.request_id, self._num_placed, num_tokens, held.request.session)
        self._num_placed += 1
        chosen = self._policy.choose(arrival, choices)
        member = candidates[chosen]
        held.sent_keys, held.num_sent = keys, member.prefixes.add(keys)
        held.member = member
        held.queue.enter()
        held.num_cached_tokens_there = member.prefixes.num_told(keys) * block_size
        held.leaves = held.lost_worker = False
        held.num_tokens_there = 0
        held.fetches_kv = held.request.kv_source is not None
        held.account = self._ledger.open(
            member.index,
            num_tokens=num_tokens,
            num_cached_tokens=choices[chosen].num_cached_tokens,
            max_output_tokens=held.num_tokens_left,
        )
        if held.is_suspect:
            self._on_trial = held
        if self._judging is None and len(self._members) > 1:
            self._judge_later()
        return member

    def _keys_of(self, held: _Held) -> list[int]:
        if not self._uses_prefixes:
            return []
        if held.keys is None:
            request = held.request
            held.keys = short_keys(
                prefix_keys(
                    request.prompt_token_ids,
                    self.limits.block_size,
                    request.cache_salt,
                    MAX_PREFIX_BLOCKS,
                )
            )
        return held.keys

    @property
    def _uses_prefixes(self) -> bool:
        """Whether it matters here what replicas have cached."""
        is_one_of_many = self._policy.uses_prefixes and len(self._members) > 1
        is_prepared = self._preparation is not None and self._preparation.needs_prefixes
        return is_one_of_many or is_prepared

    @contextlib.asynccontextmanager
    async def _prepared(self, held: _Held, member: _Member) -> AsyncIterator[GenerateRequest]:
        """What `member` is given, for as long as it has it."""
        request = held.value()
        if self._preparation is None or held.is_suspect:
            yield request
            return
        place = Place(
            member.replica.limits.role,
            held.num_cached_tokens_there,
            self._ledger.pending_tokens[member.index] - held.account.pending_tokens,
            sum(bool(h.token_ids) for h in self._requests.values() if h.member is member),
        )
        async with self._preparation.prepare(request, place) as prepared:
            if held.aborted or held.leaves or not member.has_engine:
                raise _LetGoError("The request was taken away before its replica had it.")
            held.fetches_kv = prepared.kv_source is not None
            if held.fetches_kv:
                self._ledger.reach(held.account, held.account.num_tokens)
            yield prepared

    def _hear(self, held: _Held, member: _Member, news: TokenChunk) -> TokenChunk:
        num_computed = 0
        if news.num_computed_tokens is not None:
            num_computed = self._ledger.reach(held.account, news.num_computed_tokens)
        self._progress(held, member, num_computed)
        return held.queue.told(news)

    def _progress(self, held: _Held, member: _Member, num_computed: int) -> None:
        waited_s = 0.0
        if held.waits_since is not None:
            waited_s = self._clock.now() - held.waits_since
            held.waits_since = None
        if len(self._members) > 1:
            self._outliers.progress(member.index, held.request_id, num_computed, waited_s)

    def _take(self, held: _Held, member: _Member, chunk: TokenChunk) -> TokenChunk:
        """Every token passes here, so it does little."""
        count = len(chunk.token_ids)
        if chunk.queue_time_s is not None and not held.token_ids:
            chunk = held.queue.told(chunk)
        held.token_ids += chunk.token_ids
        held.num_tokens_there += count
        num_computed = self._ledger.advance(held.account, count)
        if chunk.finish_reason is not FinishReason.ERROR:
            self._progress(held, member, num_computed)
        if count and held.deaths:
            self._acquit(held)
        if held.num_cached_tokens is None:
            held.num_cached_tokens = chunk.num_cached_tokens
        elif chunk.num_cached_tokens != held.num_cached_tokens:
            chunk = msgspec.structs.replace(chunk, num_cached_tokens=held.num_cached_tokens)
        if chunk.finish_reason is not None:
            self._leave(held)
        return chunk

    def _acquit(self, held: _Held) -> None:
        """It got on: whatever killed engines before, this request did not."""
        held.deaths = 0
        if self._on_trial is held:
            self._on_trial = None
            self._wake()

    def _leave(self, held: _Held) -> None:
        """The request is not at its replica any more. May be called twice."""
        member = held.member
        if member is None:
            return
        if held.sent_keys:
            member.prefixes.end(held.num_sent, held.sent_keys)
        self._outliers.end(member.index, held.request_id)
        held.member = None
        held.queue.leave()
        held.waits_since = None
        self._ledger.close(held.account)
        member.left.set()
        if self._on_trial is held:
            self._on_trial = None
            self._wake()

    # ---- replicas come and go

    def _on_change(self, member: _Member) -> None:
        if member not in self._members:
            return  # it was removed by another who was told the same
        is_ready = member.replica.state is ReplicaState.READY
        is_end = self._failure is not None  # of all; none was lost
        if member.was_ready and not is_ready and not is_end:
            self._tell(self._outliers.lose(member.index))
        member.was_ready = is_ready
        member.num_losses += member.had_engine and not member.has_engine and not is_end
        member.had_engine = member.has_engine
        if not is_ready:
            self._cache.clear(member.prefixes)
        if member.replica.state is ReplicaState.DEGRADED:
            self._move_requests_of(member, lost_worker=True)
        if self._limits is not None and member.limits != member.replica.limits:
            member.limits = member.replica.limits
            member.prefixes.resize(member.limits.num_blocks)
            self._outliers.regroup(member.index, member.limits.role)
            self._add_limits()
        self._notify()

    def _notify(self) -> None:
        """Something about replicas is different."""
        self._wake()
        for listener in list(self._listeners):
            listener()

    def _follow_caches(self) -> None:
        """As long as what replicas have cached matters: to a choice, to who prepares requests, or to followers."""
        matters = self._uses_prefixes or self._cache.is_followed
        for member in self._members:
            if matters and member.unfollow is None:
                self._cache.add(member.prefixes)
                member.unfollow = member.replica.subscribe_cache(
                    partial(self._cache.take, member.prefixes)
                )
            elif not matters:
                self._unfollow_cache(member)

    def _unfollow_cache(self, member: _Member) -> None:
        if member.unfollow is not None:
            member.unfollow()
            member.unfollow = None
            self._cache.remove(member.prefixes)

    def _judge_later(self) -> None:
        loop = asyncio.get_running_loop()
        self._judging = loop.call_later(_JUDGE_INTERVAL_S, self._judge)

    def _judge(self) -> None:
        """Compares replicas, for as long as there are requests."""
        self._judging = None
        if not self._requests:
            return
        self._judge_later()
        waiting: dict[int, Waiting] = {}
        for held in self._requests.values():
            member, since = held.member, held.waits_since
            if member is None or since is None or member.replica.state is not ReplicaState.READY:
                continue
            num_prompt_tokens = 0 if held.has_begun else held.account.num_tokens
            one = Waiting(since, num_prompt_tokens, self._kv_s(held))
            waiting[member.index] = one.beside(waiting.get(member.index))
        verdicts = self._outliers.check(waiting)
        for ejection in verdicts.ejected:
            self._tell(ejection)
        for member in self._members:
            if member.index in verdicts.stuck:
                self._move_requests_of(member, lost_worker=False)

    def _kv_s(self, held: _Held) -> float:
        if held.has_begun or held.account.num_tokens <= self.limits.block_size:
            return 0.0
        return REMOTE_KV_S if held.fetches_kv else TIER_KV_S

    def _tell(self, ejection: Ejection | None) -> None:
        if ejection is None:
            return
        for member in self._members:
            if member.index == ejection.member:
                _log.warning(
                    "%sgets no new requests for %g s: %s",
                    self._prefix(member),
                    ejection.duration_s,
                    ejection.reason,
                )

    def _move_requests_of(self, member: _Member, *, lost_worker: bool) -> None:
        """It computes nothing, or will do so without their KV: another replica has their tokens sooner."""
        others = [
            m
            for m in self._members
            if m is not member and m.takes_requests and m.replica.state is ReplicaState.READY
        ]
        for held in self._requests.values():
            if held.member is member and any(m.has_part_in(held.request) for m in others):
                held.leaves = True
                held.lost_worker = lost_worker
                move = asyncio.ensure_future(member.replica.abort(held.request_id))
                self._moves.add(move)
                move.add_done_callback(self._moves.discard)

    async def _watch(self, member: _Member) -> None:
        member.failure = await member.replica.wait_failed()
        failures = [m.failure for m in self._members if m.failure is not None]
        if len(failures) == len(self._members):
            text = f"{self._prefix(member)}{member.failure}"
            self._fail(EngineDeadError(text))
        else:
            _log.error(
                "%s%s; %d of %d replicas go on",
                self._prefix(member),
                str(member.failure).removesuffix("."),
                len(self._members) - len(failures),
                len(self._members),
            )

    def _fail(self, error: EngineDeadError) -> None:
        if self._failure is None:
            self._failure = error
            self._failed.set()
            self._wake()

    async def _change(self, held: _Held) -> None:
        """Returns when something may be different for a request that waits."""
        change = self._waiting[held] = asyncio.get_running_loop().create_future()
        try:
            await change
        finally:
            self._waiting.pop(held, None)

    def _wake(self) -> None:
        for change in self._waiting.values():
            if not change.done():
                change.set_result(None)

    def _prefix(self, member: _Member) -> str:
        if member.replica.name:
            return f"host {member.name}: "
        if len(self._members) == 1:
            return ""
        return f"replica {member.name}: "


class _Member:
    """A replica and what is known about it."""

    def __init__(self, index: int, name: str, replica: Replica) -> None:
        self.index = index
        self.name = name
        self.replica = replica
        self.prefixes = PrefixIndex(0)
        self.limits: EngineReady | None = None
        """As they were added up."""
        self.failure: EngineDeadError | None = None
        self.is_leaving = False
        self.was_ready = False
        self.had_engine = False
        self.num_losses = 0
        """How often its engine was lost."""
        self.last_report = LoadReport()
        self.left = asyncio.Event()
        """Set whenever a request has left it."""
        self.unwatch: Callable[[], None] = lambda: None
        self.unfollow: Callable[[], None] | None = None
        """Ends the news of its cache; None while there are none."""

    @property
    def has_engine(self) -> bool:
        return self.replica.state in (ReplicaState.READY, ReplicaState.DEGRADED)

    @property
    def takes_requests(self) -> bool:
        return self.has_engine and not self.is_leaving

    def has_part_in(self, request: GenerateRequest) -> bool:
        """Whether such requests are meant for it, by its role in prefill/decode handoff."""
        role = self.replica.limits.role
        if request.holds_kv:
            return role.holds_kv
        if request.kv_source is not None:
            return role.fetches_kv
        return role is not Role.PREFILL


def _with_a_part(members: Sequence[_Member], request: GenerateRequest) -> Sequence[_Member]:
    """Those for whom `request` is meant; all, where there is none."""
    return [member for member in members if member.has_part_in(request)] or members


class _QueueTime:
    """How long a request has waited for its first step, at replicas and between them."""

    def __init__(self, clock: LoopClock) -> None:
        self._clock = clock
        self._since = clock.now()
        """When it was last accepted, entered at a replica, or left one."""
        self._before_s = 0.0
        """Until it came to its replica."""
        self._there_s: float | None = None
        """At its replica; None until that is told."""

    def enter(self) -> None:
        now = self._clock.now()
        self._before_s += now - self._since
        self._since, self._there_s = now, None

    def leave(self) -> None:
        now = self._clock.now()
        # Where its first step was not seen, it waited all the time.
        self._before_s += now - self._since if self._there_s is None else self._there_s
        self._since = now

    def told(self, chunk: TokenChunk) -> TokenChunk:
        """`chunk` with all of it, if it says how long that was at the replica."""
        if chunk.queue_time_s is None:
            return chunk
        self._there_s = chunk.queue_time_s
        return msgspec.structs.replace(chunk, queue_time_s=self._before_s + self._there_s)


class _Held:
    """A request as a value, from the door to its last chunk."""

    def __init__(self, request: GenerateRequest, clock: LoopClock) -> None:
        self.request = request
        self.queue = _QueueTime(clock)
        self.request_id = request.request_id
        self.token_ids = list(request.output_token_ids)
        self.returns = request.returns
        """An engine took it, so none refuses it for want of room any more."""
        self.has_waited = False
        """It was accepted when no engine ran, so it is not refused for want of room either, but waits."""
        self.member: _Member | None = None
        """Where it is; None while it waits for a replica."""
        self.account = Account(0, num_tokens=0, prompt_tokens=0, output_tokens=0)
        self.num_cached_tokens_there = 0
        """What its member says to have in its cache."""
        self.num_tokens_there = 0
        """Of the answer, from its member."""
        self.fetches_kv = False
        """It was told that another engine has the KV of its prompt."""
        self.num_cached_tokens: int | None = None
        """What its first engine found; that of later ones says nothing about the client's prompt."""
        self.keys: list[int] | None = None
        """Short ones, of the blocks of its prompt."""
        self.waits_since: float | None = None
        """When its replica was last asked for more; None while its client is not, or it is at none."""
        self.sent_keys: list[int] = []
        """That the `PrefixIndex` of its replica was told of."""
        self.num_sent = 0
        """Of that `PrefixIndex`."""
        self.refusals: dict[int, int] = {}
        """Replicas that were full, and after how many seconds to come again."""
        self.deaths = 0
        """Engines that died while it was there, since its last token."""
        self.aborted = False
        self.leaves = False
        """Its replica was told to let it go, so that another takes it."""
        self.lost_worker = False
        """That was because a worker died, for which the request may be to blame."""

    @property
    def num_tokens_left(self) -> int:
        return (self.request.sampling.max_tokens or 1) - len(self.token_ids)

    @property
    def has_begun(self) -> bool:
        """Whether its member goes on with it: the first token may be of whoever computed its prompt."""
        return self.num_tokens_there > 1

    @property
    def is_suspect(self) -> bool:
        return self.deaths >= SOLO_DEATHS

    @property
    def is_given_up(self) -> bool:
        return self.deaths >= MAX_DEATHS

    def value(self) -> GenerateRequest:
        """What a replica is given: the request with the tokens so far."""
        if not self.returns:
            return self.request
        request = self.request
        has_moved_on = len(self.token_ids) > len(request.output_token_ids)
        return msgspec.structs.replace(
            request,
            output_token_ids=list(self.token_ids),
            returns=True,
            # What is held there ends with a token that has come already.
            kv_source=None if has_moved_on else request.kv_source,
        )

    def lost_an_engine(self) -> None:
        self.deaths += 1
        self.returns = True
        self.refusals.clear()

    @property
    def is_let_go(self) -> bool:
        """Whether its replica, when it ends it, leaves it to others. A prompt that is computed for someone else
        ends when nobody wants it any more."""
        return not self.aborted and (self.leaves or not self.request.holds_kv)

    def was_let_go(self, member: _Member) -> None:
        """It is at `member` no more, which is not asked again soon."""
        if self.lost_worker:
            self.lost_an_engine()
        self.returns = True
        self.refusals[member.index] = _LET_GO_RETRY_S

    def ending(self) -> TokenChunk:
        """The last chunk of a request that is tried no more."""
        if self.aborted:
            return TokenChunk(self.request_id, [], FinishReason.ABORT)
        problem = f"{self.deaths} engines in a row died while this request was running."
        return TokenChunk(self.request_id, [], FinishReason.ERROR, error=problem)


def _chunks_of(replica: Replica, request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
    return cast(AsyncGenerator[TokenChunk, None], replica.generate(request))


def _pass_on(replica: str, listener: StepListener, news: StepStatistics) -> None:
    listener(msgspec.structs.replace(news, replica=replica))


async def _load_of(member: _Member) -> LoadReport | None:
    """None from a replica that has no engine, or whose engine does not answer."""
    try:
        async with asyncio.timeout(_LOAD_TIMEOUT_S):
            report = await member.replica.load()
    except (TimeoutError, EngineLostError, EngineDeadError):
        return None
    member.last_report = report
    return report
