"""The registry of KV tiers, and the connector over those that an engine has.

To add a tier: write a `KVConnector` with a function that builds it, and name that function in `TIERS`; the
worker's half copies its blocks (`pagoda.worker.kv`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from pagoda.engine.config import KVTiersConfig
from pagoda.ipc.clock import Clock
from pagoda.kv.block_pool import BlockPool
from pagoda.kv.connector import KVConnector
from pagoda.kv.disk_scanner import DiskScanner
from pagoda.kv.disk_tier import DiskTier
from pagoda.kv.events import KVEventRecorder
from pagoda.kv.host_tier import HostTier
from pagoda.kv.tiered_connector import TieredKVConnector
from pagoda.kv.transfers import TransferLedger
from pagoda.messages.transfers import KVDirectory
from pagoda.messages.worker import WorkerReady


@dataclass(frozen=True)
class TierContext:
    """The engine's configuration, its workers and the nearer tiers, from which a tier is built."""

    config: KVTiersConfig | None
    ready: WorkerReady
    ledger: TransferLedger
    clock: Clock
    events: KVEventRecorder | None
    open_scanner: Callable[[Sequence[KVDirectory], Clock], DiskScanner]
    epoch_s: float
    """Time at which the clock read 0, in seconds since 1970."""
    nearer: list[KVConnector] = field(default_factory=list)
    """Tiers built so far, nearest first."""

    @property
    def host(self) -> HostTier | None:
        """The tier in host memory, if it is nearer."""
        return next((tier for tier in self.nearer if isinstance(tier, HostTier)), None)


TIERS: Sequence[Callable[[TierContext], KVConnector | None]] = (HostTier.build, DiskTier.build)
"""Functions that build the tiers of one engine, nearest first; None from one that this engine does not have."""

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
    open_scanner: Callable[[Sequence[KVDirectory], Clock], DiskScanner] = DiskScanner,
    epoch_s: float | None = None,
) -> TieredKVConnector | None:
    """Returns the tiers below `pool`; None if the workers have none and there is no `remote` one.

    `epoch_s` is the time at which the clock read 0, in seconds since 1970; None asks the system.
    """
    ledger = TransferLedger(pool)
    if epoch_s is None:
        epoch_s = time.time() - clock.now()
    context = TierContext(config, ready, ledger, clock, events, open_scanner, epoch_s)
    for build in TIERS:
        tier = build(context)
        if tier is not None:
            context.nearer.append(tier)
    connectors = [*context.nearer]
    if remote is not None:
        connectors.append(remote(ledger))
    if not connectors:
        return None
    return TieredKVConnector(
        connectors,
        pool,
        ledger,
        clock,
        near_pools=[] if context.host is None else [context.host.pool],
        fail_on_load_failure=fail_on_load_failure,
    )
