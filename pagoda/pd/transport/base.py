"""What every way of moving KV between workers is: memory that one side opens, and that the other reads.

Reads are one-sided: who opens memory does not know who reads what when. Whether what was read still meant what the
reader believes is for the engines to find out (`pagoda.pd.messages.KVCheck`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from pagoda.errors import PagodaError

BATCH_BYTES = 2**26
"""Of a transfer, what a worker reads at once: what came before a failure is good."""
BATCH_LIMIT_S = 60.0
"""How long it tries to, before it gives up. Large transfers go on as long as their batches come."""


def longest_transfer_s(num_bytes: int) -> float:
    """When a worker has given up a transfer of so many bytes from each rank, at the latest.

    Batches are of whole blocks, so they may be only a little more than half full.
    """
    return BATCH_LIMIT_S * (1 + 2 * num_bytes // BATCH_BYTES)


class TransportError(PagodaError):
    """Nothing, or not all, was read: the other side is gone, refuses, or cannot be reached."""


class Region(NamedTuple):
    """Memory of this process that others may read, and that this process reads theirs into."""

    address: int
    num_bytes: int


class MemoryFile(NamedTuple):
    """A file without a name that regions are mapped from; other processes of this host can map it as well."""

    descriptor: int
    num_bytes: int
    offsets: tuple[int, ...]
    """Of each region, in the file."""


class OwnMemory(NamedTuple):
    """What a worker has to offer, and room for what it reads. Stays as it is while any transport uses it."""

    regions: tuple[Region, ...]
    file: MemoryFile | None = None
    """None where regions are memory of this process alone."""


class Access(NamedTuple):
    """Who may read, and how they come here."""

    host: str
    """The address at which this host is reached."""
    secret: bytes
    """Known to all that may read; each side proves to the other that it knows it."""
    encrypts: bool = False
    """Whether what is read must not be seen by others on its way between hosts."""


class Span(NamedTuple):
    """One contiguous piece to read."""

    region: int
    """Which of the other side's regions."""
    offset: int
    """In that region, in bytes."""
    num_bytes: int
    target: int
    """Address in this process."""


class ExportedMemory(Protocol):
    """Regions of this process, open for reading to whoever knows the secret."""

    @property
    def descriptor(self) -> bytes:
        """What the other side needs to connect."""
        ...

    def close(self) -> None:
        """Reads that have not ended when this returns fail. May be called twice."""
        ...


class MemoryLink(Protocol):
    """A connection to one `ExportedMemory`. Reads may come from several threads."""

    def read(self, spans: Sequence[Span], deadline: float) -> None:
        """Returns when all spans have been read; gives up at `deadline` (`time.monotonic`).

        When it returns or raises, nothing is written to the targets any more.

        Raises:
            TransportError: they have not; what is in the targets means nothing.
        """
        ...

    def close(self) -> None:
        """Ends reads under way with an error. May be called twice, from any thread."""
        ...


class Transport(Protocol):
    """One way of moving KV, as one worker uses it: for its own memory, and to read that of others into it."""

    def export(self) -> ExportedMemory:
        """
        Raises:
            TransportError: this host does not offer what it takes.
        """
        ...

    def connect(self, descriptor: bytes, deadline: float) -> MemoryLink:
        """To the door that `descriptor` is of; gives up at `deadline` (`time.monotonic`).

        Raises:
            TransportError: there is no such remote, or not for us.
        """
        ...
