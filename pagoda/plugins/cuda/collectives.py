# SPDX-License-Identifier: Apache-2.0
"""Ranks on several GPUs: sums and gathers over NCCL, or RCCL, whose ranks find each other over the host group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed
from torch import Tensor

from pagoda.parallel.collectives import HostGroup
from pagoda.parallel.distributed import GroupStore

_dist: Any = torch.distributed
"""Type checkers know too little of it."""


class DeviceGroup:
    """The ranks of a stage. Sums are added up in the order of ranks, so their bits depend on no place or size."""

    def __init__(self, rank: int, size: int, ranks: Any, serving: GroupStore | None) -> None:
        """`ranks` is a process group of torch's, whose watchdog asks the store that rank 0 serves now and then."""
        self.rank, self.size = rank, size
        self._ranks, self._serving = ranks, serving

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum. Of two ranks the library's own: a sum of two has one order. Of more, a library would cut x into
        pieces, and begin to add up each at another rank."""
        if self.size == 2:
            self._ranks.allreduce([x]).wait()
            return x
        gathered = self.all_gather(x)
        total = gathered[0]
        for part in gathered[1:]:
            total.add_(part)
        return total

    def all_gather(self, x: Tensor) -> Tensor:
        out = x.new_empty((self.size, *x.shape))
        self._ranks._allgather_base(out, x.contiguous()).wait()
        return out

    def all_to_all(self, x: Tensor, counts: Sequence[Sequence[int]]) -> Tensor:
        received = [row[self.rank] for row in counts]
        out = x.new_empty((sum(received), *x.shape[1:]))
        self._ranks.alltoall_base(out, x.contiguous(), received, list(counts[self.rank])).wait()
        return out


def open_device_group(group: HostGroup) -> DeviceGroup:
    """Lets the ranks meet at the address at which they reach rank 0's host."""
    serving = GroupStore(group.host) if group.rank == 0 else None
    meeting = group.broadcast(None if serving is None else serving.address.encode())
    host, _, port = meeting.decode().rpartition(":")
    store = _dist.TCPStore(host, int(port), is_master=False, wait_for_workers=False)
    ranks = _dist.ProcessGroupNCCL(store, group.rank, group.size)
    found = DeviceGroup(group.rank, group.size, ranks, serving)
    # The first exchange connects all ranks, which takes seconds.
    found.all_gather(torch.zeros(1, device="cuda"))
    torch.cuda.synchronize()
    group.all_gather(torch.zeros(1))
    return found
