# SPDX-License-Identifier: Apache-2.0
"""Copies of KV on the emulated device, whose order is that of events and of nothing else."""

from __future__ import annotations

import torch

from pagoda.backend.base import KVCache
from pagoda.kv.memory import Extent
from pagoda.plugins.cuda.emulation import EmulatedDevice
from pagoda.plugins.cuda.kv_store import DeviceKVStore
from pagoda.plugins.cuda.staging import PinnedPool

BLOCKS = 6


def _store() -> tuple[EmulatedDevice, KVCache, DeviceKVStore]:
    device = EmulatedDevice()
    keys, values = (device.empty((BLOCKS, 2, 4, 8), torch.float16) for _ in range(2))
    cache = KVCache(keys, values)
    return device, cache, DeviceKVStore(device, PinnedPool(device), [cache])


def _buffers(store: DeviceKVStore, count: int) -> list[memoryview]:
    return [memoryview(bytearray(store.block_bytes)) for _ in range(count)]


def test_a_block_is_read_behind_the_step_that_wrote_it() -> None:
    device, cache, store = _store()
    device.steps.run(lambda: [tensor.fill_(1.5) for tensor in cache.tensors.values()])
    (early,), (late,) = _buffers(store, 1), _buffers(store, 1)
    unordered = store.read([2], [early])
    ordered = store.read([2], [late], store.computed())
    assert (unordered.done, ordered.done) == (False, False)
    ordered.wait()
    unordered.wait()
    expected = torch.full((64 * 2,), 1.5, dtype=torch.float16)
    assert torch.equal(torch.frombuffer(late, dtype=torch.float16), expected)
    assert set(early) == {0xFF}  # nothing had been written there


def test_a_block_is_written_behind_the_last_step_that_uses_it() -> None:
    device, cache, store = _store()
    seen = torch.zeros(1)
    device.steps.run(lambda: cache.keys.fill_(2.0))
    device.steps.run(lambda: seen.fill_(cache.keys[3].float().mean()))
    (source,) = _buffers(store, 1)
    written = store.write([3], [source], store.computed())
    source[:] = b"\x01" * len(source)  # it was taken at once
    device.steps.wait(written)
    device.steps.run(lambda: seen.add_(cache.keys[3].float().sum()))
    device.steps.record().wait()
    assert seen.item() == 2.0
    assert not bool(cache.keys[3].any())
    assert bool((cache.keys[2] == 2).all())


def test_what_is_read_may_be_written_elsewhere_at_once() -> None:
    device, cache, store = _store()
    device.steps.run(lambda: cache.keys.copy_(torch.arange(BLOCKS * 64).view(BLOCKS, 2, 4, 8)))
    device.steps.run(lambda: cache.values.fill_(7.0))
    (buffer,) = _buffers(store, 1)
    read = store.read([1], [buffer], store.computed())
    store.write([4], [buffer], read).wait()
    assert torch.equal(cache.keys[4], cache.keys[1])
    assert bool((cache.values[4] == 7).all())


def test_parts_of_blocks_and_no_blocks() -> None:
    device, cache, store = _store()
    device.steps.run(lambda: [tensor.fill_(3.0) for tensor in cache.tensors.values()])
    assert store.read([], []).done
    assert store.write([], []).done
    source = memoryview(bytearray(torch.full((24,), 9.0, dtype=torch.float16).view(torch.uint8)))
    extents = [Extent(1, store.tensors[1].block_stride, 32), Extent(0, 16, 16)]
    store.write_extents(extents, source, store.computed()).wait()
    assert bool((cache.values[1].flatten()[:16] == 9).all())
    assert bool((cache.keys[0].flatten()[8:16] == 9).all())
    assert int((cache.values == 9).sum() + (cache.keys == 9).sum()) == 24
    back = memoryview(bytearray(48))
    store.read_extents(extents, back).wait()
    assert bytes(back) == bytes(source)
    assert (store.regions(), store.file(), store.open_pages()) == ((), None, None)


def test_calls_are_as_large_as_the_bus_likes() -> None:
    _, _, store = _store()
    assert store.batch_blocks * store.block_bytes <= 2**24
    assert store.batch_blocks > 1


def test_kv_is_copied_through_memory_that_steps_have_used() -> None:
    device, pool = EmulatedDevice(), PinnedPool(EmulatedDevice())
    cache = KVCache(*(device.empty((BLOCKS, 2, 4, 8), torch.float16) for _ in range(2)))
    store = DeviceKVStore(device, pool, [cache])
    with torch.inference_mode():
        pool.take(store.block_bytes)  # and given back at once
    (into,) = _buffers(store, 1)
    store.read([2], [into]).wait()
    store.read_extents([Extent(0, 0, 64)], into[:64]).wait()
    assert set(into) == {0xFF}
