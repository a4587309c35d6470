# SPDX-License-Identifier: Apache-2.0
"""A server's replicas behind one dispatcher, and the ways by which requests come to it."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import msgspec

from pagoda.errors import OverloadedError
from pagoda.faults.injector import Faults
from pagoda.fleet.adapters import AdapterRegistry
from pagoda.fleet.dispatcher import Dispatcher
from pagoda.fleet.endpoint import Health, StepListener
from pagoda.fleet.engine_client import EngineClient
from pagoda.fleet.policies import DEFAULT_POLICY, POLICIES, PolicyName
from pagoda.messages.engine_config import EngineConfig
from pagoda.messages.figures import merged
from pagoda.messages.load import LoadReport
from pagoda.messages.tracing import StartTrace
from pagoda.parallel.config import RankPlace
from pagoda.telemetry.request_tracker import RequestTracker
from pagoda.telemetry.tracer import TraceLevel, Tracer, TraceSession


class Members(Protocol):
    """The replicas behind the dispatcher of a server: the engines of this host, or a router's hosts."""

    @property
    def pools(self) -> Mapping[str, Dispatcher]:
        """The dispatcher of each model that is served, by its name in a router's configuration, the default one
        first. The only one has no name."""

    @property
    def is_router(self) -> bool:
        """True if the members are other servers."""

    async def start(self, fleet: Fleet) -> None:
        """Returns when requests can be taken. Raises ConfigError or EngineDeadError: they cannot."""

    def start_trace(self, order: StartTrace) -> None:
        """All members trace from now on, and those that come later."""

    async def stop_trace(self) -> list[str]:
        """Returns when all fragments are closed, or some seconds later, with sentences about what went wrong."""

    async def trace_ended(self) -> None:
        """Returns when all engines have stopped by themselves, after `StartTrace.num_steps`."""

    async def close(self) -> None:
        """Leaves nothing behind, also where the start has failed."""


class OpenEntrance(Protocol):
    """An entrance that is open."""

    def compare_clocks(self) -> None:
        """Measures how far the clocks of those who ask are ahead, for the trace that has begun."""

    async def leave(self) -> None:
        """Tells those who ask to send nothing new; running requests continue."""

    async def close(self) -> None: ...


@dataclass(frozen=True)
class Entrance:
    """A way to the dispatcher of a server besides its API."""

    open: Callable[[Fleet], OpenEntrance]
    """Lets others in to a fleet that has started. Raises ConfigError: it cannot, and leaves nothing behind."""
    tracker: RequestTracker
    """Tracker of the answers that go through the entrance."""


class EndedTrace(Protocol):
    @property
    def problems(self) -> Sequence[str]: ...


class TraceOwner(Protocol):
    """The tracing of a server, which those who ask it may begin: a `TraceControl`."""

    directory: Path
    run: str

    async def start(self, level: TraceLevel) -> TraceSession: ...

    async def stop(self) -> EndedTrace: ...


class EngineMembers:
    """The engine processes of this host."""

    is_router = False

    def __init__(self, dispatcher: Dispatcher, engines: Sequence[EngineClient] = ()) -> None:
        """`engines` are the replicas of the dispatcher that trace."""
        self._dispatcher = dispatcher
        self.pools = {"": dispatcher}
        self._engines = engines

    async def start(self, _: Fleet) -> None:
        await self._dispatcher.start()

    def start_trace(self, order: StartTrace) -> None:
        for engine in self._engines:
            engine.start_trace(order)

    async def stop_trace(self) -> list[str]:
        ends = await asyncio.gather(*(engine.stop_trace() for engine in self._engines))
        return [problem for problems in ends for problem in problems]

    async def trace_ended(self) -> None:
        await asyncio.gather(*(engine.trace_ended() for engine in self._engines))

    async def close(self) -> None:
        await self._dispatcher.close()


class Fleet:
    """The replicas of one server, from its start to its end."""

    def __init__(
        self,
        members: Members,
        *,
        entrance: Entrance | None = None,
        tracer: Tracer | None = None,
        adapters: AdapterRegistry | None = None,
        faults: Faults | None = None,
    ) -> None:
        """`tracer` and `faults` are those of this process. No `entrance` lets in clients of the API alone."""
        self.members = members
        self.pools = members.pools
        self.dispatcher = next(iter(members.pools.values()))
        """The default pool's."""
        self.is_router = members.is_router
        self.tracer = tracer or Tracer("frontend")
        self.adapters = adapters or AdapterRegistry()
        self.faults = faults or Faults(None)
        self.id = new_id()
        self.tracing: TraceOwner | None = None
        """Tracing of this server; set before the start."""
        self._entrance = entrance
        self._open: OpenEntrance | None = None

    @classmethod
    def of_engines(
        cls,
        engine: EngineConfig,
        policy: PolicyName = DEFAULT_POLICY,
        *,
        entrance: Entrance | None = None,
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
        return cls(
            EngineMembers(dispatcher, engines),
            entrance=entrance,
            tracer=tracer,
            adapters=AdapterRegistry(engine.worker, engines, adapter_directory),
            faults=Faults(engine.faults),
        )

    async def start(self) -> None:
        """Returns when requests can be taken.

        Raises ConfigError or EngineDeadError if the fleet cannot start; `close` leaves nothing behind.
        """
        await self.members.start(self)
        if self._entrance is not None:
            self._open = self._entrance.open(self)

    async def leave(self) -> None:
        """Tells all who ask through the entrance to send nothing new; running requests continue."""
        if self._open is not None:
            await self._open.leave()

    def check_room(self, tenant: str, weight: float) -> None:
        """Raises OverloadedError: no pool takes a request of this tenant, however short it is."""
        refusals: list[OverloadedError] = []
        for dispatcher in self.pools.values():
            try:
                return dispatcher.check_room(tenant, weight)
            except OverloadedError as error:
                refusals.append(error)
        raise min(refusals, key=lambda error: error.retry_after_s)

    async def health(self) -> Health:
        """Ready as soon as one of the pools is."""
        found = await asyncio.gather(*(one.health() for one in self.pools.values()))
        return next((health for health in found if health.ready), found[0])

    async def load(self) -> LoadReport:
        """The report of all pools together. Raises EngineDeadError: as `Dispatcher.load`."""
        if len(self.pools) == 1:
            return await self.dispatcher.load()
        reports = await asyncio.gather(*(one.load() for one in self.pools.values()))
        named = [
            msgspec.structs.replace(replica, model=name)
            for name, report in zip(self.pools, reports, strict=True)
            for replica in report.replicas
        ]
        is_ready = any(report.is_worker_ready for report in reports)
        return msgspec.structs.replace(
            merged(reports), is_worker_ready=is_ready, replicas=tuple(named)
        )

    def subscribe_steps(self, listener: StepListener) -> Callable[[], None]:
        """Tells of the steps of all pools, as `Endpoint.subscribe_steps`."""
        ends = ExitStack()
        for dispatcher in self.pools.values():
            ends.callback(dispatcher.subscribe_steps(listener))
        return ends.close

    async def drain(self, timeout_s: float) -> None:
        await asyncio.gather(*(one.drain(timeout_s) for one in self.pools.values()))

    async def close(self) -> None:
        if self._open is not None:
            await self._open.close()
        await self.members.close()

    def start_trace(self, order: StartTrace) -> None:
        """All members trace from now on, and those that come later."""
        self.members.start_trace(order)
        if self._open is not None:
            self._open.compare_clocks()

    async def stop_trace(self) -> list[str]:
        return await self.members.stop_trace()

    async def trace_ended(self) -> None:
        await self.members.trace_ended()


def new_id() -> str:
    return secrets.token_hex(8)


def replicas_of(engine: EngineConfig) -> list[EngineConfig]:
    """The configuration of each replica."""
    places = map(RankPlace, range(engine.worker.parallel.data_parallel_size))
    workers = [msgspec.structs.replace(engine.worker, place=place) for place in places]
    return [msgspec.structs.replace(engine, worker=worker) for worker in workers]
