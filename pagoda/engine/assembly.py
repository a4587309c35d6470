"""The parts of an engine that exist once its first worker is ready, and how they are joined."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from pagoda.engine.batching import SchedulerLimits
from pagoda.engine.config import EngineConfig
from pagoda.engine.reports import CacheReporter
from pagoda.engine.scheduler import Scheduler
from pagoda.ipc.clock import Clock
from pagoda.kv.events import CacheRecorder
from pagoda.kv.manager import KVManager
from pagoda.kv.tiered_connector import TieredKVConnector
from pagoda.kv.transfers import TransferLedger
from pagoda.messages.worker import WorkerReady
from pagoda.pd.connector import RemoteKV
from pagoda.pd.exporter import KVExporter
from pagoda.pd.links import HandoffLinks
from pagoda.pd.transfer_tokens import TransferTokens

TiersBuilder = Callable[..., TieredKVConnector | None]
"""`build_tiers`, or the one of a test."""


class Timed(Protocol):
    """A part that has something to do at an instant."""

    def next_event_at(self) -> float | None:
        """The instant in seconds on the engine's clock; None for never."""
        ...


@dataclass(frozen=True)
class EngineParts:
    worker: WorkerReady
    """The first one; its successors have the same KV cache."""
    scheduler: Scheduler
    cache_reporter: CacheReporter
    cache_recorder: CacheRecorder
    remote: RemoteKV | None
    """None if no KV is fetched from other engines."""

    @property
    def timed(self) -> Sequence[Timed]:
        scheduler = self.scheduler
        parts = (self.cache_reporter, scheduler.tiers, scheduler.exporter, self.remote)
        return [part for part in parts if part is not None]

    @property
    def connected(self) -> Sequence[KVExporter | TieredKVConnector]:
        """Parts with file descriptors or sockets of their own."""
        parts = (self.scheduler.exporter, self.scheduler.tiers)
        return [part for part in parts if part is not None]


def build_parts(
    config: EngineConfig,
    worker: WorkerReady,
    clock: Clock,
    links: HandoffLinks | None,
    build_tiers: TiersBuilder,
) -> EngineParts:
    recorder = CacheRecorder(
        keeps_events=config.kv_events is not None,
        has_disk=config.kv_tiers is not None and config.kv_tiers.disk_path is not None,
    )
    kv = KVManager(
        worker.num_blocks,
        worker.block_size,
        prefix_caching=config.enable_prefix_caching,
        recorder=recorder,
    )
    ledger = TransferLedger(kv.pool)
    remote: RemoteKV | None = None
    exporter: KVExporter | None = None
    handoff = config.handoff
    if links is not None and handoff is not None:
        tokens, engine_id = TransferTokens(handoff.keys), links.engine_id
        if links.peers is not None:
            remote = RemoteKV(
                links.peers,
                ledger,
                clock,
                tokens=tokens,
                engine_id=engine_id,
                also_holds=handoff.role.holds_kv,
                fails=config.fail_on_load_failure,
            )
        if links.listener is not None:
            tp_size = config.worker.parallel.tensor_parallel_size
            exporter = KVExporter(
                links.listener, kv.pool, clock, tokens, engine_id, handoff.lease_s, tp_size
            )
    tiers = None
    if config.kv_tiers is not None or remote is not None:
        tiers = build_tiers(
            config.kv_tiers,
            worker,
            kv.pool,
            ledger,
            clock,
            recorder,
            remote,
            fail_on_load_failure=config.fail_on_load_failure,
        )
    near_pools = [] if tiers is None else tiers.near_pools
    return EngineParts(
        worker=worker,
        scheduler=Scheduler(SchedulerLimits.within(config, worker), kv, clock, tiers, exporter),
        cache_reporter=CacheReporter([kv.pool, *near_pools], recorder, clock),
        cache_recorder=recorder,
        remote=remote,
    )
