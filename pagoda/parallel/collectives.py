"""Operations of the tensor-parallel ranks of one stage: all call the same ones in the same order."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

_LENGTH_BYTES = 8


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


class Broadcasting:
    """Broadcasts of any length, by one of a length that all ranks know."""

    rank: int

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

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        return x[None]

    def broadcast(self, payload: bytes | None) -> bytes:
        if payload is None:
            raise ValueError("Rank 0 gives what is broadcast.")
        return payload
