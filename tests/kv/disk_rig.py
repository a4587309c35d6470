"""A disk tier over a pool; the tests play the scanner and the workers."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Sequence

import msgspec
from kv_tiers import READY

from pagoda.ipc.clock import Clock, VirtualClock
from pagoda.kv.block_keys import prefix_keys
from pagoda.kv.block_pool import BlockPool
from pagoda.kv.connector import CachedBlock, PrefixRequest
from pagoda.kv.disk_scanner import (
    OWN,
    DirectoryFound,
    FanOutListed,
    News,
    ObjectsFound,
    ProbeAnswer,
    Removed,
    ScanEnded,
)
from pagoda.kv.disk_tier import DiskTier
from pagoda.kv.events import KVEventRecorder
from pagoda.kv.host_tier import HostTier
from pagoda.kv.transfers import TransferLedger
from pagoda.messages.load import TierLoad
from pagoda.messages.transfers import DiskObjects, KVDirectory, Transfer, TransferEnd
from pagoda.messages.worker import WorkerReady

SIZE = 4
UNIT = 100
"""Bytes of a block on disk."""
EPOCH = 1_900_000_000
TOKENS = list(range(41 * SIZE))
KEYS = prefix_keys(TOKENS, SIZE, None, 40)
OTHER_KEYS = prefix_keys(TOKENS, SIZE, "salt", 40)


class FakeScanner:
    """A disk in memory, and a scanner that does one job whenever it is told to."""

    def __init__(self) -> None:
        self.disk: dict[int, dict[bytes, int]] = {OWN: {}}
        self.jobs: deque[Callable[[], list[News]]] = deque()
        self.removed: list[tuple[int, list[bytes]]] = []
        self.num_probes = 0
        self.forgotten: list[int] = []
        self.num_rescans = 0
        self.is_closed = False
        self._news: list[News] = []
        self._met: set[int] = set()
        self.jobs.append(self.scan)

    def scan(self) -> list[News]:
        news: list[News] = []
        for directory, objects in self.disk.items():
            if directory != OWN and directory not in self._met:
                self._met.add(directory)
                news.append(DirectoryFound(directory, UNIT // 2))
            news.append(ObjectsFound(directory, dict(objects)))
            for fan_out in range(256):
                used_at = {key: at for key, at in objects.items() if key[0] == fan_out}
                news.append(FanOutListed(directory, fan_out, used_at, EPOCH))
        return [*news, ScanEnded(0.0)]

    def probe(self, probe_id: int, keys: Sequence[bytes]) -> None:
        self.num_probes += 1
        self.jobs.append(lambda: [self._answer(probe_id, keys)])

    def cancel_probe(self, probe_id: int) -> None:
        self.forgotten.append(probe_id)

    def _answer(self, probe_id: int, keys: Sequence[bytes]) -> News:
        return ProbeAnswer(probe_id, list(itertools.takewhile(self.disk[OWN].__contains__, keys)))

    def remove(self, directory: int, keys: Sequence[bytes]) -> None:
        self.removed.append((directory, list(keys)))
        self.jobs.append(lambda: self._remove(directory, keys))

    def _remove(self, directory: int, keys: Sequence[bytes]) -> list[News]:
        for key in keys:
            self.disk[directory].pop(key, None)
        return [Removed(directory, keys)]

    def rescan(self) -> None:
        self.num_rescans += 1

    def work(self, count: int = 1000) -> None:
        while self.jobs and count:
            self._news += self.jobs.popleft()()
            count -= 1

    def poll(self) -> list[News]:
        news, self._news = self._news, []
        return news

    def fileno(self) -> int:
        return 99

    def close(self) -> None:
        self.is_closed = True


class Setup:
    """A tier over a pool, with its ledger and its scanner."""

    def __init__(
        self,
        *,
        quota: int = 20 * UNIT,
        min_touches: int = 2,
        num_blocks: int = 320,
        num_ranks: int = 1,
        host_slots: int = 0,
        is_scanned: bool = True,
    ) -> None:
        self.clock = VirtualClock()
        self.pool = BlockPool(num_blocks)
        self.ledger = TransferLedger(self.pool)
        self.events = KVEventRecorder(SIZE, has_disk=True)
        self.keepers: list[FakeScanner] = []
        self.ready = ready(num_ranks)
        self.host = HostTier(host_slots, SIZE, self.ledger) if host_slots else None
        self.tier = DiskTier(
            self.ready.kv_directories,
            self.ledger,
            self.clock,
            self._open,
            quota_bytes=quota,
            min_touches=min_touches,
            epoch_s=EPOCH,
            host=self.host,
            events=self.events,
        )
        if is_scanned:
            self.work()

    def _open(self, directories: Sequence[KVDirectory], _clock: Clock) -> FakeScanner:
        assert directories
        self.keepers.append(FakeScanner())
        return self.keepers[-1]

    @property
    def keeper(self) -> FakeScanner:
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
        cached_blocks = []
        for index, key in enumerate(keys):
            block = self.pool.find(key)
            if block is None:
                (block,) = self.pool.allocate(1)
                self.pool.publish(block, key)
                self.pool.release([block])
            parent = keys[index - 1] if index else None
            cached_blocks.append(
                CachedBlock(block, key, parent, TOKENS[index * SIZE : (index + 1) * SIZE])
            )
        return self.tier.save(cached_blocks)

    def end(
        self,
        transfer: Transfer,
        failed: Sequence[int] = (),
        error: str = "it is bad",
        unreadable: Sequence[int] = (),
    ) -> None:
        """The workers say that a transfer has ended; what was stored is on disk from then on."""
        if isinstance(transfer.target, DiskObjects):
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

    def store(self, keys: Sequence[bytes]) -> None:
        """Passes through blocks twice, and lets the workers write them."""
        self.pass_through(keys)
        self.pass_through(keys)
        for transfer in self.ledger.drain():
            self.end(transfer)

    def load(self, prefix: PrefixRequest, start: int, count: int) -> Transfer:
        blocks = self.pool.allocate(count)
        self.tier.load(prefix, start, blocks, 7)
        self.pool.release(blocks)
        (transfer,) = self.ledger.drain()
        return transfer


def ready(num_ranks: int = 1, name: str = "model") -> WorkerReady:
    directories = tuple(
        KVDirectory(f"/kv/{name}-{rank}", UNIT // num_ranks) for rank in range(num_ranks)
    )
    return msgspec.structs.replace(READY, kv_directories=directories)


def prefix(keys: Sequence[bytes] = KEYS, request_id: str = "r") -> PrefixRequest:
    return PrefixRequest(request_id, keys, TOKENS)


def stored_keys(transfers: Sequence[Transfer]) -> list[bytes]:
    return [
        key
        for transfer in transfers
        if isinstance(transfer.target, DiskObjects)
        for key in transfer.target.keys
    ]
