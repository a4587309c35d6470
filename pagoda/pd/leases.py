"""Leases of KV that an engine holds for other engines.

A lease takes one reference to each of its blocks, like a request or a transfer, and releases all of them once,
however often it is ended. It runs out `lease_s` after the prompt was computed or the lease was last renewed, and
never before the prompt is computed, while blocks are still to come.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain

from pagoda.ipc.clock import Clock
from pagoda.kv.block_pool import Block, BlockPool


class LeaseBook:
    """The leases of one engine, by transfer id. Ended leases are not in it."""

    def __init__(self, pool: BlockPool, clock: Clock, lease_s: float) -> None:
        self.num_expired = 0
        self._pool = pool
        self._clock = clock
        self._lease_s = lease_s
        self._blocks: dict[str, list[Block]] = {}
        self._ends: dict[str, float] = {}
        """Times at which leases of computed prompts run out, earliest first: all leases have one length."""
        self.num_blocks = 0
        """References of all leases; a block of two leases counts twice."""

    @property
    def num_leases(self) -> int:
        return len(self._blocks)

    @property
    def next_end(self) -> float | None:
        """Time at which the next lease runs out; None if none will."""
        return next(iter(self._ends.values()), None)

    def __contains__(self, transfer_id: str) -> bool:
        return transfer_id in self._blocks

    def blocks(self, transfer_id: str) -> Sequence[Block]:
        """Blocks of a lease, from the beginning of the prompt on; none if the lease has ended."""
        return self._blocks.get(transfer_id, ())

    def held_blocks(self) -> Iterator[Block]:
        """Blocks of all leases, once for each reference."""
        return chain.from_iterable(self._blocks.values())

    def open(self, transfer_id: str) -> None:
        self._blocks[transfer_id] = []

    def hold(self, transfer_id: str, blocks: Sequence[Block]) -> bool:
        """Adds further full, computed blocks to a lease; returns False if it has ended."""
        held = self._blocks.get(transfer_id)
        if held is None:
            return False
        self._pool.share(blocks)
        held.extend(blocks)
        self.num_blocks += len(blocks)
        return True

    def finish(self, transfer_id: str) -> bool:
        """Starts the time of a lease whose prompt is computed; returns False if the lease has ended."""
        if transfer_id not in self._blocks:
            return False
        self._ends.setdefault(transfer_id, self._clock.now() + self._lease_s)
        return True

    def renew(self, transfer_id: str) -> bool:
        """Renews a lease; returns False if it has ended."""
        if self._ends.pop(transfer_id, None) is not None:
            self._ends[transfer_id] = self._clock.now() + self._lease_s
        return transfer_id in self._blocks

    def end(self, transfer_id: str) -> bool:
        """Ends a lease and releases its blocks; returns False if there is no such lease."""
        blocks = self._blocks.pop(transfer_id, None)
        if blocks is None:
            return False
        self._ends.pop(transfer_id, None)
        self.num_blocks -= len(blocks)
        self._pool.release(blocks)
        return True

    def expire(self) -> list[str]:
        """Ends leases that have run out; returns their transfers."""
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
