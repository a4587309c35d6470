# SPDX-License-Identifier: Apache-2.0
"""The scheduler over host memory and disk as a state machine: transfers end in any order, well, badly, twice."""

from __future__ import annotations

from itertools import count as count_from
from typing import Any

import msgspec
from group_models import EVERY, grouped
from harness import VOCAB_SIZE
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule
from scheduler_rules import BLOCK_SIZE, MAX_MODEL_LEN, WANTED, SchedulerRules

from benchmarks.simulation.books import check_books, check_nothing_under_way, rank_of
from benchmarks.simulation.disk import SimDisk, disk_tiers
from pagoda.engine.batching import SchedulerLimits
from pagoda.engine.kv_transfers import KVTransferHooks
from pagoda.engine.scheduler import Scheduler
from pagoda.ipc.clock import VirtualClock
from pagoda.kv.capacity import num_cold_segments
from pagoda.kv.manager import KVManager
from pagoda.kv.tiered_connector import LOAD_TIMEOUT_S, TieredKVConnector
from pagoda.kv.tiers import build_tiers
from pagoda.kv.transfers import TransferLedger
from pagoda.messages.transfers import TierPlace, Transfer, TransferEnd
from pagoda.messages.worker import Capabilities, WorkerReady
from pagoda.parallel.segments import ALL_ON_ONE, SegmentShares
from pagoda.plugins.disaggregation.connector import Failed

DOCUMENTS = ([0] * MAX_MODEL_LEN, [0, 1] * (MAX_MODEL_LEN // 2), [1] * MAX_MODEL_LEN)


class TiersMachine(SchedulerRules):
    max_in_flight = 3

    @initialize(
        extra_blocks=st.integers(0, 4),
        max_num_seqs=st.integers(1, 3),
        budget=st.integers(8, 40),
        host_slots=st.sampled_from([0, 4, 32]),
        disk_bytes=st.sampled_from([4, 100]),
        min_touches=st.integers(1, 2),
        fails=st.booleans(),
        num_stages=st.sampled_from([1, 1, 2]),
        model=st.sampled_from(["full", *EVERY]),
        segment_tokens=st.sampled_from([0, 0, 8, 16]),
        ranks=st.sampled_from(["one", "one", "own requests", "segments"]),
    )
    def build(
        self,
        extra_blocks: int,
        max_num_seqs: int,
        budget: int,
        host_slots: int,
        disk_bytes: int,
        min_touches: int,
        fails: bool,
        num_stages: int,
        model: str,
        segment_tokens: int,
        ranks: str,
    ) -> None:
        size, shares = (1 if ranks == "one" else 2), ALL_ON_ONE
        if ranks == "segments":
            model, shares = "full", SegmentShares(2, 8)
        if size > 1:
            segment_tokens, host_slots = 0, 2 * host_slots
        groups = grouped(model, BLOCK_SIZE)
        limits = SchedulerLimits(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            max_model_len=MAX_MODEL_LEN,
            num_stages=num_stages,
        )
        self.clock = VirtualClock()
        self.disk = SimDisk(lambda: 1.0)
        ready = WorkerReady(
            capabilities=Capabilities(
                block_sizes=(BLOCK_SIZE,), max_batch_tokens=1, max_batch_seqs=1, max_model_len=1
            ),
            num_blocks=1,
            block_size=BLOCK_SIZE,
            max_model_len=MAX_MODEL_LEN,
            vocab_size=VOCAB_SIZE,
            summary="",
            kv_groups=groups,
            kv_host_slots=host_slots,
            kv_places=(TierPlace("disk", "/nowhere", 1),),
        )
        config = disk_tiers(disk_bytes, min_touches)
        num_cold = num_cold_segments(ready, config.further, segment_tokens)

        def manager(num_blocks: int) -> KVManager:
            return KVManager(
                num_blocks,
                BLOCK_SIZE,
                groups=groups,
                run_tokens=2 * budget,
                segment_tokens=segment_tokens,
                num_cold_segments=num_cold,
                shares=shares,
                num_ranks=size if ranks == "own requests" else 1,
            )

        counts = count_from(size, size)
        least = next(count for count in counts if manager(count).fit(MAX_MODEL_LEN))
        num_blocks = least + size * extra_blocks
        self.ready = msgspec.structs.replace(ready, num_blocks=num_blocks)
        kv = manager(num_blocks)
        tiers = build_tiers(
            config,
            self.ready,
            kv.pool,
            TransferLedger(kv.pool),
            self.clock,
            openers={"disk": self.disk.open_tier},
            epoch_s=1e9,
            fail_on_load_failure=fails,
        )
        assert tiers is not None
        self.tiers: TieredKVConnector = tiers
        self.told: list[TransferEnd] = []
        self.may_fail = fails
        scheduler = Scheduler(limits, kv, self.clock)
        self.hooks = KVTransferHooks(scheduler, tiers)
        self.begin(scheduler, self.disk.objects)

    def start_the_worker(self) -> None:
        check_nothing_under_way(self.tiers)
        super().start_the_worker()
        self.transfers: list[Transfer] = []
        self.tiers.workers_ready(self.ready)

    @rule(
        document=st.sampled_from(DOCUMENTS),
        length=st.integers(1, MAX_MODEL_LEN - 1),
        tail=st.lists(st.integers(0, 2), max_size=2),
        max_tokens=st.integers(1, 8),
        priority=st.integers(-1, 1),
        wanted=st.sampled_from(WANTED),
    )
    def add(
        self,
        document: list[int],
        length: int,
        tail: list[int],
        max_tokens: int,
        priority: int,
        wanted: dict[str, Any],
    ) -> None:
        prompt = [*document[:length], *tail][: MAX_MODEL_LEN - 1]
        self.arrive(prompt, max_tokens, priority, **wanted)
        self.submit_transfers()

    def submit_transfers(self) -> None:
        """The worker looks at what each touches, now and when it ends."""
        drained = self.hooks.drain_transfers()
        for transfer in [] if drained is None else drained.transfers:
            assert transfer.after_step < self.scheduler.batcher.next_step
            rank_of(transfer, self.scheduler.kv.pool, *self.hooks.near_pools)
            self.worker.begin(transfer)
            self.transfers.append(transfer)

    @precondition(lambda self: self.transfers)
    @rule(data=st.data(), fails=st.sampled_from([False, False, True]))
    def end_a_transfer(self, data: st.DataObject, fails: bool) -> None:
        ready = [t for t in self.transfers if t.after_step <= self.executed_step]
        if not ready:
            return
        transfer = data.draw(st.sampled_from(ready))
        failed: tuple[int, ...] = ()
        if fails:
            failed = tuple(data.draw(st.sets(st.integers(0, 7), min_size=1)))
        self.end(transfer, failed)

    def end(self, transfer: Transfer, failed: tuple[int, ...] = ()) -> None:
        self.transfers.remove(transfer)
        self.told.append(self.worker.end(transfer, failed))
        self.tell(self.told[-1])

    @precondition(lambda self: self.told)
    @rule(data=st.data())
    def tell_again(self, data: st.DataObject) -> None:
        self.tell(data.draw(st.sampled_from(self.told)))

    def tell(self, end: TransferEnd) -> None:
        """The scheduler hears of the end in the next turn, with whatever happens until then."""
        self.tiers.transfer_ended(end)

    @rule()
    def turn(self) -> None:
        self.take(self.hooks.apply_events())
        self.submit_transfers()

    @rule(seconds=st.sampled_from([0.5, 1.5, LOAD_TIMEOUT_S + 1]))
    def wait(self, seconds: float) -> None:
        self.clock.advance_to(self.clock.now() + seconds)

    @rule(rounds=st.integers(1, 12))
    def run(self, rounds: int) -> None:
        """All goes well for a while, so that there is something in the tiers."""
        for _ in range(rounds):
            super().go_on()
            for transfer in list(self.transfers):
                if transfer.after_step <= self.executed_step:
                    self.end(transfer)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def fail(self, data: st.DataObject) -> None:
        """Another engine fails the request, twice, in a turn with all that has happened before."""
        request_id = data.draw(st.sampled_from(sorted(self.requests)))
        events = [Failed(request_id, "it is gone")] * 2
        chunks = self.hooks.apply_events(events)
        assert [c.error for c in chunks if c.request_id == request_id] == [
            "KV of this request could not be fetched: it is gone."
        ]
        self.take([c for c in chunks if c.request_id != request_id])
        del self.requests[request_id]
        self.submit_transfers()

    @invariant()
    def always_true(self) -> None:
        check_books(self.scheduler)
        for request in self.scheduler.requests.values():
            assert (request.prefix is None) == (request.slot is not None)

    @property
    def is_busy(self) -> bool:
        return super().is_busy or bool(self.transfers)

    def go_on(self) -> None:
        self.run(1)
        self.wait(1.5)
        self.turn()

    def teardown(self) -> None:
        super().teardown()
        if hasattr(self, "scheduler"):
            check_nothing_under_way(self.tiers)


TestTiersMachine = TiersMachine.TestCase
