"""Groups of tensor-parallel ranks: over shared memory on one host, else over the network."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from pagoda.backend.cpu.collectives import SharedMemory, SharedMemoryCollectives
from pagoda.backend.cpu.native import choose_instruction_set
from pagoda.devices import BackendUnavailableError
from pagoda.errors import ConfigError
from pagoda.messages.worker import WorkerHello
from pagoda.parallel.collectives import Collectives
from pagoda.parallel.distributed import DistributedCollectives, GroupStore

LOOPBACK = "127.0.0.1"

_log = logging.getLogger(__name__)


class GroupEndpoint:
    """Shared memory and store that rank 0 of a stage offers to the others, before it knows where they are.

    Must live as long as they may still be joining.
    """

    def __init__(self, bind_host: str, size: int) -> None:
        """`bind_host` is empty when all ranks are on this host."""
        self._memory = _shared_memory(size)
        self._store: GroupStore | None = None
        if self._memory is None or bind_host:
            self._store = GroupStore(bind_host or LOOPBACK)

    @property
    def shared_memory(self) -> str:
        """Path of the shared memory; empty where there is none."""
        return self._memory.path if self._memory is not None else ""

    @property
    def address(self) -> str:
        """`host:port` of a store; empty where nobody will need it."""
        return self._store.address if self._store is not None else ""

    def close(self) -> None:
        """Closes shared memory and store, once all ranks have opened the memory."""
        if self._memory is not None:
            self._memory.close()
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


def form_group(
    rank: int,
    members: Sequence[WorkerHello],
    bind_host: str,
    offer: GroupEndpoint | None,
) -> Collectives:
    """Joins the group of a stage whose ranks said `members`, of which this is number `rank`.

    Waits for all. They decide alike: by what rank 0 offers, and by whether all are on one host.
    `offer` is None on all but rank 0.

    Raises:
        ConfigError: this process cannot open what another of its host offers.
        ConnectionError: the ranks do not reach each other.
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
    if offer is not None:
        offer.close()
    return group
