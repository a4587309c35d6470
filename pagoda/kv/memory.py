# SPDX-License-Identifier: Apache-2.0
"""Memory that holds KV blocks, as those who move them see it: regions of a process, files behind them, devices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple


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
