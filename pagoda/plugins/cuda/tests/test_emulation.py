# SPDX-License-Identifier: Apache-2.0
"""The emulated device does its work late, in order, and leaves poison where nobody waited."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from pagoda.parallel.collectives import HostGroup
from pagoda.plugins.backend_check.threads import ThreadGroup, ThreadRank
from pagoda.plugins.cuda.emulation import EmulatedDevice


def test_work_is_done_when_it_is_awaited_and_in_its_order() -> None:
    device, done = EmulatedDevice(), list[int]()
    device.steps.run(lambda: done.append(1))
    first = device.steps.record()
    device.steps.run(lambda: done.append(2))
    second = device.steps.record()
    assert (done, first.done, second.done) == ([], False, False)
    first.wait()
    assert (done, first.done, second.done) == ([1], True, False)
    second.wait()
    first.wait()
    assert done == [1, 2]


def test_streams_are_ordered_by_events_alone() -> None:
    device, done = EmulatedDevice(), list[str]()
    device.steps.run(lambda: done.append("step"))
    device.reads.run(lambda: done.append("before"))
    device.reads.wait(device.steps.record())
    device.reads.run(lambda: done.append("behind"))
    device.reads.record().wait()
    assert done == ["before", "step", "behind"]


def test_results_are_poison_until_somebody_looks_at_them() -> None:
    device = EmulatedDevice()
    out = device.empty((2, 3), torch.float32)
    assert bool(out.isnan().all())
    device.steps.run(lambda: out.copy_(torch.arange(6.0).view(2, 3)))
    shown = device.shown(out)
    assert (shown.shape, len(shown), shown.is_cpu) == ((2, 3), 2, False)
    part = shown[1:]
    assert (part.shape, part.is_cpu) == ((1, 3), False)
    turned = shown.T
    assert (turned.shape, turned.is_cpu) == ((3, 2), False)
    assert bool(out.isnan().all())
    assert turned.tolist() == [[0, 3], [1, 4], [2, 5]]
    assert part.tolist() == [[3, 4, 5]]
    assert shown[1].tolist() == [3, 4, 5]
    held = device.held(shown)
    assert held is not None
    assert (type(held), held.data_ptr()) == (torch.Tensor, out.data_ptr())
    assert device.held(out) is None


def test_memory_is_counted_while_it_is_used() -> None:
    device = EmulatedDevice()
    before, values = device.memory.taken_bytes(), device.empty((1000,), torch.float32)
    view = values[:10]
    del values
    assert device.memory.taken_bytes() - before == 4000
    del view
    assert device.memory.taken_bytes() == before
    assert not device.memory.on_host


def test_what_fails_is_found_out_by_whoever_waits_and_breaks_the_device() -> None:
    device = EmulatedDevice()
    device.steps.run(lambda: torch.zeros(2).copy_(torch.zeros(3)))
    failed = device.steps.record()
    with pytest.raises(RuntimeError, match="size"):
        failed.wait()
    device.writes.run(lambda: None)
    with pytest.raises(RuntimeError, match="has failed before"):
        device.writes.record().wait()


def test_work_is_measured_one_after_the_other() -> None:
    device, done = EmulatedDevice(), list[int]()
    times = device.timed([lambda place=place: done.append(place) for place in range(3)])  # type: ignore[misc]
    assert (done, len(times), min(times) >= 0) == ([0, 1, 2], 3, True)


def _on_ranks(size: int, run: Callable[[HostGroup], None]) -> None:
    group = ThreadGroup(size)
    with ThreadPoolExecutor(size) as pool:
        list(pool.map(lambda rank: run(ThreadRank(group, rank)), range(size)))


def test_a_device_gives_others_what_they_wait_for_and_does_no_more() -> None:
    def run(host: HostGroup) -> None:
        device = EmulatedDevice()
        group, out = device.open_group(host), device.empty((3, 2), torch.float32)
        own = torch.full((2,), host.rank + 1.0)
        device.steps.run(lambda: out.copy_(group.all_gather(group.all_reduce(own) * own)))
        given = device.steps.record()
        device.steps.run(lambda: None)
        if host.rank == 0:
            given.wait()
        host.all_gather(torch.zeros(1))  # where the hosts of other ranks are all the time
        given.wait()
        assert out.tolist() == [[6, 6], [12, 12], [18, 18]]
        assert not device.steps.record().done

    _on_ranks(3, run)


@pytest.mark.parametrize("is_asked_first", [True, False])
def test_a_device_that_fails_fails_those_that_wait_for_it(is_asked_first: bool) -> None:
    def run(host: HostGroup) -> None:
        device = EmulatedDevice()
        group = device.open_group(host)
        failing = torch.zeros(3 - host.rank)
        device.steps.run(lambda: group.all_gather(torch.zeros(3).copy_(failing)).zero_())
        if host.rank == 1 and not is_asked_first:
            with pytest.raises(RuntimeError, match="size of tensor"):
                device.steps.synchronize()
        host.all_gather(torch.zeros(1))
        if host.rank == 0:
            with pytest.raises(ConnectionError, match="Rank 1 of the group is gone, or its device"):
                device.steps.synchronize()
        host.all_gather(torch.zeros(1))
        with pytest.raises(RuntimeError, match="has failed before"):
            device.steps.synchronize()

    _on_ranks(2, run)
