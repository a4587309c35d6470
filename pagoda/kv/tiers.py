"""The KV tiers of an engine, nearest first.

To add a tier: write a `KVConnector`, and build it in `build_tiers`; the worker's half copies its blocks
(`pagoda.worker.kv`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from pagoda.engine.config import KVTiersConfig
from pagoda.ipc.clock import Clock
from pagoda.kv.block_pool import BlockPool
from pagoda.kv.connector import KVConnector
from pagoda.kv.disk_scanner import DiskScanner
from pagoda.kv.disk_tier import DiskTier
from pagoda.kv.events import CacheRecorder
from pagoda.kv.host_tier import HostTier
from pagoda.kv.tiered_connector import TieredKVConnector
from pagoda.kv.transfers import TransferLedger
from pagoda.messages.transfers import KVDirectory
from pagoda.messages.worker import WorkerReady


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
    connectors: list[KVConnector] = []
    host: HostTier | None = None
    if ready.kv_host_slots:
        host = HostTier(ready.kv_host_slots, ready.block_size, ledger, recorder)
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
            host=host,
            recorder=recorder,
        )
        connectors.append(disk)
    if remote is not None:
        connectors.append(remote)
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
