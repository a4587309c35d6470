"""Tensors in memory that other processes can map."""

from __future__ import annotations

import os

import pytest
import torch

from pagoda.messages.worker_config import KVHandoffConfig, Role, WorkerConfig
from pagoda.pd.transport.base import Region
from pagoda.worker.kv.shared_memory import SharedKVMemory, shares_kv


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
