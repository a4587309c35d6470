# SPDX-License-Identifier: Apache-2.0
"""Hosts and routers of a life, which are killed, leave, and come back."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import msgspec

from benchmarks.simulation.disk import SimDisk, disk_tiers
from benchmarks.simulation.seeds.draw import (
    ADAPTER,
    LEASE_S,
    NO_REPLICA_TIMEOUT_S,
    VOCAB_SIZE,
    EnginePlan,
    HostPlan,
    Plan,
)
from benchmarks.simulation.seeds.engine import EngineWorld, LateEngine, OffsetClock
from pagoda.concurrency.async_utils import cancel_all
from pagoda.fleet.dispatcher import Dispatcher
from pagoda.fleet.policies import POLICIES
from pagoda.messages.adapters import Adapter
from pagoda.messages.engine_config import EngineConfig, HandoffConfig, KVTiersConfig, SimConfig
from pagoda.messages.speculation import SpeculativeConfig
from pagoda.messages.transfers import TierPlace
from pagoda.messages.worker_config import CurveKeys, Role, WorkerConfig
from pagoda.parallel.config import ParallelConfig
from pagoda.plugins.router.discovery.base import Discovery, HostListener, HostTable
from pagoda.plugins.router.host_client import Identity
from pagoda.plugins.router.host_server import HostServer
from pagoda.plugins.router.messages import HostRecord
from pagoda.plugins.router.prefill_decode import PrefillDecodeRouter
from pagoda.plugins.router.registry import Registry
from pagoda.plugins.simulate.sockets import Latency, Network, Process, SimSockets
from pagoda.telemetry.tracer import Tracer

_KEYS = CurveKeys(server_key="", public_key="", secret_key="", server_secret_key="")


class Surroundings(msgspec.Struct):
    """Everything that surrounds the hosts and routers of a life."""

    plan: Plan
    engines: EngineWorld
    hosts: Network
    latency: Latency


def engine_config(plan: EnginePlan, host: HostPlan) -> EngineConfig:
    """The configuration of each engine of a host."""
    handoff = None
    if host.role is not Role.NONE:
        handoff = HandoffConfig(role=host.role, host="sim", keys=_KEYS, lease_s=LEASE_S)
    tiers = None
    if plan.has_disk:
        tiers = disk_tiers(1000, plan.min_touches, plan.host_slots)
    elif plan.host_slots:
        tiers = KVTiersConfig(host_bytes=plan.host_slots)
    worker = WorkerConfig(
        model="sim",
        parallel=ParallelConfig(
            pipeline_parallel_size=plan.num_stages,
            tensor_parallel_size=2 if host.ranks == "own requests" else 1,
            dp_attention=host.ranks == "own requests",
            context_parallel_size=2 if host.ranks == "segments" else 1,
        ),
        segment_tokens=2 * plan.block_size,
        adapters=(Adapter("adapter", "/nowhere", ADAPTER),),
    )
    sim = SimConfig(
        base_s=plan.base_s,
        per_token_s=plan.per_token_s,
        per_transferred_block_s=plan.per_block_s,
        num_blocks=host.num_blocks * host.num_ranks,
        block_size=plan.block_size,
        max_model_len=plan.max_model_len,
        vocab_size=VOCAB_SIZE,
        kv_groups=plan.groups,
        kv_host_slots=plan.host_slots * host.num_ranks,
        segment_tokens=plan.segment_tokens,
        per_cold_block_s=plan.per_cold_block_s,
        max_proposals=4 if plan.drafts == "worker" else 0,
        kv_places=(TierPlace("disk", "/nowhere", 1),) if plan.has_disk else (),
    )
    return EngineConfig(
        worker=worker,
        executor="sim",
        sim=sim,
        max_num_seqs=plan.max_num_seqs,
        max_num_batched_tokens=plan.max_num_batched_tokens,
        max_num_waiting=plan.max_num_waiting,
        enable_prefix_caching=plan.prefix_caching,
        kv_tiers=tiers,
        handoff=handoff,
        speculation=SpeculativeConfig(method="off" if plan.drafts == "off" else "auto"),
        fail_on_load_failure=plan.fails_on_load_failure,
    )


class Host:
    """A server: a dispatcher over engines, and a door for routers. Killed and started again as one process."""

    def __init__(self, around: Surroundings, number: int) -> None:
        self._around = around
        self.number = number
        self.plan = around.plan.hosts[number]
        self.name = f"host{number}"
        has_disk = around.plan.engine.has_disk
        self.disks = [SimDisk() if has_disk else None for _ in range(self.plan.num_engines)]
        self._num_starts = 0
        self.clients: dict[asyncio.Task[None], None] = {}
        """Tasks in the order in which they began: that of a set would differ from process to process."""
        """Clients that ask this host directly; they end with it."""
        self.record: HostRecord | None = None

    @property
    def is_up(self) -> bool:
        return self.record is not None

    async def start(self) -> None:
        around, plan = self._around, self._around.plan
        self._num_starts += 1
        self.process = Process(self.name, around.latency)
        clock = OffsetClock(self.plan.clock_offset_s)
        config = engine_config(plan.engine, self.plan)
        self.engines = [
            LateEngine(
                config,
                around.engines,
                self.process,
                f"{self.name}e{index}",
                clock,
                f"tcp://{self.name}e{index}:1",
                self.disks[index],
            )
            for index in range(self.plan.num_engines)
        ]
        tracer = Tracer("frontend", clock_ns=clock.now_ns)
        replicas = [engine.replica for engine in self.engines]
        self.dispatcher = Dispatcher(replicas, POLICIES[plan.policy], tracer=tracer, clock=clock)
        await self.dispatcher.start()
        identity = Identity(f"{self.name}-{self._num_starts}", "sim", "digest", is_router=False)
        address = f"tcp://{self.name}:{self.number + 1}"
        sockets = SimSockets(around.hosts, self.process)
        self.door = HostServer(self.dispatcher, sockets, address, identity, tracer)
        self.record = HostRecord(host_id=identity.id, address=address)

    async def kill(self) -> None:
        """Ends the process: nobody hears of it but by the end of connections."""
        self.record = None
        self.process.kill()
        for engine in self.engines:
            engine.end()
        await cancel_all(list(self.clients))
        await self._close()

    async def finish(self) -> None:
        """Ends the host when it has answered what it has; routers have been told."""
        await self.dispatcher.drain(30.0)
        await self._close()

    async def close(self) -> None:
        self.record = None
        await self._close()

    async def _close(self) -> None:
        await self.door.close()
        await self.dispatcher.close()


class _Names(Discovery):
    """Tells a router of hosts as soon as they are named."""

    def __init__(self, table: HostTable) -> None:
        self._table = table

    async def follow(self, listener: HostListener) -> None:
        self._table.listen(listener)
        await asyncio.Event().wait()


class Router:
    """A frontend over hosts."""

    def __init__(self, around: Surroundings, number: int) -> None:
        self._around = around
        self.name = f"router{number}"
        self._num_starts = 0
        self.clients: dict[asyncio.Task[None], None] = {}
        """Tasks in the order in which they began: that of a set would differ from process to process."""
        self.is_up = False
        self.looks_for_hosts = False
        """True from the beginning of a start, which ends once a host is found."""

    async def start(self, hosts: Sequence[HostRecord]) -> None:
        plan = self._around.plan
        self._num_starts += 1
        self.process = Process(self.name, self._around.latency)
        tracer = Tracer("router", clock_ns=OffsetClock(0.0).now_ns)
        self.members = PrefillDecodeRouter(
            POLICIES[plan.policy],
            plan.min_tokens,
            tracer,
            no_replica_timeout_s=NO_REPLICA_TIMEOUT_S,
        )
        self.dispatcher = self.members.dispatcher
        self._table = HostTable()
        identity = Identity(f"{self.name}-{self._num_starts}", "sim", "digest", is_router=True)
        sockets = SimSockets(self._around.hosts, self.process)
        self.registry = Registry({"": self.members}, _Names(self._table), sockets, identity, tracer)
        self.looks_for_hosts = True
        for host in hosts:
            self.name_host(host.address, host)
        await self.registry.first_host()
        self.is_up = True

    def name_host(self, address: str, host: HostRecord | None) -> None:
        """Tells the registry of the host at an address; None: there is none."""
        self._table.set(address, host)

    async def kill(self) -> None:
        self.is_up = self.looks_for_hosts = False
        self.process.kill()
        await cancel_all(list(self.clients))
        await self.close()

    async def close(self) -> None:
        await self.registry.close()
        await self.members.close()
