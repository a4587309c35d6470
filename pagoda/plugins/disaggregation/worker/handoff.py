# SPDX-License-Identifier: Apache-2.0
"""A worker's part in prefill/decode handoff: exports its KV memory, and reads that of other engines."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial

import msgspec

from pagoda.backend.kv_store import ReachedByNetworks
from pagoda.errors import ConfigError, TransportError
from pagoda.faults.injector import Faults
from pagoda.kv.memory import DeviceMemory, Extent, OwnMemory
from pagoda.messages.transfers import KVRank
from pagoda.messages.worker import WorkerReady
from pagoda.messages.worker_config import KVHandoffConfig
from pagoda.plugins.disaggregation.transport.base import (
    Access,
    ExportedMemory,
    KVTransport,
    MemoryLink,
)
from pagoda.plugins.disaggregation.transport.choose import TRANSPORTS
from pagoda.plugins.disaggregation.worker.fetcher import KVFetcher
from pagoda.plugins.disaggregation.worker.landing import DeviceLanding, DirectLanding, OpenLanding
from pagoda.plugins.disaggregation.worker.plan import own_parts
from pagoda.worker.kv.jobs import Jobs
from pagoda.worker.kv.manifest import kv_digest
from pagoda.worker.loading import LoadedWorker
from pagoda.worker.memory_plan import WorkerMemoryPlan

_log = logging.getLogger(__name__)


class KVHandoff:
    """One rank's side of the handoff: the memory that it exports, and its way to the memory of others."""

    def __init__(
        self,
        config: KVHandoffConfig,
        plan: WorkerMemoryPlan,
        loaded: LoadedWorker,
        faults: Faults | None = None,
    ) -> None:
        """`faults` are those of this process. Raises ConfigError if none of the transports works here."""
        worker = plan.config
        self._connect_at = (faults or Faults(None)).before("transfer.read", self._connect)
        self._parts = own_parts(loaded.kv, plan.shard, plan.layer_places)
        self.group_bytes = [
            sum(own.part.num_bytes for own in self._parts if own.part.group == group)
            for group in range(len(plan.kv_groups))
        ]
        """Bytes of this rank's parts of a block, by KV group."""
        self._rank = worker.parallel.rank_in_replica(worker.place)
        self._pool = worker.parallel.pool_of(worker.place)
        self._fetches = config.role.fetches_kv
        self.digest = kv_digest(plan, loaded.kv)
        self._transports: dict[str, KVTransport] = {}
        """The best first."""
        self._exported: dict[str, ExportedMemory] = {}
        self._store = store = loaded.kv
        regions = store.regions()
        memory: OwnMemory | DeviceMemory
        if regions:
            memory = OwnMemory(regions, store.file())
            self._open_landing: OpenLanding = partial(
                DirectLanding, [region.address for region in regions]
            )
        else:
            sizes = tuple(store.num_blocks * tensor.block_stride for tensor in store.tensors)
            direct = store.direct_memory if isinstance(store, ReachedByNetworks) else None
            memory = DeviceMemory(sizes, self._copy, direct)
            self._open_landing = partial(DeviceLanding, store)
        host = worker.bind_host or config.host  # each host of a replica has its own
        access = Access(host, config.secret, config.encrypts)
        problems = []
        for name in config.transports:
            try:
                transport = TRANSPORTS[name](memory, access)
                if config.role.holds_kv:
                    self._exported[name] = transport.export()
                self._transports[name] = transport
            except TransportError as error:
                problems.append(f"{name}: {error}")
        if not self._transports:
            raise ConfigError(
                f"no transport of --kv-transports works on this host ({'; '.join(problems)})."
            )
        for problem in problems:
            _log.warning("no KV goes over %s", problem)

    def _copy(self, extents: Sequence[Extent], into: memoryview) -> None:
        """Copies KV that a reader asks for, of steps that were executed before it knew of them."""
        self._store.read_extents(extents, into, self._store.computed()).wait()

    def open_fetcher(self, jobs: Jobs) -> KVFetcher | None:
        """Ready to start the threads that fetch; None where nothing is to be fetched."""
        if not self._fetches:
            return None
        return KVFetcher(self._parts, self._rank, self._connect_at, self._open_landing, jobs)

    def _connect(self, rank: KVRank, deadline: float) -> MemoryLink:
        """Raises TransportError, with the reason of each, if no transport reaches the rank."""
        problems = []
        for name, transport in self._transports.items():
            if name in rank.descriptors:
                try:
                    link = transport.connect(rank.descriptors[name], deadline)
                except TransportError as error:
                    problems.append(f"{name}: {error}")
                    continue
                _log.info("reading KV over %s", name)
                return link
        offered = ", ".join(sorted(rank.descriptors)) or "none"
        own = ", ".join(self._transports)
        raise TransportError(
            "; ".join(problems)
            or f"the other side offers its KV over {offered}, this one reads over {own}"
        )

    def described(self, ready: WorkerReady) -> WorkerReady:
        """Adds what the engine needs to know of the handoff to `ready`."""
        rank = KVRank(
            parts=tuple(own.part for own in self._parts),
            num_blocks=self._parts[0].num_blocks,
            descriptors={name: memory.descriptor for name, memory in self._exported.items()},
            pool=self._pool,
        )
        return msgspec.structs.replace(ready, kv_ranks=(rank,), kv_digest=self.digest)

    def close(self) -> None:
        for memory in self._exported.values():
            memory.close()


def open_handoff(plan: WorkerMemoryPlan, loaded: LoadedWorker, faults: Faults | None) -> KVHandoff:
    """An `OpenRemoteMemory`."""
    config = plan.config.kv_handoff
    if config is None:
        raise ValueError("Memory is opened for a configuration with handoff.")
    return KVHandoff(config, plan, loaded, faults)
