# SPDX-License-Identifier: Apache-2.0
"""The hosts and routers of a topology in virtual time: those of `pagoda route`, over wires that take time."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import cast

from pagoda.concurrency.async_utils import cancel_all, watched_task
from pagoda.fleet.endpoint import ReplicaState
from pagoda.fleet.policies import POLICIES, Candidate, Policy, RoutingRequest
from pagoda.ipc.clock import LoopClock
from pagoda.ipc.event_socket import SILENCE_S
from pagoda.messages.engine_config import EngineConfig, HandoffConfig, KVTiersConfig, SimConfig
from pagoda.messages.frontend import GenerateRequest, TokenChunk
from pagoda.messages.worker_config import CurveKeys, Role, WorkerConfig
from pagoda.plugins.router.discovery.base import Discovery, HostListener, HostTable
from pagoda.plugins.router.host_client import Identity
from pagoda.plugins.router.host_server import HostServer
from pagoda.plugins.router.messages import HostRecord
from pagoda.plugins.router.prefill_decode import PrefillDecodeRouter
from pagoda.plugins.router.registry import Registry
from pagoda.plugins.simulate.cores import Cores, SimProcess
from pagoda.plugins.simulate.engine import SimEngine
from pagoda.plugins.simulate.network import SimNetwork
from pagoda.plugins.simulate.processes import Machine, ReplicaProcesses
from pagoda.plugins.simulate.sockets import Network, Process, SimSockets
from pagoda.plugins.simulate.topology import HostKind, RouterKind, Topology
from pagoda.telemetry.request_tracker import RequestTracker
from pagoda.telemetry.tracer import Tracer

VOCAB_SIZE = 256
_KEYS = CurveKeys(server_key="", public_key="", secret_key="", server_secret_key="")


@dataclass(frozen=True)
class Observers:
    """Listeners for what happens to requests."""

    on_placed: Callable[[str, SimHost], None]
    """A request has reached a host; first its id."""
    on_choice: Callable[[str, RoutingRequest, Sequence[Candidate], int], None] | None = None
    """A router, by its path, has chosen one of several."""


def engine_config(topology: Topology, kind: str) -> EngineConfig:
    """The configuration of the engine of a host."""
    host, steps = topology.hosts[kind], topology.steps[kind]
    has_role = host.role is not Role.NONE
    return EngineConfig(
        worker=WorkerConfig(model="sim"),
        executor="sim",
        sim=SimConfig(
            **steps.costs(),
            per_transferred_block_s=topology.block_s[kind],
            shares_link=True,
            num_blocks=host.blocks_with(steps),
            block_size=host.block_size,
            max_model_len=host.max_model_len,
            vocab_size=VOCAB_SIZE,
            kv_host_slots=host.host_blocks,
            answers_by_seed=True,
        ),
        max_num_seqs=host.max_num_seqs,
        max_num_batched_tokens=host.max_num_batched_tokens,
        max_num_waiting=host.max_num_waiting,
        kv_tiers=KVTiersConfig(host_bytes=host.host_blocks) if host.host_blocks else None,
        handoff=HandoffConfig(role=host.role, host="sim", keys=_KEYS) if has_role else None,
    )


class SimHost:
    """A host: one engine, which its router reaches over a wire."""

    def __init__(
        self,
        path: str,
        kind: str,
        spec: HostKind,
        number: int,
        config: EngineConfig,
        network: SimNetwork,
        observers: Observers,
        above: tuple[str, ...],
        *,
        latency_s: float,
        leap: int,
        processes: ReplicaProcesses | None,
    ) -> None:
        """`above` are the kinds of the routers in front of it, and its own; `latency_s`, `leap` and
        `processes` are as in `SimEngine`."""
        self.path = path
        self.kind = kind
        self.spec = spec
        self.number = number
        self.above = above
        self.router: SimRouter | None = None
        self.is_wanted = True
        """False of a host that is stopped, or is to be as soon as it has no requests."""
        self.used_since: float | None = None
        """Instant from which on it costs; None while it does not."""
        self.used_s = 0.0
        """Seconds for which it cost before."""
        self.engine = SimEngine(
            config,
            network=network,
            address=f"tcp://{path}:1",
            name=path,
            latency_s=latency_s,
            leap=leap,
            processes=processes,
        )
        self.engine.on_request = lambda request: observers.on_placed(request.request_id, self)
        self.engine.on_ready = self._join

    @property
    def is_up(self) -> bool:
        return self.engine.scheduler is not None

    def fail(self, for_s: float) -> None:
        """Loses its power for a while; its router notices when the host has been silent for long enough."""
        restart_s = max(for_s, SILENCE_S) + self.spec.start_s
        self.engine.kill(restart_s=restart_s, blames_requests=False, notice_s=SILENCE_S)

    def use(self) -> None:
        """The host costs from now on. May be called twice."""
        if self.used_since is None:
            self.used_since = asyncio.get_running_loop().time()

    def end_use(self) -> None:
        """The host costs no more. May be called twice."""
        if self.used_since is not None:
            self.used_s += asyncio.get_running_loop().time() - self.used_since
            self.used_since = None

    def _join(self) -> None:
        if self.router is not None:
            self.router.take_in(self)


class _Names(Discovery):
    """Tells a router of the routers behind it."""

    def __init__(self, table: HostTable) -> None:
        self._table = table

    async def follow(self, listener: HostListener) -> None:
        self._table.listen(listener)
        await asyncio.Event().wait()


class SimRouter:
    """A router, with hosts or routers behind it, and a door for the one above."""

    def __init__(
        self, path: str, kind: str, spec: RouterKind, network: Network, observers: Observers
    ) -> None:
        self.path = path
        self.kind = kind
        self.spec = spec
        self.hosts: list[SimHost] = []
        self.routers: list[SimRouter] = []
        self.above: SimRouter | None = None
        self.tracker = RequestTracker(_now_ns)
        """Statistics of the requests that have come to the router."""
        self._network = network
        self._observers = observers
        self._num_starts = 0
        self._table = HostTable()
        self._taken: set[int] = set()
        """Numbers of hosts that were taken in."""
        self.process: Process | None = None
        """None while the router is down."""
        self._door: HostServer | None = None
        self._restart: asyncio.Task[None] | None = None
        self.members: PrefillDecodeRouter
        self._registry: Registry | None = None

    async def start(self) -> None:
        """Returns when the router has a host, and with it a door: before, the one above does not hear of it."""
        self._num_starts += 1
        latency_s = self.spec.round_trip_ms / 2000
        process = self.process = Process(self.path, lambda: latency_s)
        tracer = Tracer("router", clock_ns=_now_ns)
        self.members = PrefillDecodeRouter(
            self._policy(), self.spec.min_prefill_tokens, tracer, no_replica_timeout_s=3600.0
        )
        identity = Identity(f"{self.path}-{self._num_starts}", "sim", "digest", is_router=True)
        sockets = SimSockets(self._network, process)
        self._taken.clear()
        for host in self.hosts:
            if host.is_up and host.is_wanted:
                self.take_in(host)
        if self.routers:
            names = _Names(self._table)
            self._registry = Registry({"": self.members}, names, sockets, identity, tracer)
            await self._registry.first_host()
        if self.above is not None:
            await self._first_host()
            address = f"tcp://{self.path}:1"
            self._door = HostServer(
                self.members.dispatcher, sockets, address, identity, tracer, self.tracker
            )
            self.above.name_router(address, HostRecord(host_id=identity.id, address=address))

    async def _first_host(self) -> None:
        dispatcher, changed = self.members.dispatcher, asyncio.Event()
        unwatch = dispatcher.watch(changed.set)
        while dispatcher.state is ReplicaState.STARTING:
            changed.clear()
            await changed.wait()
        unwatch()

    def name_router(self, address: str, record: HostRecord | None) -> None:
        """Tells of a router behind this one; None: it is down."""
        self._table.set(address, record)

    def take_in(self, host: SimHost) -> None:
        """Takes in a host that is up, once."""
        if self.process is not None and host.number not in self._taken:
            self._taken.add(host.number)
            self.members.add(host.engine.replica)

    def knows(self, host: SimHost) -> bool:
        """True of a host that was taken in, and not let go since."""
        return self.process is not None and host.number in self._taken

    def let_go(self, host: SimHost) -> None:
        """Forgets a host, which may come again."""
        self._taken.discard(host.number)
        self.members.remove(host.engine.replica)

    def fail(self, for_s: float) -> None:
        """The process ends, and another one starts after a while. The hosts go on."""
        if self.process is None or self._restart is not None:
            return
        self._restart = watched_task(self._fail(for_s))

    async def _fail(self, for_s: float) -> None:
        process, self.process = self.process, None
        if process is not None:
            process.kill()
        if self.above is not None:
            self.above.name_router(f"tcp://{self.path}:1", None)
        await self._shut(ends_hosts=False)
        await asyncio.sleep(for_s)
        await self.start()
        self._restart = None

    def cut(self, for_s: float) -> None:
        """Lets nothing pass to and from the router above for a while."""
        if self.process is not None:
            self._network.cut(self.process, for_s)

    def below(self) -> Iterator[SimRouter]:
        """The router itself and all behind it."""
        yield self
        for router in self.routers:
            yield from router.below()

    async def close(self) -> None:
        if self._restart is not None:
            await cancel_all([self._restart])
        await self._shut(ends_hosts=True)

    async def _shut(self, *, ends_hosts: bool) -> None:
        """Closes the door, then what is behind it. May be called twice."""
        door, self._door = self._door, None
        registry, self._registry = self._registry, None
        if door is not None:
            await door.close()
        if not ends_hosts:
            for host in self.hosts:
                self.members.remove(host.engine.replica)
        if registry is not None:
            await registry.close()
        await self.members.close()

    def _policy(self) -> Policy:
        policy, on_choice = POLICIES[self.spec.policy], self._observers.on_choice
        if on_choice is None:
            return policy

        def choose(request: RoutingRequest, candidates: Sequence[Candidate]) -> int:
            chosen = policy.choose(request, candidates)
            on_choice(self.path, request, candidates, chosen)
            return chosen

        return policy._replace(choose=choose)


class SimFleet:
    """All hosts and routers of a topology; belongs to one event loop."""

    def __init__(self, topology: Topology, observers: Observers, leap: int, seed: int) -> None:
        """`leap` is as in `SimEngine`; `seed` is that of the variation of steps."""
        self._leap = leap
        self._seed = seed
        self.hosts: list[SimHost] = []
        self.routers: list[SimRouter] = []
        self._topology = topology
        self._observers = observers
        self._sockets = Network(lambda _: None)
        self._wires = SimNetwork(LoopClock())
        self._configs = {kind: engine_config(topology, kind) for kind in topology.hosts}
        self.root = self._router(topology.root, topology.root, ())

    def _router(self, path: str, kind: str, above: tuple[str, ...]) -> SimRouter:
        topology, spec = self._topology, self._topology.routers[kind]
        router = SimRouter(path, kind, spec, self._sockets, self._observers)
        self.routers.append(router)
        machine = None if spec.cores is None else _machine(spec.cores)
        for child, count in spec.children.items():
            for number in range(count):
                inner = f"{path}/{child}" + (f".{number}" if count > 1 else "")
                if child in topology.routers:
                    below = self._router(inner, child, (*above, kind))
                    below.above = router
                    router.routers.append(below)
                else:
                    router.hosts.append(self._host(inner, child, (*above, kind, child), machine))
        return router

    def _host(
        self, path: str, kind: str, above: tuple[str, ...], machine: Machine | None
    ) -> SimHost:
        """A host on the machine of its router; None: on one of its own, where no process waits for another."""
        times, processes = self._topology.steps[kind], None
        if machine is not None or times.has_processes:
            seed = f"{self._seed} {path}"
            processes = ReplicaProcesses(machine or _machine(math.inf), times, seed)
        host = SimHost(
            path,
            kind,
            self._topology.hosts[kind],
            len(self.hosts),
            self._configs[kind],
            self._wires,
            self._observers,
            above,
            latency_s=self._topology.latency_s(kind),
            leap=self._leap,
            processes=processes,
        )
        self.hosts.append(host)
        return host

    async def start(self) -> None:
        """Starts all hosts, then the routers from the lowest ones up."""
        for host in self.hosts:
            if host.is_wanted:
                host.use()
                await host.engine.start()
        for router in reversed(self.routers):
            for host in router.hosts:
                host.router = router
            await router.start()

    def generate(self, request: GenerateRequest) -> AsyncIterator[TokenChunk]:
        """The answer of the root to a request."""
        if self.root.tracker.num_listeners:
            return self._tracked(request)
        return self.root.members.dispatcher.generate(request)

    async def _tracked(self, request: GenerateRequest) -> AsyncIterator[TokenChunk]:
        tracker, dispatcher = self.root.tracker, self.root.members.dispatcher
        chunks = cast(AsyncGenerator[TokenChunk, None], dispatcher.generate(request))
        with tracker.answering(request) as record:
            async with aclosing(chunks):
                async for chunk in chunks:
                    tracker.on_chunk(record, chunk, len(chunk.token_ids))
                    if chunk.finish_reason is not None:
                        record.ending = str(chunk.finish_reason), chunk.error or ""
                    yield chunk

    async def close(self) -> None:
        for router in self.routers:
            await router.close()


def _machine(num_cores: float) -> Machine:
    cores = Cores(num_cores)
    return Machine(cores, SimProcess(cores))


def _now_ns() -> int:
    return round(asyncio.get_running_loop().time() * 1e9)
