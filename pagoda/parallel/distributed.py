# SPDX-License-Identifier: Apache-2.0
"""Collectives of CPU ranks that cannot share memory: gloo, through `torch.distributed`.

No process-wide group is made, so a process can be in several.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed
from torch import Tensor

from pagoda.parallel.collectives import Broadcasting, check_on_host, sum_in_order

_dist: Any = torch.distributed
"""Type checkers know too little of it."""
_CONNECT_TIMEOUT = timedelta(minutes=1)
"""All ranks connect as soon as they know of each other."""
_WAIT_TIMEOUT = timedelta(days=7)
"""Time for other ranks to take part in a step; the engine ends a rank that is stuck."""
_AT_ONCE_BYTES = 2**16
"""Size up to which sending everything to everybody takes less time than sending twice."""


class GroupStore:
    """Store in which the ranks of one group find each other; rank 0 serves it."""

    def __init__(self, host: str) -> None:
        """Listens on an address of this host, at any free port.

        Raises OSError if this host does not have the address.
        """
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, 0), family=family)
        port = listener.getsockname()[1]
        self.address = f"{host}:{port}"
        self._store = _dist.TCPStore(
            host,
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=_CONNECT_TIMEOUT,
            master_listen_fd=listener.detach(),
        )


class DistributedCollectives(Broadcasting):
    """One rank. Sums are added up in order of rank, in float32, as in shared memory."""

    def __init__(self, address: str, rank: int, size: int, host: str) -> None:
        """Waits for all ranks. `address` is that of the store; `host` is an address of this rank's host.

        Raises ConnectionError if, for a minute, the store does not answer or the ranks do not find each other.
        """
        self.rank = rank
        self.size = size
        self.host = host
        store_host, _, port = address.rpartition(":")
        try:
            store = _dist.TCPStore(
                store_host,
                int(port),
                is_master=False,
                timeout=_CONNECT_TIMEOUT,
                wait_for_workers=False,
            )
            self._group = _process_group(store, rank, size, host)
        except RuntimeError as error:
            raise ConnectionError(
                f"Rank {rank}, at {host}, does not reach the tensor-parallel ranks that meet at {address}; "
                "their hosts must let them connect to each other at any port."
            ) from error

    def all_reduce(self, x: Tensor) -> Tensor:
        check_on_host(x)
        x = x.contiguous()
        if x.nbytes <= _AT_ONCE_BYTES:
            return sum_in_order(self.all_gather(x))
        # Each rank adds up one part of all, and sends it to all.
        flat = torch.nn.functional.pad(x.flatten(), (0, -x.numel() % self.size))
        parts = torch.empty_like(flat)
        self._group.alltoall_base(_as_bytes(parts), _as_bytes(flat), [], []).wait()
        total = self.all_gather(sum_in_order(parts.view(self.size, -1)))
        return total.flatten()[: x.numel()].view(x.shape)

    def all_gather(self, x: Tensor) -> Tensor:
        check_on_host(x)
        out = x.new_empty((self.size, *x.shape))
        self._group._allgather_base(_as_bytes(out), _as_bytes(x.contiguous())).wait()
        return out

    def all_to_all(self, x: Tensor, counts: Sequence[Sequence[int]]) -> Tensor:
        check_on_host(x)
        sent, received = list(counts[self.rank]), [row[self.rank] for row in counts]
        out = x.new_empty((sum(received), *x.shape[1:]))
        row_bytes = x[:1].nbytes or x.itemsize * x.shape[1:].numel()
        parts = [[count * row_bytes for count in side] for side in (received, sent)]
        self._group.alltoall_base(_as_bytes(out), _as_bytes(x.contiguous()), *parts).wait()
        return out

    def exchange(self, data: bytearray) -> bytearray:
        elements = torch.frombuffer(data, dtype=torch.uint8)
        self._group.broadcast([elements], _dist.BroadcastOptions()).wait()
        return data


def _as_bytes(x: Tensor) -> Tensor:
    """Returns `x` as bytes, for libraries that do not know all dtypes."""
    return x.flatten().view(torch.uint8)


def _process_group(store: Any, rank: int, size: int, host: str) -> Any:
    options = _dist.ProcessGroupGloo._Options()
    options._devices = [_dist.ProcessGroupGloo.create_device(hostname=host)]
    options._timeout = _CONNECT_TIMEOUT
    group = _dist.ProcessGroupGloo(store, rank, size, options)
    group.set_timeout(_WAIT_TIMEOUT)
    return group
