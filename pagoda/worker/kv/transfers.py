"""The worker's half of the KV tiers: copies blocks between device, host memory and disk, beside the steps.

Every block is copied by one thread: those between device and host memory by one, reads from disk by some, and
writes to disk by others, which let reads go first. No thread holds the interpreter while it copies, computes a
checksum or waits for the disk. A transfer has ended when the last of its blocks was copied or given up.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from queue import Empty, PriorityQueue
from typing import NamedTuple

from pagoda.kv.object_files import ObjectFiles
from pagoda.kv.objects import ObjectError, ObjectUnreadableError
from pagoda.messages.transfers import (
    DeviceBlocks,
    DiskObjects,
    HostSlots,
    RemoteBlocks,
    Transfer,
    TransferEnd,
    TransferPlace,
)
from pagoda.worker.kv.host_arena import HostArena
from pagoda.worker.kv.memory import KVMemory, copy_bytes
from pagoda.worker.kv.steps import Steps

NUM_READERS = 2
NUM_WRITERS = 2
"""Threads of each kind: one copies and checks while the other's object is with the disk."""
_WRITE_PATIENCE_S = 10.0
"""Seconds after which a write no longer lets reads go first: its blocks are wanted back some time."""
_WARNING_INTERVAL_S = 10.0
"""Seconds between warnings of unforeseen errors: what breaks one block may break thousands."""
_FAREWELL_S = 5.0
_FIRST, _LATER, _LAST = range(3)
"""Urgency: a request waits for it, one will, the thread is to end."""

_log = logging.getLogger(__name__)


class _Job:
    def __init__(self, transfer: Transfer, num_blocks: int) -> None:
        self.transfer = transfer
        self.num_left = num_blocks
        self.failures: dict[int, str] = {}
        self.unreadable: set[int] = set()
        """Blocks among `failures` whose failure says nothing against an object."""
        self.begun_at = time.monotonic()

    def end(self) -> TransferEnd:
        failed = sorted(self.failures)
        return TransferEnd(
            self.transfer.transfer_id,
            self.transfer.generation,
            failed,
            self.failures[failed[0]] if failed else "",
            sorted(self.unreadable),
        )


class _Task(NamedTuple):
    """One block of a job. Compares by urgency, then by age."""

    urgency: int
    number: int
    job: _Job | None
    """None ends the thread."""
    block: int
    """Index of the block in the job."""


class _Lane:
    def __init__(self, name: str, num_threads: int, work: Callable[[_Lane], None]) -> None:
        self._tasks: PriorityQueue[_Task] = PriorityQueue()
        self._numbers = itertools.count()
        self._threads = [
            threading.Thread(target=work, args=(self,), name=f"{name}-{index}", daemon=True)
            for index in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    def put(self, urgency: int, job: _Job, index: int) -> None:
        self._tasks.put(_Task(urgency, next(self._numbers), job, index))

    def take(self) -> tuple[_Job, int] | None:
        """The next task; None when the thread is to end."""
        task = self._tasks.get()
        return None if task.job is None else (task.job, task.block)

    def close(self) -> None:
        """Ends the threads; one that the disk keeps waiting ends with the process."""
        with suppress(Empty):
            while True:
                self._tasks.get_nowait()
        for _ in self._threads:
            self._tasks.put(_Task(_LAST, next(self._numbers), None, 0))
        for thread in self._threads:
            thread.join(_FAREWELL_S)


class Transfers:
    """Does what `TransferWorker` says. `on_end` is called from any thread when `poll` has something to tell."""

    def __init__(
        self,
        memory: KVMemory,
        arena: HostArena | None,
        files: ObjectFiles | None,
        on_end: Callable[[], None],
    ) -> None:
        self._memory = memory
        self._arena = arena
        self._files = files
        self._on_end = on_end
        self._steps = Steps()
        self._state = threading.Condition()
        """Guards the jobs, and all that follows."""
        self._ends: deque[TransferEnd] = deque()
        self._num_reads = 0
        """Blocks that are to be read from disk for a request that waits."""
        self._next_warning_at = 0.0
        self._is_closing = False
        self._lanes: dict[str, _Lane] = {}
        if arena is not None:
            self._lanes["copy"] = _Lane("kv-copy", 1, self._copy)
        if files is not None:
            self._lanes["read"] = _Lane("kv-read", NUM_READERS, self._read)
            self._lanes["write"] = _Lane("kv-write", NUM_WRITERS, self._write)

    def start(self, transfers: Sequence[Transfer]) -> None:
        for transfer in transfers:
            self._begin(transfer)

    def _begin(self, transfer: Transfer) -> None:
        lane, urgency = self._route(transfer)
        count = num_blocks(transfer)
        job = _Job(transfer, count)
        with self._state:
            if lane == "read" and urgency == _FIRST:
                self._num_reads += count
            if count == 0:
                self._ends.append(job.end())
        if count == 0:
            self._on_end()
        for index in range(count):
            self._lanes[lane].put(urgency, job, index)

    def _route(self, transfer: Transfer) -> tuple[str, int]:
        """Chooses the threads that carry out a transfer.

        Raises:
            ValueError: this worker has no such places; engine and worker disagree.
        """
        match transfer.source, transfer.target:
            case (HostSlots(), DeviceBlocks()):
                lane, urgency = "copy", _FIRST
            case (DeviceBlocks(), HostSlots()):
                lane, urgency = "copy", _LATER
            case (DiskObjects(), DeviceBlocks()):
                lane, urgency = "read", _FIRST
            case (DiskObjects(), HostSlots()):
                lane, urgency = "read", _LATER
            case (DeviceBlocks(), DiskObjects()):
                lane, urgency = "write", _LATER
            case _:
                lane, urgency = "", _LATER
        needs_arena = isinstance(transfer.source, HostSlots) or isinstance(
            transfer.target, HostSlots
        )
        if lane not in self._lanes or (needs_arena and self._arena is None):
            raise ValueError(
                f"Transfer {transfer.transfer_id} is between places that are not here."
            )
        return lane, urgency

    def step_done(self, step: int) -> None:
        self._steps.done(step)

    def poll(self) -> list[TransferEnd]:
        with self._state:
            ended = list(self._ends)
            self._ends.clear()
        return ended

    def close(self) -> None:
        with self._state:
            self._is_closing = True
            self._state.notify_all()
        self._steps.close()
        for lane in self._lanes.values():
            lane.close()

    # ---- the threads

    def _copy(self, lane: _Lane) -> None:
        while (task := lane.take()) is not None:
            self._finish(*task, self._attempt(self._copy_block, *task))

    def _copy_block(self, job: _Job, index: int) -> None:
        match job.transfer.source, job.transfer.target:
            case DeviceBlocks(block_ids), HostSlots(slots):
                self._memory.read(block_ids[index], self._slot(slots[index]))
            case HostSlots(slots), DeviceBlocks(block_ids):
                self._await_step(job.transfer.after_step)
                self._memory.write(block_ids[index], self._slot(slots[index]))

    def _read(self, lane: _Lane) -> None:
        files = self._require_files()
        buffer = files.new_buffer()
        while (task := lane.take()) is not None:
            job, index = task
            problem = self._attempt(self._read_block, job, index, files, buffer)
            if isinstance(job.transfer.target, DeviceBlocks):
                with self._state:
                    self._num_reads -= 1
                    self._state.notify_all()
            self._finish(job, index, problem)

    def _read_block(self, job: _Job, index: int, files: ObjectFiles, buffer: memoryview) -> None:
        transfer = job.transfer
        if isinstance(transfer.source, DiskObjects):
            files.read(transfer.source.keys[index], buffer)
        payload = files.payload(buffer)
        match transfer.target:
            case DeviceBlocks(block_ids):
                self._await_step(transfer.after_step)
                self._memory.write(block_ids[index], payload)
            case HostSlots(slots):
                copy_bytes(payload, self._slot(slots[index]))

    def _write(self, lane: _Lane) -> None:
        files = self._require_files()
        buffer = files.new_buffer()
        while (task := lane.take()) is not None:
            self._let_reads_go_first(task[0])
            self._finish(*task, self._attempt(self._write_block, *task, files, buffer))

    def _write_block(self, job: _Job, index: int, files: ObjectFiles, buffer: memoryview) -> None:
        match job.transfer.source, job.transfer.target:
            case DeviceBlocks(block_ids), DiskObjects(keys):
                self._memory.read(block_ids[index], files.payload(buffer))
                files.write(keys[index], buffer)

    def _let_reads_go_first(self, job: _Job) -> None:
        patience_s = job.begun_at + _WRITE_PATIENCE_S - time.monotonic()
        with self._state:
            self._state.wait_for(lambda: self._num_reads == 0 or self._is_closing, patience_s)

    def _await_step(self, step: int) -> None:
        """Waits until no running step may use the blocks any more."""
        if not self._steps.wait_for(step):
            raise ObjectUnreadableError("the worker is ending")

    def _attempt(self, work: Callable[..., None], job: _Job, index: int, *places: object) -> str:
        """Copies one block; returns the reason why it was not copied, empty if it was."""
        try:
            work(job, index, *places)
        except ObjectUnreadableError as error:
            with self._state:
                job.unreadable.add(index)
            return str(error)
        except ObjectError as error:
            return str(error)
        except Exception as error:
            with self._state:
                job.unreadable.add(index)
                now = time.monotonic()
                is_told = now >= self._next_warning_at
                if is_told:
                    self._next_warning_at = now + _WARNING_INTERVAL_S
            if is_told:
                _log.exception("a block could not be copied")
            return f"{type(error).__name__}: {error}"
        return ""

    def _finish(self, job: _Job, index: int, problem: str) -> None:
        with self._state:
            if problem:
                job.failures[index] = problem
            job.num_left -= 1
            if job.num_left > 0:
                return
            self._ends.append(job.end())
        self._on_end()

    def _slot(self, index: int) -> memoryview:
        if self._arena is None:
            raise ValueError("There is no arena.")
        return self._arena.slot(index)

    def _require_files(self) -> ObjectFiles:
        if self._files is None:
            raise ValueError("There is no directory of objects.")
        return self._files


def num_blocks(transfer: Transfer) -> int:
    """Number of blocks of a transfer.

    Raises:
        ValueError: its source has more or fewer than its target.
    """
    counts = {_num_places(place) for place in (transfer.source, transfer.target)}
    if len(counts) > 1:
        raise ValueError(f"Transfer {transfer.transfer_id} has a source unlike its target.")
    return counts.pop()


def _num_places(place: TransferPlace) -> int:
    match place:
        case DeviceBlocks(block_ids) | RemoteBlocks(_, block_ids):
            return len(block_ids)
        case HostSlots(slots):
            return len(slots)
        case DiskObjects(keys):
            return len(keys)
