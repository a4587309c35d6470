# SPDX-License-Identifier: Apache-2.0
"""Memory for KV: slots in host memory, and one piece for all tensors of a rank."""

from __future__ import annotations

import os

import psutil
import pytest
import torch

from pagoda.kv.memory import Region
from pagoda.messages.worker_config import KVHandoffConfig, Role, WorkerConfig
from pagoda.worker.kv.memory import HostArena, KVAllocation, shares_kv, slot_bytes

# ---- slots in host memory


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


# ---- memory of tensors, which others can map


def test_tensors_lie_in_the_file_where_it_is_said() -> None:
    memory = KVAllocation(3000, 3, shared=True)
    shapes = [((4, 2, 16), torch.float32), ((5, 3), torch.int8), ((7,), torch.bfloat16)]
    tensors = [memory.new_tensor(shape, dtype) for shape, dtype in shapes]
    for number, (tensor, (shape, dtype)) in enumerate(zip(tensors, shapes, strict=True)):
        assert (tensor.shape, tensor.dtype) == (shape, dtype)
        assert tensor.is_contiguous()
        assert tensor.data_ptr() % 4096 == 0
        tensor.view(torch.uint8).fill_(number + 1)
    regions = tuple(Region(tensor.data_ptr(), tensor.nbytes) for tensor in tensors)
    file = memory.file(regions)
    assert file is not None
    for number, (region, offset) in enumerate(zip(regions, file.offsets, strict=True)):
        stored = os.pread(file.descriptor, region.num_bytes, offset)
        assert stored == bytes([number + 1]) * region.num_bytes
    assert os.fstat(file.descriptor).st_size == file.num_bytes
    assert os.fstat(file.descriptor).st_blocks * 512 <= 3 * 4096, "only what is written is taken"


def test_there_is_an_end_to_it() -> None:
    memory = KVAllocation(100, 1)
    with pytest.raises(ValueError, match="bytes left"):
        memory.new_tensor((2**22 + 101,), torch.int8)


@pytest.mark.parametrize(
    ("role", "transports", "expected"),
    [
        (Role.PREFILL, ("shm", "tcp"), True),
        (Role.BOTH, ("tcp", "shm"), True),
        (Role.DECODE, ("shm", "tcp"), False),
        (Role.PREFILL, ("tcp",), False),
    ],
)
def test_it_is_used_where_others_may_map_it(
    role: Role, transports: tuple[str, ...], expected: bool
) -> None:
    handoff = KVHandoffConfig(role=role, transports=transports, host="127.0.0.1", secret=b"s")
    assert shares_kv(WorkerConfig(model="m", kv_handoff=handoff)) == expected
    assert not shares_kv(WorkerConfig(model="m"))
