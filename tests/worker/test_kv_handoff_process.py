"""Worker processes of two engines: one computes a prompt, the other goes on from its KV."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from replica import Replica, new_executor, next_event, worker_config
from tiny_models import save_model

from pagoda.executor.group import GroupExecutor
from pagoda.executor.launcher import LocalWorkers
from pagoda.messages.frontend import TokenLogprobs
from pagoda.messages.transfers import DeviceBlocks, HostSlots, KVPeer, RemoteBlocks
from pagoda.messages.worker import WorkerReady
from pagoda.messages.worker_config import KVHandoffConfig, Role
from pagoda.parallel.config import ParallelConfig

PROMPT = random.Random(1).choices(range(320), k=40)
"""Two full blocks, and a part of a third one."""
ONE = ParallelConfig()
PAIR = ParallelConfig(tensor_parallel_size=2)
STAGES = ParallelConfig(pipeline_parallel_size=2)

Start = Callable[..., Replica]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    save_model("qwen3", directory)
    return directory


@pytest.fixture
def start(model: Path, tmp_path: Path) -> Iterator[Start]:
    executors: list[GroupExecutor] = []

    def start(role: Role, parallel: ParallelConfig, **options: object) -> Replica:
        directory = tmp_path / str(len(executors))
        directory.mkdir()
        secret = b"a secret of the cluster"
        handoff = KVHandoffConfig(
            role=role, transports=("shm", "tcp"), host="127.0.0.1", secret=secret
        )
        config = worker_config(model, parallel, kv_handoff=handoff, **options)
        executors.append(new_executor(config, directory))
        executors[-1].start()
        ready = next_event(executors[-1])
        assert isinstance(ready, WorkerReady)
        return Replica(executors[-1], ready, 1)

    yield start
    for executor in executors:
        executor.close()


def peer_of(replica: Replica) -> KVPeer:
    return KVPeer(peer_id="prefill-1", ranks=replica.ready.kv_ranks)


def same(one: TokenLogprobs, other: TokenLogprobs) -> bool:
    """Equality but for the order in which ranks add up."""
    return one.top_token_ids == other.top_token_ids and one.top_logprobs == pytest.approx(
        other.top_logprobs, abs=1e-4
    )


@pytest.mark.parametrize(
    ("prefill", "decode", "options"),
    [(ONE, ONE, {}), (PAIR, ONE, {}), (STAGES, PAIR, {"kv_cache_dtype": "int8"})],
    ids=["one to one", "tp2 to one", "pp2 to tp2, int8"],
)
def test_decode_goes_on_from_what_prefill_computed(
    start: Start, prefill: ParallelConfig, decode: ParallelConfig, options: dict[str, str]
) -> None:
    holder, fetcher = start(Role.PREFILL, prefill, **options), start(Role.DECODE, decode, **options)
    assert len(holder.ready.kv_ranks) == prefill.replica_size
    assert holder.ready.kv_digest == fetcher.ready.kv_digest != ""
    expected = holder.answer(PROMPT, [3, 1, 2])
    remote, here = RemoteBlocks("prefill-1", [3, 1]), DeviceBlocks([5, 4])
    assert fetcher.copy(remote, here, added_peers=(peer_of(holder),)).failed == []
    assert same(fetcher.answer(PROMPT, [5, 4, 6], num_cached=32), expected)
    assert not same(fetcher.answer(PROMPT, [5, 5, 6], num_cached=32), expected), (
        "what they hold counts"
    )


def test_what_was_fetched_goes_to_tiers_like_what_was_computed(start: Start) -> None:
    tiers = {"kv_host_bytes": 2**18}
    holder, fetcher = start(Role.PREFILL, ONE), start(Role.DECODE, ONE, **tiers)
    expected = holder.answer(PROMPT, [0, 1, 2])
    remote, here = RemoteBlocks("prefill-1", [0, 1]), DeviceBlocks([5, 4])
    assert fetcher.copy(remote, here, added_peers=(peer_of(holder),)).failed == []
    assert fetcher.copy(here, HostSlots([1, 0])).failed == []
    assert fetcher.copy(HostSlots([1, 0]), DeviceBlocks([8, 9])).failed == []
    assert fetcher.answer(PROMPT, [8, 9, 6], num_cached=32) == expected


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_prefill_that_was_killed_fails_the_transfer_alone(start: Start, transport: str) -> None:
    holder, fetcher = start(Role.PREFILL, ONE), start(Role.DECODE, ONE)
    expected = holder.answer(PROMPT, [0, 1, 2])
    (rank,) = holder.ready.kv_ranks
    only = type(rank)(
        parts=rank.parts, num_blocks=16, descriptors={transport: rank.descriptors[transport]}
    )
    added_peers = (KVPeer(peer_id="prefill-1", ranks=(only,)),)
    remote, here = RemoteBlocks("prefill-1", [0, 1]), DeviceBlocks([5, 4])
    assert fetcher.copy(remote, here, added_peers=added_peers).failed == []
    workers = holder.executor.workers
    assert isinstance(workers, LocalWorkers)
    process = psutil.Process(*workers.pids.values())
    process.kill()
    holder.executor.close()
    process.wait()
    end = fetcher.copy(remote, DeviceBlocks([7, 8]))
    assert end.failed == [0, 1]
    assert transport in end.error
    assert fetcher.answer(PROMPT, [5, 4, 6], num_cached=32) == expected
