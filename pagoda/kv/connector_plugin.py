# SPDX-License-Identifier: Apache-2.0
"""Plugins that move KV between engines: objects of the entry-point group `pagoda.kv_connectors`.

A plugin has a part in each kind of process, and each process imports its own part alone: the fields name them as
`module:name`, for `pkgutil.resolve_name`.
"""

from __future__ import annotations

from dataclasses import dataclass

from pagoda.registry import KV_CONNECTORS, load, registered

BETWEEN_ENGINES = "disaggregation"
"""The name under which the connector between engines is registered."""


@dataclass(frozen=True, kw_only=True)
class KVConnectorPlugin:
    """Parts of a connector between engines."""

    engine: str
    """An `OpenLinks` (`pagoda.engine.peer_hooks`): the engine's connections to other engines."""
    worker: str
    """An `OpenRemoteMemory` (`pagoda.worker.kv.remote`): a worker's way to the memory of other workers."""
    offload: str
    """A function that gives the `Offload` (`pagoda.fleet.offload`) to the replicas of a dispatcher, of prompts of
    which so many tokens or more are to be computed."""
    options: str
    """A frozen dataclass of flags of `pagoda serve` with a default for each (`pagoda.cli.plugin_flags`)."""


def has_connector() -> bool:
    """True if a connector between engines is installed."""
    return BETWEEN_ENGINES in registered(KV_CONNECTORS)


def find_connector() -> KVConnectorPlugin:
    """The connector between engines. Raises ConfigError: as `registry.load`."""
    return load(KV_CONNECTORS, BETWEEN_ENGINES, KVConnectorPlugin)
