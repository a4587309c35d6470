# SPDX-License-Identifier: Apache-2.0
"""Plugins of KV tiers below host memory: objects of the entry-point group `pagoda.kv_tiers`.

A tier keeps blocks by their keys. Its name is that of its entry point, under which engine and workers find it.
Each process imports only the half that it needs, and only where a server is asked for the tier.
"""

from __future__ import annotations

import pkgutil
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from pagoda.registry import KV_TIERS, load, registered

if TYPE_CHECKING:
    from pagoda.ipc.clock import Clock
    from pagoda.kv.events import CacheRecorder
    from pagoda.kv.host_tier import HostTier
    from pagoda.kv.post import TierPost
    from pagoda.kv.transfers import TransferLedger
    from pagoda.messages.transfers import TierPlace
    from pagoda.messages.worker_config import KVTierConfig


@dataclass(frozen=True, kw_only=True)
class KVTierPlugin:
    """One tier. Each field is a module and a name in it, as in `pagoda_x.tier:open_tier`."""

    options: str
    """A frozen dataclass whose fields, the tier's place first and all with defaults, become flags and arguments of
    `LLM` behind `--kv-host-bytes`. Options of the engine inherit it."""
    configure: str
    """`configure(options, model)` gives a `KVTierConfig`; called if an option has another value than the default.
    `model` is None if workers may be on other hosts: then these look at the place.
    Raises ConfigError: an option has an impossible value, or lacks another."""
    engine_half: str
    """`open_tier(context)` gives the `KVConnector` of an engine from a `TierContext`, which it may keep.
    Raises ConfigError: the tier is too small."""
    worker_half: str
    """`open_tier(config, plan, loaded, faults)` gives a `WorkerTier` (`pagoda.worker.kv.tier`) from a
    `KVTierConfig`, a `WorkerMemoryPlan`, a `LoadedWorker`, and the faults of this process, if any.
    Raises ConfigError: the place cannot be used."""

    def option_names(self) -> list[str]:
        """Names of the options, that of the tier's place first."""
        return [field.name for field in fields(pkgutil.resolve_name(self.options))]


@dataclass(frozen=True)
class TierContext:
    """Parts from which an engine's half of a tier is built."""

    config: KVTierConfig
    places: tuple[TierPlace, ...]
    """Places in which ranks keep the tier's blocks, at least one."""
    ledger: TransferLedger
    clock: Clock
    host: HostTier | None
    """The tier in host memory, to which blocks may be prefetched."""
    recorder: CacheRecorder | None
    epoch_s: float
    """Time at which the clock read 0, in seconds since 1970."""
    post: TierPost
    """Reaches the workers' halves."""


def tier_plugins() -> dict[str, KVTierPlugin]:
    """All tiers by name. Raises ConfigError as `registry.load` does."""
    return {name: tier_plugin(name) for name in sorted(registered(KV_TIERS))}


def tier_plugin(name: str) -> KVTierPlugin:
    """Raises ConfigError as `registry.load` does."""
    return load(KV_TIERS, name, KVTierPlugin)
