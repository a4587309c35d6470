"""Operations of the tensor-parallel ranks of one stage: all call the same ones in the same order."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class Collectives(Protocol):
    """The ranks of one group, on one host or several."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of every rank's x, of one shape and dtype; the same bits on all ranks. x may be overwritten."""
        ...

    def all_gather(self, x: Tensor) -> Tensor:
        """Every rank's x, of one shape and dtype, in order of rank: [size, *x.shape]."""
        ...

    def broadcast(self, payload: bytes | None) -> bytes:
        """Returns the payload of rank 0 on all ranks; the others give None."""
        ...


class Alone:
    rank = 0
    size = 1

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        return x[None]

    def broadcast(self, payload: bytes | None) -> bytes:
        if payload is None:
            raise ValueError("Rank 0 gives what is broadcast.")
        return payload
