# SPDX-License-Identifier: Apache-2.0
"""The worker's half of KV transfers: copies blocks between device, tiers and other engines, beside the steps.

Every block is copied by one thread: those between device and host memory by one, reads from disk by some, and
writes to disk by others, which let reads go first; `KVFetcher` has threads of its own for other engines. No
thread holds the interpreter while it copies, computes a checksum or waits for the disk.

A copy comes behind the steps that were executed when it begins, and its transfer ends when the device has done it:
steps that the engine plans from then on find what was written.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from pagoda.backend.kv_store import Event, KVStore
from pagoda.faults.injector import Faults
from pagoda.messages.transfers import (
    DeviceBlocks,
    DiskObjects,
    HostSlots,
    KVDirectory,
    RemoteBlocks,
    Transfer,
    TransferPlace,
    Transfers,
)
from pagoda.messages.worker import WorkerReady
from pagoda.plugins.disk_tier.objects import (
    ObjectError,
    ObjectFiles,
    ObjectUnreadableError,
    open_in_time,
)
from pagoda.worker.kv.handoff import KVHandoff
from pagoda.worker.kv.jobs import FIRST, LATER, Job, Jobs, Lane, num_blocks
from pagoda.worker.kv.manifest import make_manifest
from pagoda.worker.kv.memory import HostArena, copy_bytes
from pagoda.worker.loading import LoadedWorker, WorkerPlan

NUM_READERS = 2
NUM_WRITERS = 2
"""Threads of each kind: one copies and checks while the other's object is with the disk."""
READ_TIMEOUT_S = 10.0
"""Seconds without the end of any read after which a disk counts as hanging, and what it owes as unreadable."""
_WRITE_PATIENCE_S = 10.0
"""Seconds after which a write no longer lets reads go first: its blocks are wanted back some time."""
_WARNING_INTERVAL_S = 10.0
"""Seconds between warnings of unforeseen errors: what breaks one block may break thousands."""

_log = logging.getLogger(__name__)

_Task = tuple[Job, range]
"""Some blocks of a job, by their indices there: one, unless they go between device and host memory."""
_ROUTES: dict[tuple[type[TransferPlace], type[TransferPlace]], tuple[str, int]] = {
    (HostSlots, DeviceBlocks): ("copy", FIRST),
    (DeviceBlocks, HostSlots): ("copy", LATER),
    (DiskObjects, DeviceBlocks): ("read", FIRST),
    (DiskObjects, HostSlots): ("read", LATER),
    (DeviceBlocks, DiskObjects): ("write", LATER),
}
"""Threads and urgency of a transfer, by the kinds of its source and target."""


_HANGS = f"the disk of KV blocks has not answered for {READ_TIMEOUT_S:g} s"


class _GivenUpError(Exception):
    """The transfer has ended without this block."""


@dataclass(frozen=True)
class KVTiers:
    """The places that one rank has besides its device."""

    store: KVStore
    arena: HostArena | None
    files: ObjectFiles | None

    def described(self, ready: WorkerReady) -> WorkerReady:
        """Adds what the engine needs to know of the tiers to `ready`."""
        directories: tuple[KVDirectory, ...] = ()
        if self.files is not None:
            directories = (KVDirectory(str(self.files.directory), self.files.object_bytes),)
        return msgspec.structs.replace(
            ready,
            kv_host_slots=0 if self.arena is None else self.arena.num_slots,
            kv_directories=directories,
        )


def open_tiers(plan: WorkerPlan, loaded: LoadedWorker, faults: Faults | None = None) -> KVTiers:
    """The tiers that the configuration asks for; `faults` are those of this process.

    Raises ConfigError if the directory cannot be used.
    """
    config = plan.config
    store = loaded.kv
    arena: HostArena | None = None
    if config.kv_host_bytes:
        arena = HostArena(config.kv_host_bytes, store.block_bytes)
    files: ObjectFiles | None = None
    if config.kv_disk_path is not None:
        manifest = make_manifest(plan, store, loaded.ready.arithmetic)
        directory = open_in_time(
            Path(config.kv_disk_path), manifest, was_open=config.kept_blocks is not None
        )
        files = ObjectFiles(directory, manifest, faults)
    return KVTiers(store, arena, files)


class TransferWorker:
    """Begins the transfers of one rank, which end in `jobs`."""

    def __init__(
        self,
        tiers: KVTiers,
        handoff: KVHandoff | None,
        jobs: Jobs,
        faults: Faults | None = None,
    ) -> None:
        """`faults` are those of this process."""
        self._copy_blocks = (faults or Faults(None)).before("worker.copy", self._copy)
        self._store = tiers.store
        self._arena = tiers.arena
        self._files = tiers.files
        self._handoff = handoff
        self._jobs = jobs
        self.fetcher = None if handoff is None else handoff.open_fetcher(jobs)
        self._num_reads = 0
        """Blocks that are to be read from disk for a request that waits; guarded like the jobs."""
        self._owed: dict[tuple[Job, int], bool] = {}
        """Blocks that the disk has yet to give, by job and index, and if a request waits for them; guarded alike.
        Their targets have not been touched."""
        self._heard_at = 0.0
        """Time at which the disk gave the last of them, or was asked for the first."""
        self._is_hanging = False
        """The disk has not answered for long, and has not since; guarded alike."""
        self._next_warning_at = 0.0
        self._lanes: dict[str, Lane[_Task]] = {}
        if tiers.arena is not None:
            self._lanes["copy"] = Lane("kv-copy", 1, self._work)
        if tiers.files is not None:
            self._lanes["read"] = Lane("kv-read", NUM_READERS, self._work)
            self._lanes["write"] = Lane("kv-write", NUM_WRITERS, self._work)

    def apply(self, message: Transfers) -> None:
        """Begins transfers, which may name added peers; those from removed peers that are under way fail.

        Never waits for a transfer. Raises ValueError as `start` does.
        """
        if self.fetcher is not None:
            self.fetcher.add_peers(message.added_peers)
        self.start(message.transfers)
        if self.fetcher is not None:
            self.fetcher.remove_peers(message.removed_peers)

    def start(self, transfers: Sequence[Transfer]) -> None:
        """Begins transfers; never waits for one.

        Raises ValueError if this worker has no such places: engine and worker disagree.
        """
        for transfer in transfers:
            count = num_blocks(transfer)
            match transfer.source, transfer.target:
                case RemoteBlocks() as remote, DeviceBlocks(targets) if self.fetcher:
                    self.fetcher.start(transfer, remote, targets)
                case _:
                    lane, urgency = self._route(transfer)
                    if lane is self._lanes.get("read"):
                        self._read(lane, transfer, count, urgency)
                        continue
                    size = self._store.batch_blocks if lane is self._lanes.get("copy") else 1
                    batches = [range(count)[at : at + size] for at in range(0, count, size)]
                    job = self._jobs.begin(transfer, len(batches))
                    for batch in batches:
                        lane.put((job, batch), urgency)

    def _read(self, lane: Lane[_Task], transfer: Transfer, count: int, urgency: int) -> None:
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
                lane.put((job, range(index, index + 1)), urgency)

    @property
    def is_reading(self) -> bool:
        """True while the disk owes blocks: `give_up_reads` is to be called now and then."""
        return bool(self._owed)

    def give_up_reads(self) -> None:
        """Ends the transfers of a disk that hangs; it is not asked again until it has answered.

        Called by the thread that begins transfers, so none begins meanwhile.
        """
        with self._jobs.changed:
            if not self._owed or time.monotonic() - self._heard_at < READ_TIMEOUT_S:
                return
            self._is_hanging = True
            owed, self._owed = self._owed, {}
            self._num_reads -= sum(owed.values())
            self._jobs.changed.notify_all()
        self._lanes["read"].drop_tasks()
        _log.warning("%s, and is not asked until it answers", _HANGS)
        for job, index in owed:
            self._jobs.end_part(job, [index], _HANGS, unreadable=True)

    def _claim(self, job: Job, index: int) -> None:
        """The disk has answered. Raises _GivenUpError if its answer is not wanted any more."""
        with self._jobs.changed:
            self._is_hanging = False
            self._heard_at = time.monotonic()
            is_urgent = self._owed.pop((job, index), None)
            if is_urgent is None:
                raise _GivenUpError
            self._num_reads -= is_urgent
            self._jobs.changed.notify_all()

    def _route(self, transfer: Transfer) -> tuple[Lane[_Task], int]:
        """Chooses the threads that carry out a transfer. Raises ValueError if this worker has no such places."""
        places = type(transfer.source), type(transfer.target)
        name, urgency = _ROUTES.get(places, ("", LATER))
        if name not in self._lanes or (HostSlots in places and self._arena is None):
            raise ValueError(
                f"Transfer {transfer.transfer_id} is between places that are not here."
            )
        return self._lanes[name], urgency

    def close(self) -> None:
        """Ends exports to others, all transfers and the threads, and waits for these."""
        if self._handoff is not None:
            self._handoff.close()
        self._jobs.close()
        if self.fetcher is not None:
            self.fetcher.close()
        for lane in self._lanes.values():
            lane.drop_tasks()
            lane.end()
        for lane in self._lanes.values():
            lane.join()

    # ---- the threads

    def _work(self, tasks: Iterator[_Task]) -> None:
        files = self._files
        buffer = memoryview(b"") if files is None else files.new_buffer()
        for job, batch in tasks:
            if isinstance(job.transfer.target, DiskObjects):
                self._let_reads_go_first(job)
            self._attempt(job, batch, buffer)

    def _copy(self, job: Job, batch: range, buffer: memoryview) -> None:
        """Copies some blocks; `buffer` has room for one object on its way from or to the disk."""
        transfer, store, files = job.transfer, self._store, self._files
        chosen = slice(batch.start, batch.stop)
        match transfer.source, transfer.target:
            case DeviceBlocks(block_ids), HostSlots(slots):
                into = list(map(self._slot, slots[chosen]))
                store.read(block_ids[chosen], into, self._jobs.computed).wait()
            case HostSlots(slots), DeviceBlocks(block_ids):
                unused = self._await_step(transfer.after_step)
                sources = list(map(self._slot, slots[chosen]))
                store.write(block_ids[chosen], sources, unused).wait()
            case DeviceBlocks(block_ids), DiskObjects(keys) if files:
                payload = files.payload(buffer)
                store.read(block_ids[chosen], [payload], self._jobs.computed).wait()
                files.write(keys[batch.start], buffer)
            case DiskObjects(keys), HostSlots(slots) if files:
                self._read_object(files, keys[batch.start], buffer, job, batch.start)
                copy_bytes(files.payload(buffer), self._slot(slots[batch.start]))
            case DiskObjects(keys), DeviceBlocks(block_ids) if files:
                self._read_object(files, keys[batch.start], buffer, job, batch.start)
                unused = self._await_step(transfer.after_step)
                store.write(block_ids[chosen], [files.payload(buffer)], unused).wait()

    def _read_object(
        self, files: ObjectFiles, key: bytes, buffer: memoryview, job: Job, index: int
    ) -> None:
        """Reads an object into a buffer of this thread. Raises as `ObjectFiles.read` and `_claim` do."""
        try:
            files.read(key, buffer)
        finally:
            self._claim(job, index)

    def _let_reads_go_first(self, job: Job) -> None:
        patience_s = job.begun_at + _WRITE_PATIENCE_S - time.monotonic()
        jobs = self._jobs
        with jobs.changed:
            jobs.changed.wait_for(lambda: self._num_reads == 0 or jobs.is_closed, patience_s)

    def _await_step(self, step: int) -> Event:
        """Waits for a step; behind the event, no step up to it uses the blocks any more."""
        unused = self._jobs.wait_for_step(step)
        if unused is None:
            raise ObjectUnreadableError("the worker is ending")
        return unused

    def _attempt(self, job: Job, batch: range, buffer: memoryview) -> None:
        """Copies some blocks, or ends them with the reason why they were not copied."""
        try:
            self._copy_blocks(job, batch, buffer)
        except _GivenUpError:
            pass
        except ObjectError as error:
            unreadable = isinstance(error, ObjectUnreadableError)
            self._jobs.end_part(job, batch, str(error), unreadable=unreadable)
        except Exception as error:
            with self._jobs.changed:
                self._num_reads -= self._owed.pop((job, batch.start), False)
                now = time.monotonic()
                is_told = now >= self._next_warning_at
                if is_told:
                    self._next_warning_at = now + _WARNING_INTERVAL_S
            if is_told:
                _log.exception("blocks could not be copied")
            self._jobs.end_part(job, batch, f"{type(error).__name__}: {error}", unreadable=True)
        else:
            self._jobs.end_part(job)

    def _slot(self, index: int) -> memoryview:
        if self._arena is None:
            raise ValueError("There is no arena.")
        return self._arena.slot(index)
