# SPDX-License-Identifier: Apache-2.0
"""KV that networks move straight from one device's memory to another's, or the host's, in the order of steps.

The devices are emulated: what nobody has awaited is not there, and is NaN. The library moves only what is
registered as what it is called.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from kv_ranks import topology
from kv_sides import Side, cache_shape, handoff_plan
from nixl_library import Library
from tiny_models import save_model
from torch import Tensor

from pagoda.backend.base import KVCache
from pagoda.kv.memory import DirectMemory
from pagoda.messages.transfers import KVPeer
from pagoda.messages.worker_config import Role
from pagoda.parallel.config import ParallelConfig
from pagoda.plugins.disaggregation.transport import nixl
from pagoda.worker.kv.store import HostKVStore

if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)
with pytest.MonkeyPatch.context() as patch:
    patch.setitem(os.environ, "TRITON_INTERPRET", "1")
    importlib.import_module("pagoda.plugins.cuda.backend")
from pagoda.plugins.cuda.emulation import EmulatedDevice
from pagoda.plugins.cuda.kv_store import DeviceKVStore
from pagoda.plugins.cuda.staging import PinnedPool

SOURCES, TARGETS = [3, 4, 5, 9, 0, 11], [0, 1, 2, 7, 8, 5]


class Card(EmulatedDevice):
    """A device whose memory counts as that of a card with a number."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number

    def direct_memory(self, tensors: Sequence[Tensor]) -> DirectMemory:
        return super().direct_memory(tensors)._replace(kind="VRAM", device=self.number)


class Worker:
    """One rank with KV on a card, or in host memory."""

    def __init__(
        self,
        model: Path,
        role: Role,
        card: Card | None,
        transports: Sequence[str],
        parallel: ParallelConfig | None = None,
        tp: int = 0,
    ) -> None:
        plan = handoff_plan(model, role, transports, parallel or topology(), tp)
        self.card, self.heads = card, plan.shard.kv_heads
        shape, layers = cache_shape(plan), range(len(plan.shard.layers))
        if card is None:
            caches = [KVCache(torch.zeros(shape), torch.zeros(shape)) for _ in layers]
            self.side = Side(plan, HostKVStore(caches))
        else:
            new = [card.empty(shape, torch.float32) for _ in range(2 * len(layers))]
            caches = list(map(KVCache, new[::2], new[1::2]))
            self.side = Side(plan, DeviceKVStore(card, PinnedPool(card), caches))
        self.tensors = [tensor for cache in caches for tensor in cache.tensors.values()]

    def run(self, work: Callable[[], Any]) -> None:
        """A step, which a card does when it is awaited."""
        if self.card is None:
            work()
        else:
            self.card.steps.run(work)

    def compute(self, seed: int) -> None:
        """A step that writes all blocks."""
        generator = torch.Generator().manual_seed(seed)
        self.run(lambda: [each.normal_(generator=generator) for each in self.tensors])

    def look(self, blocks: Sequence[int]) -> list[Tensor]:
        """A step that reads blocks; what it finds is there once it is awaited."""
        found = [torch.empty_like(each[blocks]) for each in self.tensors]

        def work() -> None:
            for out, tensor in zip(found, self.tensors, strict=True):
                out.copy_(tensor[blocks])

        self.run(work)
        return found

    def await_steps(self) -> None:
        """As whoever reads the result of a step does."""
        self.side.store.computed().wait()

    def end_step(self, step: int) -> None:
        self.side.jobs.step_done(step, self.side.store.computed())


MakeWorker = Callable[..., Worker]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeWorker]:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    save_model("qwen3", tmp_path)
    made: list[Worker] = []

    def make(
        role: Role, place: int | None, transports: Sequence[str] = ("nixl",), **options: Any
    ) -> Worker:
        card = None if place is None else Card(place)
        made.append(Worker(tmp_path, role, card, transports, **options))
        return made[-1]

    yield make
    for worker in made:
        worker.side.worker.close()


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    library = Library()
    monkeypatch.setattr(nixl, "load_library", lambda *_: library)
    return library


def _refuse_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("KV goes through host memory")

    for name in ("read", "write", "read_extents", "write_extents"):
        monkeypatch.setattr(DeviceKVStore, name, refuse)


@pytest.mark.parametrize(("there", "here"), [(0, 1), (3, None), (None, 2)])
def test_blocks_go_from_memory_to_memory(
    make: MakeWorker,
    library: Library,
    monkeypatch: pytest.MonkeyPatch,
    there: int | None,
    here: int | None,
) -> None:
    _refuse_copies(monkeypatch)
    one, other = make(Role.PREFILL, there), make(Role.DECODE, here)
    one.compute(1)
    one.await_steps()
    other.compute(2)
    before = other.look([6])
    other.end_step(0)
    other.side.add_peer(one.side.peer)
    other.side.begin(SOURCES, TARGETS, after_step=0)
    end = other.side.end()
    assert (end.failed, end.error) == ([], "")
    found, beside = other.look(TARGETS), other.look([6])
    other.await_steps()
    assert all(map(torch.equal, found, [each[SOURCES] for each in one.tensors]))
    assert all(map(torch.equal, beside, before)), "no other block is written"
    kinds = {(it.here.kind, it.there.kind) for it in library.transfers}
    assert kinds == {tuple("DRAM" if it is None else "VRAM" for it in (here, there))}
    assert {device for it in library.transfers for _, _, device in it.there.pieces} == {there or 0}


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize(("theirs", "ours"), [(2, 1), (1, 2)])
def test_heads_are_taken_from_where_they_lie(
    make: MakeWorker, monkeypatch: pytest.MonkeyPatch, theirs: int, ours: int
) -> None:
    _refuse_copies(monkeypatch)
    prefill, decode = (
        [make(role, first + number, parallel=topology(tp=tp), tp=number) for number in range(tp)]
        for role, tp, first in ((Role.PREFILL, theirs, 0), (Role.DECODE, ours, 4))
    )
    for seed, worker in enumerate(prefill):
        worker.compute(seed)
        worker.await_steps()
    ranks = tuple(rank for worker in prefill for rank in worker.side.peer.ranks)
    for worker in decode:
        worker.side.add_peer(KVPeer(peer_id="p", ranks=ranks))
        worker.side.begin(SOURCES, TARGETS)
        assert worker.side.end().error == ""
        for one in prefill:
            shared = [head for head in one.heads if head in worker.heads]
            assert shared
            there, here = ([head - of.start for head in shared] for of in (one.heads, worker.heads))
            for source, target in zip(one.tensors, worker.tensors, strict=True):
                assert torch.equal(target[TARGETS][:, here], source[SOURCES][:, there])


def test_blocks_are_written_behind_the_last_step_that_uses_them(
    make: MakeWorker, library: Library
) -> None:
    one, other = make(Role.PREFILL, 0), make(Role.DECODE, 1)
    one.compute(1)
    one.await_steps()
    other.compute(2)
    before = other.look(TARGETS)
    used = other.side.store.computed()
    other.side.add_peer(one.side.peer)
    library.before_transfer = lambda: seen.append(used.done)
    seen: list[bool] = []
    other.end_step(0)
    other.side.begin(SOURCES, TARGETS, after_step=0)
    assert other.side.end().error == ""
    assert seen == [True]
    assert not any(map(torch.equal, before, other.look(TARGETS)))
    kept = torch.Generator().manual_seed(2)
    for found, tensor in zip(before, other.tensors, strict=True):
        expected = torch.empty_like(tensor).normal_(generator=kept)[TARGETS]
        assert torch.equal(found, expected), "the step found what it had before"


@pytest.mark.usefixtures("library")
def test_blocks_are_there_once_the_step_that_wrote_them_is_awaited(make: MakeWorker) -> None:
    """Readers ask nobody: whoever announces blocks has awaited the step."""
    one, other = make(Role.PREFILL, 0), make(Role.DECODE, 1)
    one.compute(1)
    other.side.add_peer(one.side.peer)
    other.side.begin([3], [0])
    assert other.side.end().error == ""
    assert all(bool(each[0].isnan().all()) for each in other.tensors)
    one.await_steps()
    other.side.begin([3], [0])
    assert other.side.end().error == ""
    assert all(
        torch.equal(each[0], own[3]) for each, own in zip(other.tensors, one.tensors, strict=True)
    )


@pytest.mark.parametrize("lacking", [Role.PREFILL, Role.DECODE])
def test_where_the_library_does_not_take_the_device_tcp_does(
    make: MakeWorker, library: Library, caplog: pytest.LogCaptureFixture, lacking: Role
) -> None:
    workers = {}
    for role, card in ((Role.PREFILL, 0), (Role.DECODE, 1)):
        library.kinds = ("DRAM",) if role is lacking else ("DRAM", "VRAM")
        with caplog.at_level(logging.WARNING):
            workers[role] = make(role, card, ("nixl", "tcp"))
    said = [record.getMessage() for record in caplog.records]
    assert said == [
        "no KV goes over nixl: NIXL does not take memory of the device, for which its UCX has to be "
        "built: NIXL_ERR_BACKEND"
    ]
    one, other = workers[Role.PREFILL], workers[Role.DECODE]
    one.compute(1)
    one.await_steps()
    other.side.add_peer(one.side.peer)
    other.side.begin(SOURCES, TARGETS)
    assert other.side.end().error == ""
    found = other.look(TARGETS)
    other.await_steps()
    assert all(map(torch.equal, found, [each[SOURCES] for each in one.tensors]))
    assert library.transfers == []
