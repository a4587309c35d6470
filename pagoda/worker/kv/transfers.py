# SPDX-License-Identifier: Apache-2.0
"""The worker's half of KV transfers: copies blocks between device, tiers and other engines, beside the steps.

Every block is copied by one thread: those between device and host memory by one; plugins' tiers and a `Fetcher`,
for other engines, have threads of their own. No thread holds the interpreter while it copies.

A copy comes behind the steps that were executed when it begins, and its transfer ends when the device has done it:
steps that the engine plans from then on find what was written.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pkgutil import resolve_name

import msgspec

from pagoda.backend.kv_store import KVStore
from pagoda.faults.injector import Faults
from pagoda.kv.plugin import tier_plugin
from pagoda.messages.transfers import (
    DeviceBlocks,
    HostSlots,
    RemoteBlocks,
    TierBlocks,
    Transfer,
    Transfers,
)
from pagoda.messages.worker import WorkerReady
from pagoda.worker.kv.jobs import FIRST, LATER, Job, Jobs, Lane, num_blocks
from pagoda.worker.kv.memory import HostArena
from pagoda.worker.kv.remote import RemoteMemory
from pagoda.worker.kv.segments import SegmentStreams
from pagoda.worker.kv.tier import WorkerTier
from pagoda.worker.loading import LoadedWorker
from pagoda.worker.memory_plan import WorkerMemoryPlan

_Task = tuple[Job, range]
"""Some blocks of a job, by their indices there."""


@dataclass(frozen=True)
class KVTiers:
    """The places that one rank has besides its device."""

    store: KVStore
    arena: HostArena | None = None
    further: Mapping[str, WorkerTier] = field(default_factory=dict)
    """Tiers of plugins by name."""

    def described(self, ready: WorkerReady) -> WorkerReady:
        """Adds what the engine needs to know of the tiers to `ready`."""
        return msgspec.structs.replace(
            ready,
            kv_host_slots=0 if self.arena is None else self.arena.num_slots,
            kv_places=tuple(tier.place for tier in self.further.values()),
        )


def open_tiers(
    plan: WorkerMemoryPlan, loaded: LoadedWorker, faults: Faults | None = None
) -> KVTiers:
    """The tiers that the configuration asks for; `faults` are those of this process.

    Raises ConfigError if the place of one cannot be used.
    """
    config = plan.config
    store = loaded.kv
    arena: HostArena | None = None
    if config.kv_host_bytes:
        arena = HostArena(config.kv_host_bytes, store.block_bytes)
    further = {
        name: resolve_name(tier_plugin(name).worker_half)(tier, plan, loaded, faults)
        for name, tier in config.kv_tiers.items()
    }
    return KVTiers(store, arena, further)


def stream_segments(
    plan: WorkerMemoryPlan, loaded: LoadedWorker, tiers: KVTiers, ready: WorkerReady
) -> WorkerReady:
    """Lets cold segments be streamed from tiers, if that can be; adds to `ready` what the engine needs to know."""
    segment = plan.segment_tokens
    if not segment:
        return ready
    places = [place.place for place in plan.layer_places]
    loaded.runner.batch.streams = SegmentStreams(
        loaded.runner.model.caches,
        places,
        tiers.store,
        tiers.arena,
        {name: tier.parts for name, tier in tiers.further.items()},
        segment,
        plan.streamed_groups,
    )
    return msgspec.structs.replace(ready, segment_tokens=segment)


class TransferWorker:
    """Begins the transfers of one rank, which end in `jobs`."""

    def __init__(
        self,
        tiers: KVTiers,
        remote: RemoteMemory | None,
        jobs: Jobs,
        faults: Faults | None = None,
    ) -> None:
        """`faults` are those of this process."""
        faults = faults or Faults(None)
        self._copy_blocks = faults.before("worker.copy", self._copy)
        self._store = tiers.store
        self._arena = tiers.arena
        self._remote = remote
        self._jobs = jobs
        self.fetcher = None if remote is None else remote.open_fetcher(jobs)
        self._lane = None if tiers.arena is None else Lane[_Task]("kv-copy", 1, self._work)
        self._tiers = {
            name: tier.start(jobs, tiers.store, tiers.arena) for name, tier in tiers.further.items()
        }

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
                case RemoteBlocks() as sources, DeviceBlocks(targets) if self.fetcher:
                    self.fetcher.start(transfer, sources, targets)
                case (TierBlocks(name), _) | (_, TierBlocks(name)) if name in self._tiers:
                    self._tiers[name].begin(transfer, count)
                case HostSlots(), DeviceBlocks():
                    self._begin(transfer, count, FIRST)
                case DeviceBlocks(), HostSlots():
                    self._begin(transfer, count, LATER)
                case _:
                    raise not_here(transfer)

    def _begin(self, transfer: Transfer, count: int, urgency: int) -> None:
        """Begins a transfer between host memory and the device."""
        if self._lane is None:
            raise not_here(transfer)
        size = self._store.batch_blocks
        batches = [range(count)[at : at + size] for at in range(0, count, size)]
        job = self._jobs.begin(transfer, len(batches))
        for batch in batches:
            self._lane.put((job, batch), urgency)

    @property
    def owes_blocks(self) -> bool:
        """True while a tier owes blocks: `give_up` is to be called now and then."""
        return any(tier.owes_blocks for tier in self._tiers.values())

    def give_up(self) -> None:
        """Ends the transfers of tiers that have not answered for long; for the thread that begins transfers."""
        for tier in self._tiers.values():
            tier.give_up()

    def close(self) -> None:
        """Ends exports to others, all transfers and the threads, and waits for these."""
        if self._remote is not None:
            self._remote.close()
        self._jobs.close()
        if self.fetcher is not None:
            self.fetcher.close()
        if self._lane is not None:
            self._lane.close()
        for tier in self._tiers.values():
            tier.close()
        if self._lane is not None:
            self._lane.join()

    # ---- the thread

    def _work(self, tasks: Iterator[_Task]) -> None:
        for job, batch in tasks:
            self._jobs.attempt(job, batch, self._copy_blocks)

    def _copy(self, job: Job, batch: range) -> None:
        """Copies some blocks between host memory and the device."""
        transfer, store = job.transfer, self._store
        chosen = slice(batch.start, batch.stop)
        match transfer.source, transfer.target:
            case DeviceBlocks(block_ids), HostSlots(slots):
                into = list(map(self._slot, slots[chosen]))
                store.read(block_ids[chosen], into, self._jobs.computed).wait()
            case HostSlots(slots), DeviceBlocks(block_ids):
                unused = self._jobs.await_step(transfer.after_step)
                sources = list(map(self._slot, slots[chosen]))
                store.write(block_ids[chosen], sources, unused).wait()

    def _slot(self, index: int) -> memoryview:
        if self._arena is None:
            raise ValueError("There is no arena.")
        return self._arena.slot(index)


def not_here(transfer: Transfer) -> ValueError:
    """Engine and worker disagree about the places of a transfer."""
    return ValueError(f"Transfer {transfer.transfer_id} is between places that are not here.")
