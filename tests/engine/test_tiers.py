# SPDX-License-Identifier: Apache-2.0
"""An engine over a device and the tiers below it, in virtual time: what moves, who waits, and what is computed."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest
from harness import Harness, assert_complete, make_request
from mortal_executor import SpeakingExecutor

from benchmarks.simulation.books import check_books
from benchmarks.simulation.disk import SimDisk, disk_tiers
from pagoda.executor.base import WorkerLost
from pagoda.ipc.clock import VirtualClock
from pagoda.kv.events import AllBlocksCleared, BlockRemoved
from pagoda.kv.tiered_connector import LOAD_TIMEOUT_S
from pagoda.messages.engine_config import KVTiersConfig
from pagoda.messages.frontend import FinishReason, GenerateRequest
from pagoda.messages.transfers import DeviceBlocks, HostSlots, TierBlocks, Transfer, TransferEnd
from pagoda.plugins.sim.executor import SimExecutor, TransferFate

LONG = 40
"""Tokens of a prompt that fills ten blocks; the device has room for sixteen."""
DISK = disk_tiers(1000, 1)


class Fates:
    """Fates of transfers to the device and of others, and all transfers that were begun."""

    def __init__(self) -> None:
        self.load = self.store = TransferFate()
        self.begun: list[Transfer] = []

    def __call__(self, transfer: Transfer) -> TransferFate:
        self.begun.append(transfer)
        return self.load if isinstance(transfer.target, DeviceBlocks) else self.store

    def loads(self) -> list[Transfer]:
        return [it for it in self.begun if isinstance(it.target, DeviceBlocks)]

    def prefetches(self) -> list[Transfer]:
        return [
            it
            for it in self.begun
            if isinstance(it.source, TierBlocks) and isinstance(it.target, HostSlots)
        ]


class Tiered(Harness):
    """An engine with sixteen blocks on the device, and more below."""

    def __init__(self, **fields: object) -> None:
        self.fates = Fates()
        settings = {
            "num_blocks": 16,
            "max_num_seqs": 4,
            "max_num_batched_tokens": 64,
            "kv_host_slots": 64,
            "kv_tiers": KVTiersConfig(host_bytes=1),
            "transfer_fate": self.fates,
            "wrap": self._wrap,
            **fields,
        }
        super().__init__(**settings)  # type: ignore[arg-type]

    def _wrap(self, inner: SimExecutor, clock: VirtualClock) -> SpeakingExecutor:
        self.executor = SpeakingExecutor(inner, clock)
        return self.executor

    def lose_the_worker(self) -> None:
        self.executor.say(WorkerLost("the worker was killed"))
        self.step()

    def fill_tiers(self) -> None:
        """The blocks of the first document are below the device, and no longer on it."""
        for index in (1, 2, 3):
            self.serve(document(f"filling {index}", index))
        self.fates.begun.clear()

    def num_cached(self, request_id: str) -> int:
        return self.finished[request_id].num_cached_tokens


def filled(**fields: object) -> Tiered:
    it = Tiered(**fields)
    it.fill_tiers()
    return it


def filled_disk(delay_s: Callable[[], float] = lambda: 0.001) -> SimDisk:
    """A disk on which an engine of before has left document 1."""
    disk = SimDisk(delay_s)
    Tiered(disk=disk, kv_tiers=DISK, kv_host_slots=0).serve(document("before", 1))
    return disk


def document(name: str, index: int, max_tokens: int = 4, **fields: object) -> GenerateRequest:
    return make_request(name, [index] * LONG, max_tokens=max_tokens, **fields)


def test_what_the_device_has_evicted_comes_back_from_host_memory() -> None:
    it = filled()
    it.serve(document("again", 1))
    assert it.num_cached("filling 3") == 0
    assert it.num_cached("again") == 36
    (host,) = it.core.load().tiers
    assert host.num_loaded >= 8


def test_a_server_that_starts_again_finds_what_is_on_disk() -> None:
    disk = filled_disk()
    assert len(disk.objects) == 10
    it = Tiered(disk=disk, kv_tiers=DISK, kv_host_slots=0)
    it.serve(document("b", 1))
    assert it.num_cached("b") == 36


def test_a_prefix_may_come_from_both_tiers() -> None:
    it = Tiered(disk=filled_disk(), kv_tiers=DISK)
    it.serve(make_request("head", [1] * 13, max_tokens=1))
    for index in (2, 3):
        it.serve(document(f"other {index}", index))
    it.fates.begun.clear()
    it.serve(document("whole", 1))
    assert [type(transfer.source) for transfer in it.fates.loads()] == [HostSlots, TierBlocks]
    assert it.num_cached("whole") == 36


def test_a_load_begins_when_the_request_comes_and_not_with_the_next_step() -> None:
    it = filled()
    num_steps = it.core.load().num_steps
    assert it.core.add(document("again", 1)) == []
    assert len(it.fates.loads()) == 1
    assert it.counts == (1, 0, 0)
    assert it.core.load().num_steps == num_steps
    it.tokens["again"] = []
    it.run()


def test_a_preempted_request_is_loaded_rather_than_computed() -> None:
    it = Tiered(max_num_seqs=1)
    low = document("low", 1, max_tokens=20, priority=5)
    it.add(low)
    it.ticks(8)
    high = make_request("high", [2] * 56, max_tokens=4)
    it.add(high)
    it.run()
    assert it.scheduler.counters.num_preemptions == 1
    assert_complete(it, [low, high])
    assert len(it.fates.loads()) == 1


def test_a_load_waits_for_steps_that_read_what_a_preempted_request_had_computed() -> None:
    """A sample of such a step counts, though its request has lost its blocks."""
    it = filled()
    low = make_request("low", [9] * 40, max_tokens=20, priority=5)
    it.add(low)
    it.ticks(4)
    table = it.scheduler.requests["low"].table
    computed = {block.block_id for block in table.blocks[: table.num_published]}
    first, second = make_request("first", [8] * 20, max_tokens=1), document("second", 1)
    for request in (first, second):  # the first takes what the step under way writes to
        it.tokens[request.request_id] = []
        assert it.core.add(request) == []
    while it.scheduler.counters.num_preemptions == 0:
        last_step = it.scheduler.batcher.next_step - 1
        assert it.tick()
    (load,) = it.fates.loads()
    assert isinstance(load.target, DeviceBlocks)
    assert computed.issuperset(load.target.block_ids[-1:])
    assert load.after_step == last_step
    it.run()
    assert_complete(it, [low, first, second])


def test_what_connectors_were_told_of_a_request_does_not_change() -> None:
    """Not even where the last sample of a preempted request comes later."""
    it = Tiered(max_num_seqs=1)
    low = document("low", 1, max_tokens=20, priority=5)
    it.add(low)
    it.tick_until_started("low")
    it.add(make_request("high", [2] * 56, max_tokens=4))
    while it.scheduler.counters.num_preemptions == 0:
        assert it.tick()
    request = it.scheduler.requests["low"]
    told = request.prefix
    assert request.num_pending_samples == 1
    assert len(told.token_ids) == 4 * len(told.keys)
    before = list(told.token_ids)
    while request.num_pending_samples:
        it.tick()
    assert told.token_ids == before
    it.run()
    assert_complete(it, [low])


def test_two_requests_never_load_the_same_block() -> None:
    it = filled(num_blocks=24)
    it.serve(document("filling 4", 4))
    it.fates.begun.clear()
    it.fates.load = TransferFate(delay_s=1.0)
    requests = [document("a", 1), document("b", 1)]
    for request in requests:
        it.add(request)
    assert it.core.load().num_awaiting_kv == 2
    it.run()
    assert_complete(it, requests)
    assert len(it.fates.loads()) == 1
    assert it.num_cached("b") == it.num_cached("a") == 36


def test_when_the_first_of_them_is_aborted_the_second_loads() -> None:
    it = filled()
    it.fates.load = TransferFate(delay_s=0.01)
    it.add(document("a", 1))
    second = document("b", 1)
    it.add(second)
    it.core.abort("a")
    it.run()
    assert_complete(it, [second])
    assert len(it.fates.loads()) == 2


def test_an_aborted_load_gives_its_blocks_back_when_it_ends() -> None:
    it = filled()
    it.fates.load = TransferFate(delay_s=1.0)
    it.add(document("a", 1))
    it.core.abort("a")
    assert not it.scheduler.requests
    assert it.scheduler.kv.pool.num_available < 16
    check_books(it.scheduler)
    it.run()


def test_who_waits_for_a_load_counts_against_the_limit_of_sequences() -> None:
    it = filled(max_num_seqs=1)
    it.fates.load = TransferFate(delay_s=1.0)
    loading, short = document("loading", 1), make_request("short", [7, 8], max_tokens=1)
    it.add(loading)
    it.add(short)
    assert it.counts == (1, 1, 0)
    it.run()
    assert_complete(it, [loading, short])


def test_who_waits_for_an_answer_keeps_nobody_from_running() -> None:
    it = Tiered(disk=SimDisk(lambda: 1.0), kv_tiers=DISK, kv_host_slots=0, max_num_seqs=1)
    unsure, short = document("unsure", 1), make_request("short", [7, 8], max_tokens=1)
    it.add(unsure)
    it.add(short)
    assert it.counts == (1, 0, 1)
    it.run()
    assert list(it.finished) == ["short", "unsure"]
    assert_complete(it, [unsure, short])


def test_only_so_many_wait_for_an_answer() -> None:
    it = Tiered(disk=SimDisk(lambda: 1.0), kv_tiers=DISK, kv_host_slots=0, max_num_seqs=2)
    requests = [document(str(index), index, max_tokens=1) for index in range(5)]
    for request in requests:
        it.add(request)
    assert it.counts == (2, 3, 0)
    it.run()
    assert_complete(it, requests)


def test_nobody_computes_what_is_there_because_many_wait_for_an_answer() -> None:
    disk = SimDisk(lambda: 1.0)
    Tiered(disk=disk, kv_tiers=DISK, kv_host_slots=0, num_blocks=64).serve(
        *(document(f"{index}", index, max_tokens=1) for index in range(5))
    )
    it = Tiered(disk=disk, kv_tiers=DISK, kv_host_slots=0, max_num_seqs=2, num_blocks=64)
    requests = [document(f"{index} again", index, max_tokens=1) for index in range(5)]
    it.serve(*requests)
    assert [it.num_cached(request.request_id) for request in requests] == [36] * 5


def test_an_answer_that_never_comes_is_waited_for_until_patience_ends() -> None:
    it = Tiered(disk=SimDisk(lambda: 1e6), kv_tiers=DISK, kv_host_slots=0)
    request = document("unsure", 1, max_tokens=1)
    it.add(request)
    assert it.core.next_wakeup() == LOAD_TIMEOUT_S
    while not it.finished:
        it.tick()
    assert_complete(it, [request])
    assert LOAD_TIMEOUT_S < it.clock.now() < 2 * LOAD_TIMEOUT_S


def test_a_load_that_takes_too_long_is_computed_instead() -> None:
    it = filled()
    it.fates.load = TransferFate(delay_s=100.0)
    began = it.clock.now()
    request = make_request("again", [1] * 24, max_tokens=1)
    it.add(request)
    while "again" not in it.finished:
        it.tick()
    assert_complete(it, [request])
    assert LOAD_TIMEOUT_S < it.clock.now() - began < 2 * LOAD_TIMEOUT_S
    assert it.num_cached("again") == 0
    assert it.scheduler.kv.pool.num_available == 11
    it.run()


def test_leading_blocks_that_came_are_kept() -> None:
    it = filled()
    it.fates.load = TransferFate(failed=(4, 6))
    it.serve(document("again", 1))
    assert it.num_cached("again") == 16
    assert len(it.fates.loads()) == 1, "two that evict each other's blocks would never run"
    assert it.core.load().tiers[0].num_failed == 2


def test_a_request_may_fail_for_kv_that_did_not_come() -> None:
    it = filled(fails=True)
    it.fates.load = TransferFate(failed=(4,))
    it.add(document("again", 1))
    it.run()
    last = it.finished["again"]
    assert last.finish_reason is FinishReason.ERROR
    assert "could not be loaded" in (last.error or "")


def test_where_there_is_no_room_blocks_are_brought_nearer() -> None:
    it = Tiered(disk=filled_disk(), kv_tiers=DISK, kv_host_slots=40)
    it.tick()  # it knows what is on the disk
    running = make_request("running", [2] * 30, max_tokens=30)
    it.add(running)
    it.tick_until_started("running")
    waiting = document("waiting", 1)
    it.add(waiting)
    assert it.core.load().num_waiting == 1
    (prefetch,) = it.fates.prefetches()
    assert len(prefetch.source.keys) == 9  # type: ignore[union-attr]
    it.run()
    assert_complete(it, [running, waiting])
    assert [type(transfer.source) for transfer in it.fates.loads()] == [HostSlots]
    assert it.num_cached("waiting") == 36


def test_blocks_are_brought_nearer_as_soon_as_they_are_found_and_as_there_is_a_place() -> None:
    it = Tiered(disk=filled_disk(lambda: 0.1), kv_tiers=DISK, kv_host_slots=16, max_num_seqs=1)
    running = make_request("running", [2] * 3, max_tokens=30)
    it.add(running)
    it.tick_until_started("running")
    waiting = document("waiting", 1)
    it.add(waiting)
    assert it.fates.prefetches() == []
    it.run()
    assert_complete(it, [running, waiting])
    sizes = [len(prefetch.source.keys) for prefetch in it.fates.prefetches()]  # type: ignore[union-attr]
    assert sizes == [4, 4, 1]
    assert it.num_cached("waiting") == 36


def test_a_lost_worker_takes_loads_with_it_and_they_are_not_tried_again() -> None:
    it = Tiered(disk=filled_disk(), kv_tiers=DISK)
    it.tick()
    it.fates.load = TransferFate(delay_s=1.0)
    request = document("b", 1)
    it.add(request)
    assert len(it.fates.loads()) == 1
    it.lose_the_worker()
    check_books(it.scheduler)
    it.run()
    assert_complete(it, [request])
    assert it.num_cached("b") == 0
    assert len(it.fates.loads()) == 1


def test_other_requests_find_again_what_outlived_the_worker() -> None:
    it = Tiered(disk=SimDisk(), kv_tiers=DISK)
    it.serve(document("a", 1))
    running = make_request("running", [9] * 8, max_tokens=30)
    it.add(running)
    it.tick_until_started("running")
    it.lose_the_worker()
    again = document("again", 1)
    it.add(again)
    it.run()
    assert_complete(it, [running, again])
    assert it.num_cached("again") == 36


def test_a_request_that_comes_while_there_is_no_worker_waits_prefetching() -> None:
    it = Tiered(disk=SimDisk(), kv_tiers=DISK)
    it.serve(document("a", 1))
    it.lose_the_worker()
    it.lose_the_worker()
    assert not it.core.is_worker_ready
    again = document("again", 1)
    it.add(again)
    assert it.counts == (0, 1, 0)
    it.run()
    assert_complete(it, [again])
    assert it.num_cached("again") == 36


def test_no_request_loads_while_another_is_in_quarantine() -> None:
    it = Tiered(disk=SimDisk(), kv_tiers=DISK)
    it.serve(document("a", 1))
    quarantined = make_request("quarantined", [9] * 8, max_tokens=9)
    it.add(quarantined)
    for _ in range(2):
        it.tick_until_started("quarantined")
        it.lose_the_worker()
        while not it.core.is_worker_ready:
            it.tick()
    assert it.scheduler.quarantine.requests
    again = document("again", 1)
    it.add(again)
    assert it.scheduler.quarantine.requests
    assert it.core.load().num_awaiting_kv == 0
    it.run()
    assert_complete(it, [quarantined, again])
    assert it.num_cached("again") == 36


@pytest.mark.parametrize(("disk", "event"), [(SimDisk(), BlockRemoved), (None, AllBlocksCleared)])
def test_what_is_on_disk_is_not_told_to_be_lost_with_a_worker(
    disk: SimDisk | None, event: type[msgspec.Struct]
) -> None:
    tiers = DISK if disk else KVTiersConfig(host_bytes=1)
    it = Tiered(disk=disk, kv_tiers=tiers)
    it.serve(document("a", 1))
    assert len(it.cached.host_keys) == 10
    on_disk = set(it.cached.disk_keys)
    assert len(on_disk) == (10 if disk else 0)
    it.executor.say(WorkerLost("gone"))
    it.core.step()
    events = it.core.drain_kv_events()
    assert {type(one) for one in events} == {event}
    removed = [key for one in events if isinstance(one, BlockRemoved) for key in one.block_hashes]
    assert len(removed) == (20 if disk else 0)


@pytest.mark.parametrize("kv_tiers", [None, KVTiersConfig(host_bytes=1)])
def test_workers_without_tiers_or_room_for_them_have_none(kv_tiers: KVTiersConfig | None) -> None:
    it = Tiered(kv_host_slots=0, kv_tiers=kv_tiers)
    it.executor.say(TransferEnd(3, 0))
    it.serve(document("a", 1))
    assert it.core.load().tiers == ()


def test_blocks_are_touched_once_by_each_request() -> None:
    """A block is written when the second request passes through it, however often the first does. What a preempted
    one needs is not written while there is room for it on the device."""
    disk = SimDisk()
    tiers = disk_tiers(1000, 2)
    it = Tiered(disk=disk, kv_tiers=tiers, kv_host_slots=0, num_blocks=32, max_num_seqs=1)
    it.tick()
    low = document("low", 1, max_tokens=20, priority=5)
    it.add(low)
    it.ticks(8)
    it.serve(make_request("high", [2, 3], max_tokens=4))
    assert it.scheduler.counters.num_preemptions == 1
    assert_complete(it, [low])
    assert disk.objects == {}
    it.serve(document("second", 1))
    assert len(disk.objects) == 10
