# SPDX-License-Identifier: Apache-2.0
"""Ranks that hold other blocks than each other: each is told of its own transfers, in its own numbers."""

from __future__ import annotations

import pytest

from pagoda.executor.group_transfers import GroupTransfers
from pagoda.executor.pools import Pools
from pagoda.messages.transfers import (
    DeviceBlocks,
    HostSlots,
    TierBlocks,
    TierWord,
    Transfer,
    TransferEnd,
    Transfers,
)
from pagoda.messages.worker import Capabilities, WorkerReady
from pagoda.parallel.config import ParallelConfig

READY = WorkerReady(
    capabilities=Capabilities(
        block_sizes=(4,), max_batch_tokens=1, max_batch_seqs=1, max_model_len=1
    ),
    num_blocks=4,
    block_size=4,
    max_model_len=16,
    vocab_size=100,
    summary="",
    kv_host_slots=6,
)
STORE = Transfer(7, 0, DeviceBlocks([5, 4]), HostSlots([8, 6]))
LOAD = Transfer(8, 0, TierBlocks("disk", [b"a"]), DeviceBlocks([1]))


@pytest.mark.parametrize(
    ("parallel", "ranks"),
    [
        (ParallelConfig(context_parallel_size=2), [[0], [1]]),
        (
            ParallelConfig(context_parallel_size=2, tensor_parallel_size=2),
            [[0, 1], [2, 3]],
        ),
        (
            ParallelConfig(tensor_parallel_size=2, pipeline_parallel_size=2, dp_attention=True),
            [[0, 2], [1, 3]],
        ),
    ],
)
def test_ranks_of_a_pool_alone_are_told_of_its_transfers(
    parallel: ParallelConfig, ranks: list[list[int]]
) -> None:
    pools = Pools(parallel, [READY] * parallel.replica_size)
    (first, told_first), (second, told_second) = pools.messages(Transfers([STORE, LOAD]))
    assert [first, second] == ranks
    assert told_first.transfers == [LOAD]
    assert told_second.transfers == [Transfer(7, 0, DeviceBlocks([1, 0]), HostSlots([2, 0]))]
    assert [it for it, _ in pools.messages(Transfers([STORE]))] == [ranks[1]]
    word = Transfers(words=[TierWord("disk", b"x")])
    assert pools.messages(word) == [(ranks[0], word), (ranks[1], word)]

    transfers = GroupTransfers(pools, timeout_s=1.0)
    transfers.begin([STORE], now=0.0)
    end = TransferEnd(7, 0)
    ends = [transfers.end(rank, end, 0.0) for rank in (*ranks[0], *ranks[1])]
    assert ends == [None] * (parallel.replica_size - 1) + [end]
    assert transfers.deadline is None
