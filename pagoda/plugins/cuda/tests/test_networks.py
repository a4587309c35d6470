# SPDX-License-Identifier: Apache-2.0
"""Memory that torch's allocator has mapped is not given to networks, and the reason says what to leave out."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from pagoda.backend.base import KVCache
from pagoda.backend.kv_store import ReachedByNetworks
from pagoda.errors import TransportError
from pagoda.plugins.cuda.emulation import EmulatedDevice
from pagoda.plugins.cuda.kv_store import DeviceKVStore
from pagoda.plugins.cuda.networks import DeviceContext, check_reachable
from pagoda.plugins.cuda.staging import PinnedPool


def _segment(tensor: torch.Tensor, *, expandable: bool) -> dict[str, Any]:
    """A segment of the allocator that begins before a tensor and ends behind it."""
    first, size = tensor.data_ptr() - 64, tensor.nbytes + 128
    return {"address": first, "total_size": size, "is_expandable": expandable}


@pytest.fixture
def segments(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    segments: list[dict[str, Any]] = []
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "native")
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: segments)
    return segments


def test_expandable_segments_are_refused(segments: list[dict[str, Any]]) -> None:
    one, other = torch.zeros(256), torch.zeros(256)
    segments += [_segment(one, expandable=False), _segment(other, expandable=True)]
    check_reachable([one])
    with pytest.raises(TransportError, match="leave expandable_segments out of PYTORCH_CUDA_ALLOC"):
        check_reachable([one, other])


@pytest.mark.usefixtures("segments")
def test_other_allocators_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "cudaMallocAsync")
    with pytest.raises(TransportError, match="cudaMallocAsync, which networks cannot reach"):
        check_reachable([torch.zeros(1)])


def test_a_store_tells_where_its_tensors_lie() -> None:
    device = EmulatedDevice()
    caches = [
        KVCache(*(device.empty((6, 2, 4, 8), torch.float16) for _ in range(2))) for _ in range(2)
    ]
    store = DeviceKVStore(device, PinnedPool(device), caches)
    assert isinstance(store, ReachedByNetworks)
    direct = store.direct_memory()
    assert (direct.kind, direct.device) == ("DRAM", 0), "the emulated device is the host"
    tensors = [tensor for cache in caches for tensor in cache.tensors.values()]
    assert [region.address for region in direct.regions] == [each.data_ptr() for each in tensors]
    sizes = [store.num_blocks * tensor.block_stride for tensor in store.tensors]
    assert [region.num_bytes for region in direct.regions] == sizes


def test_each_thread_takes_the_context_of_the_device_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that has called nothing of the runtime has no context, and libraries find no device there."""
    entered: list[tuple[threading.Thread, int]] = []
    device = torch.device("cuda", 3)

    def zeros(*_: Any, device: torch.device) -> torch.Tensor:
        entered.append((threading.current_thread(), device.index))
        return torch.empty(1)

    monkeypatch.setattr(torch, "zeros", zeros)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    context = DeviceContext(device)
    threads = [
        threading.Thread(target=lambda: (context.enter(), context.enter())) for _ in range(2)
    ]
    for thread in threads:
        thread.start()
        thread.join()
    assert entered == [(thread, 3) for thread in threads]
