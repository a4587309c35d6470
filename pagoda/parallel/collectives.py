# SPDX-License-Identifier: Apache-2.0
"""Operations of the tensor-parallel ranks of one stage: all call the same ones in the same order.

Control messages are bytes in host memory (`ControlGroup`). Data is tensors where the backend has them
(`Collectives`): a `HostGroup` exchanges both, data in host memory only; a backend of another device brings its own
collectives, and may let its ranks find each other by messages of the host group.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from pagoda.parallel.config import ParallelConfig

LOOPBACK = "127.0.0.1"
"""Address of a host whose ranks are all here."""
_LENGTH_BYTES = 8


class Ranks(Protocol):
    """The ranks of one group, on one host or several."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...


class Collectives(Ranks, Protocol):
    """Exchange of tensors on the device where the ranks compute."""

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of every rank's x, of one shape and dtype; the same bits on all ranks. x may be overwritten."""
        ...

    def all_gather(self, x: Tensor) -> Tensor:
        """Every rank's x, of one shape and dtype, in order of rank: [size, *x.shape]."""
        ...

    def all_to_all(self, x: Tensor, counts: Sequence[Sequence[int]]) -> Tensor:
        """Rows for this rank, of every rank in order: `counts[a][b]` rows go from rank a to b.

        All ranks know all counts. The rows of x [rows, ...] are those for the first rank, then for the next."""
        ...


class ControlGroup(Ranks, Protocol):
    """Exchange of messages between processes."""

    def broadcast(self, payload: bytes | None) -> bytes:
        """Returns the payload of rank 0 on all ranks; the others give None."""
        ...


class HostGroup(Collectives, ControlGroup, Protocol):
    """Exchange of messages, and of tensors in host memory."""

    @property
    def host(self) -> str:
        """Address of this rank's host at which the other ranks reach it."""
        ...


def check_on_host(x: Tensor) -> None:
    """Raises ValueError: the tensor is not in host memory, where a group over the host exchanges tensors."""
    if not x.is_cpu:
        raise ValueError(
            f"Ranks on {x.device} cannot exchange tensors over the host; their backend brings its own collectives."
        )


def sum_in_order(parts: Tensor) -> Tensor:
    """Sum of parts [ranks, ...], in order of rank, in float32."""
    total = parts[0].to(torch.float32, copy=True)
    for part in parts[1:]:
        total += part
    return total.to(parts.dtype)


class Broadcasting:
    """Broadcasts of any length, by one of a length that all ranks know."""

    rank: int
    host = LOOPBACK

    def broadcast(self, payload: bytes | None) -> bytes:
        if self.rank > 0:
            length = self.exchange(bytearray(_LENGTH_BYTES))
            payload = bytes(int.from_bytes(length, "little"))
        elif payload is None:
            raise ValueError("Rank 0 gives what is broadcast.")
        else:
            self.exchange(bytearray(len(payload).to_bytes(_LENGTH_BYTES, "little")))
        return bytes(self.exchange(bytearray(payload))) if payload else payload

    def exchange(self, data: bytearray) -> bytearray:
        """Returns `data` of rank 0, of the same length as the other ranks give."""
        raise NotImplementedError


class Alone:
    rank = 0
    size = 1
    host = LOOPBACK

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        return x[None]

    def all_to_all(self, x: Tensor, counts: Sequence[Sequence[int]]) -> Tensor:  # noqa: ARG002
        return x

    def broadcast(self, payload: bytes | None) -> bytes:
        if payload is None:
            raise ValueError("Rank 0 gives what is broadcast.")
        return payload


class RankGroups(NamedTuple):
    """The groups that one rank is in."""

    stage: HostGroup = Alone()
    """All ranks of its stage, which sample together."""
    tensor: HostGroup = Alone()
    """Ranks that share every layer."""
    context: HostGroup = Alone()
    """Ranks that share the context of every request."""


ALONE = RankGroups()


def stage_groups(parallel: ParallelConfig, joined: Mapping[str, HostGroup]) -> RankGroups:
    """A rank's groups, by the names of `ParallelConfig.groups_of`."""
    stage = joined.get("stage", Alone())
    tensor = stage if parallel.context_parallel_size == 1 else Alone()
    context = stage if parallel.tensor_parallel_size == 1 else Alone()
    return RankGroups(stage, joined.get("tensor", tensor), joined.get("context", context))
