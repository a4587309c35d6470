"""What every way of moving KV between workers is: memory that one side opens, and that the other reads.

Reads are one-sided: who opens memory does not know who reads what when. Whether what was read still meant what the
reader believes is for the engines to find out (`pagoda.pd.messages.KVCheck`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from pagoda.errors import PagodaError

TRANSFER_LIMIT_S = 60.0
"""How long a worker tries to read the blocks of one transfer, once they may be written, before it gives up."""


class TransportError(PagodaError):
    """Nothing, or not all, was read: the other side is gone, refuses, or cannot be reached."""


class Region(NamedTuple):
    """Memory of this process that others may read."""

    address: int
    num_bytes: int


class Span(NamedTuple):
    """One contiguous piece to read."""

    region: int
    """Which of the other side's regions."""
    offset: int
    """In that region, in bytes."""
    num_bytes: int
    target: int
    """Address in this process."""


class MemoryDoor(Protocol):
    """Regions of this process, open for reading to whoever knows the secret."""

    @property
    def descriptor(self) -> bytes:
        """What the other side needs to connect."""
        ...

    def close(self) -> None:
        """Nobody reads any more when this returns."""
        ...


class MemoryLink(Protocol):
    """A connection to one `MemoryDoor`. Reads may come from several threads."""

    def read(self, spans: Sequence[Span]) -> None:
        """Returns when all spans have been read.

        Raises:
            TransportError: they have not; what is in the targets means nothing.
        """
        ...

    def close(self) -> None:
        """Ends reads under way with an error. May be called twice, from any thread."""
        ...
