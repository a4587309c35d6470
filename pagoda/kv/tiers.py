# SPDX-License-Identifier: Apache-2.0
"""The connector over the tiers that an engine has: host memory, then those of plugins (`pagoda.kv.plugin`)."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pkgutil import resolve_name

from pagoda.ipc.clock import Clock
from pagoda.kv.block_pool import BlockPool
from pagoda.kv.connector import KVConnector
from pagoda.kv.events import CacheRecorder
from pagoda.kv.host_tier import HostTier
from pagoda.kv.layout import KVLayout
from pagoda.kv.plugin import TierContext, tier_plugin
from pagoda.kv.post import TierPost
from pagoda.kv.tiered_connector import TieredKVConnector
from pagoda.kv.transfers import TransferLedger
from pagoda.messages.engine_config import KVTiersConfig
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
    openers: Mapping[str, Callable[[TierContext], KVConnector]] = {},
    epoch_s: float | None = None,
) -> TieredKVConnector | None:
    """Returns the tiers below `pool`, nearest first; None if there are none.

    `remote` is the connector to other engines, the farthest of all. `openers` open the tiers of their names in
    place of plugins. `epoch_s` is the time at which the clock read 0, in seconds since 1970; None asks the system.
    """
    if epoch_s is None:
        epoch_s = time.time() - clock.now()
    connectors: list[KVConnector] = []
    host: HostTier | None = None
    post = TierPost()
    if ready.kv_host_slots:
        host = HostTier(
            ready.kv_host_slots,
            ready.block_size,
            ledger,
            recorder,
            num_ranks=pool.num_ranks,
            own_keys=pool.own_keys,
        )
        connectors.append(host)
    for name, tier in ({} if config is None else config.further).items():
        if places := ready.places_of(name):
            open_tier = openers.get(name) or resolve_name(tier_plugin(name).engine_half)
            context = TierContext(tier, places, ledger, clock, host, recorder, epoch_s, post)
            connectors.append(open_tier(context))
    if remote is not None:
        connectors.append(remote)
    if not connectors:
        return None
    tiers = TieredKVConnector(
        connectors,
        pool,
        ledger,
        clock,
        layout=KVLayout(ready.block_size, ready.kv_groups),
        near_pools=[] if host is None else [host.pool],
        post=post,
        fail_on_load_failure=fail_on_load_failure,
    )
    if host is not None:
        host.find_needed = tiers.swap.find
    return tiers
