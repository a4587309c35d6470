# SPDX-License-Identifier: Apache-2.0
"""Transfers of a group of workers: how the ends of ranks are joined, and real worker processes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from worker_double import kv_rank
from worker_group import PAIR, PLAN, SQUARE, MakeExecutor, assert_gone, next_event, pids

from pagoda.executor.base import WorkerLost
from pagoda.executor.group import GroupExecutor
from pagoda.executor.group_transfers import GroupTransfers
from pagoda.executor.pools import Pools
from pagoda.messages.transfers import (
    BATCH_BYTES,
    BATCH_LIMIT_S,
    DeviceBlocks,
    HostSlots,
    KVPart,
    KVPeer,
    KVRank,
    RemoteBlocks,
    TierBlocks,
    TierPlace,
    Transfer,
    TransferEnd,
    Transfers,
)
from pagoda.messages.worker import StepResult, WorkerReady
from pagoda.messages.worker_config import KVHandoffConfig, KVTierConfig, Role
from pagoda.parallel.config import ParallelConfig

NUM_BLOCKS = 4

failures = st.lists(st.integers(0, NUM_BLOCKS - 1), unique=True)


def of_ranks(count: int) -> Pools:
    return Pools(ParallelConfig(tensor_parallel_size=count))


def transfer(number: int, generation: int = 0) -> Transfer:
    """Returns a transfer of four blocks to slots of its own."""
    slots = list(range(4 * number, 4 * number + 4))
    return Transfer(number, generation, DeviceBlocks([3, 1, 2, 0]), HostSlots(slots))


def test_a_rank_that_moves_does_not_hang() -> None:
    transfers = GroupTransfers(of_ranks(2), timeout_s=10.0)
    assert transfers.deadline is None
    transfers.begin([transfer(0)], now=1.0)
    transfers.begin([transfer(1), transfer(2)], now=2.0)
    assert transfers.deadline == 11.0
    transfers.end(0, TransferEnd(0, 0), 4.0)
    assert transfers.deadline == 11.0
    transfers.end(1, TransferEnd(0, 0), 5.0)
    assert transfers.deadline == 14.0
    transfers.end(0, TransferEnd(1, 0), 6.0)
    transfers.end(0, TransferEnd(2, 0), 7.0)
    assert transfers.deadline == 15.0
    transfers.end(1, TransferEnd(2, 0), 8.0)
    transfers.end(1, TransferEnd(1, 0), 9.0)
    assert transfers.deadline is None


def test_a_disk_that_hangs_does_not_hide_memory_that_does() -> None:
    transfers = GroupTransfers(of_ranks(1), timeout_s=10.0)
    to_disk = Transfer(0, 0, DeviceBlocks([0]), TierBlocks("disk", [b"key"]))
    transfers.begin([to_disk, transfer(1)], now=0.0)
    assert transfers.deadline == 10.0
    transfers.end(0, TransferEnd(1, 0), 9.0)
    assert transfers.deadline is None


def test_another_engine_that_is_slow_is_no_worker_that_hangs() -> None:
    transfers = GroupTransfers(of_ranks(1), timeout_s=10.0)
    transfers.begin([Transfer(0, 0, RemoteBlocks("p", [3]), DeviceBlocks([0]))], now=0.0)
    assert transfers.deadline == 10.0 + BATCH_LIMIT_S
    transfers.begin([transfer(1)], now=1.0)
    assert transfers.deadline == 11.0, "nor does it hide one"
    transfers.end(0, TransferEnd(1, 0), 5.0)
    transfers.end(0, TransferEnd(0, 0, [0], "nobody answers"), 6.0)
    assert transfers.deadline is None


def test_a_large_transfer_from_elsewhere_has_as_long_as_its_batches_may_take() -> None:
    """Blocks of which one is a little more than half a batch: each is one."""
    part = KVPart(0, "keys", 0, num_heads=1, head_bytes=BATCH_BYTES // 2 + 1)
    rank = KVRank(parts=(part,), num_blocks=100, descriptors={})
    transfers = GroupTransfers(of_ranks(1), timeout_s=10.0, kv=[rank])
    blocks = list(range(7))
    transfers.begin([Transfer(0, 0, RemoteBlocks("p", blocks), DeviceBlocks(blocks))], now=0.0)
    transfers.begin([Transfer(1, 0, RemoteBlocks("p", [8]), DeviceBlocks([8]))], now=0.0)
    assert transfers.deadline is not None
    assert transfers.deadline > 10.0 + 7 * BATCH_LIMIT_S


def test_the_error_is_that_of_the_first_block_that_failed() -> None:
    transfers = GroupTransfers(of_ranks(3), timeout_s=10.0)
    transfers.begin([transfer(0)], now=0.0)
    assert transfers.end(2, TransferEnd(0, 0, [3, 1], "rank 2 is full"), 0.0) is None
    assert transfers.end(0, TransferEnd(0, 0, [2, 3], "rank 0 is full"), 0.0) is None
    end = transfers.end(1, TransferEnd(0, 0, [1], "rank 1 is full"), 0.0)
    assert end == TransferEnd(0, 0, [1, 2, 3], "rank 1 is full")


def test_an_object_is_bad_if_any_rank_says_so() -> None:
    transfers = GroupTransfers(of_ranks(2), timeout_s=10.0)
    transfers.begin([transfer(0)], now=0.0)
    transfers.end(0, TransferEnd(0, 0, [1, 2], "no descriptors", [1, 2]), 0.0)
    end = transfers.end(1, TransferEnd(0, 0, [2, 3, 4], "it is cut", [3]), 0.0)
    assert end == TransferEnd(0, 0, [1, 2, 3, 4], "no descriptors", [1, 3])


@given(st.data())
def test_each_transfer_ends_once_in_whatever_order_ranks_say_so(data: st.DataObject) -> None:
    num_ranks = data.draw(st.integers(1, 4))
    num_transfers = data.draw(st.integers(1, 4))
    says = {
        (rank, number): data.draw(failures)
        for rank in range(num_ranks)
        for number in range(num_transfers)
    }
    again = data.draw(st.lists(st.sampled_from(sorted(says))))
    order = data.draw(st.permutations([*says, *again]))
    transfers = GroupTransfers(of_ranks(num_ranks), timeout_s=10.0)
    transfers.begin([transfer(number) for number in range(num_transfers)], now=0.0)
    heard: set[tuple[int, int]] = set()
    ended: set[int] = set()
    for rank, number in order:
        heard.add((rank, number))
        failed = says[rank, number]
        end = transfers.end(rank, TransferEnd(number, 0, failed, "broken" if failed else ""), 0.0)
        is_last = all((other, number) in heard for other in range(num_ranks))
        assert (end is not None) == (is_last and number not in ended)
        if end is not None:
            ended.add(number)
            union = {block for other in range(num_ranks) for block in says[other, number]}
            assert end == TransferEnd(number, 0, sorted(union), "broken" if union else "")
    assert len(ended) == num_transfers
    assert transfers.deadline is None


# ---- with worker processes


def with_tiers(make_executor: MakeExecutor, model: str, **options: object) -> GroupExecutor:
    """Two ranks that are ready."""
    executor = make_executor(model, PAIR, kv_host_bytes=1, **options)
    assert isinstance(next_event(executor), WorkerReady)
    return executor


def test_tiers_of_all_ranks_are_told_as_one(make_executor: MakeExecutor) -> None:
    executor = make_executor(
        "obeys", SQUARE, kv_host_bytes=1, kv_tiers={"disk": KVTierConfig("/kv", 1)}
    )
    ready = next_event(executor)
    assert isinstance(ready, WorkerReady)
    assert ready.kv_host_slots == 13  # what the rank with the least room has
    assert ready.kv_places == tuple(
        TierPlace("disk", f"/kv/rank{rank}", 4096 + rank) for rank in range(4)
    )


def test_a_transfer_of_one_worker_ends(make_executor: MakeExecutor) -> None:
    executor = make_executor("obeys", kv_host_bytes=1)
    next_event(executor)
    executor.submit_transfers(Transfers([transfer(0, generation=5)]))
    assert next_event(executor) == TransferEnd(0, 5)


def test_a_transfer_ends_once_when_all_ranks_have_ended_it(make_executor: MakeExecutor) -> None:
    executor = with_tiers(make_executor, "ends-late@1")
    for number in range(3):
        executor.submit_transfers(Transfers([transfer(number)]))
        if number > 0:  # rank 0 has ended this one as well
            assert next_event(executor) == TransferEnd(number - 1, 0)
    assert executor.next_event_at() is not None, "the last is under way on rank 1"


def test_transfers_go_on_beside_steps(make_executor: MakeExecutor) -> None:
    executor = with_tiers(make_executor, "ends-late")
    executor.submit_transfers(Transfers([transfer(0)]))
    executor.submit(PLAN)
    assert isinstance(next_event(executor), StepResult)
    executor.submit_transfers(Transfers([transfer(1)]))
    assert next_event(executor) == TransferEnd(0, 0)


@pytest.mark.parametrize(
    ("model", "end"),
    [
        ("fails-copying@1", TransferEnd(0, 0, [1, 3], "rank 1 has no room")),
        ("fails-copying", TransferEnd(0, 0, [0, 1, 3], "rank 0 has no room")),
    ],
)
def test_a_block_that_any_rank_has_not_copied_has_failed(
    make_executor: MakeExecutor, model: str, end: TransferEnd
) -> None:
    executor = with_tiers(make_executor, model)
    executor.submit_transfers(Transfers([transfer(0)]))
    assert next_event(executor) == end
    assert executor.next_event_at() is None


@pytest.mark.parametrize("model", ["ends-twice@1", "ends-twice", "ends-what-nobody-began"])
def test_ends_of_nothing_under_way_are_not_told(make_executor: MakeExecutor, model: str) -> None:
    executor = with_tiers(make_executor, model)
    for number in range(3):
        executor.submit_transfers(Transfers([transfer(number)]))
        assert next_event(executor) == TransferEnd(number, 0)
    assert executor.next_event_at() is None


@pytest.mark.parametrize("model", ["never-ends", "never-ends@1"])
def test_a_transfer_that_hangs_is_the_end_of_all(make_executor: MakeExecutor, model: str) -> None:
    executor = with_tiers(make_executor, model, step_timeout_s=0.2)
    started = list(pids(executor).values())
    executor.submit_transfers(Transfers([transfer(0)]))
    assert next_event(executor) == WorkerLost("no KV transfer ended within 0.2 s")
    assert_gone(started)
    assert executor.next_event_at() is None


def test_a_disk_that_hangs_is_not_the_end_of_the_workers_which_go_on_with_steps(
    make_executor: MakeExecutor,
) -> None:
    executor = with_tiers(make_executor, "never-ends", step_timeout_s=5.0)
    executor.submit_transfers(
        Transfers([Transfer(0, 0, DeviceBlocks([0]), TierBlocks("disk", [b"key"]))])
    )
    assert executor.next_event_at() is None
    executor.submit(PLAN)
    assert isinstance(next_event(executor), StepResult)


def test_transfers_of_lost_workers_are_forgotten(make_executor: MakeExecutor) -> None:
    executor = with_tiers(make_executor, "dies-copying@1")
    executor.submit_transfers(Transfers([transfer(0)]))
    assert next_event(executor) == WorkerLost("worker pp0 tp1 was killed by SIGKILL", suspicion=0)
    executor.start(num_blocks=7)
    assert isinstance(next_event(executor), WorkerReady)
    assert executor.next_event_at() is None


def test_a_rank_whose_link_hangs_up_is_lost(make_executor: MakeExecutor) -> None:
    executor = with_tiers(make_executor, "hangs-up-copying@1")
    executor.submit_transfers(Transfers([transfer(0)]))
    assert next_event(executor) == WorkerLost("worker pp0 tp1 hung up, or was silent for 30 s")


HANDOFF = KVHandoffConfig(role=Role.BOTH, transports=("tcp",), host="127.0.0.1", secret=b"s")


def test_kv_of_all_ranks_is_described_in_their_order(make_executor: MakeExecutor) -> None:
    ready = next_event(make_executor("obeys", SQUARE, kv_handoff=HANDOFF))
    assert isinstance(ready, WorkerReady)
    assert ready.kv_ranks == tuple(kv_rank(rank) for rank in range(4))
    assert ready.kv_digest == "KV"


def test_ranks_whose_kv_means_something_else_do_not_start(make_executor: MakeExecutor) -> None:
    loss = next_event(make_executor("means-other@1", PAIR, kv_handoff=HANDOFF))
    assert isinstance(loss, WorkerLost)
    assert loss.is_user_error
    assert "does not mean the same" in loss.reason


def test_workers_are_told_of_peers(make_executor: MakeExecutor) -> None:
    executor = make_executor("obeys", PAIR, kv_handoff=HANDOFF)
    next_event(executor)
    transfers = [
        Transfer(number, 0, RemoteBlocks("p", [5]), DeviceBlocks([7])) for number in range(3)
    ]
    executor.submit_transfers(Transfers([transfers[0]], [KVPeer(peer_id="p", ranks=(kv_rank(0),))]))
    assert next_event(executor) == TransferEnd(0, 0)
    executor.submit_transfers(Transfers([transfers[1]], removed_peers=["p"]))
    assert next_event(executor) == TransferEnd(1, 0)
    executor.submit_transfers(Transfers([transfers[2]]))
    assert next_event(executor) == TransferEnd(2, 0, [0], "who is that?")


def test_nobody_takes_transfers_before_the_start(make_executor: MakeExecutor) -> None:
    executor = make_executor("obeys", kv_host_bytes=1)
    executor.close()
    with pytest.raises(RuntimeError, match="without a worker"):
        executor.submit_transfers(Transfers([transfer(0)]))
