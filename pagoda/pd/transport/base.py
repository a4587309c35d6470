# SPDX-License-Identifier: Apache-2.0
"""The interface of transports: one worker exports memory, and another one reads it.

Reads are one-sided: the exporter does not know who reads what when. The engines find out if the blocks were still
held when they were read (`pagoda.pd.messages.KVCheck`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, Protocol

from pagoda.errors import PagodaError

BATCH_BYTES = 2**26
"""Bytes of a transfer that a worker reads at once; batches before a failure are good."""
BATCH_LIMIT_S = 60.0
"""Seconds after which a worker gives up a batch."""


def longest_transfer_s(num_bytes: int) -> float:
    """Seconds after which a transfer of `num_bytes` from each rank has ended, at the latest.

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


class Extent(NamedTuple):
    """Bytes of a region."""

    region: int
    offset: int
    num_bytes: int


class OwnMemory(NamedTuple):
    """The memory that a worker exports, and into which it reads. Unchanged while any transport uses it."""

    regions: tuple[Region, ...]
    file: MemoryFile | None = None
    """None where regions are memory of this process alone."""


MemoryKind = Literal["DRAM", "VRAM"]
"""NIXL's names of memory: of the host, and of a device."""


class DirectMemory(NamedTuple):
    """Regions that a network, or another device, reads and writes by itself, wherever they lie.

    It knows nothing of steps: it may read what steps have written once these are done, and write where no step is
    left that uses it; steps that are launched when it has written find that.
    """

    regions: tuple[Region, ...]
    kind: MemoryKind
    device: int
    """Number of the device among those of its kind that this process sees; 0 for the host."""
    enter: Callable[[], None]
    """Lets the calling thread use the device, before libraries that move its memory are called from there."""


class DeviceMemory(NamedTuple):
    """Memory of a device that a worker exports; this process does not address it, so it is sent from copies, or by
    a network that reaches it."""

    sizes: tuple[int, ...]
    """Bytes of each region."""
    copy: Callable[[Sequence[Extent], memoryview], None]
    """Copies bytes of regions into host memory, one after the other; returns when they are there."""
    direct: Callable[[], DirectMemory] | None = None
    """Gives the regions to networks; raises TransportError where these cannot reach them as the device is set up.
    None where no network reaches this device."""


class Access(NamedTuple):
    host: str
    """The address at which this host is reached."""
    secret: bytes
    """Secret that readers and exporters share; each side proves to the other that it knows it."""
    encrypts: bool = False


class Span(NamedTuple):
    region: int
    offset: int
    num_bytes: int
    target: int
    """Address in this process, or in `DirectMemory` of a device for a link with `own_regions`."""


class ExportedMemory(Protocol):
    """Regions of this process that readers with the secret may read."""

    @property
    def descriptor(self) -> bytes: ...

    def close(self) -> None:
        """Reads that have not ended when this returns fail. May be called twice."""


class MemoryLink(Protocol):
    """A connection to one `ExportedMemory`. Reads may come from several threads."""

    @property
    def own_regions(self) -> Sequence[Region]:
        """Regions of this worker, wherever they lie, that targets are in; empty where any host memory will do."""

    def read(self, spans: Sequence[Span], deadline: float) -> None:
        """Returns when all spans have been read; gives up at `deadline` (`time.monotonic`).

        When it returns or raises, nothing is written to the targets any more.

        Raises TransportError if spans have not been read; what is in the targets then means nothing.
        """

    def close(self) -> None:
        """Ends reads under way with an error. May be called twice, from any thread."""


class Transport(Protocol):
    """One way of moving KV, as one worker uses it: for its own memory, and to read that of others into it."""

    def export(self) -> ExportedMemory:
        """Raises TransportError if this host lacks what the transport needs."""

    def connect(self, descriptor: bytes, deadline: float) -> MemoryLink:
        """Connects to the memory of `descriptor`; gives up at `deadline` (`time.monotonic`).

        Raises TransportError if there is no such memory, or this worker may not read it.
        """
