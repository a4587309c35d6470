# SPDX-License-Identifier: Apache-2.0
"""Rendezvous of the ranks of one replica: each says hello, and connects to the addresses of the others.

The tensor-parallel ranks of a stage form a group: over shared memory on one host, else over the network. It
carries control messages, and data of backends that compute in host memory; others open collectives of their own.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from pathlib import Path

import zmq

from pagoda.backend.cpu.collectives import SharedMemory, SharedMemoryCollectives
from pagoda.backend.cpu.native import choose_instruction_set
from pagoda.devices import BackendUnavailableError
from pagoda.errors import ConfigError
from pagoda.ipc.addresses import bracketed
from pagoda.ipc.curve import start_authenticator
from pagoda.messages.worker import WorkerHello, WorkerPeers
from pagoda.messages.worker_config import WorkerConfig
from pagoda.parallel.collectives import LOOPBACK, HostGroup
from pagoda.parallel.config import RankPlace
from pagoda.parallel.distributed import DistributedCollectives, GroupStore
from pagoda.worker.stages import StageInput, StageOutput

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_PID_NAMESPACE = Path("/proc/self/ns/pid")

_log = logging.getLogger(__name__)


class Rendezvous:
    """One rank's side of it. Must live as long as the worker: peers may join later than this rank."""

    def __init__(
        self,
        config: WorkerConfig,
        context: zmq.Context[zmq.Socket[bytes]],
        address: str,
        *,
        hidden_size: int,
    ) -> None:
        """`address` is the engine's: beside it lie the sockets of the stages, where it is a path."""
        self._config = config
        self._context = context
        parallel, place = config.parallel, config.place
        if config.curve is not None:
            start_authenticator(context, config.curve)
        self.source: StageInput | None = None
        if place.pp > 0:
            own = f"{address}-{parallel.rank_in_replica(place)}"
            if config.curve is not None:
                own = f"tcp://{bracketed(config.bind_host)}:*"
            self.source = StageInput(context, own, config.curve, hidden_size=hidden_size)
        self._memory: SharedMemory | None = None
        self._store: GroupStore | None = None
        # What rank 0 of a stage offers to the others before it knows where they are.
        if parallel.tensor_parallel_size > 1 and place.tp == 0:
            self._memory = _shared_memory(parallel.tensor_parallel_size)
            if self._memory is None or config.bind_host:  # empty where all ranks are on this host
                self._store = GroupStore(config.bind_host or LOOPBACK)

    def hello(self) -> WorkerHello:
        return WorkerHello(
            host=host_identity(self._config.bind_host),
            stage_address="" if self.source is None else self.source.address,
            group_address="" if self._store is None else self._store.address,
            shared_memory="" if self._memory is None else self._memory.path,
        )

    def form_group(self, peers: WorkerPeers) -> HostGroup | None:
        """The tensor-parallel ranks of this stage, for which it waits; None where there is one only.

        Raises ConfigError if this process cannot open memory that another of its host offers, ConnectionError if
        the ranks do not reach each other.
        """
        place, size = self._config.place, self._config.parallel.tensor_parallel_size
        if size == 1:
            return None
        members = [self._hello_of(peers, RankPlace(place.dp, place.pp, tp)) for tp in range(size)]
        group = join_group(place.tp, members, self._config.bind_host)
        if self._memory is not None:
            self._memory.close()  # all ranks have opened it, or none will
        if isinstance(group, SharedMemoryCollectives):
            self._store = None
        return group

    def target(self, peers: WorkerPeers) -> StageOutput | None:
        """The rank of the same number one stage on; None on the last stage."""
        place, num_stages = self._config.place, self._config.parallel.pipeline_parallel_size
        if place.pp == num_stages - 1:
            return None
        successor = self._hello_of(peers, RankPlace(place.dp, place.pp + 1, place.tp))
        return StageOutput(self._context, successor.stage_address, self._config.curve)

    def _hello_of(self, peers: WorkerPeers, place: RankPlace) -> WorkerHello:
        return peers.hellos[self._config.parallel.rank_in_replica(place)]


def _shared_memory(size: int) -> SharedMemory | None:
    try:
        choose_instruction_set()
        return SharedMemory(size)
    except BackendUnavailableError:
        return None
    except (OSError, ValueError) as error:
        _log.warning(
            "ranks of one host cannot share memory and use gloo, which is slower: %s", error
        )
        return None


def join_group(rank: int, members: Sequence[WorkerHello], bind_host: str) -> HostGroup:
    """Joins the group of the ranks that said `members`, of which this is number `rank`, and waits for all.

    They decide alike: by what rank 0 offers, and by whether all are on one host.
    """
    first, size = members[0], len(members)
    if not first.shared_memory or len({member.host for member in members}) > 1:
        return DistributedCollectives(first.group_address, rank, size, bind_host or LOOPBACK)
    try:
        group = SharedMemoryCollectives(first.shared_memory, rank, size)
    except (BackendUnavailableError, OSError) as error:
        raise ConfigError(
            f"this worker cannot open the memory that another one of this host shares ({error}); "
            "all workers of a host must run as one user, from one installation."
        ) from None
    group.broadcast(b"" if rank == 0 else None)
    return group


def host_identity(bind_host: str) -> str:
    """The same for processes that can share memory: they see each other under /proc, and have one address."""
    namespace = os.stat(_PID_NAMESPACE).st_ino
    return f"{_BOOT_ID.read_text(encoding='ascii').strip()}/{namespace}/{bind_host}"
