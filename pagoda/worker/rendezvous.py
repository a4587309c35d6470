# SPDX-License-Identifier: Apache-2.0
"""Rendezvous of the ranks of one replica: each says hello, and connects to the addresses of the others.

The ranks of a stage form a group: over shared memory on one host, else over the network. It carries control
messages, and data of backends that compute in host memory; others open collectives of their own. Where there are
both tensor-parallel and context-parallel ranks, those of each kind form further groups.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from pathlib import Path

import msgspec
import zmq

from pagoda.backend.cpu.collectives import SharedMemory, SharedMemoryCollectives
from pagoda.backend.cpu.native import choose_instruction_set
from pagoda.devices import BackendUnavailableError
from pagoda.errors import ConfigError
from pagoda.ipc.addresses import bracketed
from pagoda.ipc.curve import start_authenticator
from pagoda.messages.worker import GroupOffer, WorkerHello, WorkerPeers
from pagoda.messages.worker_config import WorkerConfig
from pagoda.parallel.collectives import LOOPBACK, HostGroup, RankGroups, stage_groups
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
        self._members = parallel.groups_of(place)
        # What the first rank of a group offers to the others before it knows where they are.
        self._offers = {
            name: _Offer(len(places), config.bind_host)
            for name, places in self._members.items()
            if places[0] == place
        }

    def hello(self) -> WorkerHello:
        return WorkerHello(
            host=host_identity(self._config.bind_host),
            stage_address="" if self.source is None else self.source.address,
            offers={name: offer.told for name, offer in self._offers.items()},
        )

    def form_groups(self, peers: WorkerPeers) -> RankGroups:
        """The groups of this rank, for whose ranks it waits.

        Raises ConfigError if this process cannot open memory that another of its host offers, ConnectionError if
        the ranks do not reach each other.
        """
        joined = {name: self._join(name, peers) for name in self._members}
        return stage_groups(self._config.parallel, joined)

    def _join(self, name: str, peers: WorkerPeers) -> HostGroup:
        places, config = self._members[name], self._config
        hosts = [self._hello_of(peers, place) for place in places]
        offer = hosts[0].offers.get(name, GroupOffer())
        group = join_group(
            places.index(config.place), [it.host for it in hosts], offer, config.bind_host
        )
        if name in self._offers:
            self._offers[name].taken(group)
        return group

    def target(self, peers: WorkerPeers) -> StageOutput | None:
        """The rank of the same number one stage on; None on the last stage."""
        place, num_stages = self._config.place, self._config.parallel.pipeline_parallel_size
        if place.pp == num_stages - 1:
            return None
        successor = self._hello_of(peers, msgspec.structs.replace(place, pp=place.pp + 1))
        return StageOutput(self._context, successor.stage_address, self._config.curve)

    def _hello_of(self, peers: WorkerPeers, place: RankPlace) -> WorkerHello:
        return peers.hellos[self._config.parallel.rank_in_replica(place)]


class _Offer:
    """Memory and a meeting point that the first rank of a group has ready for the others."""

    def __init__(self, size: int, bind_host: str) -> None:
        """`bind_host` is empty where all ranks are on this host."""
        self._memory = _shared_memory(size)
        self._store: GroupStore | None = None
        if self._memory is None or bind_host:
            self._store = GroupStore(bind_host or LOOPBACK)
        self.told = GroupOffer(
            "" if self._store is None else self._store.address,
            "" if self._memory is None else self._memory.path,
        )

    def taken(self, group: HostGroup) -> None:
        if self._memory is not None:
            self._memory.close()  # all ranks have opened it, or none will
        if isinstance(group, SharedMemoryCollectives):
            self._store = None


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


def join_group(rank: int, hosts: Sequence[str], offer: GroupOffer, bind_host: str) -> HostGroup:
    """Joins the group of the ranks on `hosts`, of which this is number `rank`, and waits for all.

    They decide alike: by what the first one offers, and by whether all are on one host.
    """
    size = len(hosts)
    if not offer.shared_memory or len(set(hosts)) > 1:
        return DistributedCollectives(offer.address, rank, size, bind_host or LOOPBACK)
    try:
        group = SharedMemoryCollectives(offer.shared_memory, rank, size)
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
