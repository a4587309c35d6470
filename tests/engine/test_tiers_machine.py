"""The scheduler over host memory and disk as a state machine: transfers end in any order, well, badly, twice."""

from __future__ import annotations

from collections import deque

from harness import VOCAB_SIZE, assert_nothing_under_way, check_books, expected_tokens
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from sim_disk import SimDisk

from pagoda.engine.batching import SchedulerLimits
from pagoda.engine.config import KVTiersConfig, SimConfig
from pagoda.engine.scheduler import Scheduler
from pagoda.executor.sim import SimWorker
from pagoda.ipc.clock import VirtualClock
from pagoda.kv.manager import KVManager
from pagoda.kv.tiered_connector import LOAD_TIMEOUT_S, TieredKVConnector
from pagoda.kv.tiers import build_tiers
from pagoda.messages.frontend import FinishReason, GenerateRequest, TokenChunk
from pagoda.messages.sampling_params import SamplingParams
from pagoda.messages.transfers import KVDirectory, Transfer, TransferEnd
from pagoda.messages.worker import Capabilities, StepResult, WorkerReady
from pagoda.pd.connector import Failed

MAX_MODEL_LEN = 32
BLOCK_SIZE = 4
DOCUMENTS = ([0] * MAX_MODEL_LEN, [0, 1] * (MAX_MODEL_LEN // 2), [1] * MAX_MODEL_LEN)


class TiersMachine(RuleBasedStateMachine):
    @initialize(
        extra_blocks=st.integers(0, 4),
        max_num_seqs=st.integers(1, 3),
        budget=st.integers(8, 40),
        host_slots=st.sampled_from([0, 4, 32]),
        disk_bytes=st.sampled_from([4, 100]),
        min_touches=st.integers(1, 2),
        fails=st.booleans(),
        num_stages=st.sampled_from([1, 1, 2]),
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
    ) -> None:
        num_blocks = MAX_MODEL_LEN // BLOCK_SIZE + extra_blocks
        limits = SchedulerLimits(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            max_model_len=MAX_MODEL_LEN,
            num_stages=num_stages,
        )
        self.clock = VirtualClock()
        self.disk = SimDisk(lambda: 1.0)
        self.sim = SimConfig(block_size=BLOCK_SIZE, vocab_size=VOCAB_SIZE)
        self.ready = WorkerReady(
            capabilities=Capabilities(
                block_sizes=(BLOCK_SIZE,), max_batch_tokens=1, max_batch_seqs=1, max_model_len=1
            ),
            num_blocks=num_blocks,
            block_size=BLOCK_SIZE,
            max_model_len=MAX_MODEL_LEN,
            vocab_size=VOCAB_SIZE,
            summary="",
            kv_host_slots=host_slots,
            kv_directories=(KVDirectory("/nowhere", 1),),
        )
        config = KVTiersConfig(disk_bytes=disk_bytes, disk_min_touches=min_touches)
        kv = KVManager(num_blocks, BLOCK_SIZE)
        tiers = build_tiers(
            config,
            self.ready,
            kv.pool,
            self.clock,
            open_scanner=lambda _, clock: self.disk.open(clock),
            epoch_s=1e9,
            fail_on_load_failure=fails,
        )
        assert tiers is not None
        self.tiers: TieredKVConnector = tiers
        self.scheduler = Scheduler(limits, kv, self.clock, tiers)
        self.start_the_worker()
        self.told: list[TransferEnd] = []
        self.fails = fails
        self.requests: dict[str, GenerateRequest] = {}
        self.tokens: dict[str, list[int]] = {}
        self.count = 0

    def start_the_worker(self) -> None:
        self.worker = SimWorker(
            self.sim,
            check_kv=True,
            num_stages=self.scheduler.limits.num_stages,
            disk=self.disk.objects,
        )
        self.results: deque[StepResult] = deque()
        self.transfers: list[Transfer] = []
        self.executed_step = self.scheduler.batcher.next_step - 1
        self.tiers.workers_ready(self.ready)

    @rule(
        document=st.sampled_from(DOCUMENTS),
        length=st.integers(1, MAX_MODEL_LEN - 1),
        tail=st.lists(st.integers(0, 2), max_size=2),
        max_tokens=st.integers(1, 8),
        priority=st.integers(-1, 1),
    )
    def add(
        self, document: list[int], length: int, tail: list[int], max_tokens: int, priority: int
    ) -> None:
        self.count += 1
        request = GenerateRequest(
            request_id=f"r{self.count}",
            prompt_token_ids=[*document[:length], *tail][: MAX_MODEL_LEN - 1],
            sampling=SamplingParams(seed=self.count, max_tokens=max_tokens),
            priority=priority,
        )
        assert self.scheduler.add(request) == []
        self.requests[request.request_id] = request
        self.tokens[request.request_id] = []
        self.submit_transfers()

    @precondition(lambda self: len(self.scheduler.in_flight) < 3)
    @rule()
    def schedule(self) -> None:
        self.turn()
        plan = self.scheduler.schedule()
        if plan is not None:
            self.results.append(self.worker.execute(plan, 0.0))
        self.submit_transfers()

    def submit_transfers(self) -> None:
        """The worker looks at what each touches, now and when it ends."""
        for transfer in self.tiers.drain_transfers():
            assert transfer.after_step < self.scheduler.batcher.next_step
            self.worker.begin(transfer)
            self.transfers.append(transfer)

    @precondition(lambda self: self.results)
    @rule()
    def deliver(self) -> None:
        result = self.results.popleft()
        self.worker.step_done(result.step)
        self.executed_step = result.step
        self.take(self.scheduler.update(result))
        self.submit_transfers()

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
        self.take(self.scheduler.apply_kv_events())
        self.submit_transfers()

    @rule(seconds=st.sampled_from([0.5, 1.5, LOAD_TIMEOUT_S + 1]))
    def wait(self, seconds: float) -> None:
        self.clock.advance_to(self.clock.now() + seconds)

    @rule(rounds=st.integers(1, 12))
    def run(self, rounds: int) -> None:
        """All goes well for a while, so that there is something in the tiers."""
        for _ in range(rounds):
            self.schedule()
            if self.results:
                self.deliver()
            for transfer in list(self.transfers):
                if transfer.after_step <= self.executed_step:
                    self.end(transfer)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def fail(self, data: st.DataObject) -> None:
        """Another engine fails the request, twice, in a turn with all that has happened before."""
        request_id = data.draw(st.sampled_from(sorted(self.requests)))
        events = [Failed(request_id, "it is gone")] * 2
        chunks = self.scheduler.apply_kv_events(events)
        assert [c.error for c in chunks if c.request_id == request_id] == [
            "KV of this request could not be fetched: it is gone."
        ]
        self.take([c for c in chunks if c.request_id != request_id])
        del self.requests[request_id]
        self.submit_transfers()

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.requests)))
        assert self.scheduler.abort(request_id)
        del self.requests[request_id]

    @rule()
    def lose_the_worker(self) -> None:
        self.take(self.scheduler.recover())
        assert self.scheduler.kv.pool.num_available == self.scheduler.kv.pool.num_blocks
        assert_nothing_under_way(self.tiers)
        self.start_the_worker()

    def take(self, chunks: list[TokenChunk]) -> None:
        for chunk in chunks:
            request = self.requests[chunk.request_id]
            self.tokens[chunk.request_id] += chunk.token_ids
            whole = expected_tokens(request, MAX_MODEL_LEN)
            so_far = self.tokens[chunk.request_id]
            assert so_far == whole[: len(so_far)]
            if chunk.finish_reason is FinishReason.ERROR:
                assert "worker died" in (chunk.error or "") or self.fails
            elif chunk.finish_reason is not None:
                assert so_far == whole
            if chunk.finish_reason is not None:
                del self.requests[chunk.request_id]

    @invariant()
    def always_true(self) -> None:
        check_books(self.scheduler)
        assert set(self.scheduler.requests) == set(self.requests)
        for request in self.scheduler.requests.values():
            assert 0 <= request.num_computed_tokens <= request.num_scheduled_tokens
            assert (request.prefix is None) == (request.slot is not None)

    def teardown(self) -> None:
        """All requests that are left complete, nothing is stuck and nothing stays behind."""
        if not hasattr(self, "scheduler"):
            return
        self.turn()
        for _ in range(2000):
            if not (self.scheduler.requests or self.results or self.transfers):
                break
            self.run(1)
            self.wait(1.5)
            self.turn()
        assert not self.scheduler.requests
        assert self.scheduler.kv.pool.num_available == self.scheduler.kv.pool.num_blocks
        assert_nothing_under_way(self.tiers)


TestTiersMachine = TiersMachine.TestCase
