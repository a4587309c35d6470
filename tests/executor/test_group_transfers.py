from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pagoda.executor.group_transfers import GroupTransfers
from pagoda.messages.transfers import (
    DeviceBlocks,
    DiskObjects,
    HostSlots,
    KVPart,
    KVRank,
    RemoteBlocks,
    Transfer,
    TransferEnd,
)
from pagoda.pd.transport.base import BATCH_BYTES, BATCH_LIMIT_S

NUM_BLOCKS = 4

failures = st.lists(st.integers(0, NUM_BLOCKS - 1), unique=True)


def transfer(transfer_id: int, generation: int = 0) -> Transfer:
    blocks = list(range(NUM_BLOCKS))
    return Transfer(transfer_id, generation, DeviceBlocks(blocks), HostSlots(blocks))


def test_a_rank_that_moves_does_not_hang() -> None:
    transfers = GroupTransfers(2, timeout_s=10.0)
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


def test_memory_that_moves_does_not_hide_a_disk_that_hangs() -> None:
    transfers = GroupTransfers(1, timeout_s=10.0)
    to_disk = Transfer(0, 0, DeviceBlocks([0]), DiskObjects([b"key"]))
    transfers.begin([to_disk, transfer(1)], now=0.0)
    transfers.end(0, TransferEnd(1, 0), 9.0)
    assert transfers.deadline == 10.0


def test_another_engine_that_is_slow_is_no_worker_that_hangs() -> None:
    transfers = GroupTransfers(1, timeout_s=10.0)
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
    transfers = GroupTransfers(1, timeout_s=10.0)
    transfers.learn([rank])
    blocks = list(range(7))
    transfers.begin([Transfer(0, 0, RemoteBlocks("p", blocks), DeviceBlocks(blocks))], now=0.0)
    transfers.begin([Transfer(1, 0, RemoteBlocks("p", [8]), DeviceBlocks([8]))], now=0.0)
    assert transfers.deadline is not None
    assert transfers.deadline > 10.0 + 7 * BATCH_LIMIT_S


def test_the_error_is_that_of_the_first_block_that_failed() -> None:
    transfers = GroupTransfers(3, timeout_s=10.0)
    transfers.begin([transfer(0)], now=0.0)
    assert transfers.end(2, TransferEnd(0, 0, [3, 1], "rank 2 is full"), 0.0) is None
    assert transfers.end(0, TransferEnd(0, 0, [2, 3], "rank 0 is full"), 0.0) is None
    end = transfers.end(1, TransferEnd(0, 0, [1], "rank 1 is full"), 0.0)
    assert end == TransferEnd(0, 0, [1, 2, 3], "rank 1 is full")


def test_an_object_is_bad_if_any_rank_says_so() -> None:
    transfers = GroupTransfers(2, timeout_s=10.0)
    transfers.begin([transfer(0)], now=0.0)
    transfers.end(0, TransferEnd(0, 0, [1, 2], "no descriptors", [1, 2]), 0.0)
    end = transfers.end(1, TransferEnd(0, 0, [2, 3, 4], "it is cut", [3]), 0.0)
    assert end == TransferEnd(0, 0, [1, 2, 3, 4], "no descriptors", [1, 3])


def test_what_a_rank_says_again_does_not_count() -> None:
    transfers = GroupTransfers(2, timeout_s=10.0)
    transfers.begin([transfer(0)], now=0.0)
    assert transfers.end(0, TransferEnd(0, 0), 0.0) is None
    assert transfers.end(0, TransferEnd(0, 0, [1], "again"), 0.0) is None
    assert transfers.end(1, TransferEnd(0, 0), 0.0) == TransferEnd(0, 0)
    assert transfers.end(1, TransferEnd(0, 0), 0.0) is None


def test_another_generation_is_another_transfer() -> None:
    transfers = GroupTransfers(1, timeout_s=10.0)
    transfers.begin([transfer(0, generation=2)], now=0.0)
    assert transfers.end(0, TransferEnd(0, 1), 0.0) is None
    assert transfers.end(0, TransferEnd(0, 2), 0.0) == TransferEnd(0, 2)


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
    transfers = GroupTransfers(num_ranks, timeout_s=10.0)
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
