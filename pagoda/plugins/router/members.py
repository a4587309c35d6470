# SPDX-License-Identifier: Apache-2.0
"""The hosts of a router, behind its dispatcher."""

from __future__ import annotations

from dataclasses import dataclass

import zmq

from pagoda.fleet.dispatcher import DEFAULT_NO_REPLICA_TIMEOUT_S
from pagoda.fleet.fleet import Fleet
from pagoda.fleet.policies import DEFAULT_POLICY, POLICIES, PolicyName
from pagoda.ipc.curve import start_authenticator
from pagoda.messages.tracing import StartTrace
from pagoda.messages.worker_config import CurveKeys
from pagoda.plugins.router.discovery.base import Context, Discover
from pagoda.plugins.router.host_client import Identity
from pagoda.plugins.router.host_sockets import CurveSockets
from pagoda.plugins.router.prefill_decode import DEFAULT_MIN_TOKENS, PrefillDecodeRouter
from pagoda.plugins.router.registry import Registry
from pagoda.telemetry.tracer import Tracer


@dataclass(frozen=True)
class RouterConfig:
    """The hosts of a router, and the choice among them."""

    discover: Discover
    keys: CurveKeys
    model: str
    model_digest: str
    policy: PolicyName = DEFAULT_POLICY
    remote_prefill_min_tokens: int = DEFAULT_MIN_TOKENS
    """Prompts of which as many tokens are not cached are computed by prefill hosts, where there are any."""
    no_replica_timeout_s: float = DEFAULT_NO_REPLICA_TIMEOUT_S
    """Seconds that a request waits while no host takes requests."""


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
        self._hosts = PrefillDecodeRouter(
            POLICIES[config.policy],
            config.remote_prefill_min_tokens,
            self._tracer,
            no_replica_timeout_s=config.no_replica_timeout_s,
        )
        self.dispatcher = self._hosts.dispatcher
        self.registry: Registry | None = None
        """None before the start."""
        self._order: StartTrace | None = None
        """The trace under way."""

    async def start(self, fleet: Fleet) -> None:
        """Returns when a host has been found. Raises ConfigError: hosts cannot be looked for."""
        config = self._config
        start_authenticator(self._context, config.keys)
        self.registry = Registry(
            self._hosts,
            config.discover(self._context),
            CurveSockets(self._context, config.keys, fleet.faults),
            Identity(fleet.id, config.model, config.model_digest, is_router=True),
            self._tracer,
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
        await self._hosts.close()
        self._context.term()
