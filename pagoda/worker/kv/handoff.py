"""A worker's part in prefill/decode handoff: exports its KV memory, and reads that of other engines."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import msgspec

from pagoda.errors import ConfigError
from pagoda.messages.transfers import KVRank
from pagoda.messages.worker import WorkerReady
from pagoda.pd.transport.base import (
    Access,
    ExportedMemory,
    MemoryLink,
    OwnMemory,
    Transport,
    TransportError,
)
from pagoda.pd.transport.choose import TRANSPORTS
from pagoda.worker.kv.fetcher import KVFetcher
from pagoda.worker.kv.jobs import Jobs
from pagoda.worker.kv.manifest import kv_digest
from pagoda.worker.kv.plan import OwnPart, own_parts
from pagoda.worker.loading import LoadedWorker, WorkerPlan

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class KVHandoff:
    """One rank's side of the handoff: the memory that it exports, and its way to the memory of others."""

    parts: tuple[OwnPart, ...]
    rank: int
    transports: dict[str, Transport]
    """The best first."""
    exported: dict[str, ExportedMemory]
    digest: str
    fetches: bool

    def open_fetcher(self, jobs: Jobs) -> KVFetcher | None:
        """Ready to start the threads that fetch; None where nothing is to be fetched."""
        return KVFetcher(self.parts, self.rank, self._connect, jobs) if self.fetches else None

    def _connect(self, rank: KVRank, deadline: float) -> MemoryLink:
        """
        Raises:
            TransportError: no transport reaches it; says what went wrong with each.
        """
        problems = []
        for name, transport in self.transports.items():
            if name in rank.descriptors:
                try:
                    link = transport.connect(rank.descriptors[name], deadline)
                except TransportError as error:
                    problems.append(f"{name}: {error}")
                    continue
                _log.info("reading KV over %s", name)
                return link
        offered = ", ".join(sorted(rank.descriptors)) or "none"
        own = ", ".join(self.transports)
        raise TransportError(
            "; ".join(problems)
            or f"the other side offers its KV over {offered}, this one reads over {own}"
        )

    def described(self, ready: WorkerReady) -> WorkerReady:
        """Adds what the engine needs to know of the handoff to `ready`."""
        rank = KVRank(
            parts=tuple(own.part for own in self.parts),
            num_blocks=self.parts[0].num_blocks,
            descriptors={name: memory.descriptor for name, memory in self.exported.items()},
        )
        return msgspec.structs.replace(ready, kv_ranks=(rank,), kv_digest=self.digest)

    def close(self) -> None:
        for memory in self.exported.values():
            memory.close()


def open_handoff(plan: WorkerPlan, loaded: LoadedWorker) -> KVHandoff:
    """
    Raises:
        ConfigError: none of the transports works here.
    """
    handoff = plan.config.kv_handoff
    if handoff is None:
        raise ValueError("This worker has no part in handoff.")
    parts = own_parts(loaded.caches, plan.shard)
    regions = tuple(own.region for own in parts)
    file = None if loaded.shared is None else loaded.shared.file(regions)
    memory = OwnMemory(regions, file)
    host = plan.config.bind_host or handoff.host  # each host of a replica has its own
    access = Access(host, handoff.secret, handoff.encrypts)
    transports: dict[str, Transport] = {}
    exported: dict[str, ExportedMemory] = {}
    problems = []
    for name in handoff.transports:
        try:
            transport = TRANSPORTS[name](memory, access)
            if handoff.role.holds_kv:
                exported[name] = transport.export()
            transports[name] = transport
        except TransportError as error:
            problems.append(f"{name}: {error}")
    if not transports:
        raise ConfigError(
            f"no transport of --kv-transports works on this host ({'; '.join(problems)})."
        )
    for problem in problems:
        _log.warning("no KV goes over %s", problem)
    config = plan.config
    return KVHandoff(
        parts=parts,
        rank=config.parallel.rank_in_replica(config.place),
        transports=transports,
        exported=exported,
        digest=kv_digest(plan, loaded.caches),
        fetches=handoff.role.fetches_kv,
    )
