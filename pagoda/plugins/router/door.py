# SPDX-License-Identifier: Apache-2.0
"""The entrance of a server to which routers send requests."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import zmq

from pagoda.api.answers.answer_log import log_answer
from pagoda.checkpoints.fingerprint import model_digest
from pagoda.cli.cluster import ServerStart
from pagoda.errors import ConfigError
from pagoda.fleet.endpoint import ReplicaState
from pagoda.fleet.fleet import Entrance, Fleet
from pagoda.ipc.addresses import Advertised
from pagoda.ipc.curve import start_authenticator
from pagoda.messages.frontend import PoolModel
from pagoda.messages.worker_config import CurveKeys
from pagoda.plugins.router.discovery.base import Context, Register, Registration
from pagoda.plugins.router.discovery.choice import registering
from pagoda.plugins.router.flags import JoinFlags
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
    models: Sequence[PoolModel]
    """Model of each pool of the server, by the name here, and the pool of routers that it is to belong to; empty:
    that of the model."""
    region: str = ""
    price: float = 0.0
    tracker: RequestTracker = field(default_factory=RequestTracker)

    @property
    def entrance(self) -> Entrance:
        return Entrance(lambda fleet: HostDoor(fleet, self), self.tracker)


def entrance(server: ServerStart, flags: JoinFlags) -> Entrance:
    """The entrance of a server for routers, which are told of it where the flags say.
    Raises ConfigError: a flag lacks another or has an impossible value."""
    tracker = RequestTracker()
    tracker.subscribe(on_finish=log_answer)
    if server.spans is not None:
        server.spans.follow(tracker)
    keys = server.cluster.keys("--join" if flags.join is not None else "--advertise with a port")
    if flags.pool and server.models:
        raise ConfigError("--pool is for servers of one model; pools of --pools have their names.")
    own = PoolModel(flags.pool, server.name, model_digest(server.files))
    config = JoinConfig(
        register=registering(flags.join, keys, flags.etcd_files),
        keys=keys,
        advertised=Advertised.parse(server.cluster.advertise, flags.join),
        models=server.models or (own,),
        region=flags.region,
        price=flags.price,
        tracker=tracker,
    )
    return config.entrance


class HostDoor:
    """A server of routers that is made known to them. Each pool of a router is a host of its own, with the next
    port, as soon as it has hosts."""

    def __init__(self, fleet: Fleet, config: JoinConfig) -> None:
        """Raises ConfigError: the address of `config` cannot be listened on."""
        self._fleet, self._config = fleet, config
        self._context: Context = zmq.Context()
        self._servers: dict[int, HostServer] = {}
        self._registrations: list[Registration] = []
        self._lost: set[int] = set()
        """Pools whose ports cannot be had."""
        self._has_left = False
        self._unwatch = [
            dispatcher.watch(partial(self._on_change, number))
            for number, dispatcher in enumerate(fleet.pools.values())
        ]
        try:
            start_authenticator(self._context, config.keys)
            for number in range(len(fleet.pools)):
                self._open(number)
        except BaseException:
            self._context.destroy(linger=0)
            raise

    def _open(self, number: int) -> None:
        """Lets routers in to a pool that has had a host. Raises ConfigError: its address cannot be listened on."""
        if number in self._servers or self._has_left:
            return
        fleet, advertised = self._fleet, self._config.advertised
        dispatcher = list(fleet.pools.values())[number]
        if dispatcher.state is ReplicaState.STARTING:
            return
        model = self._config.models[number]
        host, port = advertised.host, advertised.port
        identity = Identity(
            fleet.id,
            model.model,
            model.digest,
            fleet.is_router,
            pool=model.pool,
            region=self._config.region,
            price=self._config.price,
            number=number,
        )
        server = self._servers[number] = HostServer(
            dispatcher,
            CurveSockets(self._context, self._config.keys, fleet.faults),
            f"tcp://{host}:{'*' if port is None else port + number}",
            identity,
            fleet.tracer,
            self._config.tracker,
            fleet.tracing,
            None if fleet.is_router else dispatcher.set_role,
        )
        record = HostRecord(host_id=identity.host_id, address=f"tcp://{host}:{server.port}")
        self._registrations += self._config.register(self._context, record)
        of_pool = f" ({identity.model})" if len(fleet.pools) > 1 else ""
        _log.info("routers reach this host at %s:%d%s", host, server.port, of_pool)

    def _on_change(self, number: int) -> None:
        try:
            self._open(number)
        except ConfigError as error:  # others have taken the port meanwhile
            if number not in self._lost:
                self._lost.add(number)
                _log.error("%s", error)

    def compare_clocks(self) -> None:
        for server in self._servers.values():
            server.compare_clocks()

    async def leave(self) -> None:
        self._has_left = True
        for server in self._servers.values():
            server.leave()
        await self._unregister()

    async def close(self) -> None:
        self._has_left = True
        for unwatch in self._unwatch:
            unwatch()
        await self._unregister()
        await asyncio.gather(*(server.close() for server in self._servers.values()))
        self._context.term()

    async def _unregister(self) -> None:
        registrations, self._registrations = self._registrations, []
        await asyncio.gather(*(registration.close() for registration in registrations))
