"""Ranks on several GPUs: sums and gathers over NCCL, or RCCL, whose ranks find each other over the host group."""

from __future__ import annotations

import hashlib
import socket
from typing import Any

import torch
import torch.distributed
from torch import Tensor

from pagoda.parallel.collectives import HostGroup
from pagoda.parallel.distributed import GroupStore

_dist: Any = torch.distributed
"""Type checkers know too little of it."""
_LOOPBACK = "127.0.0.1"


class DeviceGroup:
    """The ranks of a stage. Sums are added up in the order of ranks, so their bits depend on no place or size."""

    def __init__(self, rank: int, size: int, ranks: Any) -> None:
        """`ranks` is a process group of torch's."""
        self.rank, self.size = rank, size
        self._ranks = ranks

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


def open_device_group(group: HostGroup) -> DeviceGroup:
    """Lets the ranks meet at an address of rank 0's host, which it tells the others."""
    here = hashlib.sha256(socket.gethostname().encode()).digest()[:8]
    hosts = group.all_gather(torch.tensor([int.from_bytes(here, "little", signed=True)]))
    is_one_host = bool((hosts == hosts[0]).all())
    serving, meeting = None, None
    if group.rank == 0:
        serving = GroupStore(
            _LOOPBACK if is_one_host else socket.gethostbyname(socket.gethostname())
        )
        meeting = serving.address.encode()
    host, _, port = group.broadcast(meeting).decode().rpartition(":")
    store = _dist.TCPStore(host, int(port), is_master=False, wait_for_workers=False)
    ranks = _dist.ProcessGroupNCCL(store, group.rank, group.size)
    found = DeviceGroup(group.rank, group.size, ranks)
    # The first exchange connects all ranks, which takes seconds; behind it, nobody needs the store any more.
    found.all_gather(torch.zeros(1, device="cuda"))
    torch.cuda.synchronize()
    group.all_gather(torch.zeros(1))
    return found
