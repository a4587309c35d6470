# SPDX-License-Identifier: Apache-2.0
"""The interface of transports: one worker exports memory, and another one reads it.

Reads are one-sided: the exporter does not know who reads what when. The engines find out if the blocks were still
held when they were read (`pagoda.plugins.disaggregation.messages.KVCheck`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from pagoda.kv.memory import Region


class Access(NamedTuple):
    host: str
    """The address at which this host is reached."""
    secret: bytes
    """Secret that readers and exporters share; each side proves to the other that it knows it."""
    encrypts: bool = False


class MemorySpan(NamedTuple):
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

    def read(self, spans: Sequence[MemorySpan], deadline: float) -> None:
        """Returns when all spans have been read; gives up at `deadline` (`time.monotonic`).

        When it returns or raises, nothing is written to the targets any more.

        Raises TransportError if spans have not been read; what is in the targets then means nothing.
        """

    def close(self) -> None:
        """Ends reads under way with an error. May be called twice, from any thread."""


class KVTransport(Protocol):
    """One way of moving KV, as one worker uses it: for its own memory, and to read that of others into it."""

    def export(self) -> ExportedMemory:
        """Raises TransportError if this host lacks what the transport needs."""

    def connect(self, descriptor: bytes, deadline: float) -> MemoryLink:
        """Connects to the memory of `descriptor`; gives up at `deadline` (`time.monotonic`).

        Raises TransportError if there is no such memory, or this worker may not read it.
        """
