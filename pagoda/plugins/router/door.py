# SPDX-License-Identifier: Apache-2.0
"""The entrance of a server to which routers send requests."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field

import zmq

from pagoda.api.answers.answer_log import log_answer
from pagoda.checkpoints.fingerprint import model_digest
from pagoda.cli.cluster import ServerStart
from pagoda.fleet.fleet import Entrance, Fleet
from pagoda.ipc.addresses import Advertised
from pagoda.ipc.curve import start_authenticator
from pagoda.ipc.tls import TlsFiles
from pagoda.messages.worker_config import CurveKeys
from pagoda.plugins.router.discovery.base import Context, Register
from pagoda.plugins.router.discovery.choice import registering
from pagoda.plugins.router.host_client import Identity
from pagoda.plugins.router.host_server import HostServer
from pagoda.plugins.router.host_sockets import CurveSockets
from pagoda.plugins.router.messages import HostRecord
from pagoda.telemetry.request_tracker import RequestTracker

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class JoinConfig:
    """The routers of a host, and what they are told of it."""

    register: Register
    keys: CurveKeys
    advertised: Advertised
    model: str
    model_digest: str
    tracker: RequestTracker = field(default_factory=RequestTracker)

    @property
    def entrance(self) -> Entrance:
        return Entrance(lambda fleet: HostDoor(fleet, self), self.tracker)


def entrance(server: ServerStart, join: str | None, etcd_files: TlsFiles) -> Entrance:
    """The entrance of a server for routers, which is made known where `join` says.
    Raises ConfigError: a flag lacks another or has an impossible value."""
    tracker = RequestTracker()
    tracker.subscribe(on_finish=log_answer)
    if server.spans is not None:
        server.spans.follow(tracker)
    keys = server.cluster.keys("--join" if join is not None else "--advertise with a port")
    config = JoinConfig(
        register=registering(join, keys, etcd_files),
        keys=keys,
        advertised=Advertised.parse(server.cluster.advertise, join),
        model=server.files.served_name,
        model_digest=model_digest(server.files),
        tracker=tracker,
    )
    return config.entrance


class HostDoor:
    """A server of routers that is made known to them."""

    def __init__(self, fleet: Fleet, config: JoinConfig) -> None:
        """Raises ConfigError: the address of `config` cannot be listened on."""
        host, port = config.advertised.host, config.advertised.port
        self._context: Context = zmq.Context()
        try:
            start_authenticator(self._context, config.keys)
            self._server = HostServer(
                fleet.dispatcher,
                CurveSockets(self._context, config.keys, fleet.faults),
                f"tcp://{host}:{'*' if port is None else port}",
                Identity(fleet.id, config.model, config.model_digest, fleet.is_router),
                fleet.tracer,
                config.tracker,
                fleet.tracing,
                None if fleet.is_router else fleet.dispatcher.set_role,
            )
            record = HostRecord(host_id=fleet.id, address=f"tcp://{host}:{self._server.port}")
            self._registrations = config.register(self._context, record)
        except BaseException:
            self._context.destroy(linger=0)
            raise
        _log.info("routers reach this host at %s:%d", host, self._server.port)

    def compare_clocks(self) -> None:
        self._server.compare_clocks()

    async def leave(self) -> None:
        self._server.leave()
        await self._unregister()

    async def close(self) -> None:
        await self._unregister()
        await self._server.close()
        self._context.term()

    async def _unregister(self) -> None:
        registrations, self._registrations = self._registrations, []
        await asyncio.gather(*(registration.close() for registration in registrations))
