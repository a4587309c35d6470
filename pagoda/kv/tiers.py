# SPDX-License-Identifier: Apache-2.0
"""The registry of KV tiers, and the connector over those that an engine has.

To add a tier: write a `KVConnector`, and name a function that builds it in `TIERS`; the worker's half copies its
blocks (`pagoda.worker.kv`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pagoda.ipc.clock import Clock
from pagoda.kv.block_pool import BlockPool
from pagoda.kv.connector import KVConnector
from pagoda.kv.events import CacheRecorder
from pagoda.kv.host_tier import HostTier
from pagoda.kv.layout import KVLayout
from pagoda.kv.tiered_connector import TieredKVConnector
from pagoda.kv.transfers import TransferLedger
from pagoda.messages.engine_config import KVTiersConfig
from pagoda.messages.transfers import KVDirectory
from pagoda.messages.worker import WorkerReady
from pagoda.plugins.disk_tier.scanner import DiskScanner
from pagoda.plugins.disk_tier.tier import DiskTier


@dataclass(frozen=True)
class TierContext:
    """An engine's configuration and workers, from which its tiers are built."""

    config: KVTiersConfig | None
    ready: WorkerReady
    ledger: TransferLedger
    clock: Clock
    recorder: CacheRecorder | None
    open_scanner: Callable[[Sequence[KVDirectory], Clock], DiskScanner]
    epoch_s: float
    """Time at which the clock read 0, in seconds since 1970."""


def _host_tier(context: TierContext, _nearer: Sequence[KVConnector]) -> KVConnector | None:
    ready = context.ready
    if not ready.kv_host_slots:
        return None
    return HostTier(ready.kv_host_slots, ready.block_size, context.ledger, context.recorder)


def _disk_tier(context: TierContext, nearer: Sequence[KVConnector]) -> KVConnector | None:
    config, directories = context.config, context.ready.kv_directories
    if config is None or not directories:
        return None
    return DiskTier(
        directories,
        context.ledger,
        context.clock,
        context.open_scanner,
        quota_bytes=config.disk_bytes,
        min_touches=config.disk_min_touches,
        epoch_s=context.epoch_s,
        host=_host_of(nearer),
        recorder=context.recorder,
    )


def _host_of(tiers: Sequence[KVConnector]) -> HostTier | None:
    return next((tier for tier in tiers if isinstance(tier, HostTier)), None)


TIERS: Sequence[Callable[[TierContext, Sequence[KVConnector]], KVConnector | None]] = (
    _host_tier,
    _disk_tier,
)
"""Functions that build the tiers of one engine, nearest first. Each is given the nearer tiers, and returns None
if the engine does not have its tier."""


def build_tiers(
    config: KVTiersConfig | None,
    ready: WorkerReady,
    pool: BlockPool,
    ledger: TransferLedger,
    clock: Clock,
    recorder: CacheRecorder | None = None,
    remote: KVConnector | None = None,
    *,
    fail_on_load_failure: bool = False,
    open_scanner: Callable[[Sequence[KVDirectory], Clock], DiskScanner] = DiskScanner,
    epoch_s: float | None = None,
) -> TieredKVConnector | None:
    """Returns the tiers below `pool`, nearest first; None if there are none.

    `remote` is the connector to other engines, the farthest of all. `epoch_s` is the time at which the
    clock read 0, in seconds since 1970; None asks the system.
    """
    if epoch_s is None:
        epoch_s = time.time() - clock.now()
    context = TierContext(config, ready, ledger, clock, recorder, open_scanner, epoch_s)
    connectors: list[KVConnector] = []
    for build in TIERS:
        tier = build(context, connectors)
        if tier is not None:
            connectors.append(tier)
    if remote is not None:
        connectors.append(remote)
    if not connectors:
        return None
    host = _host_of(connectors)
    return TieredKVConnector(
        connectors,
        pool,
        ledger,
        clock,
        layout=KVLayout(ready.block_size, ready.kv_groups),
        near_pools=[] if host is None else [host.pool],
        fail_on_load_failure=fail_on_load_failure,
    )
