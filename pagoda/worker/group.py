"""How the tensor-parallel ranks of a stage reach each other: through memory on one host, else over the network."""

from __future__ import annotations

from collections.abc import Sequence

from pagoda.backend.cpu_collectives import SharedMemoryCollectives, make_shared_memory
from pagoda.backend.cpu_native import BackendUnavailableError
from pagoda.engine.messages import WorkerHello
from pagoda.parallel.collectives import Collectives
from pagoda.parallel.distributed import DistributedCollectives, MeetingPoint

_LOOPBACK = "127.0.0.1"


class GroupOffer:
    """What rank 0 of a stage holds ready for the others, before it knows where they are."""

    def __init__(self, bind_host: str, size: int) -> None:
        self.meeting_point = MeetingPoint(bind_host or _LOOPBACK, size)
        try:
            self.shared_memory = make_shared_memory(size)
        except BackendUnavailableError:
            self.shared_memory = ""

    @property
    def address(self) -> str:
        return self.meeting_point.address


def form_group(rank: int, members: Sequence[WorkerHello], offer: GroupOffer | None) -> Collectives:
    """The group of a stage whose ranks said `members`, of which this is number `rank`.

    All decide alike: by what rank 0 offers, and by whether all are on one host. `offer` is rank 0's own.
    """
    first, size = members[0], len(members)
    if first.shared_memory and len({member.host for member in members}) == 1:
        return SharedMemoryCollectives(rank, size, first.shared_memory)
    return DistributedCollectives(rank, size, first.group_address)
