"""The parts of an engine that exist once its first worker is ready, and how they are joined."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pagoda.engine.batching import SchedulerLimits
from pagoda.engine.config import EngineConfig
from pagoda.engine.kv_transfers import KVTransferHooks
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


@dataclass(frozen=True)
class EngineParts:
    worker: WorkerReady
    """The first one; its successors have the same KV cache."""
    scheduler: Scheduler
    cache_reporter: CacheReporter
    cache_recorder: CacheRecorder


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
    scheduler = Scheduler(SchedulerLimits.within(config, worker), kv, clock)
    if config.kv_tiers is not None or links is not None:
        _attach_hooks(scheduler, config, worker, clock, links, build_tiers, recorder)
    return EngineParts(
        worker=worker,
        scheduler=scheduler,
        cache_reporter=CacheReporter([kv.pool, *scheduler.hooks.near_pools], recorder, clock),
        cache_recorder=recorder,
    )


def _attach_hooks(
    scheduler: Scheduler,
    config: EngineConfig,
    worker: WorkerReady,
    clock: Clock,
    links: HandoffLinks | None,
    build_tiers: TiersBuilder,
    recorder: CacheRecorder,
) -> None:
    kv = scheduler.kv
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
    if tiers is not None or exporter is not None:
        tiers = tiers or TieredKVConnector([], kv.pool, ledger, clock)
        KVTransferHooks(scheduler, tiers, exporter, remote)
