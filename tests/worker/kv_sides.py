# SPDX-License-Identifier: Apache-2.0
"""Workers of a handoff without models, whose KV lies wherever a test puts it."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import msgspec
from kv_ranks import NUM_BLOCKS, READY, SECRET

from pagoda.backend.kv_store import KVStore
from pagoda.messages.transfers import DeviceBlocks, KVPeer, RemoteBlocks, Transfer, TransferEnd
from pagoda.messages.worker_config import KVHandoffConfig, Role, WorkerConfig
from pagoda.parallel.config import ParallelConfig
from pagoda.plugins.disaggregation.worker.handoff import KVHandoff
from pagoda.worker.kv.jobs import Jobs
from pagoda.worker.kv.transfers import KVTiers, TransferWorker
from pagoda.worker.loading import LoadedWorker, plan_worker
from pagoda.worker.memory_plan import WorkerMemoryPlan


def handoff_plan(
    model: Path, role: Role, transports: Sequence[str], parallel: ParallelConfig, tp: int = 0
) -> WorkerMemoryPlan:
    """The plan of rank `tp` of a worker that hands KV over, or is handed some."""
    handoff = KVHandoffConfig(
        role=role, transports=tuple(transports), host="127.0.0.1", secret=SECRET
    )
    config = WorkerConfig(
        model=str(model),
        num_blocks=NUM_BLOCKS,
        max_num_seqs=2,
        num_threads=1,
        max_model_len=64,
        dtype="float32",
        parallel=parallel,
        workers_on_host=parallel.replica_size,
        kv_handoff=handoff,
    )
    return plan_worker(msgspec.structs.replace(config, place=list(parallel.places(0))[tp]))


def cache_shape(plan: WorkerMemoryPlan) -> tuple[int, ...]:
    """[blocks, heads, tokens, elements] of the keys, or values, of a layer."""
    shard = plan.shard
    return NUM_BLOCKS, shard.num_kv_heads, plan.block_size, shard.config.head_dim


class Side:
    """One engine's worker, with blocks on a device or in host memory."""

    def __init__(self, plan: WorkerMemoryPlan, store: KVStore) -> None:
        assert plan.config.kv_handoff is not None
        self.store = store
        loaded: Any = LoadedWorker(None, READY, store, None, None)  # type: ignore[arg-type]
        self.handoff = KVHandoff(plan.config.kv_handoff, plan, loaded)
        self.ended = threading.Semaphore(0)
        self.jobs = Jobs(self.ended.release)
        self.worker = TransferWorker(KVTiers(store), self.handoff, self.jobs)

    @property
    def peer(self) -> KVPeer:
        """This worker as the only rank of a peer."""
        return KVPeer(peer_id="p", ranks=self.handoff.described(READY).kv_ranks)

    def add_peer(self, peer: KVPeer) -> None:
        assert self.worker.fetcher is not None
        self.worker.fetcher.add_peers([peer])

    def begin(self, sources: Sequence[int], targets: Sequence[int], after_step: int = -1) -> None:
        places = RemoteBlocks("p", list(sources)), DeviceBlocks(list(targets))
        self.worker.start([Transfer(0, 0, *places, after_step)])

    def end(self) -> TransferEnd:
        """The end of the transfer that was begun."""
        assert self.ended.acquire(timeout=20)
        (end,) = self.jobs.poll()
        return end

    def block(self, block: int) -> bytes:
        copy = memoryview(bytearray(self.store.block_bytes))
        self.store.read([block], [copy], self.store.computed()).wait()
        return bytes(copy)

    def fill(self) -> None:
        for block in range(NUM_BLOCKS):
            source = memoryview(bytearray(Random(block).randbytes(self.store.block_bytes)))
            self.store.write([block], [source], self.store.computed()).wait()
