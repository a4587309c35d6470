# SPDX-License-Identifier: Apache-2.0
"""The hosts of a router, behind a dispatcher for each pool."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import zmq

from pagoda.fleet.fleet import Fleet
from pagoda.fleet.policies import POLICIES
from pagoda.ipc.clock import LoopClock
from pagoda.ipc.curve import start_authenticator
from pagoda.messages.frontend import HostPool
from pagoda.messages.tracing import StartTrace
from pagoda.messages.worker_config import CurveKeys
from pagoda.plugins.router.discovery.base import Context, Discover
from pagoda.plugins.router.host_client import Identity
from pagoda.plugins.router.host_sockets import CurveSockets
from pagoda.plugins.router.pools import PoolConfig, router_identity
from pagoda.plugins.router.prefill_decode import PrefillDecodeRouter
from pagoda.plugins.router.recording import Recorder
from pagoda.plugins.router.registry import Registry
from pagoda.telemetry.tracer import Tracer


@dataclass(frozen=True)
class RouterConfig:
    """The hosts of a router, and its pools by name, the default one first."""

    discover: Discover
    keys: CurveKeys
    pools: Mapping[str, PoolConfig]
    region: str = ""
    """The router's own."""
    recorder: Recorder | None = None
    """Writes down the requests of all pools."""


class HostMembers:
    """Hosts as a discovery names them."""

    is_router = True

    def __init__(self, config: RouterConfig, tracer: Tracer | None = None) -> None:
        """`tracer` is that of this process."""
        self._config = config
        self._tracer = tracer or Tracer("router")
        self._context: Context = zmq.Context()
        # There is no host too many but for the system, which has limits of its own.
        self._context.set(zmq.MAX_SOCKETS, self._context.get(zmq.SOCKET_LIMIT))
        self._hosts = {name: self._opened(name, pool) for name, pool in config.pools.items()}
        self.pools = {name: hosts.dispatcher for name, hosts in self._hosts.items()}
        self.registry: Registry | None = None
        """None before the start."""
        self._order: StartTrace | None = None
        """The trace under way."""

    def _opened(self, name: str, pool: PoolConfig) -> PrefillDecodeRouter:
        hosts = PrefillDecodeRouter(
            POLICIES[pool.policy],
            pool.remote_prefill_min_tokens,
            self._tracer,
            no_replica_timeout_s=pool.no_replica_timeout_s,
            max_requests=pool.max_requests,
        )
        if self._config.recorder is not None:
            hosts.dispatcher.on_end = partial(self._config.recorder.ended, name)
        return hosts

    def identity(self, fleet_id: str) -> Identity:
        """This router as its hosts, and routers above, see it."""
        return router_identity(fleet_id, self._config.pools, self._config.region)

    def _weigh(self, place: HostPool, round_trip_s: float) -> int:
        pool = self._config.pools.get(place.pool)
        return 0 if pool is None else pool.distance.tokens(place, round_trip_s, self._config.region)

    async def start(self, fleet: Fleet) -> None:
        """Returns when a host has been found. Raises ConfigError: hosts cannot be looked for, or requests not be
        recorded."""
        config = self._config
        if config.recorder is not None:
            config.recorder.start(LoopClock().now())
        start_authenticator(self._context, config.keys)
        self.registry = Registry(
            self._hosts,
            config.discover(self._context),
            CurveSockets(self._context, config.keys, fleet.faults),
            self.identity(fleet.id),
            self._tracer,
            self._weigh,
        )
        if self._order is not None:
            self.registry.start_trace(self._order)
        await self.registry.first_host()

    def start_trace(self, order: StartTrace) -> None:
        self._order = order
        if self.registry is not None:
            self.registry.start_trace(order)

    async def stop_trace(self) -> list[str]:
        self._order = None
        return [] if self.registry is None else await self.registry.stop_trace()

    async def trace_ended(self) -> None:
        """Hosts trace until they are told to stop: steps are those of engines."""

    async def close(self) -> None:
        if self.registry is not None:
            await self.registry.close()
        await asyncio.gather(*(hosts.close() for hosts in self._hosts.values()))
        if self._config.recorder is not None:
            await asyncio.to_thread(self._config.recorder.close)
        self._context.term()
