# SPDX-License-Identifier: Apache-2.0
"""Pools of a replica: ranks that hold other blocks than each other have places of their own for transfers.

The engine numbers device blocks, and slots of host memory, over all pools: those of one follow each other. A rank
knows its own alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from pagoda.messages.transfers import DeviceBlocks, HostSlots, Transfer, TransferPlace, Transfers
from pagoda.messages.worker import WorkerReady
from pagoda.parallel.config import ParallelConfig


class Pools:
    """The ranks that take part in transfers, and the places of these there."""

    def __init__(self, parallel: ParallelConfig, readies: Sequence[WorkerReady] = ()) -> None:
        """`readies` are those of all ranks of the replica; without them there are no transfers yet."""
        self.size = parallel.num_pools
        places = list(parallel.places(0))
        self.ranks = [
            [rank for rank, place in enumerate(places) if parallel.pool_of(place) == pool]
            for pool in range(self.size)
        ]
        """Ranks in the replica, by pool."""
        self._num_blocks = min((ready.num_blocks for ready in readies), default=1)
        self._num_slots = max(1, min((ready.kv_host_slots for ready in readies), default=1))

    def of(self, transfer: Transfer) -> int:
        """The pool in which a transfer's blocks lie, all in the same."""
        if self.size == 1:
            return 0
        for place in (transfer.source, transfer.target):
            match place:
                case DeviceBlocks([first, *_]):
                    return first // self._num_blocks
                case HostSlots([first, *_]):
                    return first // self._num_slots
        return 0

    def messages(self, message: Transfers) -> list[tuple[list[int], Transfers]]:
        """Ranks of each pool that is told anything, and the message to them."""
        if self.size == 1:
            return [(self.ranks[0], message)]
        parts: list[list[Transfer]] = [[] for _ in range(self.size)]
        for transfer in message.transfers:
            pool = self.of(transfer)
            source, target = self._seen(transfer.source, pool), self._seen(transfer.target, pool)
            parts[pool].append(msgspec.structs.replace(transfer, source=source, target=target))
        told = [msgspec.structs.replace(message, transfers=part) for part in parts]
        pairs = zip(self.ranks, told, strict=True)
        return [(ranks, part) for ranks, part in pairs if part != Transfers()]

    def _seen(self, place: TransferPlace, pool: int) -> TransferPlace:
        match place:
            case DeviceBlocks(block_ids):
                return DeviceBlocks([it - pool * self._num_blocks for it in block_ids])
            case HostSlots(slots):
                return HostSlots([it - pool * self._num_slots for it in slots])
            case _:
                return place
