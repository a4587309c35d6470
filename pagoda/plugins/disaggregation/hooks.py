# SPDX-License-Identifier: Apache-2.0
"""An engine's part: what becomes of its requests goes to the exporter and the connector, and their news back."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import Any

import zmq

from pagoda.engine.peer_hooks import PeerHooks, PeerNews
from pagoda.engine.request import Request
from pagoda.engine.scheduler import Scheduler
from pagoda.faults.injector import Faults
from pagoda.ipc.clock import Clock
from pagoda.ipc.curve import start_authenticator
from pagoda.kv.transfers import TransferLedger
from pagoda.messages.engine_config import EngineConfig, HandoffConfig
from pagoda.messages.frontend import GenerateRequest, KVSource, TokenChunk, TokenLogprobs
from pagoda.messages.transfers import Transfers
from pagoda.messages.worker import WorkerReady
from pagoda.plugins.disaggregation.connector import RemoteKV
from pagoda.plugins.disaggregation.exporter import KVExporter
from pagoda.plugins.disaggregation.links import (
    Context,
    KVListener,
    Peers,
    SocketListener,
    SocketPeers,
)
from pagoda.plugins.disaggregation.token_conditions import conditions_of
from pagoda.plugins.disaggregation.transfer_tokens import TransferTokens


@dataclass(frozen=True)
class HandoffLinks:
    """Connections of one engine: a listener if it exports KV, peers if it fetches KV."""

    engine_id: str
    listener: KVListener | None = None
    peers: Peers | None = None
    context: Context | None = None
    """Context of the sockets; None if the links have none."""

    def hooks(
        self, config: EngineConfig, scheduler: Scheduler, ledger: TransferLedger, clock: Clock
    ) -> HandoffHooks:
        handoff, kv = config.handoff, scheduler.kv
        if handoff is None:
            raise ValueError("Links are opened for a configuration with handoff.")
        tokens = TransferTokens(handoff.keys)
        exporter: KVExporter | None = None
        remote: RemoteKV | None = None
        if self.listener is not None:
            exporter = KVExporter(
                self.listener,
                kv.pool,
                kv.layout,
                clock,
                tokens,
                self.engine_id,
                handoff.lease_s,
                config.worker.parallel.tensor_parallel_size,
            )
        if self.peers is not None:
            remote = RemoteKV(
                self.peers,
                ledger,
                kv.layout,
                clock,
                tokens=tokens,
                engine_id=self.engine_id,
                also_holds=handoff.role.holds_kv,
                fails=config.fail_on_load_failure,
            )
        return HandoffHooks(scheduler, exporter, remote)

    def close(self) -> None:
        """Closes the links, and waits up to `LINGER_MS` until what was sent is out."""
        for link in (self.listener, self.peers):
            if link is not None:
                link.close()
        if self.context is not None:
            self.context.term()


def open_engine_links(config: EngineConfig, faults: Faults) -> HandoffLinks:
    """An `OpenLinks`."""
    if config.handoff is None:
        raise ValueError("Links are opened for a configuration with handoff.")
    return open_links(config.handoff, config.worker.place.dp, faults)


def open_links(config: HandoffConfig, replica: int, faults: Faults | None = None) -> HandoffLinks:
    """Returns links over ZeroMQ; `faults` are those of this process.

    Raises ConfigError if the listener's port is taken or this host does not have the address.
    """
    context: Context = zmq.Context()
    start_authenticator(context, config.keys)
    listener = peers = None
    try:
        if config.role.holds_kv:
            port = config.port + replica if config.port else 0
            listener = SocketListener(context, config.host, port, config.keys, faults)
        if config.role.fetches_kv:
            peers = SocketPeers(context, config.keys, faults)
    except BaseException:
        context.term()
        raise
    return HandoffLinks(secrets.token_hex(8), listener, peers, context)


class HandoffHooks(PeerHooks):
    """Holds KV with a `KVExporter`, and loads it with a `RemoteKV`; an engine has one of them or both."""

    def __init__(
        self, scheduler: Scheduler, exporter: KVExporter | None, remote: RemoteKV | None
    ) -> None:
        self._scheduler, self._kv = scheduler, scheduler.kv
        self.exporter, self.remote = exporter, remote
        self.connector = remote

    def refusal(self, message: GenerateRequest) -> str | None:
        return super().refusal(message) if self.exporter is None else None

    def on_added(self, message: GenerateRequest, request: Request) -> list[TokenChunk]:
        if not message.holds_kv or self.exporter is None:
            return []
        num_blocks = self._kv.num_handed_over(request.num_tokens)
        source = self.exporter.open(request.request_id, num_blocks)
        request.transfer_id = source.transfer_id
        return [TokenChunk(request.request_id, [], kv_source=source)]

    def on_refused(self, message: GenerateRequest) -> None:
        if self.remote is not None and message.kv_source is not None:
            self.remote.release(message.kv_source)

    def on_published(self, request: Request) -> None:
        if request.transfer_id is None or self.exporter is None:
            return
        table, missing = request.table, self.exporter.missing(request.transfer_id)
        first, end = missing.start, min(missing.stop, table.num_published)
        if end > first:
            parts = self._kv.part(table, missing.stop, first, end)
            self.exporter.hold(request.transfer_id, parts, table.keys[first + 1 : end + 1])

    def on_prefilled(
        self, request: Request, token_id: int, logprobs: TokenLogprobs | None
    ) -> KVSource | None:
        transfer_id, request.transfer_id = request.transfer_id, None
        if transfer_id is None or self.exporter is None:
            return None
        key = self._kv.sequence_key(request.table, request.token_ids)
        num_cached_tokens = request.num_cached_tokens or 0
        conditions = conditions_of(request)
        return self.exporter.finish(
            transfer_id, key, token_id, conditions, logprobs, num_cached_tokens
        )

    def on_preempted(self, request: Request) -> None:
        """Lets go of held KV: two requests that hold each other's room for others would wait for ever."""
        self._drop(request, "its request was preempted", goes_on=True)

    def on_finished(self, request: Request) -> None:
        if self.exporter is not None:
            self.exporter.request_ended(request.request_id)
        self._drop(request, "its request failed or was aborted")

    def _drop(self, request: Request, reason: str, *, goes_on: bool = False) -> None:
        transfer_id, request.transfer_id = request.transfer_id, None
        if transfer_id is not None and self.exporter is not None:
            self.exporter.drop(transfer_id, reason, goes_on=goes_on)

    def make_room(self) -> bool:
        return self.exporter is not None and self.exporter.make_room()

    # ---- the workers, and the engine's loop

    def workers_ready(self, worker: WorkerReady) -> None:
        """Tells the exporter; the tiers tell the connector."""
        if self.exporter is not None:
            self.exporter.workers_ready(worker)

    def workers_lost(self) -> list[Request]:
        if self.exporter is not None:
            self.exporter.workers_lost()
        for request in self._scheduler.requests.values():
            request.transfer_id = None
        return []

    def news(self) -> list[PeerNews]:
        news: list[PeerNews] = []
        if self.exporter is not None:
            self.exporter.step()
            news += self.exporter.drain_unwanted()
        if self.remote is not None:
            self.remote.step()
            news += self.remote.drain_events()
        return news

    def drain_transfers(self) -> Transfers | None:
        """The peers that transfers may name from now on, or may not."""
        added, removed = ([], []) if self.remote is None else self.remote.drain_peer_changes()
        return Transfers([], added, removed) if added or removed else None

    def load_figures(self) -> dict[str, Any]:
        if self.exporter is None:
            return {}
        return {
            "num_leases": len(self.exporter.leases),
            "num_wanted_leases": self.exporter.num_wanted,
            "num_leased_blocks": self.exporter.num_leased_blocks,
            "num_leases_expired": self.exporter.num_expired,
        }

    def next_event_at(self) -> float | None:
        instants = (it.next_event_at() for it in (self.exporter, self.remote) if it is not None)
        return min((at for at in instants if at is not None), default=None)

    def pollables(self) -> list[object]:
        """Sockets of the exporter; the tiers ask the connector for its own."""
        return [] if self.exporter is None else self.exporter.pollables()

    def close(self) -> None:
        """Ends what is held; the tiers close the connector."""
        if self.exporter is not None:
            self.exporter.close()
