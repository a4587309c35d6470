# SPDX-License-Identifier: Apache-2.0
"""Pages go out of the pool and in as blocks [head, token, element], whatever number of chips they lie on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random

import pytest
import torch

from pagoda.backend.base import DeviceLostError, KVCache
from pagoda.backend.kv_store import DONE, block_extents
from pagoda.devices import DeviceSet
from pagoda.kv.memory import Extent
from pagoda.plugins.pypto.device import Device
from pagoda.plugins.pypto.library import open_library
from pagoda.plugins.pypto.pool import PageBuffers, Pool, PoolStore, stand_in

LAYERS, PAGES, PAGE, HEADS, HEAD_DIM = 2, 5, 128, 4, 8


def open_pool(chips: int) -> tuple[Pool, PoolStore]:
    library, _ = open_library(DeviceSet("npu", tuple(range(chips))))
    buffers = PageBuffers((PAGE, HEADS, HEAD_DIM), torch.bfloat16, chips)
    device = Device(library, [], list(range(chips)))
    pool = Pool(device, buffers, layers=LAYERS, pages=PAGES)
    shape = (PAGES, HEADS, PAGE, HEAD_DIM)
    caches = [KVCache(*(stand_in(shape, torch.bfloat16) for _ in range(2))) for _ in range(LAYERS)]
    return pool, PoolStore(pool, caches)


def read(store: PoolStore, pages: Sequence[int]) -> list[bytes]:
    buffers = [memoryview(bytearray(store.block_bytes)) for _ in pages]
    store.read(pages, buffers).wait()
    return [bytes(buffer) for buffer in buffers]


@pytest.mark.parametrize("chips", [1, 2])
def test_blocks_come_back_and_heads_are_where_strides_say(
    install: Callable[..., None], chips: int
) -> None:
    install()
    _, store = open_pool(chips)
    assert read(store, [0, 4]) == [bytes(store.block_bytes)] * 2
    given = [Random(seed).randbytes(store.block_bytes) for seed in range(2)]
    event = store.write([3, 1], [memoryview(bytearray(one)) for one in given], DONE)
    into = memoryview(bytearray(store.block_bytes))
    store.read([3], [into], event).wait()
    assert bytes(into) == given[0]
    assert read(store, [1, 0]) == [given[1], bytes(store.block_bytes)]
    heads = [
        Extent(region, 3 * tensor.block_stride + 2 * tensor.head_stride, tensor.head_stride)
        for region, tensor in enumerate(store.tensors)
    ]
    own = memoryview(bytearray(sum(head.num_bytes for head in heads)))
    store.read_extents(heads, own).wait()
    size = store.tensors[0].block_bytes
    starts = [size * region + 2 * store.tensors[0].head_stride for region in range(2 * LAYERS)]
    step = store.tensors[0].head_stride
    assert bytes(own) == b"".join(given[0][at : at + step] for at in starts)
    store.write_extents([heads[1]], memoryview(bytearray(b"\1" * step)), DONE).wait()
    (changed,) = read(store, [3])
    assert changed[: starts[1]] == given[0][: starts[1]]
    assert changed[starts[1] : starts[1] + step] == b"\1" * step
    assert changed[starts[1] + step :] == given[0][starts[1] + step :]
    whole = block_extents(store.tensors, [1, 3])
    both = memoryview(bytearray(2 * store.block_bytes))
    store.read_extents(whole, both).wait()
    assert bytes(both) == given[1] + changed


def test_pools_of_other_numbers_of_chips_exchange_blocks(install: Callable[..., None]) -> None:
    install()
    (_, one), (_, two) = open_pool(1), open_pool(2)
    assert one.tensors == two.tensors
    given = Random(3).randbytes(one.block_bytes)
    one.write([2], [memoryview(bytearray(given))], DONE).wait()
    two.write([0], [memoryview(bytearray(read(one, [2])[0]))], DONE).wait()
    assert read(two, [0]) == [given]


def test_pages_that_begin_anew_are_zeros(install: Callable[..., None]) -> None:
    install()
    pool, store = open_pool(2)
    nan = memoryview(bytearray(b"\xff" * store.block_bytes))
    store.write([2], [nan], DONE).wait()
    pool.clear([1])
    assert read(store, [2]) == [bytes(nan)]
    pool.clear([2])
    assert read(store, [1, 2]) == [bytes(store.block_bytes)] * 2


def test_a_copy_that_fails_says_why(install: Callable[..., None]) -> None:
    install()
    pool, store = open_pool(1)
    pool.free()
    event = store.read([0], [memoryview(bytearray(store.block_bytes))])
    with pytest.raises(RuntimeError, match="has no memory"):
        event.wait()
    assert not event.done


def test_a_pool_that_is_too_large_loses_the_device(install: Callable[..., None]) -> None:
    install(memory_bytes=1 << 16)
    with pytest.raises(DeviceLostError, match="the chips fail: chip 0 has no 81920 bytes left"):
        open_pool(1)
