# SPDX-License-Identifier: Apache-2.0
"""Ranks of engines with KV in them, without weights: of any topology, the same KV."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pagoda.backend.base import KVCache
from pagoda.messages.transfers import (
    DeviceBlocks,
    KVPeer,
    KVRank,
    RemoteBlocks,
    Transfer,
    TransferEnd,
)
from pagoda.messages.worker import WorkerReady
from pagoda.messages.worker_config import KVHandoffConfig, Role, WorkerConfig
from pagoda.parallel.config import ParallelConfig
from pagoda.plugins.disaggregation.worker.handoff import KVHandoff
from pagoda.worker.backends import choose_backend
from pagoda.worker.kv.jobs import Jobs
from pagoda.worker.kv.memory import KVAllocation, shares_kv
from pagoda.worker.kv.store import HostKVStore
from pagoda.worker.kv.transfers import KVTiers, TransferWorker
from pagoda.worker.loading import LoadedWorker, plan_worker
from pagoda.worker.memory_plan import WorkerMemoryPlan

NUM_BLOCKS = 12
SECRET = b"a secret of the cluster"


def topology(tp: int = 1, pp: int = 1) -> ParallelConfig:
    return ParallelConfig(tensor_parallel_size=tp, pipeline_parallel_size=pp)


@dataclass
class Rank:
    plan: WorkerMemoryPlan
    caches: list[KVCache]
    handoff: KVHandoff

    def tensors(self) -> list[tuple[dict[int, int], str, Tensor]]:
        """Layers by KV group, kind and bytes [blocks, heads, ...] of each."""
        layers: list[dict[int, int]] = [{} for _ in self.caches]
        for layer, (group, place) in zip(
            self.plan.shard.layers, self.plan.layer_places, strict=True
        ):
            layers[place][group] = layer
        return [
            (at_place, kind, tensor.view(torch.uint8))
            for at_place, cache in zip(layers, self.caches, strict=True)
            for kind, tensor in cache.tensors.items()
        ]

    def fill(self) -> None:
        """Blocks are of the KV groups in turn."""
        num_groups = len(self.plan.kv_groups)
        for layers, kind, tensor in self.tensors():
            tensor.zero_()
            for group, layer in layers.items():
                tensor[group::num_groups] = self.whole(layer, kind, tensor)[group::num_groups]

    def whole(self, layer: int, kind: str, like: Tensor) -> Tensor:
        """KV of these blocks, of this rank's heads."""
        heads = self.plan.shard.kv_heads
        all_heads = self.plan.shard.config.num_kv_heads
        shape = (NUM_BLOCKS, all_heads, *like.shape[2:])
        return _random(f"{layer} {kind}", shape)[:, heads.start : heads.stop]


class Engine:
    """All ranks of one."""

    def __init__(
        self,
        model: Path,
        parallel: ParallelConfig,
        role: Role,
        *,
        transports: tuple[str, ...] = ("shm", "tcp"),
        secret: bytes = SECRET,
        **options: Any,
    ) -> None:
        handoff = KVHandoffConfig(role=role, transports=transports, host="127.0.0.1", secret=secret)
        settings = {"max_num_seqs": 2, "num_threads": 1, "max_model_len": 64} | options
        config = WorkerConfig(
            model=str(model),
            num_blocks=NUM_BLOCKS,
            parallel=parallel,
            workers_on_host=parallel.replica_size,
            kv_handoff=handoff,
            **settings,
        )
        places = parallel.places(0)
        configs = [WorkerConfig(**_fields(config) | {"place": place}) for place in places]
        self.ranks = [_make_rank(one, role) for one in configs]
        self._ended = threading.Semaphore(0)
        self.jobs = [Jobs(self._ended.release) for _ in self.ranks]
        self.workers = [
            TransferWorker(KVTiers(HostKVStore(rank.caches)), rank.handoff, jobs)
            for rank, jobs in zip(self.ranks, self.jobs, strict=True)
        ]
        self._next_id = 0

    def peer(self, peer_id: str = "prefill-1") -> KVPeer:
        return KVPeer(peer_id=peer_id, ranks=self.described())

    def described(self) -> tuple[KVRank, ...]:
        return tuple(rank.handoff.described(READY).kv_ranks[0] for rank in self.ranks)

    @property
    def digests(self) -> set[str]:
        return {rank.handoff.digest for rank in self.ranks}

    def add_peer(self, peer: KVPeer) -> None:
        for worker in self.workers:
            worker.fetcher.add_peers([peer])

    def remove_peer(self, peer_id: str) -> None:
        for worker in self.workers:
            worker.fetcher.remove_peers([peer_id])

    def step_done(self, step: int) -> None:
        for jobs in self.jobs:
            jobs.step_done(step)

    def begin(
        self,
        sources: Sequence[int],
        targets: Sequence[int],
        peer_id: str = "prefill-1",
        after_step: int = -1,
        group: int = 0,
    ) -> int:
        remote, local = RemoteBlocks(peer_id, list(sources), group), DeviceBlocks(list(targets))
        transfer = Transfer(self._next_id, 3, remote, local, after_step)
        self._next_id += 1
        for worker in self.workers:
            worker.start([transfer])
        return transfer.transfer_id

    def wait(self, num_transfers: int = 1) -> dict[int, list[TransferEnd]]:
        """The ends of so many transfers, of all ranks."""
        ends: dict[int, list[TransferEnd]] = {}
        for _ in range(num_transfers * len(self.workers)):
            assert self._ended.acquire(timeout=20)
        for jobs in self.jobs:
            for end in jobs.poll():
                assert end.generation == 3
                ends.setdefault(end.transfer_id, []).append(end)
        return ends

    def has_ended(self) -> bool:
        return self._ended.acquire(blocking=False)

    def read(
        self, sources: Sequence[int], targets: Sequence[int], group: int = 0
    ) -> list[TransferEnd]:
        transfer_id = self.begin(sources, targets, group=group)
        return self.wait()[transfer_id]

    def read_and_check(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        assert [end.failed for end in self.read(sources, targets)] == [[]] * len(self.workers)
        self.check(sources, targets)

    def check(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """The targets hold what the sources do, byte for byte, and no other block has changed."""
        self.check_groups({0: (sources, targets)})

    def check_groups(self, read: Mapping[int, tuple[Sequence[int], Sequence[int]]]) -> None:
        """As `check`, of what was read of each KV group."""
        for rank in self.ranks:
            for layers, kind, tensor in rank.tensors():
                expected = torch.zeros_like(tensor)
                for group, (sources, targets) in read.items():
                    if targets and group in layers:
                        whole = rank.whole(layers[group], kind, tensor)
                        expected[list(targets)] = whole[list(sources)]
                assert torch.equal(tensor, expected), (rank.plan.config.place, layers, kind)

    def close_exports(self) -> None:
        for rank in self.ranks:
            rank.handoff.close()

    def close(self) -> None:
        for worker in self.workers:
            worker.close()


def _make_rank(config: WorkerConfig, role: Role) -> Rank:
    plan = plan_worker(config)
    backend, _ = choose_backend(config.backend)
    allocation = KVAllocation(
        NUM_BLOCKS * plan.bytes_per_block, 4 * len(plan.shard.layers), shared=shares_kv(config)
    )
    shape = NUM_BLOCKS, plan.block_size, plan.shard.num_kv_heads, plan.shard.config.head_dim
    caches = [
        backend.allocate_kv_cache(*shape, plan.dtype, plan.kv_dtype, allocation.new_tensor)
        for _ in range(1 + max(place for _, place in plan.layer_places))
    ]
    handoff = KVHandoff(
        config.kv_handoff,
        plan,
        LoadedWorker(None, READY, HostKVStore(caches, allocation), None, None),
    )  # type: ignore[arg-type]
    rank = Rank(plan, caches, handoff)
    if role.holds_kv:
        rank.fill()
    else:
        for _, _, tensor in rank.tensors():
            tensor.zero_()
    return rank


def _fields(config: WorkerConfig) -> dict[str, Any]:
    return {name: getattr(config, name) for name in config.__struct_fields__}


@cache
def _random(name: str, shape: tuple[int, ...]) -> Tensor:
    generator = torch.Generator().manual_seed(sum(name.encode()))
    return torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)


def _ready() -> WorkerReady:
    backend, _ = choose_backend("reference")
    return WorkerReady(
        capabilities=backend.capabilities,
        num_blocks=NUM_BLOCKS,
        block_size=16,
        max_model_len=64,
        vocab_size=320,
        summary="",
    )


READY = _ready()
