"""Blocks as bytes: what is read of one and written to another is the same, and nothing else changes."""

from __future__ import annotations

import os

import psutil
import pytest
import torch

from pagoda.backend.base import KVCache
from pagoda.messages.worker_config import KVHandoffConfig, Role, WorkerConfig
from pagoda.pd.transport.base import Region
from pagoda.worker.backends import choose_backend
from pagoda.worker.kv.memory import HostArena, KVMemory, SharedKVMemory, shares_kv, slot_bytes

NUM_BLOCKS, BLOCK_SIZE, HEADS, HEAD_DIM, LAYERS = 6, 16, 2, 32, 3


def _caches(backend: str, dtype: torch.dtype) -> list[KVCache]:
    chosen, _ = choose_backend(backend)
    activations = torch.float32 if dtype == torch.int8 else dtype
    caches = [
        chosen.allocate_kv_cache(NUM_BLOCKS, BLOCK_SIZE, HEADS, HEAD_DIM, activations, dtype)
        for _ in range(LAYERS)
    ]
    generator = torch.Generator().manual_seed(0)
    for cache in caches:
        for tensor in cache.tensors.values():
            view = tensor.view(torch.uint8)
            view.copy_(torch.randint(0, 100, view.shape, generator=generator, dtype=torch.uint8))
    return caches


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int8], ids=str
)
def test_a_block_goes_out_and_in(backend: str, dtype: torch.dtype) -> None:
    caches = _caches(backend, dtype)
    before = [[tensor.clone() for tensor in cache.tensors.values()] for cache in caches]
    memory = KVMemory(caches)
    tokens = LAYERS * 2 * BLOCK_SIZE * HEADS
    scales = tokens * 4 if dtype == torch.int8 else 0
    assert memory.block_bytes == tokens * HEAD_DIM * dtype.itemsize + scales
    outside = memoryview(bytearray(memory.block_bytes))
    memory.read(4, outside)
    memory.write(1, outside)
    for cache, old in zip(caches, before, strict=True):
        for tensor, was in zip(cache.tensors.values(), old, strict=True):
            expected = was.clone()
            expected[1] = was[4]
            assert torch.equal(tensor.view(torch.uint8), expected.view(torch.uint8))


def test_layouts_tell_bytes_apart() -> None:
    layouts = {
        KVMemory(_caches("reference", dtype)).layout
        for dtype in (torch.float32, torch.bfloat16, torch.int8)
    }
    assert len(layouts) == 3
    assert KVMemory(_caches("reference", torch.float32)[:2]).layout not in layouts


@pytest.mark.parametrize(("block", "extra"), [(NUM_BLOCKS, 0), (-1, 0), (0, 1), (0, -1)])
def test_what_does_not_fit_is_refused(block: int, extra: int) -> None:
    memory = KVMemory(_caches("reference", torch.float32))
    outside = memoryview(bytearray(memory.block_bytes + extra))
    with pytest.raises(ValueError, match="a block has"):
        memory.read(block, outside)
    with pytest.raises(ValueError, match="a block has"):
        memory.write(block, outside)


def test_tensors_that_lie_otherwise_are_refused() -> None:
    (cache, *_) = _caches("reference", torch.float32)
    turned = KVCache(cache.keys.transpose(0, 1), cache.values)
    with pytest.raises(ValueError, match="contiguous"):
        KVMemory([turned])


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


# ---- memory that others can map


def test_tensors_lie_in_the_file_where_it_is_said() -> None:
    memory = SharedKVMemory(3000, 3)
    shapes = [((4, 2, 16), torch.float32), ((5, 3), torch.int8), ((7,), torch.bfloat16)]
    tensors = [memory.new_tensor(shape, dtype) for shape, dtype in shapes]
    for number, (tensor, (shape, dtype)) in enumerate(zip(tensors, shapes, strict=True)):
        assert (tensor.shape, tensor.dtype) == (shape, dtype)
        assert tensor.is_contiguous()
        assert tensor.data_ptr() % 4096 == 0
        tensor.view(torch.uint8).fill_(number + 1)
    regions = tuple(Region(tensor.data_ptr(), tensor.nbytes) for tensor in tensors)
    file = memory.file(regions)
    for number, (region, offset) in enumerate(zip(regions, file.offsets, strict=True)):
        stored = os.pread(file.descriptor, region.num_bytes, offset)
        assert stored == bytes([number + 1]) * region.num_bytes
    assert os.fstat(file.descriptor).st_size == file.num_bytes
    assert os.fstat(file.descriptor).st_blocks * 512 <= 3 * 4096, "only what is written is taken"


def test_there_is_an_end_to_it() -> None:
    memory = SharedKVMemory(100, 1)
    with pytest.raises(ValueError, match="bytes left"):
        memory.new_tensor((2**21 + 101,), torch.int8)


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
