# SPDX-License-Identifier: Apache-2.0
"""Storeys: tiers in which running requests may have segments of their KV, which steps read where they lie."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from pagoda.kv.connector import CachedBlock
from pagoda.messages.transfers import HostSlots, TierBlocks


class Hold:
    """Blocks of one KV group in a storey, which are neither evicted nor overwritten until `release`."""

    def __init__(
        self,
        place: HostSlots | TierBlocks,
        release: Callable[[], object],
        *,
        is_there: bool = False,
    ) -> None:
        self.place = place
        self.is_there = is_there
        """All blocks are in the storey. Until then they are being copied, unless there is an `error`."""
        self.error = ""
        """Clause that says why a copy failed."""
        self._release: Callable[[], object] | None = release

    def release(self) -> None:
        """Gives the blocks back, once; copies under way end by themselves."""
        release, self._release = self._release, None
        if release is not None:
            release()


class Storey(Protocol):
    """A tier that keeps blocks in place for steps."""

    tier: str

    @property
    def num_held(self) -> int:
        """Blocks that are held; one that several hold counts once."""

    @property
    def num_holdable(self) -> int:
        """Blocks that may be held at most, as things are."""

    @property
    def trouble(self) -> str:
        """Clause that says why nothing can be stored at present, as of a disk that is full; empty if it can."""

    @property
    def is_back_soon(self) -> bool:
        """True while the tier rests because a step waited for it in vain: has nothing, and takes nothing."""

    @property
    def next_event_at(self) -> float | None:
        """Time at which trouble will begin or end unless the tier says something before; None if it will not."""

    def has(self, key: bytes) -> bool:
        """True if the block is here, and can be held."""

    def is_held(self, key: bytes) -> bool:
        """True if somebody holds the block."""

    def hold_found(self, keys: Sequence[bytes]) -> Hold:
        """Holds blocks that are here. Raises ValueError: one is not."""

    def hold(self, blocks: Sequence[CachedBlock]) -> Hold | None:
        """Holds blocks, and copies those that lack from the device; None if there is no room for them now, or
        one of them is under way already."""

    def lose(self, keys: Sequence[bytes], *, hangs: bool) -> None:
        """Blocks that a step could not read are not here any more; or the tier did not answer and rests a while
        (`hangs`), and they are here as before."""
