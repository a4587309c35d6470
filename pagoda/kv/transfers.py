# SPDX-License-Identifier: Apache-2.0
"""Transfers under way, and the device blocks that they hold.

A block under transfer is referenced like any other: it returns to the pool when its last reader and writer have
ended, whatever happened to the request meanwhile. An end counts once: repeated ends, ends of unknown transfers and
ends of lost workers change nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from pagoda.kv.block_pool import Block, BlockPool
from pagoda.kv.connector import CachedBlock
from pagoda.messages.transfers import DeviceBlocks, Transfer, TransferEnd, TransferPlace

_STORE_SHARE = 8
"""Stores hold at most this part of the pool: requests that need blocks must not have to wait for a slow disk."""
_NEEDED_SHARE = 4
"""The part of the pool that stores may hold of blocks that are needed again."""


OnEnd = Callable[[TransferEnd | None], object]
"""Applies the end of a transfer, whose device blocks are still referenced; None if the workers are gone, with
everything in device and host memory."""


class OpenTransfer(NamedTuple):
    transfer: Transfer
    on_end: OnEnd
    blocks: Sequence[Block]
    likely: bool
    """The blocks are as worth keeping on the device when the transfer has ended as before."""


class TransferLedger:
    """Numbers transfers, and holds one reference to each of their device blocks until they have ended.

    A load whose transfers begin one after the other is held open as a whole, under a number of its own, until its
    owner settles it.
    """

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._generation = 0
        self._next_id = 0
        self.transfers: dict[int, OpenTransfer] = {}
        """Transfers that have not ended, by id."""
        self.held: dict[int, Sequence[Block]] = {}
        """Device blocks of loads that are held open, by id."""
        self.settled: list[TransferEnd] = []
        """Ends of holds that `drain_settled` returns next."""
        self._outbox: list[Transfer] = []
        self._num_stored = [0] * pool.num_ranks
        """Device blocks of each rank that are sources of transfers."""

    @property
    def num_open(self) -> int:
        return len(self.transfers) + len(self.held)

    @property
    def store_room(self) -> int:
        """Number of further device blocks, of any rank, that may be sources of transfers."""
        return max(1, self._pool.of_rank // _STORE_SHARE) - max(self._num_stored)

    @property
    def needed_room(self) -> int:
        """The same for blocks that are needed again."""
        return max(1, self._pool.of_rank // _NEEDED_SHARE) - max(self._num_stored)

    def room_for(self, saved: Sequence[CachedBlock]) -> int:
        """The room among stores for these blocks, all or none of which are needed again."""
        return self.needed_room if saved and saved[0].is_needed else self.store_room

    def open(
        self,
        on_end: OnEnd,
        source: TransferPlace,
        target: TransferPlace,
        blocks: Sequence[Block] = (),
        *,
        after_step: int = -1,
        likely: bool = True,
    ) -> int:
        """Begins a transfer, to be sent with the next `drain`; returns its id.

        `blocks` are those of `source` or `target` that are on the device, all of one rank; each must be referenced
        already, or findable. They are evicted before others once they are copied, unless they are `likely` to be
        wanted on the device.
        """
        transfer = Transfer(self._next_id, self._generation, source, target, after_step)
        self._next_id += 1
        self._pool.share(blocks)
        if isinstance(source, DeviceBlocks):
            self._count_stored(blocks, 1)
        self.transfers[transfer.transfer_id] = OpenTransfer(transfer, on_end, blocks, likely)
        self._outbox.append(transfer)
        return transfer.transfer_id

    def hold(self, blocks: Sequence[Block]) -> int:
        """Holds the targets of transfers that its owner will open; `settle` ends it. Returns its id."""
        held_id = self._next_id
        self._next_id += 1
        self._pool.share(blocks)
        self.held[held_id] = blocks
        return held_id

    def settle(self, held_id: int, failed: list[int], error: str = "") -> None:
        """Ends a hold, which is reported like the end of a transfer; repeating it changes nothing."""
        blocks = self.held.pop(held_id, None)
        if blocks is not None:
            self._pool.release(blocks)
            self.settled.append(TransferEnd(held_id, self._generation, failed, error))

    def drain_settled(self) -> list[TransferEnd]:
        settled, self.settled = self.settled, []
        return settled

    def drain(self) -> list[Transfer]:
        begun, self._outbox = self._outbox, []
        return begun

    def close(self, end: TransferEnd) -> bool:
        """Ends a transfer; returns False if the end does not count."""
        if end.generation != self._generation:
            return False
        entry = self.transfers.pop(end.transfer_id, None)
        if entry is None:
            return False
        entry.on_end(end)
        self._pool.release(entry.blocks, likely=entry.likely or bool(end.failed))
        if isinstance(entry.transfer.source, DeviceBlocks):
            self._count_stored(entry.blocks, -1)
        return True

    def _count_stored(self, blocks: Sequence[Block], sign: int) -> None:
        for block in blocks:
            self._num_stored[block.rank] += sign

    def drop_all(self) -> None:
        """Drops all transfers and holds, since the workers are gone."""
        entries, self.transfers = list(self.transfers.values()), {}
        held, self.held = list(self.held.values()), {}
        self._outbox.clear()
        self.settled.clear()
        self._num_stored = [0] * self._pool.num_ranks
        self._generation += 1
        for entry in entries:
            entry.on_end(None)
            self._pool.release(entry.blocks)
        for blocks in held:
            self._pool.release(blocks)
