# SPDX-License-Identifier: Apache-2.0
"""Routers and hosts in one process, over real sockets."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Self

import zmq
from scripted_endpoint import EOS, ScriptedEndpoint
from virtual_fleet import request

from pagoda.fleet.endpoint import SharedEndpoint
from pagoda.fleet.fleet import TraceOwner, new_id
from pagoda.fleet.policies import POLICIES
from pagoda.ipc.curve import keys_of, start_authenticator
from pagoda.messages.frontend import FinishReason
from pagoda.messages.worker_config import CurveKeys
from pagoda.plugins.router.discovery.base import Context, Discovery
from pagoda.plugins.router.discovery.joins import JoinDiscovery, Membership
from pagoda.plugins.router.host_client import HostClient, Identity
from pagoda.plugins.router.host_server import HostServer
from pagoda.plugins.router.host_sockets import CurveSockets
from pagoda.plugins.router.messages import HostRecord
from pagoda.plugins.router.prefill_decode import PrefillDecodeRouter
from pagoda.plugins.router.registry import HostReport, Registry
from pagoda.telemetry.request_tracker import RequestTracker
from pagoda.telemetry.tracer import Tracer

KEYS = keys_of(b"a secret of all hosts and routers")
TTL_S = 0.4

Discover = Callable[[Context], Discovery]


class Closing:
    """An asynchronous context manager that closes itself."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        raise NotImplementedError


def join_discovery(context: Context) -> JoinDiscovery:
    return JoinDiscovery(context, "127.0.0.1:*", KEYS, ttl_s=TTL_S)


class Router(Closing):
    """Finds hosts in the given way."""

    def __init__(self, discover: Discover = join_discovery) -> None:
        self.context = zmq.Context()
        start_authenticator(self.context, KEYS)
        self.hosts = PrefillDecodeRouter(POLICIES["round-robin"])
        sockets = CurveSockets(self.context, KEYS)
        self.dispatcher = self.hosts.dispatcher
        self.identity = Identity(id=new_id(), model="m", model_digest="1", is_router=True)
        self.discovery = discover(self.context)
        self.registry = Registry({"": self.hosts}, self.discovery, sockets, self.identity)

    @property
    def address(self) -> str:
        """Where hosts join."""
        return f"127.0.0.1:{self.discovery.port}"  # type: ignore[attr-defined]

    async def until_hosts(self, count: int) -> None:
        await until(lambda: len(self.dispatcher.replicas) == count)

    async def ask(self, request_id: str, max_tokens: int = 20) -> tuple[str, FinishReason | None]:
        asked = request(request_id, [65, 66], max_tokens, eos_token_ids=(EOS,))
        tokens: list[int] = []
        async for chunk in self.dispatcher.generate(asked):
            tokens += chunk.token_ids
            if chunk.finish_reason is not None:
                return bytes(token for token in tokens if token < 128).decode(), chunk.finish_reason
        raise ValueError("The stream has no end.")

    async def close(self) -> None:
        await self.registry.close()
        await self.hosts.close()
        self.context.term()


class Host(Closing):
    """An endpoint that routers can reach."""

    def __init__(
        self,
        endpoint: SharedEndpoint,
        keys: CurveKeys = KEYS,
        port: str = "*",
        tracker: RequestTracker | None = None,
        tracer: Tracer | None = None,
        tracing: TraceOwner | None = None,
        **identity: object,
    ) -> None:
        self.endpoint = endpoint
        self.context = zmq.Context()
        start_authenticator(self.context, keys)
        whole = {"id": new_id(), "model": "m", "model_digest": "1", "is_router": False} | identity
        self.identity = Identity(**whole)  # type: ignore[arg-type]
        address = f"tcp://127.0.0.1:{port}"
        self._sockets = CurveSockets(self.context, keys)
        self.door = HostServer(
            endpoint, self._sockets, address, self.identity, tracer, tracker, tracing
        )
        self.address = f"127.0.0.1:{self.door.port}"
        self.record = HostRecord(host_id=self.identity.id, address=f"tcp://{self.address}")
        self._keys = keys
        self._memberships: list[Membership] = []

    async def dial(self, tracer: Tracer | None = None, **options: Any) -> HostClient:
        """A router's connection to this host."""
        router = Identity("router", "m", "1", is_router=True)
        client = HostClient(self._sockets, self.record.address, router, tracer, **options)
        await client.start()
        return client

    def join(self, router: Router) -> Membership:
        membership = Membership(self.context, router.address, self._keys, self.record)
        self._memberships.append(membership)
        return membership

    async def leave(self) -> None:
        self.door.leave()
        for membership in self._memberships:
            await membership.close()

    async def close(self) -> None:
        for membership in self._memberships:
            await membership.close()
        await self.door.close()
        self.context.term()


class ScriptedHost(Host):
    """Joins a router when it is made."""

    def __init__(
        self, router: Router, answer: str = "ok", keys: CurveKeys = KEYS, **identity: object
    ) -> None:
        endpoint = ScriptedEndpoint(lambda request: answer[len(request.output_token_ids) :])
        super().__init__(endpoint, keys, **identity)
        self.membership = self.join(router)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.01)


async def until_refused(router: Router) -> list[HostReport]:
    """Returns the hosts of `router`, once one of them is refused."""
    async with asyncio.timeout(20):
        while True:
            reports = await router.registry.hosts()
            if any(report.reason for report in reports):
                return reports
            await asyncio.sleep(0.01)
