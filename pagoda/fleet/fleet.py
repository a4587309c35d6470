# SPDX-License-Identifier: Apache-2.0
"""The engines of this host, or the hosts of a router, behind one dispatcher."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import zmq

from pagoda.errors import ConfigError
from pagoda.faults.injector import Faults
from pagoda.fleet.adapters import AdapterRegistry
from pagoda.fleet.dispatcher import DEFAULT_NO_REPLICA_TIMEOUT_S, Dispatcher
from pagoda.fleet.engine_client import EngineClient
from pagoda.fleet.policies import DEFAULT_POLICY, POLICIES, PolicyName
from pagoda.fleet.prefill_decode import DEFAULT_MIN_TOKENS, PrefillDecodeRouter
from pagoda.ipc.curve import keys_of, start_authenticator
from pagoda.messages.engine_config import EngineConfig
from pagoda.messages.tracing import StartTrace
from pagoda.messages.worker_config import CurveKeys
from pagoda.parallel.config import RankPlace
from pagoda.plugins.router.discovery.addresses import Advertised
from pagoda.plugins.router.discovery.base import Context, Discover, Register, Registration
from pagoda.plugins.router.host_client import Identity
from pagoda.plugins.router.host_server import HostServer
from pagoda.plugins.router.host_sockets import CurveSockets
from pagoda.plugins.router.host_traces import TraceOwner
from pagoda.plugins.router.messages import HostRecord
from pagoda.plugins.router.registry import Registry
from pagoda.telemetry.request_tracker import RequestTracker
from pagoda.telemetry.tracer import Tracer

MIN_SECRET_BYTES = 16

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class JoinConfig:
    register: Register
    keys: CurveKeys
    advertised: Advertised
    model: str
    model_digest: str
    tracker: RequestTracker = field(default_factory=RequestTracker)


@dataclass(frozen=True)
class RouterConfig:
    discover: Discover
    keys: CurveKeys
    model: str
    model_digest: str
    policy: PolicyName = DEFAULT_POLICY
    remote_prefill_min_tokens: int = DEFAULT_MIN_TOKENS
    """Prompts of which as many tokens are not cached are computed by prefill hosts, where there are any."""
    no_replica_timeout_s: float = DEFAULT_NO_REPLICA_TIMEOUT_S
    """Seconds that a request waits while no host takes requests."""


class Fleet:
    """A dispatcher over the engines of this host or the hosts of a router; may serve the routers above."""

    def __init__(
        self,
        members: Dispatcher | RouterConfig,
        engines: Sequence[EngineClient] = (),
        *,
        join: JoinConfig | None = None,
        tracer: Tracer | None = None,
        adapters: AdapterRegistry | None = None,
        faults: Faults | None = None,
    ) -> None:
        """`engines` are the replicas of the dispatcher that trace; `tracer` and `faults` are those of this
        process.

        No `join` serves no routers. With both, the keys of the router and of `join` are the same.
        """
        self._engines = engines
        self.adapters = adapters or AdapterRegistry()
        self.faults = faults or Faults(None)
        self._join = join
        self._tracer = tracer or Tracer("frontend")
        self._context: Context = zmq.Context()
        self._router: tuple[RouterConfig, PrefillDecodeRouter] | None = None
        self._door: HostServer | None = None
        self._registrations: list[Registration] = []
        self._order: StartTrace | None = None
        """The trace under way."""
        self.tracing: TraceOwner | None = None
        """Tracing of this server for routers above; set before the start."""
        self.id = new_id()
        self.is_router = not isinstance(members, Dispatcher)
        self.registry: Registry | None = None
        """Registry of a router's hosts, once the router has started."""
        if isinstance(members, Dispatcher):
            self.dispatcher = members
            return
        # There is no host too many but for the system, which has limits of its own.
        self._context.set(zmq.MAX_SOCKETS, self._context.get(zmq.SOCKET_LIMIT))
        hosts = PrefillDecodeRouter(
            POLICIES[members.policy],
            members.remote_prefill_min_tokens,
            self._tracer,
            no_replica_timeout_s=members.no_replica_timeout_s,
        )
        self._router = members, hosts
        self.dispatcher = hosts.dispatcher

    @classmethod
    def of_engines(
        cls,
        engine: EngineConfig,
        policy: PolicyName = DEFAULT_POLICY,
        *,
        join: JoinConfig | None = None,
        tracer: Tracer | None = None,
        adapter_directory: Path | None = None,
    ) -> Fleet:
        """One engine process of this host for each replica of the configuration.

        `adapter_directory` holds adapters that may be loaded while they run; None allows none.

        Raises ConfigError if there is no place for the engines' sockets.
        """
        engines = [EngineClient(config, tracer) for config in replicas_of(engine)]
        replicas = [engine.replica for engine in engines]
        dispatcher = Dispatcher(replicas, POLICIES[policy], tracer=tracer)
        adapters = AdapterRegistry(engine.worker, engines, adapter_directory)
        faults = Faults(engine.faults)
        return cls(dispatcher, engines, join=join, tracer=tracer, adapters=adapters, faults=faults)

    async def start(self) -> None:
        """Returns when requests can be taken.

        Raises ConfigError or EngineDeadError if the fleet cannot start; `close` leaves nothing behind.
        """
        if self._router is None:
            await self.dispatcher.start()
        else:
            config, hosts = self._router
            start_authenticator(self._context, config.keys)
            self.registry = Registry(
                hosts,
                config.discover(self._context),
                CurveSockets(self._context, config.keys, self.faults),
                self._identity(config),
                self._tracer,
            )
            if self._order is not None:
                self.registry.start_trace(self._order)
            await self.registry.first_host()
        if self._join is not None:
            self._serve_routers(self._join)

    def _serve_routers(self, join: JoinConfig) -> None:
        if not self.is_router:
            start_authenticator(self._context, join.keys)
        host, port = join.advertised.host, join.advertised.port
        self._door = HostServer(
            self.dispatcher,
            CurveSockets(self._context, join.keys, self.faults),
            f"tcp://{host}:{'*' if port is None else port}",
            self._identity(join),
            self._tracer,
            join.tracker,
            self.tracing,
        )
        record = HostRecord(host_id=self.id, address=f"tcp://{host}:{self._door.port}")
        _log.info("routers reach this host at %s:%d", host, self._door.port)
        self._registrations = join.register(self._context, record)

    def _identity(self, config: JoinConfig | RouterConfig) -> Identity:
        return Identity(self.id, config.model, config.model_digest, self.is_router)

    async def leave(self) -> None:
        """Tells routers to send nothing new; running requests continue."""
        if self._door is not None:
            self._door.leave()
        await self._unregister()

    async def close(self) -> None:
        await self._unregister()
        if self._door is not None:
            await self._door.close()
        if self.registry is not None:
            await self.registry.close()
        await (self.dispatcher if self._router is None else self._router[1]).close()
        self._context.term()

    async def _unregister(self) -> None:
        registrations, self._registrations = self._registrations, []
        await asyncio.gather(*(registration.close() for registration in registrations))

    def start_trace(self, order: StartTrace) -> None:
        """The engines of this host, or the hosts of a router, and those that come later trace from now on."""
        self._order = order
        if self.registry is not None:
            self.registry.start_trace(order)
        for engine in self._engines:
            engine.start_trace(order)
        if self._door is not None:
            self._door.compare_clocks()

    async def stop_trace(self) -> list[str]:
        """Returns when all fragments are closed, or some seconds later, with sentences about what went wrong."""
        self._order = None
        members = self._engines if self.registry is None else [self.registry]
        ends = await asyncio.gather(*(member.stop_trace() for member in members))
        return [problem for problems in ends for problem in problems]

    async def trace_ended(self) -> None:
        """Returns when all engines have stopped by themselves, after `StartTrace.num_steps`."""
        await asyncio.gather(*(engine.trace_ended() for engine in self._engines))


def new_id() -> str:
    return secrets.token_hex(8)


def read_cluster_key(path: Path) -> CurveKeys:
    """The keys of all hosts and routers that have this file; raises what `read_cluster_secret` does."""
    return keys_of(read_cluster_secret(path))


def read_cluster_secret(path: Path) -> bytes:
    """Raises ConfigError if the file cannot be read or is too short to be a secret."""
    try:
        secret = path.read_bytes().strip()
    except OSError as error:
        raise ConfigError(f"--cluster-key-file {path} cannot be read ({error.strerror}).") from None
    if len(secret) < MIN_SECRET_BYTES:
        raise ConfigError(
            f"--cluster-key-file {path} must hold a secret of {MIN_SECRET_BYTES} bytes or more, "
            f"such as `openssl rand -hex 32` makes; it has {len(secret)}."
        )
    return secret


def replicas_of(engine: EngineConfig) -> list[EngineConfig]:
    """The configuration of each replica."""
    places = map(RankPlace, range(engine.worker.parallel.data_parallel_size))
    workers = [msgspec.structs.replace(engine.worker, place=place) for place in places]
    return [msgspec.structs.replace(engine, worker=worker) for worker in workers]
