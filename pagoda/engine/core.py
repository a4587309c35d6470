# SPDX-License-Identifier: Apache-2.0
"""The engine's core joins the scheduler and the executor. It plans a step while workers compute the one before
(overlap scheduling), and queues running requests again when a worker is lost. It has no sockets of its own."""

from __future__ import annotations

import logging

from pagoda.admission.waiting_room import Bounds, Newcomer, WaitingRoom
from pagoda.engine import canary
from pagoda.engine.adapters import EngineAdapters
from pagoda.engine.assembly import EngineParts, GrammarsOpener, build_parts, open_grammars
from pagoda.engine.canary import Canary
from pagoda.engine.deadlines import Deadlines
from pagoda.engine.kv_transfers import TiersBuilder
from pagoda.engine.peer_hooks import EngineLinks
from pagoda.engine.reports import StepRecorder
from pagoda.engine.request import Request
from pagoda.engine.result_check import is_alike
from pagoda.engine.scheduler import Scheduler
from pagoda.engine.structured_output.grammars import Busy, GrammarOutcome
from pagoda.engine.tracing import EngineTracing
from pagoda.errors import ConfigError, DeadlineError, EngineDeadError
from pagoda.executor.base import Executor, WorkerLost
from pagoda.ipc.clock import Clock
from pagoda.kv.events import KVEvent
from pagoda.kv.tiers import build_tiers
from pagoda.messages.adapters import AdapterLoaded
from pagoda.messages.engine_config import EngineConfig
from pagoda.messages.frontend import (
    EngineReady,
    FinishReason,
    GenerateRequest,
    PrefixCacheUpdate,
    RequestRefused,
    StepStatistics,
    TokenChunk,
)
from pagoda.messages.load import LoadReport
from pagoda.messages.tracing import StartTrace, TraceStopped
from pagoda.messages.transfers import TierWord, TransferEnd
from pagoda.messages.worker import StepResult, WorkerReady
from pagoda.messages.worker_config import Role
from pagoda.parallel.config import even_share
from pagoda.telemetry.tracer import Tracer

STABLE_S = 30.0
"""A worker that lived this many seconds starts a new count of losses."""
MAX_IDLE_LOSSES = 5
"""Short-lived workers in a row after which the engine gives up: those that were lost without a step in flight, or
while they computed the canary. Of losses during other steps the scheduler fails the request that causes them."""
_FIRST_PAUSE_S = 0.25
"""Pause behind the second loss in a row; behind the first there is none."""
_MAX_PAUSE_S = 10.0
_STEP_TIME_WEIGHT = 0.1
_log = logging.getLogger(__name__)


class WorkerRestarts:
    """Counts losses. The pause before a restart doubles with each loss in a row, without a step in between."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.count = 0
        self._restart_at: float | None = None
        self._ready_at: float | None = None
        self._next_pause_s = 0.0
        self._idle_losses_in_row = 0
        self.losses_in_row = 0
        """Workers that were lost since a step has ended, or one was stable."""

    def on_ready(self) -> None:
        self._ready_at = self._clock.now()

    def on_step(self) -> None:
        self._idle_losses_in_row = self.losses_in_row = 0
        self._next_pause_s = 0.0

    def on_loss(self, reason: str, *, is_idle: bool) -> None:
        """The worker is lost; `is_idle` says that no request was in a step in flight.

        Raises EngineDeadError if too many workers were lost in a row.
        """
        now, ready_at = self._clock.now(), self._ready_at
        self._ready_at = None
        if ready_at is not None and now - ready_at >= STABLE_S:
            self._next_pause_s, self._idle_losses_in_row, self.losses_in_row = 0.0, 0, 0
        self.count += 1
        self.losses_in_row += 1
        self._idle_losses_in_row += is_idle
        if self._idle_losses_in_row > MAX_IDLE_LOSSES:
            raise EngineDeadError(
                f"{self._idle_losses_in_row} workers were lost in a row; last: {reason}"
            )
        self._restart_at = now + self._next_pause_s
        self._next_pause_s = min(_MAX_PAUSE_S, max(_FIRST_PAUSE_S, 2 * self._next_pause_s))

    def is_due(self) -> bool:
        """True, once, when the worker is to be started."""
        if self._restart_at is None or self._clock.now() < self._restart_at:
            return False
        self._restart_at = None
        return True

    def next_event_at(self) -> float | None:
        return self._restart_at


class EngineCore:
    """Drives an executor from a scheduler; `step` does whatever can be done now and never waits."""

    def __init__(
        self,
        config: EngineConfig,
        executor: Executor,
        clock: Clock,
        build_tiers: TiersBuilder = build_tiers,
        handoff: EngineLinks | None = None,
        tracer: Tracer | None = None,
        open_grammars: GrammarsOpener = open_grammars,
    ) -> None:
        """`handoff` is there if `config.handoff` is, and has what its role needs."""
        self._config = config
        self._build_tiers = build_tiers
        self._open_grammars = open_grammars
        self.executor = executor
        self._clock = clock
        self._handoff = handoff
        self.parts: EngineParts | None = None
        """None until the first worker is ready."""
        self._follows_cache = False
        self.steps = StepRecorder(clock)
        self._restarts = WorkerRestarts(clock)
        self.adapters = EngineAdapters(config.worker.adapters, executor)
        self._refusals: list[RequestRefused] = []
        self._room = WaitingRoom(clock)
        self._deadlines = Deadlines()
        self.is_worker_ready = False
        """False while the first worker starts, and while a lost one is being replaced."""
        self._was_worker_ready = True
        """`is_worker_ready` of the last report; `EngineReady` counts as the first one."""
        self._step_time_s = 0.0
        self._expert_tokens: list[int] = []
        self._last_progress = clock.now()
        self._tracer = tracer or Tracer("engine")
        self._tracings: list[EngineTracing] = []
        """Empty before the first trace; then one."""
        if config.trace is not None:
            self.start_trace(config.trace)
        executor.start()

    @property
    def tracing(self) -> EngineTracing:
        """Made for the first trace."""
        if not self._tracings:
            self._tracings.append(EngineTracing(self._tracer, self.executor.max_in_flight))
        return self._tracings[0]

    @property
    def ready(self) -> EngineReady | None:
        """The engine's limits, as soon as its first worker is ready."""
        if self.parts is None:
            return None
        worker, limits = self.parts.worker, self.parts.limits
        told, handoff = self.parts.scheduler.kv.groups[0], self._config.handoff
        able = Role.NONE if handoff is None else handoff.role
        return EngineReady(
            max_model_len=self.parts.scheduler.limits.max_model_len,
            vocab_size=worker.vocab_size,
            hidden_size=worker.hidden_size,
            feature_bytes=worker.feature_bytes,
            encodes_text=worker.encodes_text,
            num_blocks=worker.num_blocks,
            block_size=worker.block_size,
            max_num_seqs=limits.max_num_seqs,
            max_num_waiting=limits.max_num_waiting,
            max_num_waiting_tokens=limits.max_num_waiting_tokens,
            max_logprobs=self._config.max_logprobs,
            summary=worker.summary,
            role=able if handoff is None else handoff.first_role or able,
            roles=able.alternatives,
            kv_group=None if told.keeps_all else told,
        )

    @property
    def scheduler(self) -> Scheduler | None:
        """None until the first worker is ready."""
        return None if self.parts is None else self.parts.scheduler

    def add(self, request: GenerateRequest) -> RequestRefused | list[TokenChunk]:
        """Takes a request. One that returns after a restart is never refused for want of room."""
        if self.parts is None:
            return RequestRefused(request.request_id, retry_after_s=1)
        scheduler, grammars = self.parts.scheduler, self.parts.grammars
        if not request.returns and not self._make_room(self.parts, request):
            scheduler.hooks.on_refused(request)
            return RequestRefused(request.request_id, retry_after_s=self._room.retry_after_s)
        if request.timeout_s is not None and request.request_id not in scheduler.requests:
            self._deadlines.add(request.request_id, self._clock.now() + request.timeout_s)
        if request.grammar is None:
            return self._add(scheduler, request, None)
        constraint = grammars.take(request, request.grammar)
        return [] if constraint is None else self._add(scheduler, request, constraint)

    def _make_room(self, parts: EngineParts, request: GenerateRequest) -> bool:
        """Enters a request into the waiting queue; False if it has no room. Refuses others for it."""
        if request.request_id in parts.scheduler.requests:
            return True  # the scheduler says so
        newcomer = Newcomer(
            request.request_id, request.tenant, request.weight, request.num_prompt_positions
        )
        limits = parts.limits
        num_begun = (
            len(parts.scheduler.requests) + parts.grammars.num_compiling - self._room.num_requests
        )
        evicted = self._room.evictions_for(
            newcomer,
            Bounds(
                limits.max_num_seqs + limits.max_num_waiting - num_begun,
                limits.max_num_waiting_tokens,
            ),
        )
        if evicted is None:
            return False
        for request_id in evicted:
            self.abort(request_id)
            self._refusals.append(RequestRefused(request_id, self._room.retry_after_s))
        self._room.add(newcomer)
        return True

    def _add(
        self, scheduler: Scheduler, request: GenerateRequest, constraint: GrammarOutcome | None
    ) -> RequestRefused | list[TokenChunk]:
        """Gives a request to the scheduler or refuses it. `constraint` is None for a request without a grammar."""
        problem = constraint if isinstance(constraint, str) else ""
        if request.work.adapter and not self.adapters.has(request.work.adapter):
            problem = "the adapter is not loaded here."
        if problem or isinstance(constraint, str | Busy):
            scheduler.hooks.on_refused(request)
            self._forget(request.request_id)
            return RequestRefused(
                request.request_id,
                retry_after_s=0 if problem else self._room.retry_after_s,
                error=problem,
            )
        if not scheduler.requests:
            self._last_progress = self._clock.now()
        chunks = scheduler.add(request, constraint)
        if chunks and chunks[-1].finish_reason is not None:
            scheduler.hooks.on_refused(request)
            self._forget(request.request_id)
        self._submit_transfers(scheduler)
        return chunks

    def _forget(self, request_id: str) -> None:
        """The request has ended: it neither waits nor has a deadline any more."""
        self._room.remove(request_id, has_begun=False)
        self._deadlines.remove(request_id)

    def drain_refusals(self) -> list[RequestRefused]:
        """Requests that were taken, and whose grammars turned out to be wrong, or which made room for others."""
        refusals, self._refusals = self._refusals, []
        return refusals

    def abort(self, request_id: str) -> None:
        if self.parts is None:
            return
        self._refusals = [one for one in self._refusals if one.request_id != request_id]
        if self.parts.grammars.drop(request_id):
            self._forget(request_id)
        else:
            self.parts.scheduler.abort(request_id)

    def _end_late(self, parts: EngineParts) -> list[TokenChunk]:
        """Ends the requests whose deadlines have passed, wherever they are."""
        chunks: list[TokenChunk] = []
        error = str(DeadlineError())
        for request_id in self._deadlines.drain(self._clock.now()):
            request = parts.scheduler.requests.get(request_id)
            if request is not None:
                chunks.append(parts.scheduler.fail(request, error, timed_out=True))
            elif parts.grammars.drop(request_id):
                self._forget(request_id)
                reason = FinishReason.ERROR
                chunks.append(TokenChunk(request_id, [], reason, error=error, timed_out=True))
        return chunks

    def step(self) -> list[TokenChunk]:
        """Applies what has happened, then hands out as many plans as may be in flight.

        Raises ConfigError if the worker cannot start for a reason that the user can mend, EngineDeadError if it
        cannot start for another reason or was lost too often in a row.
        """
        chunks: list[TokenChunk] = []
        is_astray = False
        for event in self.executor.poll():
            match event:
                case StepResult() if is_astray:
                    pass  # it is as far behind as the one before
                case StepResult():
                    problem = self._problem_with(event)
                    if problem is None:
                        chunks += self._apply_result(event)
                    else:
                        is_astray = True
                        self.executor.close()
                        # One that came in turn says of its requests what cannot be: one of them may be why.
                        suspicion = int(self.scheduler is not None and self.scheduler.awaits(event))
                        chunks += self._on_worker_lost(WorkerLost(problem, suspicion=suspicion))
                case TransferEnd():
                    if self.parts is not None:
                        self.parts.scheduler.hooks.transfer_ended(event)
                case TierWord():
                    if self.parts is not None:
                        self.parts.scheduler.hooks.take_word(event)
                case WorkerReady() if self.parts and not is_alike(event, self.parts.worker):
                    self.executor.close()
                    problem = "the worker came back with another model or KV cache than before"
                    chunks += self._on_worker_lost(WorkerLost(problem, suspicion=0))
                case WorkerReady():
                    self._on_worker_ready(event)
                case AdapterLoaded():
                    self.adapters.on_loaded(event)
                case TraceStopped():
                    self.tracing.on_workers_stopped(event)
                case WorkerLost() if is_astray:
                    pass  # it was given up
                case WorkerLost():
                    chunks += self._on_worker_lost(event)
        if self._restarts.is_due():
            self.executor.start(self.parts.worker.num_blocks if self.parts else None)
        if self.parts is not None:
            chunks += self._end_late(self.parts)
            chunks += self._step_scheduler(self.parts.scheduler)
        return chunks

    def _step_scheduler(self, scheduler: Scheduler) -> list[TokenChunk]:
        chunks = self._add_constrained(scheduler)
        chunks += scheduler.hooks.step()
        self.adapters.step(scheduler.requests)
        if self.is_worker_ready:
            chunks += self._submit_masks(scheduler)
            chunks += self._submit_plans(scheduler)
        self._submit_transfers(scheduler)
        if self._tracer.e2e():
            self.tracing.count(scheduler)
        return chunks

    def _add_constrained(self, scheduler: Scheduler) -> list[TokenChunk]:
        """Takes requests whose grammars are compiled."""
        chunks: list[TokenChunk] = []
        grammars = None if self.parts is None else self.parts.grammars
        for request, constraint in grammars.drain() if grammars else ():
            answer = self._add(scheduler, request, constraint)
            if isinstance(answer, RequestRefused):
                self._refusals.append(answer)
            else:
                chunks += answer
        return chunks

    def _submit_masks(self, scheduler: Scheduler) -> list[TokenChunk]:
        if not scheduler.batcher.unmasked:
            return []
        messages, chunks = scheduler.take_masks()
        for masks in messages:
            self.executor.submit_masks(masks)
        return chunks

    def _submit_plans(self, scheduler: Scheduler) -> list[TokenChunk]:
        chunks: list[TokenChunk] = []
        while len(scheduler.in_flight) < self.executor.max_in_flight:
            began, trace_began = self._clock.now(), self._tracer.e2e()
            plan = scheduler.schedule()
            if plan is None:
                break
            planned = self._clock.now()
            if trace_began:
                self.tracing.scheduled(trace_began, plan, scheduler)
            trace_began = self._tracer.e2e()
            self.executor.submit(plan)
            self.steps.submitted(plan, began, planned)
            if trace_began:
                self.tracing.submitted(trace_began, plan)
            chunks += self._submit_masks(scheduler)
        return chunks

    def _submit_transfers(self, scheduler: Scheduler) -> None:
        transfers = scheduler.hooks.drain_transfers()
        if transfers is not None:
            self.executor.submit_transfers(transfers)

    def _problem_with(self, result: StepResult) -> str | None:
        """Clause that says why the result cannot be; see `Scheduler.problem_with`."""
        if self.parts is None:
            return "a worker answered a step before it was ready"
        so_far, now = self._expert_tokens, result.expert_tokens
        if so_far and len(so_far) != len(now):
            return f"the result of step {result.step} is of {len(now)} experts instead of {len(so_far)}"
        return self.parts.scheduler.problem_with(result, self.parts.worker.vocab_size)

    def _apply_result(self, result: StepResult) -> list[TokenChunk]:
        if self.parts is None:
            raise RuntimeError("A worker answered a step before it was ready.")
        self._restarts.on_step()
        self._last_progress = self._clock.now()
        self._step_time_s += _STEP_TIME_WEIGHT * (result.step_time_s - self._step_time_s)
        self._count_expert_tokens(result.expert_tokens)
        taken, trace_began = self._last_progress, self._tracer.e2e()
        chunks = Canary.without(self.parts.scheduler.update(result))
        self.steps.finished(result, taken)
        if trace_began:
            self.tracing.updated(trace_began, result)
        if any(tracing.count_step() for tracing in self._tracings):
            self.stop_trace()
        return chunks

    def _count_expert_tokens(self, tokens: list[int]) -> None:
        so_far = self._expert_tokens or [0] * len(tokens)
        self._expert_tokens = [a + b for a, b in zip(so_far, tokens, strict=True)]

    def _on_worker_ready(self, worker: WorkerReady) -> None:
        self.is_worker_ready = True
        self._last_progress = self._clock.now()
        self._restarts.on_ready()
        self._tracer.instant("worker ready")
        parts = self.parts
        if parts is None:
            parts = self.parts = build_parts(
                self._config,
                worker,
                self._clock,
                self._handoff,
                self._build_tiers,
                self._open_grammars,
            )
            parts.scheduler.on_finished = lambda request: self._forget(request.request_id)
            parts.scheduler.batcher.on_begun = self._on_begun
            if self._follows_cache:
                parts.cache_reporter.follow()
            if self._tracer.session is not None:
                self.tracing.watch(parts.scheduler)
        parts.scheduler.hooks.workers_ready(worker)
        if self._restarts.losses_in_row >= canary.LOSSES_BEFORE and parts.scheduler.requests:
            Canary(parts.scheduler).send()

    def _on_worker_lost(self, loss: WorkerLost) -> list[TokenChunk]:
        chunks = self.lose_worker(loss)
        for tracing in self._tracings:
            tracing.on_workers_stopped(TraceStopped())
        return chunks

    def _on_begun(self, request: Request) -> None:
        self._room.remove(request.request_id, has_begun=True)

    def lose_worker(self, loss: WorkerLost) -> list[TokenChunk]:
        self.is_worker_ready = False
        self.steps.lost()
        if self.parts is None:
            raise ConfigError(loss.reason) if loss.is_user_error else EngineDeadError(loss.reason)
        scheduler = self.parts.scheduler
        tried = Canary(scheduler)
        is_idle = not scheduler.in_flight or tried.is_in_flight
        tried.take_back()
        self._restarts.on_loss(loss.reason, is_idle=is_idle)
        for tracing in self._tracings:
            tracing.worker_lost(loss.reason)
        chunks = scheduler.recover(loss.suspicion)
        _log.error(
            "%s; starting it again, %d requests will continue",
            loss.reason.removesuffix("."),
            len(scheduler.requests),
        )
        for chunk in chunks:
            _log.error("is given up: %s", chunk.error, extra={"request_id": chunk.request_id})
        return chunks

    def unload_adapter(self, digest: str) -> None:
        self.adapters.unload(digest, self.parts.scheduler.requests if self.parts else {})

    def start_trace(self, order: StartTrace) -> None:
        """Traces from now on, with all workers."""
        self.tracing.start(order, self.scheduler)
        self.executor.start_trace(order.session)

    def stop_trace(self) -> None:
        """Asks the workers to stop; once they have, this engine does, and `drain_trace_end` returns the end."""
        self.tracing.await_workers()
        self.executor.stop_trace()

    def drain_trace_end(self) -> TraceStopped | None:
        """The end of a trace whose fragments are closed now; None without one."""
        return next(filter(None, (tracing.drain_end() for tracing in self._tracings)), None)

    def drain_kv_events(self) -> list[KVEvent]:
        """Events of cached blocks since the last call; none unless the configuration asks for them."""
        return [] if self.parts is None else self.parts.cache_recorder.drain()

    def follow_cache(self) -> None:
        """Tells of the prefix cache, from its beginning, as soon as there is one."""
        self._follows_cache = True
        if self.parts is not None:
            self.parts.cache_reporter.follow()

    def unfollow_cache(self) -> None:
        self._follows_cache = False
        if self.parts is not None:
            self.parts.cache_reporter.unfollow()

    def drain_updates(self) -> list[PrefixCacheUpdate | StepStatistics]:
        """Messages that are due to frontends which have subscribed."""
        cache = None if self.parts is None else self.parts.cache_reporter.drain()
        return [update for update in (cache, self.steps.drain()) if update is not None]

    def next_wakeup(self) -> float | None:
        """The next instant, on the clock, with something to do even if no event comes; None for never."""
        parts = (self._restarts, self.executor, self.steps, self._deadlines)
        instants = [part.next_event_at() for part in parts]
        if self.parts is not None:
            instants.append(self.parts.cache_reporter.next_event_at())
            instants.append(self.parts.scheduler.hooks.next_event_at())
            instants.append(self.parts.grammars.next_event_at())
        return min((instant for instant in instants if instant is not None), default=None)

    def drain_load_report(self) -> LoadReport | None:
        """The report that frontends are to be sent now without having asked; None if none is due."""
        has_changed = self.is_worker_ready != self._was_worker_ready
        if self.parts is None or not (has_changed or self.steps.is_report_due()):
            return None
        self._was_worker_ready = self.is_worker_ready
        self.steps.reported()
        return self.load()

    def load(self) -> LoadReport:
        """Answered at any time: an engine that answers is not stuck, whatever its workers do."""
        if self.parts is None:
            return LoadReport(is_worker_ready=False)
        scheduler = self.parts.scheduler
        speculator = scheduler.batcher.speculator
        return LoadReport(
            draft_index_bytes=0 if speculator is None else speculator.num_bytes,
            **scheduler.counters.figures(),
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting) + self.parts.grammars.num_compiling,
            num_pending_tokens=scheduler.queue.num_pending_tokens,
            num_free_blocks=scheduler.kv.pool.num_available,
            num_cached_blocks=scheduler.kv.pool.num_evictable,
            num_blocks=scheduler.kv.pool.num_blocks,
            planned_memory_bytes=self.parts.worker.planned_memory_bytes,
            taken_memory_bytes=self.parts.worker.taken_memory_bytes,
            num_worker_restarts=self._restarts.count,
            num_cold_blocks=0 if scheduler.kv.cold is None else scheduler.kv.cold.num_held,
            num_blocks_stored=scheduler.kv.pool.num_stored,
            num_blocks_removed=scheduler.kv.pool.num_removed,
            step_time_s=self._step_time_s,
            stalled_for_s=self._clock.now() - self._last_progress if scheduler.requests else 0.0,
            expert_tokens=self._expert_tokens,
            expert_rank_tokens=self._expert_rank_tokens(),
            is_worker_ready=self.is_worker_ready,
            num_awaiting_kv=scheduler.num_awaiting_kv,
            **scheduler.hooks.load_figures(),
            steps=self.steps.totals(),
        )

    def _expert_rank_tokens(self) -> list[int]:
        parallel = self._config.worker.parallel
        if not parallel.expert_parallel or not self._expert_tokens:
            return []
        size = parallel.tensor_parallel_size
        shares = (even_share(len(self._expert_tokens), rank, size) for rank in range(size))
        return [sum(self._expert_tokens[expert] for expert in share) for share in shares]

    def pollables(self) -> list[object]:
        """File descriptors and sockets that become readable with news for `step` or `drain_trace_end`."""
        sources = self.executor.pollables()
        if self.parts is not None:
            sources += self.parts.scheduler.hooks.pollables()
            sources += self.parts.grammars.pollables()
        for tracing in self._tracings:
            sources += tracing.pollables()
        return sources

    def close(self) -> None:
        if self.parts is not None:
            self.parts.scheduler.hooks.close()
            self.parts.grammars.close()
        self.executor.close()
        for tracing in self._tracings:
            tracing.close()
