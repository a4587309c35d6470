"""Whoever looks into directories of objects for the engine, which never waits for a disk itself.

Every rank has a directory of its own. What is in rank 0's stands for all: an object there that another rank lacks
fails to load, and is removed then. Directories of other models under the same root are looked into too, since all
share one quota.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

OWN = 0
"""The number of the directory from which blocks can be loaded; the others under its root have higher ones."""


class DirectoryFound(NamedTuple):
    """There is a directory of another model's objects."""

    directory: int
    object_bytes: int
    """What each of them takes."""


class ObjectsFound(NamedTuple):
    """Some of the objects in a directory: all of them once, later those used since they were last listed."""

    directory: int
    used_at: Mapping[bytes, int]
    """Key to seconds since 1970 of the last use."""


class FanOutListed(NamedTuple):
    """Everything in one fan-out directory has been found."""

    directory: int
    fan_out: int
    """The first byte of its keys."""
    used_at: Mapping[bytes, int]
    """As in `ObjectsFound`, of all that are there."""
    listed_at: int
    """Seconds since 1970; what was written later may not be in `used_at`."""


class ScanEnded(NamedTuple):
    """All that was there when the scan began has been found."""

    seconds: float


class ProbeAnswer(NamedTuple):
    probe_id: int
    found: Sequence[bytes]
    """The keys that are there, up to the first that is not."""


class Removed(NamedTuple):
    """The objects are gone, or cannot be removed. What is found from now on is there."""

    directory: int
    keys: Sequence[bytes]


News = DirectoryFound | ObjectsFound | FanOutListed | ScanEnded | ProbeAnswer | Removed


class DiskScanner(Protocol):
    """Begins to scan as soon as it is made. No method waits for the disk, and none raises for what is on it."""

    def probe(self, probe_id: int, keys: Sequence[bytes]) -> None:
        """Looks for keys that have not been found so far; a `ProbeAnswer` follows."""
        ...

    def forget(self, probe_id: int) -> None:
        """Nobody waits for the answer any more: none is needed, though one may come."""
        ...

    def remove(self, directory: int, keys: Sequence[bytes]) -> None:
        """Removes objects, those of all ranks if the directory is `OWN`; a `Removed` follows."""
        ...

    def rescan(self) -> None:
        """Something was written, or no scan has ended yet. Looks for what is there if none is at it.

        Not soon after the last scan.
        """
        ...

    def poll(self) -> list[News]:
        """News, in their order except that a `ProbeAnswer` may come early; a moment's reading at most."""
        ...

    def fileno(self) -> int:
        """Readable while there are news."""
        ...

    def close(self) -> None:
        """Stops."""
        ...
