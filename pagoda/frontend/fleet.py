"""What stands behind one API, and how it starts and ends: engines of this host, or hosts behind a router."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import msgspec
import zmq.asyncio

from pagoda.engine.config import EngineConfig
from pagoda.engine.messages import CurveKeys, HostJoin
from pagoda.errors import ConfigError
from pagoda.frontend.dispatcher import Dispatcher
from pagoda.frontend.engine_client import EngineClient
from pagoda.frontend.host_link import HostDoor
from pagoda.frontend.pods import DEFAULT_MIN_TOKENS, Pod
from pagoda.frontend.policies import DEFAULT_POLICY, POLICIES, PolicyName
from pagoda.frontend.registry import Membership, Registry
from pagoda.ipc.curve import keep_door, keys_of
from pagoda.parallel.config import RankPlace

MIN_SECRET_BYTES = 16

_log = logging.getLogger(__name__)


class Fleet(Protocol):
    """A dispatcher and whoever brings its replicas."""

    @property
    def dispatcher(self) -> Dispatcher: ...

    async def start(self) -> None:
        """Returns when requests can be taken.

        Raises:
            ConfigError, EngineDeadError: it cannot start; nothing is left behind.
        """
        ...

    async def leave(self) -> None:
        """Others send nothing new from now on; what runs goes on."""
        ...

    async def close(self) -> None: ...


class EngineFleet:
    """As many engine processes as the configuration has replicas."""

    def __init__(self, engine: EngineConfig, policy: PolicyName = DEFAULT_POLICY) -> None:
        """
        Raises:
            ConfigError: there is no place for their sockets.
        """
        self.dispatcher = make_dispatcher(engine, policy)

    async def start(self) -> None:
        await self.dispatcher.start()

    async def leave(self) -> None:
        pass

    async def close(self) -> None:
        await self.dispatcher.close()


@dataclass(frozen=True)
class JoinConfig:
    """How a host makes itself known to routers."""

    routers: Sequence[str]
    """Each `host:port`."""
    keys: CurveKeys
    advertise: str
    """The address at which routers reach this host."""
    model: str
    model_digest: str


class JoinedFleet:
    """The engines of a host that also serves routers."""

    def __init__(self, engines: EngineFleet, join: JoinConfig) -> None:
        self._engines = engines
        self._join = join
        self._context = zmq.asyncio.Context()
        self._door: HostDoor | None = None
        self._memberships: list[Membership] = []

    @property
    def dispatcher(self) -> Dispatcher:
        return self._engines.dispatcher

    async def start(self) -> None:
        await self._engines.start()
        join = self._join
        keep_door(self._context, join.keys)
        self._door = HostDoor(
            self.dispatcher, self._context, f"tcp://{join.advertise}:*", join.keys
        )
        message = HostJoin(
            host_id=secrets.token_hex(8),
            address=f"tcp://{join.advertise}:{self._door.port}",
            model=join.model,
            model_digest=join.model_digest,
            role=self.dispatcher.limits.role,
        )
        self._memberships = [
            Membership(self._context, router, join.keys, message) for router in join.routers
        ]

    async def leave(self) -> None:
        await asyncio.gather(*(membership.leave() for membership in self._memberships))

    async def close(self) -> None:
        await asyncio.gather(*(membership.close() for membership in self._memberships))
        if self._door is not None:
            await self._door.close()
        await self._engines.close()
        self._context.term()


@dataclass(frozen=True)
class RouterConfig:
    """Where hosts join a router, and which."""

    listen: str
    """`host:port`; port `*` takes a free one."""
    keys: CurveKeys
    model: str
    model_digest: str
    policy: PolicyName = DEFAULT_POLICY
    remote_prefill_min_tokens: int = DEFAULT_MIN_TOKENS
    """Prompts of which as many tokens are not cached are computed by prefill hosts, where there are any."""


class RoutedFleet:
    """The hosts that have joined a router."""

    def __init__(self, config: RouterConfig) -> None:
        self._config = config
        self._context = zmq.asyncio.Context()
        self._registry: Registry | None = None
        self._pod = Pod(POLICIES[config.policy], config.remote_prefill_min_tokens)

    @property
    def dispatcher(self) -> Dispatcher:
        return self._pod.dispatcher

    @property
    def port(self) -> int:
        """Where hosts join."""
        if self._registry is None:
            raise RuntimeError("The router has not started.")
        return self._registry.port

    async def start(self) -> None:
        config = self._config
        keep_door(self._context, config.keys)
        self._registry = Registry(
            self._pod,
            self._context,
            f"tcp://{config.listen}",
            config.keys,
            model=config.model,
            model_digest=config.model_digest,
        )
        _log.info(
            "waiting for hosts: pagoda serve %s --join %s:%d --cluster-key-file FILE",
            config.model,
            config.listen.rpartition(":")[0],
            self.port,
        )
        await self._registry.first_host()

    async def leave(self) -> None:
        pass

    async def close(self) -> None:
        if self._registry is not None:
            await self._registry.close()
        await self._pod.close()
        self._context.term()


def parse_address(address: str, flag: str) -> str:
    """`address`, a host and a port, as ZeroMQ takes it behind `tcp://`; port 0 becomes any free one.

    Raises:
        ConfigError: it is not HOST:PORT.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isascii() or not port.isdigit() or int(port) > 65535 or "/" in host:
        raise ConfigError(f"{flag} must be HOST:PORT, such as 10.0.0.1:5600, got {address!r}.")
    return f"{host}:{'*' if int(port) == 0 else port}"


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


def make_dispatcher(engine: EngineConfig, policy: PolicyName = DEFAULT_POLICY) -> Dispatcher:
    """A dispatcher, not started, over as many engine processes as `engine.worker.parallel` has replicas.

    Raises:
        ConfigError: there is no place for their sockets.
    """
    return Dispatcher([EngineClient(config) for config in replicas_of(engine)], POLICIES[policy])


def replicas_of(engine: EngineConfig) -> list[EngineConfig]:
    """One configuration for each replica."""
    return [_replica(engine, index) for index in range(engine.worker.parallel.data_parallel_size)]


def _replica(engine: EngineConfig, index: int) -> EngineConfig:
    worker = msgspec.structs.replace(engine.worker, place=RankPlace(dp=index))
    return msgspec.structs.replace(engine, worker=worker)
