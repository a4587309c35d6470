# SPDX-License-Identifier: Apache-2.0
"""The seam for KV that goes from engine to engine: what a plugin of `pagoda.kv_connectors` gives an engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from pagoda.engine.kv_hooks import KVHooks
from pagoda.engine.request import Request
from pagoda.engine.scheduler import Scheduler
from pagoda.faults.injector import Faults
from pagoda.ipc.clock import Clock
from pagoda.kv.connector import KVConnector
from pagoda.kv.transfers import TransferLedger
from pagoda.messages.engine_config import EngineConfig
from pagoda.messages.frontend import TokenChunk


class PeerNews(Protocol):
    """News of another engine about one request."""

    @property
    def request_id(self) -> str: ...

    def apply(self, scheduler: Scheduler, request: Request) -> list[TokenChunk]:
        """Changes the request, which has not finished; returns what its client is told."""


class PeerHooks(KVHooks):
    """The hooks of an engine that hands no KV over and fetches none; a plugin's do. `step` is not called."""

    connector: KVConnector | None = None
    """Loads KV of other engines; None if this engine fetches none."""

    def news(self) -> Sequence[PeerNews]:
        """Answers questions of other engines; returns their news since the last call."""
        return ()


class EngineLinks(Protocol):
    """An engine's connections to other engines, which are there before its first worker is."""

    def hooks(
        self, config: EngineConfig, scheduler: Scheduler, ledger: TransferLedger, clock: Clock
    ) -> PeerHooks:
        """Hooks over these connections. Loads of the connector are in `ledger`."""

    def close(self) -> None: ...


OpenLinks = Callable[[EngineConfig, Faults], EngineLinks]
"""Opens the links that a configuration with `handoff` asks for; the faults are those of this process.
Raises ConfigError: an address cannot be used."""
NO_PEERS = PeerHooks()
