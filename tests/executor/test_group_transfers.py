"""Transfers of several ranks: each ends once, when all ranks have ended it, whatever else they say."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pagoda.engine.messages import DeviceBlocks, DiskObjects, HostSlots, Transfer, TransferEnd
from pagoda.executor.group_transfers import GroupTransfers

NUM_RANKS = 3
TIMEOUT_S = 10.0


def to_host(number: int) -> Transfer:
    return Transfer(number, 2, DeviceBlocks([0, 1]), HostSlots([0, 1]))


def to_disk(number: int) -> Transfer:
    return Transfer(number, 2, DeviceBlocks([0, 1]), DiskObjects([b"a", b"b"]))


@given(
    st.lists(
        st.tuples(
            st.integers(0, NUM_RANKS - 1),
            st.integers(0, 5),
            st.integers(1, 3),
            st.lists(st.integers(0, 1), unique=True),
        ),
        max_size=60,
    )
)
def test_whatever_ranks_say(said: list[tuple[int, int, int, list[int]]]) -> None:
    """Ends come of ranks in any order, of transfers that were never begun, of other generations, and twice."""
    transfers = GroupTransfers(NUM_RANKS, TIMEOUT_S)
    transfers.begin([to_host(0), to_disk(1), to_host(2), to_disk(3)], 0.0)
    heard: dict[int, dict[int, list[int]]] = {number: {} for number in range(4)}
    for rank, number, generation, failed in said:
        end = transfers.end(
            rank, TransferEnd(number, generation, failed, "e" if failed else ""), 0.0
        )
        if generation != 2 or number not in heard or rank in heard[number]:
            assert end is None
            continue
        heard[number][rank] = failed
        if len(heard[number]) < NUM_RANKS:
            assert end is None
            continue
        union = sorted(set().union(*heard[number].values()))
        assert end == TransferEnd(number, 2, union, "e" if union else "")
    is_open = any(len(ranks) < NUM_RANKS for ranks in heard.values())
    assert transfers.deadline == (TIMEOUT_S if is_open else None)


def test_a_rank_that_ends_nothing_hangs() -> None:
    transfers = GroupTransfers(2, TIMEOUT_S)
    assert transfers.deadline is None
    transfers.begin([to_disk(0), to_disk(1)], 100.0)
    assert transfers.deadline == 110.0
    transfers.end(0, TransferEnd(0, 2), 107.0)
    assert transfers.deadline == 110.0  # the other has not moved
    transfers.end(1, TransferEnd(0, 2), 109.0)
    assert transfers.deadline == 117.0
    transfers.begin([to_disk(2)], 116.0)
    assert transfers.deadline == 117.0
    transfers.end(0, TransferEnd(1, 2), 116.0)
    transfers.end(0, TransferEnd(2, 2), 116.0)
    assert transfers.deadline == 119.0


def test_a_disk_that_hangs_is_noticed_while_memory_is_copied() -> None:
    transfers = GroupTransfers(1, TIMEOUT_S)
    transfers.begin([to_disk(0)], 0.0)
    for number in range(1, 10):
        transfers.begin([to_host(number)], float(number))
        transfers.end(0, TransferEnd(number, 2), float(number))
    assert transfers.deadline == 10.0
    transfers.end(0, TransferEnd(0, 2), 9.5)
    assert transfers.deadline is None


def test_a_rank_that_was_idle_has_all_the_time() -> None:
    transfers = GroupTransfers(1, TIMEOUT_S)
    transfers.begin([to_host(0)], 0.0)
    transfers.end(0, TransferEnd(0, 2), 1.0)
    transfers.begin([to_host(1)], 500.0)
    assert transfers.deadline == 510.0
