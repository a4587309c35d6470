"""Whoever looks into directories of objects for the engine, which never waits for a disk itself.

A directory holds at most what its manifest allows, and every rank has one of its own. What is in rank 0's stands for
all: an object there without its counterparts fails to load, and is removed then.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

OWN = 0
"""The number of the directory from which blocks can be loaded; others under the same root have higher ones."""


class DirectoryFound(NamedTuple):
    """A directory of other objects under the same root, which take part in the quota."""

    directory: int
    path: Path
    object_bytes: int


class Listing(NamedTuple):
    """All objects in one fan-out directory."""

    directory: int
    fan_out: int
    """The first byte of their keys."""
    used_at: Mapping[bytes, int]
    """Key to seconds since 1970 of the last use."""
    listed_at: int
    """When looking began, in seconds since 1970; objects may have come or gone since."""


class ScanEnded(NamedTuple):
    """Everything has been listed that there was when the scan began."""

    seconds: float


class ProbeAnswer(NamedTuple):
    probe_id: int
    found: Sequence[bytes]
    """The keys, from the first on, that are there."""


class Removed(NamedTuple):
    """The objects are gone, or cannot be removed; later listings know."""

    directory: int
    keys: Sequence[bytes]


News = DirectoryFound | Listing | ScanEnded | ProbeAnswer | Removed


class Housekeeper(Protocol):
    """Nothing here waits for the disk, and nothing raises for what is found on it."""

    def watch(self, directories: Sequence[Path]) -> None:
        """Begins to list the directories of all ranks, in their order, and then others beside them."""
        ...

    def probe(self, probe_id: int, keys: Sequence[bytes]) -> None:
        """Looks for keys that are not listed, up to the first that is not there either; a `ProbeAnswer` follows."""
        ...

    def remove(self, directory: int, keys: Sequence[bytes]) -> None:
        """Removes objects, of all ranks if the directory is `OWN`; a `Removed` follows."""
        ...

    def rescan(self) -> None:
        """Something was written: if it has been a while, looks for what other processes wrote."""
        ...

    def poll(self) -> list[News]:
        """What there is to tell since the last call, in its order; no more at a time than takes a moment to read."""
        ...

    def fileno(self) -> int:
        """Readable while there are news."""
        ...

    def close(self) -> None:
        """Ends what is under way, and waits for that."""
        ...
