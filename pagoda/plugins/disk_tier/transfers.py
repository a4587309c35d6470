# SPDX-License-Identifier: Apache-2.0
"""The worker's half of the tier: copies blocks between the objects of one rank, its device and its host memory.

Some threads read, others write and let reads go first. No thread holds the interpreter while it copies, computes a
checksum or waits for the disk.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from pagoda.backend.kv_store import KVStore
from pagoda.faults.injector import Faults
from pagoda.messages.transfers import (
    DeviceBlocks,
    HostSlots,
    TierBlocks,
    TierPlace,
    TierWord,
    Transfer,
)
from pagoda.messages.worker_config import KVTierConfig
from pagoda.plugins.disk_tier.directory import TIER, check_kv_directory
from pagoda.plugins.disk_tier.host_scanner import HostScanner
from pagoda.plugins.disk_tier.manifest import make_manifest
from pagoda.plugins.disk_tier.objects import (
    ObjectError,
    ObjectFiles,
    ObjectUnreadableError,
    open_in_time,
)
from pagoda.plugins.disk_tier.parts import ObjectParts
from pagoda.worker.kv.jobs import FIRST, LATER, CopyError, GivenUpError, Job, Jobs, Lane
from pagoda.worker.kv.memory import HostArena, copy_bytes
from pagoda.worker.kv.segments import BlockPart, place_parts
from pagoda.worker.kv.tier import WorkerTier
from pagoda.worker.kv.transfers import not_here
from pagoda.worker.loading import LoadedWorker
from pagoda.worker.memory_plan import WorkerMemoryPlan
from pagoda.worker.rendezvous import host_identity

NUM_READERS = 2
NUM_WRITERS = 2
"""Threads of each kind: one copies and checks while the other's object is with the disk."""
READ_TIMEOUT_S = 10.0
"""Seconds without the end of any read after which a disk counts as hanging, and what it owes as unreadable."""
_WRITE_PATIENCE_S = 10.0
"""Seconds after which a write no longer lets reads go first: its blocks are wanted back some time."""

_log = logging.getLogger(__name__)

_Task = tuple[Job, int]
"""A block of a job, by its index there."""

_HANGS = f"the disk of KV blocks has not answered for {READ_TIMEOUT_S:g} s"


def open_tier(
    config: KVTierConfig, plan: WorkerMemoryPlan, loaded: LoadedWorker, faults: Faults | None
) -> WorkerTier:
    """The objects of one rank. Raises ConfigError if the directory cannot be used."""
    manifest = make_manifest(plan, loaded.kv, loaded.ready.arithmetic)
    was_open = plan.config.kept_blocks is not None
    own_host = plan.config.bind_host
    if own_host and not was_open:  # else the engine's host is this one, and has looked
        check_kv_directory(config.path, config.num_bytes, plan.config.model)
    directory = open_in_time(Path(config.path), manifest, was_open=was_open)
    host = host_identity(own_host) if own_host else ""
    files = ObjectFiles(directory, manifest, faults)
    return tier_of(files, place_parts(loaded.kv), faults, host, plan.config.replicas_on_host)


def tier_of(
    files: ObjectFiles,
    parts: Sequence[BlockPart] = (),
    faults: Faults | None = None,
    host: str = "",
    num_sharers: int = 1,
) -> WorkerTier:
    """The tier of these objects, whose transfers begin later; `parts` are those of places in a block, and `faults`
    of this process. `host` is that of the rank if the engine may be on another one; `num_sharers` are the
    replicas that share its quota."""
    place = TierPlace(TIER, str(files.directory), files.object_bytes, host, num_sharers)
    start = partial(DiskTransfers, files, place, faults or Faults(None))
    return WorkerTier(place, start, ObjectParts(files, parts))


class DiskTransfers:
    """Transfers between objects and the memory of one rank, which end in `jobs`."""

    def __init__(
        self,
        files: ObjectFiles,
        place: TierPlace,
        faults: Faults,
        jobs: Jobs,
        store: KVStore,
        arena: HostArena | None,
    ) -> None:
        self._copy_block = faults.before("worker.copy", self._copy)
        self._files = files
        self._jobs = jobs
        self._host_scanner = HostScanner(place, lambda body: jobs.tell(TierWord(place.tier, body)))
        self._store = store
        self._arena = arena
        self._num_reads = 0
        """Blocks that are to be read from disk for a request that waits; guarded like the jobs."""
        self._owed: dict[_Task, bool] = {}
        """Blocks that the disk has yet to give, and if a request waits for them; guarded alike.
        Their targets have not been touched."""
        self._heard_at = 0.0
        """Time at which the disk gave the last of them, or was asked for the first."""
        self._is_hanging = False
        """The disk has not answered for long, and has not since; guarded alike."""
        self._readers = Lane[_Task]("kv-read", NUM_READERS, self._work)
        self._writers = Lane[_Task]("kv-write", NUM_WRITERS, self._work)

    def begin(self, transfer: Transfer, count: int) -> None:
        match transfer.source, transfer.target:
            case TierBlocks(), DeviceBlocks():
                self._read(transfer, count, FIRST)
            case TierBlocks(), HostSlots() if self._arena is not None:
                self._read(transfer, count, LATER)
            case DeviceBlocks() | HostSlots(), TierBlocks():
                job = self._jobs.begin(transfer, count)
                for index in range(count):
                    self._writers.put((job, index))
            case _:
                raise not_here(transfer)

    def _read(self, transfer: Transfer, count: int, urgency: int) -> None:
        """Begins to read blocks from disk, or ends at once if the disk hangs."""
        job = self._jobs.begin(transfer, count)
        with self._jobs.changed:
            is_hanging = self._is_hanging
            if not is_hanging:
                if not self._owed:
                    self._heard_at = time.monotonic()
                self._owed.update({(job, index): urgency == FIRST for index in range(count)})
                self._num_reads += count * (urgency == FIRST)
        for index in range(count):
            if is_hanging:
                self._jobs.end_part(job, [index], _HANGS, unreadable=True)
            else:
                self._readers.put((job, index), urgency)

    def hear(self, body: bytes) -> None:
        self._host_scanner.hear(body)

    @property
    def owes_blocks(self) -> bool:
        return bool(self._owed)

    def give_up(self) -> None:
        """Ends the transfers of a disk that hangs; it is not asked again until it has answered."""
        with self._jobs.changed:
            if not self._owed or time.monotonic() - self._heard_at < READ_TIMEOUT_S:
                return
            self._is_hanging = True
            owed, self._owed = self._owed, {}
            self._num_reads -= sum(owed.values())
            self._jobs.changed.notify_all()
        self._readers.drop_tasks()
        _log.warning("%s, and is not asked until it answers", _HANGS)
        for job, index in owed:
            self._jobs.end_part(job, [index], _HANGS, unreadable=True)

    def close(self) -> None:
        self._host_scanner.close()
        for lane in (self._readers, self._writers):
            lane.close()
        for lane in (self._readers, self._writers):
            lane.join()

    # ---- the threads

    def _work(self, tasks: Iterator[_Task]) -> None:
        copy = partial(self._attempt, self._files.new_buffer())
        for job, index in tasks:
            if isinstance(job.transfer.target, TierBlocks):
                self._let_reads_go_first(job)
            self._jobs.attempt(job, range(index, index + 1), copy)

    def _attempt(self, buffer: memoryview, job: Job, batch: range) -> None:
        """Copies one block; `buffer` has room for its object. Raises CopyError, and as `_claim` does."""
        try:
            self._copy_block(buffer, job, batch.start)
        except ObjectError as error:
            unreadable = isinstance(error, ObjectUnreadableError)
            raise CopyError(str(error), unreadable=unreadable) from error
        except Exception:  # perhaps before the disk was asked, so that `_claim` was not
            with self._jobs.changed:
                self._num_reads -= self._owed.pop((job, batch.start), False)
                self._jobs.changed.notify_all()
            raise

    def _copy(self, buffer: memoryview, job: Job, index: int) -> None:
        transfer, store, files = job.transfer, self._store, self._files
        payload = files.payload(buffer)
        match transfer.source, transfer.target:
            case DeviceBlocks(block_ids), TierBlocks(_, keys):
                store.read([block_ids[index]], [payload], self._jobs.computed).wait()
                files.write(keys[index], buffer)
            case HostSlots(slots), TierBlocks(_, keys) if self._arena is not None:
                copy_bytes(self._arena.slot(slots[index]), payload)
                files.write(keys[index], buffer)
            case TierBlocks(_, keys), HostSlots(slots) if self._arena is not None:
                self._read_object(keys[index], buffer, job, index)
                copy_bytes(payload, self._arena.slot(slots[index]))
            case TierBlocks(_, keys), DeviceBlocks(block_ids):
                self._read_object(keys[index], buffer, job, index)
                unused = self._jobs.await_step(transfer.after_step)
                store.write([block_ids[index]], [payload], unused).wait()

    def _read_object(self, key: bytes, buffer: memoryview, job: Job, index: int) -> None:
        """Reads an object into a buffer of this thread. Raises as `ObjectFiles.read` and `_claim` do."""
        try:
            self._files.read(key, buffer)
        finally:
            self._claim(job, index)

    def _claim(self, job: Job, index: int) -> None:
        """The disk has answered. Raises GivenUpError if its answer is not wanted any more."""
        with self._jobs.changed:
            self._is_hanging = False
            self._heard_at = time.monotonic()
            is_urgent = self._owed.pop((job, index), None)
            if is_urgent is None:
                raise GivenUpError
            self._num_reads -= is_urgent
            self._jobs.changed.notify_all()

    def _let_reads_go_first(self, job: Job) -> None:
        patience_s = job.begun_at + _WRITE_PATIENCE_S - time.monotonic()
        jobs = self._jobs
        with jobs.changed:
            jobs.changed.wait_for(lambda: self._num_reads == 0 or jobs.is_closed, patience_s)
