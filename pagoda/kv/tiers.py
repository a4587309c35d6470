"""Which connectors an engine has, from its configuration and from what its workers have."""

from __future__ import annotations

from pagoda.engine.config import KVTiersConfig
from pagoda.engine.messages import WorkerReady
from pagoda.ipc.clock import Clock
from pagoda.kv.block_pool import BlockPool
from pagoda.kv.connector import KVConnector
from pagoda.kv.events import KVEventRecorder
from pagoda.kv.host_tier import HostTier
from pagoda.kv.stack import ConnectorStack
from pagoda.kv.transfers import TransferLedger


def build_tiers(
    config: KVTiersConfig,
    ready: WorkerReady,
    pool: BlockPool,
    clock: Clock,
    events: KVEventRecorder | None = None,
) -> ConnectorStack | None:
    """The tiers below `pool`, nearest first; None if there is room in none of them."""
    ledger = TransferLedger(pool)
    connectors: list[KVConnector] = []
    if ready.kv_host_slots:
        connectors.append(HostTier(ready.kv_host_slots, ready.block_size, ledger, events))
    if not connectors:
        return None
    return ConnectorStack(
        connectors, pool, ledger, clock, fail_on_load_failure=config.fail_on_load_failure
    )
