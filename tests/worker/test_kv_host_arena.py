"""Slots of the arena lie side by side, and never in each other."""

from __future__ import annotations

import psutil
import pytest

from pagoda.worker.kv.host_arena import HostArena, slot_bytes


def test_slots_do_not_overlap() -> None:
    arena = HostArena(1000, 70)
    assert arena.num_slots == 1000 // 128
    for index in range(arena.num_slots):
        arena.slot(index)[:] = bytes([index]) * 70
    for index in range(arena.num_slots):
        assert arena.slot(index) == bytes([index]) * 70


@pytest.mark.parametrize(("block", "slot"), [(1, 64), (64, 64), (65, 128), (4096, 4096)])
def test_slots_begin_at_lines_of_the_cache(block: int, slot: int) -> None:
    assert slot_bytes(block) == slot
    assert HostArena(3 * slot - 1, block).num_slots == 2


@pytest.mark.parametrize("index", [-1, 7])
def test_there_are_no_other_slots(index: int) -> None:
    with pytest.raises(ValueError, match="7 slots"):
        HostArena(1000, 70).slot(index)


def test_an_arena_has_room_for_a_block() -> None:
    with pytest.raises(ValueError, match="do not hold a block"):
        HostArena(100, 70)


def test_memory_is_taken_before_slots_are_used() -> None:
    before = psutil.Process().memory_info().rss
    arena = HostArena(2**26, 2**20)
    arena.slot(5)[:] = bytes([7]) * 2**20
    arena.taking.join()
    assert psutil.Process().memory_info().rss - before > 2**26 * 0.9
    assert arena.slot(5) == bytes([7]) * 2**20
    assert arena.slot(6) == bytes(2**20)
