# SPDX-License-Identifier: Apache-2.0
"""Ranks that attend to requests of their own: which rank takes a request, and what a step gives to each."""

from __future__ import annotations

from harness import Harness, make_request

from pagoda.engine.batching import SchedulerLimits
from pagoda.engine.request import Request
from pagoda.engine.request_queue import RequestQueue
from pagoda.engine.scheduler import Scheduler
from pagoda.ipc.clock import VirtualClock
from pagoda.kv.block_pool import BlockPool
from pagoda.kv.events import CacheRecorder
from pagoda.kv.manager import KVManager
from pagoda.messages.engine_config import KVTiersConfig
from pagoda.messages.worker import StepPlan, StepResult
from pagoda.parallel.config import ParallelConfig
from pagoda.parallel.segments import SegmentShares


def make_scheduler(num_ranks: int, blocks_of_rank: int = 32, budget: int = 16) -> Scheduler:
    limits = SchedulerLimits(max_num_seqs=8, max_num_batched_tokens=budget, max_model_len=64)
    return Scheduler(
        limits, KVManager(num_ranks * blocks_of_rank, 4, num_ranks=num_ranks), VirtualClock()
    )


def step(scheduler: Scheduler) -> dict[str, tuple[int, int]]:
    """Rank and tokens of each request that is in the next step, which is computed."""
    plan = scheduler.schedule()
    assert isinstance(plan, StepPlan)
    scheduled = scheduler.in_flight[-1].scheduled
    found = {it.request.request_id: (it.request.table.rank, it.num_tokens) for it in scheduled}
    slots = [it.slot for it in scheduled if it.samples]
    scheduler.update(StepResult(plan.step, slots, [[1] for _ in slots]))
    return found


def test_prompts_share_a_step_evenly_among_ranks() -> None:
    scheduler = make_scheduler(2)
    scheduler.add(make_request("a", [1] * 40))
    assert step(scheduler) == {"a": (0, 16)}, "nobody else wants any"
    scheduler.add(make_request("b", [2] * 40))
    assert step(scheduler) == {"a": (0, 8), "b": (1, 8)}
    assert step(scheduler) == {"a": (0, 8), "b": (1, 8)}


def test_the_rank_with_the_fewest_tokens_takes_a_request() -> None:
    scheduler = make_scheduler(3, budget=48)
    for name, length in (("a", 12), ("b", 4), ("c", 6), ("d", 4)):
        scheduler.add(make_request(name, [ord(name)] * length))
    ranks = {name: rank for name, (rank, _) in step(scheduler).items()}
    assert ranks == {"a": 0, "b": 1, "c": 2, "d": 1}


def test_a_rank_that_has_the_prefix_takes_a_request_until_it_has_much_more_to_do() -> None:
    scheduler = make_scheduler(2, budget=64)
    scheduler.add(make_request("a", [1] * 32, max_tokens=1))
    scheduler.add(make_request("b", [2] * 8, max_tokens=8))
    step(scheduler)  # "a" ends, and leaves its blocks on rank 0
    scheduler.add(make_request("c", [1] * 31 + [3], max_tokens=8))
    assert step(scheduler)["c"] == (0, 4)
    scheduler.add(make_request("d", [1] * 31 + [4], max_tokens=8))
    assert step(scheduler)["d"] == (0, 4)
    scheduler.add(make_request("e", [1] * 31 + [5], max_tokens=8))
    assert step(scheduler)["e"] == (1, 32), "though it has nothing of the prefix"


def test_a_request_comes_to_the_rank_whose_host_memory_has_its_prefix() -> None:
    """It comes there from host memory; what a device has is better still."""
    it = Harness(
        num_blocks=32,
        kv_host_slots=64,
        kv_tiers=KVTiersConfig(host_bytes=1),
        parallel=ParallelConfig(tensor_parallel_size=2, dp_attention=True),
    )
    ranks: dict[str, int] = {}
    on_admitted = it.hooks.on_admitted

    def note_rank(request: Request) -> None:
        ranks[request.request_id] = request.table.rank
        on_admitted(request)

    it.hooks.on_admitted = note_rank  # type: ignore[method-assign]
    it.serve(make_request("busy", [9] * 4, max_tokens=1), make_request("a", [1] * 40, max_tokens=1))
    assert ranks == {"busy": 0, "a": 1}
    # They drive the first ones out of both devices.
    it.serve(*(make_request(f"{number}", [number] * 60, max_tokens=1) for number in (2, 3)))
    table = it.scheduler.kv.new_table()
    table.rank = 1
    assert it.scheduler.kv.find_prefix(table, [1] * 40).num_blocks == 0
    it.serve(make_request("a again", [1] * 40, max_tokens=1))
    assert ranks["a again"] == 1
    assert it.core.load().tiers[0].num_loaded == 9
    it.serve(make_request("a once more", [1] * 40, max_tokens=1))
    assert ranks["a once more"] == 1
    assert it.core.load().tiers[0].num_loaded == 9


def test_a_newcomer_leaves_each_context_rank_what_a_running_request_needs_there() -> None:
    """Over all ranks there is room for both, but on the first one there is not. Segments have four blocks."""
    kv = KVManager(24, 4, shares=SegmentShares(2, 16))
    limits = SchedulerLimits(
        max_num_seqs=8, max_num_batched_tokens=24, max_chunk_tokens=16, max_model_len=80
    )
    scheduler = Scheduler(limits, kv, VirtualClock())
    scheduler.add(make_request("long", [1] * 79, max_tokens=1))
    step(scheduler)
    scheduler.add(make_request("short", [2] * 5, max_tokens=4))
    while scheduler.requests:
        step(scheduler)
    assert scheduler.counters.num_preemptions == 0


def test_room_that_comes_on_any_context_rank_is_seen() -> None:
    kv = KVManager(24, 4, shares=SegmentShares(2, 16))
    queue = RequestQueue(kv, 8)
    blocks = kv.pool.allocate(12, 0)
    before = queue.num_unreserved
    kv.pool.release(blocks[:4])
    assert queue.num_unreserved > before


def test_only_requests_of_its_rank_make_way_for_one() -> None:
    scheduler = make_scheduler(2, blocks_of_rank=16, budget=64)
    for name in "abc":
        scheduler.add(make_request(name, [ord(name)] * 24, max_tokens=40))
    while not scheduler.counters.num_preemptions:
        placed = step(scheduler)
    assert {name: rank for name, (rank, _) in placed.items()} == {"a": 0, "b": 1}
    (waiting,) = scheduler.waiting
    assert waiting.request_id == "c"


def test_a_prefix_on_two_ranks_is_known_until_both_have_lost_it() -> None:
    recorder = CacheRecorder(keeps_events=False)
    recorder.changed = {}
    pool = BlockPool(4, recorder, num_ranks=2, own_keys=True)
    blocks = [*pool.allocate(1, 0), *pool.allocate(1, 1)]
    for block in blocks:
        pool.publish(block, b"key")
    assert [pool.find(b"key", rank) for rank in (0, 1)] == blocks
    pool.release(blocks)
    assert (pool.num_cached, list(pool.keys())) == (2, [b"key"])
    recorder.changed.clear()
    pool.allocate(2, 0)
    assert pool.find(b"key", 0) is None
    assert pool.holds(b"key")
    assert not recorder.changed, "another rank has it"
    pool.allocate(2, 1)
    assert not pool.holds(b"key")
    assert list(recorder.changed) == [b"key"]
    pool.check()
