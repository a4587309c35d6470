# SPDX-License-Identifier: Apache-2.0
"""At any time one worker drives the chips: the one before it is closed, whatever it was opened for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from pypto_graphs import HEAD_DIM, KV_HEADS, Recorder

from pagoda.backend.base import DeviceLostError, KVCache
from pagoda.backend.kv_store import KVStore
from pagoda.devices import DeviceSet
from pagoda.plugins.pypto.backend import PyptoBackend, open_backend


@pytest.fixture
def log(tmp_path: Path, install: Callable[..., None]) -> Path:
    install(log=str(tmp_path))
    return tmp_path


def workers(log: Path) -> tuple[int, int]:
    """Workers that were opened, and those of them that were closed."""
    files = [log / "workers", log / "closed"]
    opened, closed = (
        file.read_text(encoding="utf-8").count("\n") if file.exists() else 0 for file in files
    )
    return opened, closed


def open_chip() -> PyptoBackend:
    return open_backend(DeviceSet("npu", (0,)))


def open_store(backend: PyptoBackend, pages: int = 2) -> KVStore:
    shape = (pages, 128, KV_HEADS, HEAD_DIM)
    caches: list[KVCache] = [backend.allocate_kv_cache(*shape, torch.float32) for _ in range(4)]
    return backend.open_kv_store(caches)


def test_a_store_before_a_decoder_ends_with_its_worker(log: Path) -> None:
    backend = open_chip()
    assert workers(log) == (0, 0)
    lone = open_store(backend)
    assert workers(log) == (1, 0)
    second = open_store(backend)
    assert workers(log) == (2, 1)
    backend.compile(Recorder().graph())
    assert workers(log) == (3, 2)
    for store in (lone, second):
        with pytest.raises(RuntimeError, match="the worker is closed"):
            store.read([0], [memoryview(bytearray(store.block_bytes))]).wait()
    own = open_store(backend)
    own.read([1], [memoryview(bytearray(own.block_bytes))]).wait()
    assert workers(log) == (3, 2)


def test_another_decoder_takes_the_place_of_the_one_before(log: Path) -> None:
    backend = open_chip()
    backend.compile(Recorder().graph())
    taken = backend.memory.taken_bytes()
    backend.compile(Recorder().graph())
    assert workers(log) == (2, 1)
    assert backend.memory.taken_bytes() == taken


def test_a_decoder_that_finds_no_room_leaves_no_worker(
    tmp_path: Path, install: Callable[..., None]
) -> None:
    install(log=str(tmp_path), memory_bytes=1 << 22)
    backend = open_chip()
    free = backend.memory.free_bytes()
    with pytest.raises(DeviceLostError, match="bytes left of 4194304"):
        backend.compile(Recorder().graph())
    assert workers(tmp_path) == (1, 1)
    assert backend.memory.free_bytes() == free
