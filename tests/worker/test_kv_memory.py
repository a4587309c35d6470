"""Blocks as bytes: what is read of one and written to another is the same, and nothing else changes."""

from __future__ import annotations

import pytest
import torch

from pagoda.backend.base import KVCache
from pagoda.worker.backends import choose_backend
from pagoda.worker.kv.memory import KVMemory

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
        for tensor in _tensors(cache):
            view = tensor.view(torch.uint8)
            view.copy_(torch.randint(0, 100, view.shape, generator=generator, dtype=torch.uint8))
    return caches


def _tensors(cache: KVCache) -> list[torch.Tensor]:
    parts = (cache.keys, cache.values, cache.key_scales, cache.value_scales)
    return [part for part in parts if part is not None]


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int8], ids=str
)
def test_a_block_goes_out_and_in(backend: str, dtype: torch.dtype) -> None:
    caches = _caches(backend, dtype)
    before = [[tensor.clone() for tensor in _tensors(cache)] for cache in caches]
    memory = KVMemory(caches)
    tokens = LAYERS * 2 * BLOCK_SIZE * HEADS
    scales = tokens * 4 if dtype == torch.int8 else 0
    assert memory.block_bytes == tokens * HEAD_DIM * dtype.itemsize + scales
    outside = memoryview(bytearray(memory.block_bytes))
    memory.read(4, outside)
    memory.write(1, outside)
    for cache, old in zip(caches, before, strict=True):
        for tensor, was in zip(_tensors(cache), old, strict=True):
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
