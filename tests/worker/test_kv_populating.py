# SPDX-License-Identifier: Apache-2.0
"""Blocks of a cache get their pages in order, ahead of use, and keep what they hold."""

from __future__ import annotations

import mmap
import threading
from pathlib import Path

import pytest
import torch

from pagoda.backend.base import KVCache
from pagoda.backend.cpu.native import load_native
from pagoda.backend.kv_store import OpenPages
from pagoda.devices import BackendUnavailableError
from pagoda.messages.frontend import Work
from pagoda.messages.sampling_params import SamplingParams
from pagoda.messages.worker import NewBlocks, SlotStart, StepPlan
from pagoda.worker.backends import choose_backend
from pagoda.worker.kv import pages, populating
from pagoda.worker.kv.pages import AdvisedPages
from pagoda.worker.kv.populating import KVPopulator
from pagoda.worker.kv.store import HostKVStore, host_store

PAGE = mmap.PAGESIZE
NUM_BLOCKS, BLOCK_SIZE = 32, 16
BLOCK_BYTES = 3 * PAGE


def _kernels() -> OpenPages:
    """The way of the cpu backend."""
    try:
        native = load_native()
    except BackendUnavailableError as error:
        pytest.skip(str(error))
    return lambda tensors, num_blocks: native.Populator(list(tensors), num_blocks)  # type: ignore[no-any-return]


@pytest.fixture(params=["kernels", "madvise"])
def way(request: pytest.FixtureRequest) -> OpenPages:
    return _kernels() if request.param == "kernels" else AdvisedPages


class Cache:
    """K and V of some layers in memory of their own, in small pages of which none has been taken."""

    def __init__(self, way: OpenPages, layers: int = 2) -> None:
        self.maps = [self._map() for _ in range(2 * layers)]
        tensors = [
            torch.frombuffer(m, dtype=torch.uint8).view(NUM_BLOCKS, 1, -1) for m in self.maps
        ]
        self.caches = [KVCache(*tensors[i : i + 2]) for i in range(0, len(tensors), 2)]
        self.store = HostKVStore(self.caches, open_pages=way)

    def _map(self) -> mmap.mmap:
        private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        memory = mmap.mmap(-1, NUM_BLOCKS * BLOCK_BYTES, flags=private)
        memory.madvise(mmap.MADV_NOHUGEPAGE)
        return memory

    def present(self) -> list[int]:
        """Pages of each tensor that are there, by `/proc/self/pagemap`."""
        counts = []
        with Path("/proc/self/pagemap").open("rb") as pagemap:
            for cache in self.caches:
                for tensor in cache.tensors.values():
                    pagemap.seek(tensor.data_ptr() // PAGE * 8)
                    entries = pagemap.read(8 * NUM_BLOCKS * BLOCK_BYTES // PAGE)
                    flags = [entries[i + 7] >> 7 for i in range(0, len(entries), 8)]
                    counts.append(sum(flags))
                    assert flags == sorted(flags, reverse=True)  # the first ones
        return counts


@pytest.fixture
def ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight blocks are kept ready."""
    monkeypatch.setattr(populating, "AHEAD_TOKENS", 8 * BLOCK_SIZE)


def _plan(*block_ids: int, new: tuple[int, ...] = ()) -> StepPlan:
    start = SlotStart(0, [1], 1, 0, [list(block_ids)], Work(SamplingParams()))
    return StepPlan(0, [0], [1], [start], [NewBlocks(0, 0, list(new))] if new else [])


@pytest.mark.usefixtures("ahead")
def test_blocks_are_ready_before_they_are_used(way: OpenPages) -> None:
    cache = Cache(way)
    populator = KVPopulator(cache.store, [BLOCK_SIZE], available_bytes=lambda: 2**40)
    assert cache.present() == [0, 0, 0, 0]
    populator.keep_ready_behind(-1)
    populator.wait()
    assert cache.present() == [3 * 8] * 4
    populator.use(_plan())
    populator.use(_plan(0, 1, new=(2,)))
    populator.wait()
    assert cache.present() == [3 * 11] * 4
    populator.use(_plan(1))
    populator.wait()
    assert cache.present() == [3 * 11] * 4
    populator.use(_plan(30, 5))
    populator.wait()
    assert cache.present() == [3 * NUM_BLOCKS] * 4
    populator.use(_plan(31))


@pytest.mark.usefixtures("ahead")
def test_as_many_blocks_are_ready_as_the_tokens_take_in_all_groups(way: OpenPages) -> None:
    cache = Cache(way)
    populator = KVPopulator(
        cache.store, [BLOCK_SIZE, BLOCK_SIZE, 4 * BLOCK_SIZE], available_bytes=lambda: 2**40
    )
    populator.keep_ready_behind(-1)
    populator.wait()
    assert cache.present() == [3 * (8 + 8 + 2)] * 4


@pytest.mark.usefixtures("ahead")
def test_a_cache_that_no_longer_fits_into_memory_is_left_alone(way: OpenPages) -> None:
    cache = Cache(way)
    free = 2 * 4 * NUM_BLOCKS * BLOCK_BYTES
    populator = KVPopulator(cache.store, [BLOCK_SIZE], 2, available_bytes=lambda: free)
    free -= 1
    populator.keep_ready_behind(-1)
    populator.wait()
    assert cache.present() == [0] * 4
    free += 1
    populator.use(_plan(0))
    populator.wait()
    assert cache.present() == [3 * 9] * 4


def test_contents_stay_whoever_writes_meanwhile(way: OpenPages) -> None:
    """Bytes at which pages begin are counted up while the pages are touched."""
    cache = Cache(way)
    counters = [
        tensor.view(-1)[:: PAGE // 2] for each in cache.caches for tensor in each.tensors.values()
    ]

    def count() -> None:
        for _ in range(100):
            for counter in counters:
                counter += 1

    counting = threading.Thread(target=count)
    counting.start()
    populators = [
        KVPopulator(cache.store, [BLOCK_SIZE], available_bytes=lambda: 2**40) for _ in range(20)
    ]
    for populator in populators:
        populator.keep_ready_behind(NUM_BLOCKS)
    for populator in populators:
        populator.wait()
    counting.join()
    assert all(bool((counter == 100).all()) for counter in counters)


def test_a_populator_that_goes_away_stops() -> None:
    cache = Cache(_kernels())
    names = Path("/proc/self/task")
    populator = KVPopulator(cache.store, [BLOCK_SIZE], available_bytes=lambda: 2**40)
    populator.keep_ready_behind(-1)
    populator.wait()

    def threads() -> int:
        return sum((t / "comm").read_text() == "kv-populator\n" for t in names.iterdir())

    assert threads() == 1
    del populator
    assert threads() == 0


def test_a_backend_without_kernels_takes_pages_by_the_system() -> None:
    tensor = torch.zeros(NUM_BLOCKS, 1, PAGE, dtype=torch.uint8)
    backend, _ = choose_backend("reference")
    store = host_store(backend, [KVCache(tensor, tensor)])
    assert isinstance(store.open_pages(), AdvisedPages)


def test_pages_that_the_system_does_not_give_are_not_asked_for_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[tuple[int, int]] = []

    def refuse(address: int, num_bytes: int) -> bool:
        asked.append((address, num_bytes))
        return False

    monkeypatch.setattr(pages, "take_pages", refuse)
    some = AdvisedPages([(0, 2**22), (2**30, 2**22)], 10)
    some.advance(10)
    some.wait()
    some.advance(10)
    some.wait()
    assert asked == [(0, 2**23), (2**30, 2**23)]
