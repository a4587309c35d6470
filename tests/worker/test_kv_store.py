# SPDX-License-Identifier: Apache-2.0
"""Blocks as bytes: what is read of one and written to another is the same, and nothing else changes."""

from __future__ import annotations

import pytest
import torch

from pagoda.backend.base import KVCache
from pagoda.backend.kv_store import layout_of
from pagoda.worker.backends import choose_backend
from pagoda.worker.kv.memory import KVAllocation
from pagoda.worker.kv.store import HostKVStore

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
    store = HostKVStore(caches)
    tokens = LAYERS * 2 * BLOCK_SIZE * HEADS
    scales = tokens * 4 if dtype == torch.int8 else 0
    assert store.block_bytes == tokens * HEAD_DIM * dtype.itemsize + scales
    outside = memoryview(bytearray(store.block_bytes))
    store.read([4], [outside])
    store.write([1], [outside])
    for cache, old in zip(caches, before, strict=True):
        for tensor, was in zip(cache.tensors.values(), old, strict=True):
            expected = was.clone()
            expected[1] = was[4]
            assert torch.equal(tensor.view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize(("dtype", "scale"), [(torch.bfloat16, 0), (torch.int8, 4)], ids=str)
def test_latents_take_one_vector_of_each_token(
    backend: str, dtype: torch.dtype, scale: int
) -> None:
    chosen, _ = choose_backend(backend)
    shape = (NUM_BLOCKS, BLOCK_SIZE, 48, 16, torch.bfloat16, dtype)
    caches = [chosen.allocate_latent_cache(*shape) for _ in range(LAYERS)]
    store = HostKVStore(caches)
    assert store.num_blocks == NUM_BLOCKS
    assert store.block_bytes == LAYERS * BLOCK_SIZE * (64 * dtype.itemsize + scale)
    assert {tensor.kind for tensor in store.tensors} == {"latents", "latent_scales"} - (
        set() if scale else {"latent_scales"}
    )
    caches[1].latents[2] = 7
    outside = memoryview(bytearray(store.block_bytes))
    store.read([2], [outside])
    store.write([5], [outside])
    assert torch.equal(caches[1].latents[5], caches[1].latents[2])


def test_layouts_tell_bytes_apart() -> None:
    layouts = {
        layout_of(HostKVStore(_caches("reference", dtype)).tensors)
        for dtype in (torch.float32, torch.bfloat16, torch.int8)
    }
    assert len(layouts) == 3
    assert layout_of(HostKVStore(_caches("reference", torch.float32)[:2]).tensors) not in layouts


@pytest.mark.parametrize(("block", "extra"), [(NUM_BLOCKS, 0), (-1, 0), (0, 1), (0, -1)])
def test_what_does_not_fit_is_refused(block: int, extra: int) -> None:
    store = HostKVStore(_caches("reference", torch.float32))
    outside = memoryview(bytearray(store.block_bytes + extra))
    with pytest.raises(ValueError, match="a block has"):
        store.read([block], [outside])
    with pytest.raises(ValueError, match="a block has"):
        store.write([block], [outside])


def test_tensors_that_lie_otherwise_are_refused() -> None:
    (cache, *_) = _caches("reference", torch.float32)
    turned = KVCache(cache.keys.transpose(0, 1), cache.values)
    with pytest.raises(ValueError, match="contiguous"):
        HostKVStore([turned])


def test_blocks_of_a_tensor_may_lie_apart() -> None:
    """The second of two caches lies in what the first leaves of each block."""
    pool = torch.zeros((NUM_BLOCKS, 2, HEADS, BLOCK_SIZE, HEAD_DIM))
    store = HostKVStore([KVCache(pool[:, 1], pool[:, 1])])
    outside = memoryview(bytearray(b"\x01" * store.block_bytes))
    store.write([2], [outside])
    assert pool[2, 1].count_nonzero() == pool[2, 1].numel() == pool.count_nonzero()
    with pytest.raises(ValueError, match="follow one another"):
        store.regions()


def test_strides_are_those_of_the_tensors() -> None:
    (cache, *_) = _caches("reference", torch.int8)
    store = HostKVStore([cache])
    assert [tensor.kind for tensor in store.tensors] == list(cache.tensors)
    for tensor, described, address in zip(
        cache.tensors.values(), store.tensors, store.addresses, strict=True
    ):
        assert tensor[3, 1].data_ptr() == (
            address + 3 * described.block_stride + described.head_stride
        )
    assert [region.num_bytes for region in store.regions()] == [
        tensor.nbytes for tensor in cache.tensors.values()
    ]
    assert store.file() is None


@pytest.mark.parametrize("shared", [False, True])
def test_all_layers_lie_in_one_allocation_at_large_pages(shared: bool) -> None:
    backend, _ = choose_backend("reference")
    allocation = KVAllocation(2**20, 6, shared=shared)
    sizes = (NUM_BLOCKS, BLOCK_SIZE, HEADS, HEAD_DIM, torch.float32, torch.float32)
    caches = [backend.allocate_kv_cache(*sizes, allocation.new_tensor) for _ in range(3)]
    store = HostKVStore(caches, allocation)
    addresses = store.addresses
    assert {address % 2**21 for address in addresses} == {0}
    assert [it - addresses[0] for it in addresses] == [2**21 * n for n in range(6)]
    assert (store.file() is not None) is shared
