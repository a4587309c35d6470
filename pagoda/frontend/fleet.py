"""Fleets: the engines of this host, or the hosts of a router, behind one dispatcher."""

from __future__ import annotations

import asyncio
import logging
import secrets
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import msgspec
import zmq

from pagoda.engine.config import EngineConfig
from pagoda.errors import ConfigError
from pagoda.frontend.discovery.addresses import Advertised
from pagoda.frontend.discovery.base import Context, Discover, Register, Registration
from pagoda.frontend.dispatcher import DEFAULT_NO_REPLICA_TIMEOUT_S, Dispatcher
from pagoda.frontend.engine_client import EngineClient
from pagoda.frontend.host_client import Identity
from pagoda.frontend.host_server import HostServer
from pagoda.frontend.policies import DEFAULT_POLICY, POLICIES, PolicyName
from pagoda.frontend.prefill_decode import PrefillDecodeRouter
from pagoda.frontend.prefill_offload import DEFAULT_MIN_TOKENS
from pagoda.frontend.registry import Registry
from pagoda.frontend.request_tracker import RequestTracker
from pagoda.ipc.curve import keys_of, start_authenticator
from pagoda.messages.hosts import HostRecord
from pagoda.messages.tracing import StartTrace
from pagoda.messages.worker_config import CurveKeys
from pagoda.parallel.config import RankPlace
from pagoda.telemetry.tracer import Tracer

MIN_SECRET_BYTES = 16

_log = logging.getLogger(__name__)


class Fleet(Protocol):
    @property
    def dispatcher(self) -> Dispatcher: ...

    @property
    def registry(self) -> Registry | None:
        """Registry of a router's hosts, once the router has started; None for engines."""
        ...

    @property
    def router_id(self) -> str | None:
        """None if it is no router."""
        ...

    async def start(self) -> None:
        """Returns when requests can be taken.

        Raises:
            ConfigError, EngineDeadError: it cannot start; nothing is left behind.
        """
        ...

    async def leave(self) -> None:
        """Tells routers to send nothing new; running requests continue."""
        ...

    async def close(self) -> None: ...

    def start_trace(self, order: StartTrace) -> None:
        """The engines of this host, and the ones that replace them, trace from now on; other hosts do not."""
        ...

    async def stop_trace(self) -> list[str]:
        """Returns when all fragments are closed, or some seconds later, with sentences about what went wrong."""
        ...

    async def trace_ended(self) -> None:
        """Returns when all engines have stopped by themselves, after `StartTrace.num_steps`."""
        ...


class EngineFleet:
    """Engine processes of this host, one for each replica of the configuration."""

    def __init__(
        self,
        engine: EngineConfig,
        policy: PolicyName = DEFAULT_POLICY,
        tracer: Tracer | None = None,
    ) -> None:
        """`tracer` is that of this process.

        Raises:
            ConfigError: there is no place for their sockets.
        """
        self._engines = [EngineClient(config, tracer) for config in replicas_of(engine)]
        self.dispatcher = Dispatcher(self._engines, POLICIES[policy], tracer=tracer)

    @property
    def registry(self) -> None:
        return None

    @property
    def router_id(self) -> None:
        return None

    async def start(self) -> None:
        await self.dispatcher.start()

    async def leave(self) -> None:
        pass

    async def close(self) -> None:
        await self.dispatcher.close()

    def start_trace(self, order: StartTrace) -> None:
        for engine in self._engines:
            engine.start_trace(order)

    async def stop_trace(self) -> list[str]:
        ends = await asyncio.gather(*(engine.stop_trace() for engine in self._engines))
        return [problem for problems in ends for problem in problems]

    async def trace_ended(self) -> None:
        await asyncio.gather(*(engine.trace_ended() for engine in self._engines))


@dataclass(frozen=True)
class JoinConfig:
    register: Register
    keys: CurveKeys
    advertised: Advertised
    model: str
    model_digest: str
    tracker: RequestTracker = field(default_factory=RequestTracker)


class JoinedFleet:
    """A fleet that also serves routers: the engines of a host, or the hosts of a router."""

    def __init__(self, inner: Fleet, join: JoinConfig, tracer: Tracer | None = None) -> None:
        self._inner = inner
        self._tracer = tracer or Tracer("frontend")
        self._join = join
        self._context: Context = zmq.Context()
        self.host_id = inner.router_id or new_id()
        self._door: HostServer | None = None
        self._registrations: list[Registration] = []

    @property
    def dispatcher(self) -> Dispatcher:
        return self._inner.dispatcher

    @property
    def registry(self) -> Registry | None:
        return self._inner.registry

    @property
    def router_id(self) -> str | None:
        return self._inner.router_id

    async def start(self) -> None:
        await self._inner.start()
        join = self._join
        start_authenticator(self._context, join.keys)
        identity = Identity(
            id=self.host_id,
            model=join.model,
            model_digest=join.model_digest,
            is_router=self.router_id is not None,
        )
        host, port = join.advertised.host, join.advertised.port
        address = f"tcp://{host}:{'*' if port is None else port}"
        self._door = HostServer(
            self.dispatcher,
            self._context,
            address,
            join.keys,
            identity,
            self._tracer,
            join.tracker,
        )
        record = HostRecord(host_id=self.host_id, address=f"tcp://{host}:{self._door.port}")
        _log.info("routers reach this host at %s:%d", host, self._door.port)
        self._registrations = join.register(self._context, record)

    async def leave(self) -> None:
        if self._door is not None:
            self._door.leave()
        await self._unregister()

    async def close(self) -> None:
        await self._unregister()
        if self._door is not None:
            await self._door.close()
        await self._inner.close()
        self._context.term()

    def start_trace(self, order: StartTrace) -> None:
        self._inner.start_trace(order)
        if self._door is not None:
            self._door.compare_clocks()

    async def stop_trace(self) -> list[str]:
        return await self._inner.stop_trace()

    async def trace_ended(self) -> None:
        await self._inner.trace_ended()

    async def _unregister(self) -> None:
        registrations, self._registrations = self._registrations, []
        await asyncio.gather(*(registration.close() for registration in registrations))


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


class RoutedFleet:
    def __init__(self, config: RouterConfig, tracer: Tracer | None = None) -> None:
        self._config = config
        self._tracer = tracer or Tracer("router")
        self._context: Context = zmq.Context()
        # There is no host too many but for the system, which has limits of its own.
        self._context.set(zmq.MAX_SOCKETS, self._context.get(zmq.SOCKET_LIMIT))
        self.registry: Registry | None = None
        self.router_id = new_id()
        self._hosts = PrefillDecodeRouter(
            POLICIES[config.policy],
            config.remote_prefill_min_tokens,
            self._tracer,
            no_replica_timeout_s=config.no_replica_timeout_s,
        )

    @property
    def dispatcher(self) -> Dispatcher:
        return self._hosts.dispatcher

    async def start(self) -> None:
        config = self._config
        start_authenticator(self._context, config.keys)
        router = Identity(self.router_id, config.model, config.model_digest, is_router=True)
        self.registry = Registry(
            self._hosts,
            config.discover(self._context),
            self._context,
            config.keys,
            router,
            self._tracer,
        )
        await self.registry.first_host()

    async def leave(self) -> None:
        pass

    async def close(self) -> None:
        if self.registry is not None:
            await self.registry.close()
        await self._hosts.close()
        self._context.term()

    def start_trace(self, order: StartTrace) -> None:
        """Does nothing: each host starts its own traces."""

    async def stop_trace(self) -> list[str]:
        return []

    async def trace_ended(self) -> None:
        pass


def new_id() -> str:
    return secrets.token_hex(8)


def read_cluster_key(path: Path) -> CurveKeys:
    """The keys of all hosts and routers that have this file; raises what `read_cluster_secret` does."""
    return keys_of(read_cluster_secret(path))


def read_cluster_secret(path: Path) -> bytes:
    """
    Raises:
        ConfigError: it cannot be read, or is too short to be a secret.
    """
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
    return [_replica(engine, index) for index in range(engine.worker.parallel.data_parallel_size)]


def _replica(engine: EngineConfig, index: int) -> EngineConfig:
    worker = msgspec.structs.replace(engine.worker, place=RankPlace(dp=index))
    return msgspec.structs.replace(engine, worker=worker)
