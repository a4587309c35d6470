"""KV that an engine holds for others, and until when.

A lease takes one reference to each of its blocks, like a request or a transfer, and gives all of them back when it
ends: once, however it ends and however often it is told to. It runs out `lease_s` after the prompt was computed or
somebody last said that he wants it, and never before the prompt is computed: then its blocks are still to come.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain

from pagoda.ipc.clock import Clock
from pagoda.kv.block_pool import Block, BlockPool


class LeaseBook:
    """The leases of one engine, by transfer id. What is not in it has ended, or never was."""

    def __init__(self, pool: BlockPool, clock: Clock, lease_s: float) -> None:
        self.num_expired = 0
        self._pool = pool
        self._clock = clock
        self._lease_s = lease_s
        self._blocks: dict[str, list[Block]] = {}
        self._ends: dict[str, float] = {}
        """When a lease whose prompt is computed runs out, the earliest first: all are as long."""
        self._num_blocks = 0

    @property
    def num_leases(self) -> int:
        return len(self._blocks)

    @property
    def num_blocks(self) -> int:
        """Held by all of them; one of two leases counts twice."""
        return self._num_blocks

    @property
    def next_end(self) -> float | None:
        """When the next one runs out; None if none will."""
        return next(iter(self._ends.values()), None)

    def __contains__(self, transfer_id: str) -> bool:
        return transfer_id in self._blocks

    def blocks(self, transfer_id: str) -> Sequence[Block]:
        """Those that it holds, from the beginning of the prompt on; empty for what has ended."""
        return self._blocks.get(transfer_id, ())

    def held_blocks(self) -> Iterator[Block]:
        """Blocks of all leases, once for each reference."""
        return chain.from_iterable(self._blocks.values())

    def open(self, transfer_id: str) -> None:
        self._blocks[transfer_id] = []

    def hold(self, transfer_id: str, blocks: Sequence[Block]) -> bool:
        """Takes further blocks, which are full and computed; False if the lease has ended."""
        held = self._blocks.get(transfer_id)
        if held is None:
            return False
        self._pool.share(blocks)
        held.extend(blocks)
        self._num_blocks += len(blocks)
        return True

    def finish(self, transfer_id: str) -> bool:
        """The prompt is computed: from now on the lease runs out. False if it has ended."""
        if transfer_id not in self._blocks:
            return False
        self._ends.setdefault(transfer_id, self._clock.now() + self._lease_s)
        return True

    def renew(self, transfer_id: str) -> bool:
        """Somebody wants it; False if it has ended."""
        if self._ends.pop(transfer_id, None) is not None:
            self._ends[transfer_id] = self._clock.now() + self._lease_s
        return transfer_id in self._blocks

    def end(self, transfer_id: str) -> bool:
        """Gives its blocks back; False if that was done before, or there never was such a lease."""
        blocks = self._blocks.pop(transfer_id, None)
        if blocks is None:
            return False
        self._ends.pop(transfer_id, None)
        self._num_blocks -= len(blocks)
        self._pool.release(blocks)
        return True

    def expire(self) -> list[str]:
        """Ends those that have run out; returns which."""
        now = self._clock.now()
        expired = []
        while self._ends:
            transfer_id, ends_at = next(iter(self._ends.items()))
            if ends_at > now:
                break
            self.end(transfer_id)
            expired.append(transfer_id)
        self.num_expired += len(expired)
        return expired
