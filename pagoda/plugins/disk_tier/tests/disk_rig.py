# SPDX-License-Identifier: Apache-2.0
"""A disk tier over a pool; the tests play the scanner and the workers."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
from kv_tiers import READY, cached_blocks_of

from benchmarks.simulation.disk import SimScanner
from pagoda.ipc.clock import Clock, VirtualClock
from pagoda.kv.block_keys import prefix_keys
from pagoda.kv.block_pool import BlockPool
from pagoda.kv.connector import PrefixRequest
from pagoda.kv.events import CacheRecorder
from pagoda.kv.host_tier import HostTier
from pagoda.kv.plugin import TierContext
from pagoda.kv.post import TierPost
from pagoda.kv.transfers import TransferLedger
from pagoda.messages.load import TierLoad
from pagoda.messages.transfers import TierBlocks, TierPlace, Transfer, TransferEnd
from pagoda.messages.worker import WorkerReady
from pagoda.messages.worker_config import KVTierConfig
from pagoda.plugins.disk_tier.directory import MIN_TOUCHES
from pagoda.plugins.disk_tier.scanner import OWN
from pagoda.plugins.disk_tier.tier import DiskTier

SIZE = 4
UNIT = 100
"""Bytes of a block on disk."""
EPOCH = 1_900_000_000
TOKENS = list(range(41 * SIZE))
KEYS = prefix_keys(TOKENS, SIZE, None, 40)
OTHER_KEYS = prefix_keys(TOKENS, SIZE, "salt", 40)


class DiskRig:
    """A tier over a pool, with its ledger and its scanner."""

    def __init__(
        self,
        *,
        quota: int = 20 * UNIT,
        min_touches: int = 2,
        num_blocks: int = 320,
        num_ranks: int = 1,
        host_slots: int = 0,
        num_sharers: int = 1,
        is_scanned: bool = True,
    ) -> None:
        self.clock = VirtualClock()
        self.pool = BlockPool(num_blocks)
        self.ledger = TransferLedger(self.pool)
        self.events = CacheRecorder(outlives_workers=True)
        self.keepers: list[SimScanner] = []
        self.ready = ready(num_ranks, num_sharers=num_sharers)
        self.host = HostTier(host_slots, SIZE, self.ledger) if host_slots else None
        context = TierContext(
            KVTierConfig("/kv", quota, {MIN_TOUCHES: min_touches}),
            self.ready.kv_places,
            self.ledger,
            self.clock,
            self.host,
            self.events,
            EPOCH,
            TierPost(),
        )
        self.tier = DiskTier(context, self._open)
        if is_scanned:
            self.work()

    def _open(self, directories: Sequence[TierPlace], clock: Clock) -> SimScanner:
        """A scanner that does nothing until it is told to."""
        assert directories
        disk: dict[int, dict[bytes, int]] = {OWN: {}}
        self.keepers.append(SimScanner(disk, clock, lambda: math.inf, EPOCH, used_at=int))
        return self.keepers[-1]

    @property
    def keeper(self) -> SimScanner:
        return self.keepers[-1]

    @property
    def disk(self) -> dict[bytes, int]:
        return self.keeper.disk[OWN]

    @property
    def report(self) -> TierLoad:
        return self.tier.load_report()

    def work(self) -> set[str]:
        """The scanner does all that it was asked for; returns the requests to look up again."""
        changed: set[str] = set()
        while self.keeper.jobs:
            self.keeper.work()
            changed.update(self.tier.poll())
        return changed

    def pass_through(self, keys: Sequence[bytes]) -> int:
        """A request passes through blocks that are on the device."""
        return self.tier.save(cached_blocks_of(self.pool, prefix(keys), 0, len(keys)))

    def end(
        self,
        transfer: Transfer,
        failed: Sequence[int] = (),
        error: str = "it is bad",
        unreadable: Sequence[int] = (),
    ) -> None:
        """The workers say that a transfer has ended; what was stored is on disk from then on."""
        if isinstance(transfer.target, TierBlocks):
            for index, key in enumerate(transfer.target.keys):
                if index not in failed:
                    self.disk[key] = int(EPOCH + self.clock.now())
        end = TransferEnd(
            transfer.transfer_id,
            transfer.generation,
            list(failed),
            error if failed else "",
            list(unreadable),
        )
        assert self.ledger.close(end)

    def begin_store(self, keys: Sequence[bytes]) -> Transfer:
        """Passes through blocks twice, which is worth one transfer."""
        self.pass_through(keys)
        self.pass_through(keys)
        (transfer,) = self.ledger.drain()
        return transfer

    def begun_stores(self) -> list[bytes]:
        """Keys of the stores that have begun since the last call."""
        return stored_keys(self.ledger.drain())

    def store(self, keys: Sequence[bytes]) -> None:
        """Passes through blocks twice, and lets the workers write them."""
        self.end(self.begin_store(keys))

    def store_one_by_one(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            self.store([key])

    def load(self, prefix: PrefixRequest, start: int, count: int) -> Transfer:
        blocks = self.pool.allocate(count)
        self.tier.load(prefix, start, blocks, 7)
        self.pool.release(blocks)
        (transfer,) = self.ledger.drain()
        return transfer


def ready(num_ranks: int = 1, name: str = "model", num_sharers: int = 1) -> WorkerReady:
    directories = tuple(
        TierPlace("disk", f"/kv/{name}-{rank}", UNIT // num_ranks, num_sharers=num_sharers)
        for rank in range(num_ranks)
    )
    return msgspec.structs.replace(READY, kv_places=directories)


def prefix(keys: Sequence[bytes] = KEYS, request_id: str = "r") -> PrefixRequest:
    return PrefixRequest(request_id, keys, TOKENS)


def stored_keys(transfers: Sequence[Transfer]) -> list[bytes]:
    return [
        key
        for transfer in transfers
        if isinstance(transfer.target, TierBlocks)
        for key in transfer.target.keys
    ]
