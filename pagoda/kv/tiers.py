"""Which connectors an engine has, from its configuration and from what its workers have."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from pagoda.engine.config import KVTiersConfig
from pagoda.ipc.clock import Clock
from pagoda.kv.block_pool import BlockPool
from pagoda.kv.connector import KVConnector
from pagoda.kv.disk_scan import DiskScannerThread
from pagoda.kv.disk_scanner import DiskScanner
from pagoda.kv.disk_tier import DiskTier
from pagoda.kv.events import KVEventRecorder
from pagoda.kv.host_tier import HostTier
from pagoda.kv.tiered_connector import TieredKVConnector
from pagoda.kv.transfers import TransferLedger
from pagoda.messages.transfers import KVDirectory
from pagoda.messages.worker import WorkerReady

RemoteOpener = Callable[[TransferLedger], KVConnector]
"""Makes the connector to other engines, the farthest of all."""


def build_tiers(
    config: KVTiersConfig | None,
    ready: WorkerReady,
    pool: BlockPool,
    clock: Clock,
    events: KVEventRecorder | None = None,
    remote: RemoteOpener | None = None,
    *,
    fail_on_load_failure: bool = False,
) -> TieredKVConnector | None:
    """The tiers below `pool`, nearest first; None if the workers have none, and there is no `remote` one."""

    def open_scanner(directories: Sequence[KVDirectory]) -> DiskScanner:
        return DiskScannerThread(directories, clock)

    epoch_s = time.time() - clock.now()
    return stack_tiers(
        config,
        ready,
        pool,
        clock,
        events,
        open_scanner,
        epoch_s,
        remote,
        fail_on_load_failure=fail_on_load_failure,
    )


def stack_tiers(
    config: KVTiersConfig | None,
    ready: WorkerReady,
    pool: BlockPool,
    clock: Clock,
    events: KVEventRecorder | None,
    open_scanner: Callable[[Sequence[KVDirectory]], DiskScanner],
    epoch_s: float,
    remote: RemoteOpener | None = None,
    *,
    fail_on_load_failure: bool = False,
) -> TieredKVConnector | None:
    """`build_tiers`, with who looks at the disk, and with what the clock's time lacks to seconds since 1970."""
    ledger = TransferLedger(pool)
    connectors: list[KVConnector] = []
    host = None
    if ready.kv_host_slots:
        host = HostTier(ready.kv_host_slots, ready.block_size, ledger, events)
        connectors.append(host)
    if config is not None and ready.kv_directories:
        disk = DiskTier(
            ready.kv_directories,
            ledger,
            clock,
            open_scanner,
            quota_bytes=config.disk_bytes,
            min_touches=config.disk_min_touches,
            epoch_s=epoch_s,
            landing=host,
            events=events,
        )
        connectors.append(disk)
    if remote is not None:
        connectors.append(remote(ledger))
    if not connectors:
        return None
    return TieredKVConnector(
        connectors,
        pool,
        ledger,
        clock,
        near_pools=[] if host is None else [host.pool],
        fail_on_load_failure=fail_on_load_failure,
    )
