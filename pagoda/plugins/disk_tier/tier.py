# SPDX-License-Identifier: Apache-2.0
"""The tier on disk: which blocks are there, which are worth writing, and which go to make room.

Workers read and write the objects; a `DiskScanner` lists directories and removes objects. The index here may lag
behind the disk: an object that has gone fails to load, and one that has come is found by a probe. So others may
use the directories as well. Nothing is written before the first scan has counted everything that is there, since
the quota cannot be kept before.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from functools import partial

from pagoda.errors import ConfigError
from pagoda.ipc.clock import Clock
from pagoda.kv.block_pool import Block
from pagoda.kv.connector import CachedBlock, IsThere, OtherBlocks, PrefixRequest
from pagoda.kv.events import CacheRecorder
from pagoda.kv.host_tier import HostTier, Lower
from pagoda.kv.plugin import TierContext
from pagoda.kv.storeys import Hold
from pagoda.kv.transfers import OnEnd
from pagoda.messages.load import TierLoad
from pagoda.messages.transfers import (
    DeviceBlocks,
    HostSlots,
    TierBlocks,
    TierPlace,
    TransferEnd,
)
from pagoda.messages.worker import WorkerReady
from pagoda.plugins.disk_tier.directory import MIN_TOUCHES, TIER
from pagoda.plugins.disk_tier.far_scanner import FarScanner
from pagoda.plugins.disk_tier.index import DiskIndex
from pagoda.plugins.disk_tier.policy import (
    AdmissionFilter,
    Evictor,
    Silence,
    SwapBudget,
    WriteBackoff,
)
from pagoda.plugins.disk_tier.scanner import (
    OWN,
    DirectoryFound,
    DiskScanner,
    FanOutListed,
    News,
    ObjectsFound,
    Probe,
    ProbeAnswer,
    Removed,
    ScanEnded,
    Scanner,
)

logger = logging.getLogger(__name__)

_MEDIUM = "DISK"
"""The tier in KV events, by the name that vLLM's subscribers know."""
_SCANNER_TIMEOUT_S = 10.0
"""Seconds of silence, while the scanner owes an answer, after which the disk counts as hanging."""
_WRITE_TIMEOUT_S = 60.0
"""Seconds without the end of any write after which segments of running requests are not awaited any more."""
_REST_S = 10.0
"""Seconds in which steps read nothing here after one has waited in vain."""
_WARNING_INTERVAL_S = 10.0
"""Seconds between warnings of failed loads: in a directory that was removed, one fails after the other."""


OpenScanner = Callable[[Sequence[TierPlace], Clock], Scanner]


def open_tier(context: TierContext, open_scanner: OpenScanner | None = None) -> DiskTier:
    """The tier of one engine. Raises ConfigError if the quota is too small for even one block."""

    def scanner(places: Sequence[TierPlace], clock: Clock) -> Scanner:
        return FarScanner(places, context.post) if places[0].host else DiskScanner(places, clock)

    return DiskTier(context, open_scanner or scanner)


class DiskTier:
    """The engine's half of the directories of objects. Every rank has the same keys in its own directory."""

    tier = TIER
    has_own_timeout = False
    is_cache = True

    def __init__(self, context: TierContext, open_scanner: OpenScanner) -> None:
        """Raises ConfigError if the quota is too small for even one block."""
        self._ledger = context.ledger
        self._clock = context.clock
        self._open_scanner = open_scanner
        self._quota_bytes = context.config.num_bytes
        self._epoch_s = context.epoch_s
        self._host = context.host
        self._recorder = context.recorder or CacheRecorder(keeps_events=False)
        self._admission = AdmissionFilter(int(context.config.settings[MIN_TOUCHES]))
        self._backoff = WriteBackoff(context.clock)
        self._num_probes = 0
        self._changed: set[str] = set()
        self._next_warning_at = 0.0
        self._last_error = ""
        """Clause that says why a store failed last."""
        self._num_stored = 0
        self._num_removed = 0
        self._num_loaded = 0
        self._num_failed = 0
        self._queued: dict[str, tuple[PrefixRequest, int]] = {}
        """Requests in line, and where what the device lacks begins."""
        self._unwritten: list[Hold] = []
        """Holds whose blocks are being written."""
        self._writing = Silence(context.clock, _WRITE_TIMEOUT_S)
        self._rests_until = 0.0
        """Time until which steps read nothing here."""
        self._open_directories(context.places)
        self._budget = SwapBudget(self._quota_bytes // self._block_bytes, self._clock)
        if self._host is not None and self._host.lower is None:
            self._host.lower = Lower(self._wants, self._store_slots)

    def _open_directories(self, directories: tuple[TierPlace, ...]) -> None:
        """Starts anew with directories of which nothing is known yet."""
        self._directories = directories
        self._path = directories[0].path
        by_host = Counter[str]()
        for directory in directories:
            by_host[directory.host] += directory.block_bytes
        self._block_bytes = max(by_host.values())
        """Bytes of one block, on all ranks of a host together: each host has a disk of its own."""
        if self._block_bytes > self._quota_bytes:
            raise ConfigError(
                f"--kv-disk-bytes {self._quota_bytes} is too small: one KV block of this model "
                f"takes {self._block_bytes} bytes on disk."
            )
        self._index = DiskIndex()
        self._index.add_directory(OWN, self._block_bytes)
        self._is_indexed = False
        self._probes: dict[str, Probe] = {}
        """Probes for whose answers requests wait, by request."""
        self._probing = Silence(self._clock, _SCANNER_TIMEOUT_S)
        self._listing = Silence(self._clock, _SCANNER_TIMEOUT_S)
        """Silence of the first scan."""
        self._listing.asked()
        self._is_hang_known = False
        """`poll` has named the requests whose probes the hanging disk does not answer."""
        self._scanner = self._open_scanner(directories, self._clock)
        self._evictor = Evictor(
            self._index,
            self._scanner.remove,
            self._quota_bytes,
            self._forget_object,
            max(directory.num_sharers for directory in directories),
        )
        for prefix, start in self._queued.values():
            self._look(prefix, start)

    # ---- what requests find

    def on_queued(self, prefix: PrefixRequest, start: int) -> None:
        self._queued[prefix.request_id] = prefix, start
        self._look(prefix, start)

    def _look(self, prefix: PrefixRequest, start: int) -> None:
        """Asks for blocks that are not known to be there."""
        keys = prefix.keys
        unknown = [index for index in range(start, len(keys)) if not self._has(keys[index])]
        if not (unknown or (prefix.other_blocks and keys)) or self._probing.is_long:
            return
        self._probing.asked()
        self._num_probes += 1
        probe = self._probes[prefix.request_id] = Probe(prefix.request_id, self._num_probes)
        others: OtherBlocks | None = None
        if prefix.other_blocks is not None:
            others = partial(_blocks_behind, prefix.other_blocks, [*unknown, len(keys)])
        self._scanner.probe(probe, [keys[index] for index in unknown], others)

    def on_dequeued(self, request_id: str) -> None:
        self._queued.pop(request_id, None)
        probe = self._probes.pop(request_id, None)
        if probe is not None:
            self._scanner.cancel_probe(probe)
            if not self._probes and not self._probing.is_long:
                self._probing.heard(owes_more=False)

    def lookup(self, prefix: PrefixRequest, start: int) -> int | None:
        for index in range(start, len(prefix.keys)):
            if not self._has(prefix.keys[index]):
                may_come = prefix.request_id in self._probes and not self._probing.is_long
                return None if may_come else index - start
        return max(0, len(prefix.keys) - start)

    def _has(self, key: bytes) -> bool:
        return self._index.has(OWN, key)

    def prefetch(self, prefix: PrefixRequest, start: int) -> None:
        if self._host is None:
            return
        keys: list[bytes] = []
        slots: list[int] = []
        end = min(len(prefix.keys), start + self._host.room_behind(prefix, start))
        for index in range(start, end):
            key = prefix.keys[index]
            if not self._has(key):
                break
            slot = self._host.reserve(prefix, index)
            if slot is not None:
                keys.append(key)
                slots.append(slot)
        if keys:
            self._use(keys)
            on_end = partial(self._prefetch_ended, self._host, keys)
            self._ledger.open(on_end, TierBlocks(TIER, keys), HostSlots(slots))

    def load(
        self, prefix: PrefixRequest, start: int, blocks: Sequence[Block], after_step: int
    ) -> int:
        keys = list(prefix.keys[start : start + len(blocks)])
        self._use(keys)
        target = DeviceBlocks([block.block_id for block in blocks])
        on_end = partial(self._load_ended, keys)
        return self._ledger.open(
            on_end, TierBlocks(TIER, keys), target, blocks, after_step=after_step
        )

    # ---- what is kept

    def save(self, cached_blocks: Sequence[CachedBlock]) -> int:
        self._scan_first()
        may_store = self._may_store
        room = self._ledger.room_for(cached_blocks)
        known: list[bytes] = []
        wanted: dict[bytes, CachedBlock] = {}
        num_done = 0
        for cached in cached_blocks:
            key = cached.key
            is_kept = self._has(key)
            is_worth_it = cached.is_needed or self._admission.touch(
                key, cached.parent, cached.group, is_kept=is_kept
            )
            if is_kept:
                known.append(key)
            elif is_worth_it and may_store and not self._evictor.is_changing(key):
                if len(wanted) == room and key not in wanted:
                    break
                wanted[key] = cached
            num_done += 1
        self._use(known)
        self._store(list(wanted.values()))
        return num_done

    def _scan_first(self) -> None:
        """Begins to scan if the first scan has failed."""
        if not self._is_indexed:
            self._scanner.rescan()

    @property
    def _may_store(self) -> bool:
        return self._is_indexed and not self._backoff.is_on

    def _store(self, saved: Sequence[CachedBlock]) -> None:
        saved = self._affordable(saved)
        if not saved:
            return
        self._write(saved, partial(self._store_ended, saved), likely=not saved[0].is_needed)

    def _write(self, saved: Sequence[CachedBlock], on_end: OnEnd, *, likely: bool) -> None:
        """Begins to write blocks that are on the device."""
        keys = [cached.key for cached in saved]
        blocks = [cached.block for cached in saved]
        source = DeviceBlocks([block.block_id for block in blocks])
        self._ledger.open(on_end, source, TierBlocks(TIER, keys), blocks, likely=likely)
        self._begin_storing(keys)

    def _begin_storing(self, keys: Sequence[bytes]) -> None:
        self._evictor.storing.update(keys)
        self._writing.asked()

    def _affordable(self, saved: Sequence[CachedBlock]) -> Sequence[CachedBlock]:
        """The leading ones for which there is room and, if they are needed again, a budget."""
        saved = saved[: self._evictor.make_room(len(saved))]
        if saved and saved[0].is_needed:
            saved = saved[: self._budget.take(len(saved))]
        return saved

    def _wants(self, key: bytes) -> bool:
        return self._may_store and not (self._has(key) or self._evictor.is_changing(key))

    def _store_slots(self, saved: Sequence[CachedBlock]) -> int:
        """Writes blocks that are about to be evicted from host memory; see `Lower`."""
        saved = self._affordable(saved)
        if saved:
            keys = [cached.key for cached in saved]
            source = HostSlots([cached.block.block_id for cached in saved])
            self._ledger.open(partial(self._sunk, saved), source, TierBlocks(TIER, keys))
            self._begin_storing(keys)
        return len(saved)

    def _sunk(self, saved: Sequence[CachedBlock], end: TransferEnd | None) -> None:
        self._store_ended(saved, end)
        if self._host is not None:
            is_good = end is not None and not end.failed
            self._host.sunk([cached.block for cached in saved], is_good=is_good)

    def _forget_object(self, directory: int, key: bytes) -> None:
        if self._index.remove(directory, key) and directory == OWN:
            self._num_removed += 1
            self._recorder.remove(key, _MEDIUM, None)

    def _use(self, keys: Sequence[bytes]) -> None:
        """Marks objects as used now; the end of a prefix is evicted before its beginning."""
        now = self._now()
        for key in reversed(keys):
            self._index.touch(OWN, key, now)

    def _now(self) -> int:
        return int(self._epoch_s + self._clock.now())

    # ---- segments of running requests, which steps read here (`Storey`)

    @property
    def storey(self) -> DiskTier:
        return self

    @property
    def num_held(self) -> int:
        return len(self._evictor.holds)

    @property
    def num_holdable(self) -> int:
        return self.num_held if self.trouble else self._evictor.num_holdable

    @property
    def trouble(self) -> str:
        if self._backoff.is_on:
            return self._last_error
        if self.is_back_soon or self._listing.is_long or self._writing.is_long:
            return f"{self._path} does not answer"
        return ""

    @property
    def is_back_soon(self) -> bool:
        return self._clock.now() < self._rests_until

    @property
    def next_event_at(self) -> float | None:
        instants = [self._listing.is_long_at, self._writing.is_long_at]
        if self.is_back_soon:
            instants.append(self._rests_until)
        return min((at for at in instants if at is not None), default=None)

    def has(self, key: bytes) -> bool:
        return self._has(key) and not (self._evictor.is_changing(key) or self.is_back_soon)

    def is_held(self, key: bytes) -> bool:
        return key in self._evictor.holds

    def hold_found(self, keys: Sequence[bytes]) -> Hold:
        if not all(map(self.has, keys)):
            raise ValueError("Blocks are to be held that are not here.")
        self._use(keys)
        return self._hold(keys, is_there=True)

    def hold(self, blocks: Sequence[CachedBlock]) -> Hold | None:
        lacking = [it for it in blocks if not self._has(it.key)]
        if any(self._evictor.is_changing(it.key) for it in blocks):
            return None
        may_store = self._may_store and not self.trouble
        if lacking and not (may_store and self._evictor.has_room_for(len(lacking))):
            self._scan_first()
            return None
        keys = [it.key for it in blocks]
        self._use(keys)
        hold = self._hold(keys, is_there=not lacking)
        if lacking:
            self._unwritten.append(hold)
            self._write(lacking, partial(self._hold_written, hold, lacking), likely=True)
        return hold

    def _hold(self, keys: Sequence[bytes], *, is_there: bool) -> Hold:
        holds = self._evictor.holds
        holds.update(keys)

        def release() -> None:
            for key in keys:
                holds[key] -= 1
                if not holds[key]:
                    del holds[key]

        return Hold(TierBlocks(TIER, list(keys)), release, is_there=is_there)

    def _hold_written(
        self, hold: Hold, saved: Sequence[CachedBlock], end: TransferEnd | None
    ) -> None:
        self._unwritten.remove(hold)
        self._store_ended(saved, end)
        hold.is_there = end is not None and not end.failed
        if not hold.is_there:
            hold.error = "the workers are lost" if end is None else end.error

    def lose(self, keys: Sequence[bytes], *, hangs: bool) -> None:
        """Removes objects, whose blocks are computed and written again if they are needed; or rests a while."""
        if hangs:
            self._rests_until = self._clock.now() + _REST_S
        else:
            self._evictor.discard([key for key in keys if self._has(key)])

    # ---- transfers

    def _load_ended(self, keys: Sequence[bytes], end: TransferEnd | None) -> None:
        if end is not None:
            self._num_loaded += len(keys) - len(end.failed)
            self._num_failed += len(end.failed)
            self._give_up(keys, end)

    def _prefetch_ended(
        self, host: HostTier, keys: Sequence[bytes], end: TransferEnd | None
    ) -> None:
        if end is not None:
            self._give_up(keys, end)
            failed = set(end.failed)
            for index, key in enumerate(keys):
                host.settle(key, is_good=index not in failed)

    def _give_up(self, keys: Sequence[bytes], end: TransferEnd) -> None:
        """Removes bad objects. Unreadable ones are only forgotten: a probe or a scan finds them again."""
        if not end.failed:
            return
        self._warn_of_loads(end)
        unreadable = set(end.unreadable)
        for index in end.unreadable:
            self._forget_object(OWN, keys[index])
        self._evictor.discard([keys[index] for index in end.failed if index not in unreadable])

    def _store_ended(self, saved: Sequence[CachedBlock], end: TransferEnd | None) -> None:
        self._evictor.storing.difference_update(cached.key for cached in saved)
        self._writing.heard(owes_more=bool(self._evictor.storing))
        if end is None:  # a later scan finds what was written
            return
        failed = set(end.failed)
        good = [cached for index, cached in enumerate(saved) if index not in failed]
        now = self._now()
        for cached in reversed(good):
            self._index.add(OWN, cached.key, now)
        self._num_stored += len(good)
        self._num_failed += len(failed)
        for it in good:
            self._recorder.store(it.key, it.parent, it.token_ids, _MEDIUM, it.group)
        if failed:
            self._last_error = end.error
            # A disk that took some is not full: what failed is in the way of single objects.
            pause_s = None if good else self._backoff.failed()
            if pause_s is not None:
                logger.warning(
                    "KV blocks cannot be written to %s (%s); the next try is in %g s.",
                    self._path,
                    end.error,
                    pause_s,
                )
            if len(self._directories) > 1:  # some ranks may have written theirs
                self._evictor.discard([saved[index].key for index in end.failed])
        elif self._backoff.succeeded():
            logger.info("KV blocks are written to %s again.", self._path)
        if good:
            self._scanner.rescan()

    def _warn_of_loads(self, end: TransferEnd) -> None:
        if self._clock.now() < self._next_warning_at:
            return
        self._next_warning_at = self._clock.now() + _WARNING_INTERVAL_S
        logger.warning(
            "%d KV blocks could not be read from %s, the first because %s; they are computed again.",
            len(end.failed),
            self._path,
            end.error,
        )

    # ---- the workers, and the engine's loop

    def workers_ready(self, ready: WorkerReady) -> None:
        """Raises ConfigError if the quota is too small for even one block."""
        directories = ready.places_of(TIER)
        if directories == self._directories and not directories[0].host:
            self._scanner.rescan()  # some stores may have ended unseen
        else:
            self._scanner.close()
            self._open_directories(directories)

    def workers_lost(self) -> None: ...

    def poll(self) -> Collection[str]:
        everything = self._scanner.poll()
        for news in everything:
            self._apply(news)
        if everything:
            self._probing.heard(owes_more=bool(self._probes))
            self._listing.heard(owes_more=not self._is_indexed)
        if self._writing.is_long:
            for hold in self._unwritten:
                hold.error = f"nothing was written for {_WRITE_TIMEOUT_S:g} s"
        self._evictor.evict()
        is_hanging = self._probing.is_long
        changed, self._changed = self._changed, set()
        if is_hanging and not self._is_hang_known:
            changed.update(self._probes)
        self._is_hang_known = is_hanging
        return changed

    def _apply(self, news: News) -> None:
        match news:
            case ProbeAnswer():
                for key in news.found:
                    if not self._has(key):
                        self._found(OWN, key, self._now())
                request_id = news.probe.request_id
                if self._probes.get(request_id) == news.probe:
                    del self._probes[request_id]
                    self._changed.add(request_id)
            case ObjectsFound():
                for key, used_at in news.used_at.items():
                    self._found(news.directory, key, used_at)
            case FanOutListed():
                self._compare(news)
            case Removed():
                self._evictor.removed(news)
            case DirectoryFound():
                self._index.add_directory(news.directory, news.object_bytes)
            case ScanEnded():
                self._scan_ended(news)

    def _found(self, directory: int, key: bytes, used_at: int) -> None:
        if not self._evictor.is_removing(directory, key):
            self._index.add(directory, key, used_at)

    def _compare(self, listed: FanOutListed) -> None:
        """Adds objects that are there and unknown; forgets those that are known and not there."""
        directory, used_at = listed.directory, listed.used_at
        unknown, missing = self._index.compare(
            directory, listed.fan_out, used_at.keys(), listed.listed_at
        )
        for key in unknown:
            self._found(directory, key, used_at[key])
        for key in missing:
            self._forget_object(directory, key)

    def _scan_ended(self, scan: ScanEnded) -> None:
        if not self._is_indexed:
            self._is_indexed = True
            logger.info(
                "%d KV blocks in %s indexed in %.1f s.",
                self._index.count(OWN),
                self._path,
                scan.seconds,
            )
        self._evictor.check()

    def pollables(self) -> list[object]:
        return [self._scanner.fileno()]

    def load_report(self) -> TierLoad:
        return TierLoad(
            name=self.tier,
            num_blocks=self._index.count(OWN),
            num_total_blocks=self._quota_bytes // self._block_bytes,
            num_stored=self._num_stored,
            num_removed=self._num_removed,
            num_loaded=self._num_loaded,
            num_failed=self._num_failed,
            is_indexed=self._is_indexed,
            is_shared=True,
        )

    def close(self) -> None:
        self._scanner.close()


def _blocks_behind(
    others: OtherBlocks, unknown: Sequence[int], num_found: int, is_there: IsThere
) -> list[bytes]:
    """Blocks of other groups behind a prefix of which `num_found` blocks were unknown, and are there.

    `unknown` are the indices of its unknown blocks, and its length.
    """
    return others(unknown[num_found], is_there)
