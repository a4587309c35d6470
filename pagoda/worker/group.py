"""How the tensor-parallel ranks of a stage reach each other: through memory on one host, else over the network."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import torch

from pagoda.backend.cpu_collectives import SharedMemory, SharedMemoryCollectives
from pagoda.backend.cpu_native import BackendUnavailableError, choose_instruction_set
from pagoda.engine.messages import WorkerHello
from pagoda.parallel.collectives import Collectives
from pagoda.parallel.distributed import DistributedCollectives, GroupStore

LOOPBACK = "127.0.0.1"


class GroupOffer:
    """What rank 0 of a stage holds ready for the others, before it knows where they are.

    Must live as long as they may still be joining.
    """

    def __init__(self, bind_host: str, size: int) -> None:
        """`bind_host` is empty when all ranks are on this host."""
        self._memory: SharedMemory | None = None
        self._store: GroupStore | None = None
        with contextlib.suppress(BackendUnavailableError):
            choose_instruction_set()
            self._memory = SharedMemory(size)
        if self._memory is None or bind_host:
            self._store = GroupStore(bind_host or LOOPBACK)

    @property
    def shared_memory(self) -> str:
        """Its path; empty where the native kernels are missing."""
        return self._memory.path if self._memory is not None else ""

    @property
    def address(self) -> str:
        """`host:port` of a store; empty where nobody will need it."""
        return self._store.address if self._store is not None else ""


def form_group(
    rank: int, members: Sequence[WorkerHello], device: torch.device, bind_host: str
) -> Collectives:
    """Joins the group of a stage whose ranks said `members`, of which this is number `rank`.

    All decide alike: by what rank 0 offers, and by whether all are on one host.
    """
    first, size = members[0], len(members)
    if first.shared_memory and len({member.host for member in members}) == 1:
        return SharedMemoryCollectives(first.shared_memory, rank, size)
    return DistributedCollectives(first.group_address, rank, size, device, bind_host or LOOPBACK)
