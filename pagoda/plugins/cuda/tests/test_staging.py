# SPDX-License-Identifier: Apache-2.0
"""Pinned memory is used again in time, and parcels hold their tensors."""

from __future__ import annotations

import torch

from pagoda.plugins.cuda.emulation import EmulatedDevice
from pagoda.plugins.cuda.staging import Parcel, PinnedPool


def test_memory_is_used_again_once_the_device_is_done_with_it() -> None:
    device = EmulatedDevice()
    pool = PinnedPool(device)
    taken = pool.take(100)
    address = taken.memory.data_ptr()
    device.steps.run(lambda: None)
    copied = device.steps.record()
    taken.used_until(copied)
    del taken
    other = pool.take(100)
    assert other.memory.data_ptr() != address
    copied.wait()
    again = pool.take(90)
    assert (again.memory.data_ptr(), len(again.memory)) == (address, 90)


def test_large_memory_is_not_spent_on_little() -> None:
    pool = PinnedPool(EmulatedDevice())
    large = pool.take(2**20)
    address = large.memory.data_ptr()
    del large
    assert pool.take(10).memory.data_ptr() != address
    assert pool.take(2**19).memory.data_ptr() == address


def test_tensors_of_a_parcel_lie_apart_and_aligned() -> None:
    specs = [
        ((3,), torch.int32),
        ((0, 4), torch.int64),
        ((2, 5), torch.float32),
        ((1,), torch.int64),
    ]
    parcel = Parcel(specs)
    memory = torch.zeros(parcel.num_bytes, dtype=torch.uint8)
    views = parcel.views(memory)
    assert [(tuple(view.shape), view.dtype) for view in views] == specs
    for number, view in enumerate(views):
        view.fill_(number + 1)
    assert [view.flatten().tolist() for view in views] == [[1] * 3, [], [3] * 10, [4]]
    assert all((view.data_ptr() - memory.data_ptr()) % 16 == 0 for view in views if view.numel())
