"""One engine: a scheduler, an executor, and what happens when a worker is lost. No sockets of its own."""

from __future__ import annotations

import logging
from typing import Protocol

from pagoda.engine.config import EngineConfig, KVTiersConfig
from pagoda.engine.limits import SchedulerLimits
from pagoda.engine.load_reports import LoadReportSchedule
from pagoda.engine.prefix_cache_updates import CacheReporter
from pagoda.engine.scheduler import Scheduler
from pagoda.engine.step_meter import StepMeter
from pagoda.engine.step_statistics import StepReporter
from pagoda.engine.tracing import EngineTracing
from pagoda.errors import ConfigError, EngineDeadError
from pagoda.executor.base import Executor, WorkerLost
from pagoda.ipc.clock import Clock
from pagoda.kv.block_pool import BlockPool
from pagoda.kv.connector import KVConnector
from pagoda.kv.events import KVEvent, KVEventRecorder
from pagoda.kv.manager import KVManager
from pagoda.kv.tiered_connector import TieredKVConnector
from pagoda.kv.tiers import RemoteOpener, build_tiers
from pagoda.kv.transfers import TransferLedger
from pagoda.messages.frontend import (
    EngineReady,
    GenerateRequest,
    PrefixCacheUpdate,
    RequestRefused,
    StepStatistics,
    TokenChunk,
)
from pagoda.messages.load import LoadReport
from pagoda.messages.tracing import StartTrace, TraceStopped
from pagoda.messages.transfers import TransferEnd
from pagoda.messages.worker import StepResult, WorkerReady
from pagoda.messages.worker_config import Role
from pagoda.parallel.config import expert_share
from pagoda.pd.connector import RemoteKV
from pagoda.pd.exporter import KVExporter
from pagoda.pd.leases import LeaseBook
from pagoda.pd.links import HandoffLinks
from pagoda.pd.transfer_tokens import TransferTokens
from pagoda.telemetry.tracer import Tracer

STABLE_S = 30.0
"""A worker that lived this long starts a new count of losses."""
MAX_IDLE_LOSSES = 8
"""Short-lived workers in a row, lost without a step under way, after which the engine gives up. Losses during
steps need no such limit: the scheduler gives up the request that causes them."""
_STEP_TIME_WEIGHT = 0.1


class TiersBuilder(Protocol):
    """`build_tiers`, or one that tests have."""

    def __call__(
        self,
        config: KVTiersConfig | None,
        ready: WorkerReady,
        pool: BlockPool,
        clock: Clock,
        events: KVEventRecorder | None,
        remote: RemoteOpener | None,
        *,
        fail_on_load_failure: bool,
    ) -> TieredKVConnector | None: ...


_log = logging.getLogger(__name__)


class EngineCore:
    """Drives an executor from a scheduler; `step` does whatever can be done now and never waits."""

    def __init__(
        self,
        config: EngineConfig,
        executor: Executor,
        clock: Clock,
        build_tiers: TiersBuilder = build_tiers,
        handoff: HandoffLinks | None = None,
        tracer: Tracer | None = None,
    ) -> None:
        """`handoff` is there if `config.handoff` is, and has what its role needs."""
        self._config = config
        self._build_tiers = build_tiers
        self.executor = executor
        self._clock = clock
        self._handoff = handoff
        self.exporter: KVExporter | None = None
        self.remote: RemoteKV | None = None
        self.scheduler: Scheduler | None = None
        self._tiers: TieredKVConnector | None = None
        self._kv_events: KVEventRecorder | None = None
        self._cache_news: CacheReporter | None = None
        self._step_news = StepReporter(clock)
        self._load_reports = LoadReportSchedule(clock)
        self._worker: WorkerReady | None = None
        self._is_worker_ready = False
        self._restart_at: float | None = None
        self._ready_at: float | None = None
        self._losses_in_row = 0
        self._idle_losses_in_row = 0
        self._num_restarts = 0
        self._step_time_s = 0.0
        self._meter = StepMeter(clock)
        self._expert_tokens: list[int] = []
        self._last_progress = clock.now()
        self._tracer = tracer or Tracer("engine")
        self._tracing = EngineTracing(self._tracer, executor.max_in_flight)
        self._trace_number = 0
        self._stops_trace = False
        """Whether the workers are being waited for, so that the trace can end."""
        self._workers_problems: list[str] = []
        """Why their fragments lack something."""
        if config.trace is not None:
            self.start_trace(config.trace)
        executor.start()

    @property
    def ready(self) -> EngineReady | None:
        """The engine's limits, as soon as its first worker is ready."""
        if self.scheduler is None or self._worker is None:
            return None
        return EngineReady(
            max_model_len=self.scheduler.limits.max_model_len,
            vocab_size=self._worker.vocab_size,
            num_blocks=self._worker.num_blocks,
            block_size=self._worker.block_size,
            max_num_seqs=self.scheduler.limits.max_num_seqs,
            max_num_waiting=self._config.max_num_waiting,
            summary=self._worker.summary,
            role=Role.NONE if self._config.handoff is None else self._config.handoff.role,
        )

    @property
    def is_worker_ready(self) -> bool:
        """False while the first worker starts, and while a lost one is being replaced."""
        return self._is_worker_ready

    def add(self, request: GenerateRequest) -> RequestRefused | list[TokenChunk]:
        """Takes a request. What returns after a restart is never refused for want of room."""
        scheduler = self.scheduler
        if scheduler is None:
            return RequestRefused(request.request_id, retry_after_s=1)
        room = scheduler.limits.max_num_seqs + self._config.max_num_waiting
        if scheduler.num_requests >= room and not request.returns:
            self._release_source(request)
            return RequestRefused(request.request_id, retry_after_s=1)
        if not scheduler.has_requests():
            self._last_progress = self._clock.now()
        chunks = scheduler.add(request)
        if chunks and chunks[-1].finish_reason is not None:
            self._release_source(request)
        self._submit_transfers()
        return chunks

    def _release_source(self, request: GenerateRequest) -> None:
        """The request is not taken: what is held for it elsewhere is not needed."""
        if self.remote is not None and request.kv_source is not None:
            self.remote.release(request.kv_source)

    def abort(self, request_id: str) -> None:
        if self.scheduler is not None:
            self.scheduler.abort(request_id)

    def step(self) -> list[TokenChunk]:
        """Collects results, then hands out as many plans as may be under way.

        Raises:
            ConfigError: the worker cannot start, for a reason that the user can mend.
            EngineDeadError: the worker cannot start, or was lost too often in a row.
        """
        chunks: list[TokenChunk] = []
        for event in self.executor.poll():
            match event:
                case StepResult():
                    chunks += self._take_result(event)
                case TransferEnd():
                    if self._tiers is not None:
                        self._tiers.transfer_ended(event)
                case WorkerReady():
                    self._take_worker(event)
                case TraceStopped():
                    self._end_trace(event)
                case WorkerLost():
                    chunks += self.lose_worker(event)
                    self._end_trace(TraceStopped())
        if self._restart_at is not None and self._clock.now() >= self._restart_at:
            self._restart_at = None
            self.executor.start(self._worker.num_blocks if self._worker else None)
        if self.exporter is not None:
            self.exporter.step()
        if self.remote is not None:
            self.remote.step()
        if self.scheduler is not None:
            remote = () if self.remote is None else self.remote.drain_events()
            chunks += self.scheduler.apply_kv_events(remote)
        self._submit_plans()
        self._submit_transfers()
        if self._tracer.e2e() and self.scheduler is not None:
            self._tracing.count(self.scheduler)
        return chunks

    def _submit_plans(self) -> None:
        scheduler = self.scheduler
        if scheduler is None or not self._is_worker_ready:
            return
        while scheduler.num_in_flight < self.executor.max_in_flight:
            began, trace_began = self._clock.now(), self._tracer.e2e()
            plan = scheduler.schedule()
            if plan is None:
                return
            planned = self._clock.now()
            if trace_began:
                self._tracing.scheduled(trace_began, plan, scheduler)
            self._step_news.begin(plan)
            trace_began = self._tracer.e2e()
            self.executor.submit(plan)
            self._meter.submitted(plan, began, planned)
            if trace_began:
                self._tracing.submitted(trace_began, plan)

    def _submit_transfers(self) -> None:
        if self._tiers is not None:
            transfers = self._tiers.drain_transfers()
            added_peers, removed_peers = (
                ([], []) if self.remote is None else self.remote.drain_peer_changes()
            )
            if transfers or added_peers or removed_peers:
                self.executor.submit_transfers(transfers, added_peers, removed_peers)

    def _take_result(self, result: StepResult) -> list[TokenChunk]:
        if self.scheduler is None:
            raise RuntimeError("A worker answered a step before it was ready.")
        self._idle_losses_in_row = 0
        self._last_progress = self._clock.now()
        self._step_time_s += _STEP_TIME_WEIGHT * (result.step_time_s - self._step_time_s)
        self._count_expert_tokens(result.expert_tokens)
        self._step_news.end(result)
        taken, trace_began = self._last_progress, self._tracer.e2e()
        chunks = self.scheduler.update(result)
        self._meter.finished(result, taken)
        if trace_began:
            self._tracing.updated(trace_began, result)
        if self._tracing.count_step():
            self.stop_trace()
        return chunks

    def _count_expert_tokens(self, tokens: list[int]) -> None:
        so_far = self._expert_tokens or [0] * len(tokens)
        self._expert_tokens = [a + b for a, b in zip(so_far, tokens, strict=True)]

    def _take_worker(self, worker: WorkerReady) -> None:
        self._is_worker_ready = True
        self._ready_at = self._last_progress = self._clock.now()
        self._tracing.worker_ready()
        if self.scheduler is None:
            self._worker = worker
            self.scheduler = self._make_scheduler(worker)
            if self._tracer.session is not None:
                self._tracing.watch(self.scheduler)
        if self._tiers is not None:
            self._tiers.workers_ready(worker)
        if self.exporter is not None:
            self.exporter.workers_ready(worker)

    def _make_scheduler(self, worker: WorkerReady) -> Scheduler:
        config = self._config
        limits = SchedulerLimits.within(
            worker.capabilities,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_model_len=worker.max_model_len,
            num_stages=config.worker.parallel.pipeline_parallel_size,
        )
        if config.kv_events is not None:
            has_disk = config.kv_tiers is not None and config.kv_tiers.disk_path is not None
            self._kv_events = KVEventRecorder(worker.block_size, has_disk=has_disk)
        kv = KVManager(
            worker.num_blocks,
            worker.block_size,
            prefix_caching=config.enable_prefix_caching,
            events=self._kv_events,
        )
        remote = self._open_remote if self._handoff and self._handoff.peers else None
        if config.kv_tiers is not None or remote is not None:
            self._tiers = self._build_tiers(
                config.kv_tiers,
                worker,
                kv.pool,
                self._clock,
                self._kv_events,
                remote,
                fail_on_load_failure=config.fail_on_load_failure,
            )
        near = [] if self._tiers is None else self._tiers.near_pools
        self._cache_news = CacheReporter([kv.pool, *near], self._clock)
        self.exporter = self._make_exporter(kv.pool)
        return Scheduler(limits, kv, self._clock, self._tiers, self.exporter)

    def _open_remote(self, ledger: TransferLedger) -> KVConnector:
        links, config = self._handoff, self._config.handoff
        if links is None or links.peers is None or config is None:
            raise RuntimeError("This engine has no way to others.")
        self.remote = RemoteKV(
            links.peers,
            ledger,
            self._clock,
            tokens=TransferTokens(config.keys),
            engine_id=links.engine_id,
            also_holds=config.role.holds_kv,
            fails=self._config.fail_on_load_failure,
        )
        return self.remote

    def _make_exporter(self, pool: BlockPool) -> KVExporter | None:
        links, config = self._handoff, self._config.handoff
        if links is None or links.listener is None or config is None:
            return None
        leases = LeaseBook(pool, self._clock, config.lease_s)
        tp_size = self._config.worker.parallel.tensor_parallel_size
        tokens = TransferTokens(config.keys)
        return KVExporter(links.listener, leases, tokens, links.engine_id, config.lease_s, tp_size)

    def lose_worker(self, loss: WorkerLost) -> list[TokenChunk]:
        self._is_worker_ready = False
        self._meter.lost()
        if self.scheduler is None:
            raise ConfigError(loss.reason) if loss.is_user_error else EngineDeadError(loss.reason)
        self._count_loss(loss.reason, idle=self.scheduler.num_in_flight == 0)
        backoff_s = 0.25 * 2 ** (self._losses_in_row - 2) if self._losses_in_row > 1 else 0.0
        self._restart_at = self._clock.now() + min(10.0, backoff_s)
        self._tracing.worker_lost(loss.reason)
        chunks = self.scheduler.recover()
        _log.error(
            "%s; starting it again, %d requests will continue",
            loss.reason.removesuffix("."),
            self.scheduler.num_requests,
        )
        for chunk in chunks:
            _log.error("is given up: %s", chunk.error, extra={"request_id": chunk.request_id})
        return chunks

    def _count_loss(self, reason: str, *, idle: bool) -> None:
        ready_at, self._ready_at = self._ready_at, None
        if ready_at is not None and self._clock.now() - ready_at >= STABLE_S:
            self._losses_in_row = self._idle_losses_in_row = 0
        self._num_restarts += 1
        self._losses_in_row += 1
        self._idle_losses_in_row += idle
        if self._idle_losses_in_row > MAX_IDLE_LOSSES:
            raise EngineDeadError(f"{MAX_IDLE_LOSSES} workers were lost in a row; last: {reason}")

    def start_trace(self, order: StartTrace) -> None:
        """Traces from now on, with all workers."""
        self._stops_trace = False
        self._trace_number = order.number
        self._tracing.start(order, self.scheduler)
        self.executor.start_trace(order.session)

    def stop_trace(self) -> None:
        """Asks the workers to stop; once they have, this engine does, and `take_trace_end` tells."""
        self._stops_trace = True
        self.executor.stop_trace()

    def _end_trace(self, workers: TraceStopped) -> None:
        if self._stops_trace:
            self._stops_trace = False
            self._workers_problems = workers.problems
            self._tracing.stop()

    def take_trace_end(self) -> TraceStopped | None:
        """The trace whose fragments have been closed since the last call."""
        problems = self._tracing.take_end()
        if problems is None:
            return None
        return TraceStopped([*problems, *self._workers_problems], self._trace_number)

    def take_kv_events(self) -> list[KVEvent]:
        """What happened to cached blocks since the last call; nothing unless the configuration asks for it."""
        return [] if self._kv_events is None else self._kv_events.drain()

    def subscribe_cache(self, frontend: bytes) -> None:
        """From now on `frontend` is among those that `take_news` names.

        Raises RuntimeError before the engine is ready.
        """
        if self._cache_news is None:
            raise RuntimeError("The engine is not ready.")
        self._cache_news.follow(frontend)

    def subscribe_steps(self, frontend: bytes) -> None:
        """From now on `frontend` is told of steps, until `unfollow_steps`."""
        self._step_news.follow(frontend)

    def unfollow_steps(self, frontend: bytes) -> None:
        self._step_news.unfollow(frontend)

    def take_news(self) -> list[tuple[bytes, PrefixCacheUpdate | StepStatistics]]:
        """What frontends that follow something are to be told now."""
        cache_news = [] if self._cache_news is None else self._cache_news.take()
        return [*cache_news, *self._step_news.take()]

    def next_wakeup(self) -> float | None:
        """When there is something to do even if no event comes, on the clock; None for never."""
        instants = [
            instant
            for instant in (
                self._restart_at,
                self.executor.next_event_at(),
                None if self._tiers is None else self._tiers.next_event_at(),
                None if self.exporter is None else self.exporter.next_event_at(),
                None if self.remote is None else self.remote.next_event_at(),
                None if self._cache_news is None else self._cache_news.next_event_at(),
                self._step_news.next_event_at(),
                self._load_reports.next_event_at(),
            )
            if instant is not None
        ]
        return min(instants, default=None)

    def take_load_report(self) -> LoadReport | None:
        """The report that frontends are to be sent now without having asked; None if none is due."""
        scheduler = self.scheduler
        if scheduler is None or not self._load_reports.is_due(
            scheduler.counters.num_steps, is_worker_ready=self._is_worker_ready
        ):
            return None
        return self.load()

    def load(self) -> LoadReport:
        """Raises RuntimeError before the engine is ready."""
        scheduler = self.scheduler
        if scheduler is None:
            raise RuntimeError("The engine is not ready.")
        busy = scheduler.has_requests()
        leases = None if self.exporter is None else self.exporter.leases
        return LoadReport(
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            num_pending_tokens=scheduler.num_pending_tokens,
            num_free_blocks=scheduler.kv.pool.num_available,
            num_cached_blocks=scheduler.kv.pool.num_evictable,
            num_blocks=scheduler.kv.pool.num_blocks,
            num_steps=scheduler.counters.num_steps,
            num_preemptions=scheduler.counters.num_preemptions,
            num_worker_restarts=self._num_restarts,
            num_blocks_stored=scheduler.kv.pool.num_stored,
            num_blocks_removed=scheduler.kv.pool.num_removed,
            num_prefix_hit_tokens=scheduler.counters.num_prefix_hit_tokens,
            num_prompt_tokens=scheduler.counters.num_prompt_tokens,
            step_time_s=self._step_time_s,
            stalled_for_s=self._clock.now() - self._last_progress if busy else 0.0,
            expert_tokens=self._expert_tokens,
            expert_rank_tokens=self._expert_rank_tokens(),
            is_worker_ready=self._is_worker_ready,
            num_awaiting_kv=scheduler.num_awaiting_kv,
            tiers=() if self._tiers is None else self._tiers.load_report(),
            num_leases=leases.num_leases if leases else 0,
            num_wanted_leases=0 if self.exporter is None else self.exporter.num_wanted,
            num_leased_blocks=leases.num_blocks if leases else 0,
            num_leases_expired=leases.num_expired if leases else 0,
            num_generated_tokens=scheduler.counters.num_generated_tokens,
            steps=self._meter.totals(),
        )

    def _expert_rank_tokens(self) -> list[int]:
        parallel = self._config.worker.parallel
        if not parallel.expert_parallel or not self._expert_tokens:
            return []
        size = parallel.tensor_parallel_size
        shares = (expert_share(len(self._expert_tokens), rank, size) for rank in range(size))
        return [sum(self._expert_tokens[expert] for expert in share) for share in shares]

    def pollables(self) -> list[object]:
        """File descriptors and sockets that become readable with news for `step` or `take_trace_end`."""
        tiers = [] if self._tiers is None else self._tiers.pollables()
        exporter = [] if self.exporter is None else self.exporter.pollables()
        return [*self.executor.pollables(), *tiers, *exporter, *self._tracing.pollables()]

    def close(self) -> None:
        if self.exporter is not None:
            self.exporter.close()
        if self._tiers is not None:
            self._tiers.close()
        self.executor.close()
        self._tracing.close()
