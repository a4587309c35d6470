"""The scheduler as a state machine: arrivals, aborts, results, errors and lost workers in any order."""

from __future__ import annotations

from collections import deque

import msgspec
from harness import VOCAB_SIZE, check_sums, expected_tokens
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from kv_subscriber import CacheView

from pagoda.engine.batching import SchedulerLimits
from pagoda.engine.config import SimConfig
from pagoda.engine.scheduler import Scheduler
from pagoda.executor.sim import SimWorker
from pagoda.ipc.clock import VirtualClock
from pagoda.kv.events import CacheRecorder, KVEventBatch
from pagoda.kv.manager import KVManager
from pagoda.messages.frontend import FinishReason, GenerateRequest, TokenChunk
from pagoda.messages.sampling_params import SamplingParams
from pagoda.messages.worker import StepPlan, StepResult

MAX_MODEL_LEN = 32
BLOCK_SIZE = 4


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(
        extra_blocks=st.integers(0, 8),
        max_num_seqs=st.integers(1, 4),
        budget=st.integers(4, 24),
        multiple=st.sampled_from([1, 4]),
        mixed=st.booleans(),
        num_stages=st.sampled_from([1, 1, 2, 3]),
    )
    def build(
        self,
        extra_blocks: int,
        max_num_seqs: int,
        budget: int,
        multiple: int,
        mixed: bool,
        num_stages: int,
    ) -> None:
        num_blocks = MAX_MODEL_LEN // BLOCK_SIZE + extra_blocks
        self.limits = SchedulerLimits(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            max_model_len=MAX_MODEL_LEN,
            batch_multiple=multiple,
            mixed_steps=mixed,
            num_stages=num_stages,
        )
        self.sim = SimConfig(block_size=BLOCK_SIZE, vocab_size=VOCAB_SIZE)
        self.events = CacheRecorder()
        self.cached = CacheView()
        kv = KVManager(num_blocks, BLOCK_SIZE, recorder=self.events)
        self.scheduler = Scheduler(self.limits, kv, VirtualClock())
        self.worker = SimWorker(self.sim, check_kv=True, num_stages=self.limits.num_stages)
        self.results: deque[StepResult] = deque()
        self.requests: dict[str, GenerateRequest] = {}
        self.tokens: dict[str, list[int]] = {}
        self.count = 0

    @rule(
        prompt=st.lists(st.integers(0, 1), min_size=1, max_size=MAX_MODEL_LEN - 1),
        max_tokens=st.integers(1, 12),
        seed=st.integers(0, 99),
        priority=st.integers(-1, 1),
        eos=st.integers(0, VOCAB_SIZE - 1),
    )
    def add(self, prompt: list[int], max_tokens: int, seed: int, priority: int, eos: int) -> None:
        self.count += 1
        request = GenerateRequest(
            request_id=f"r{self.count}",
            prompt_token_ids=prompt,
            sampling=SamplingParams(seed=seed, max_tokens=max_tokens),
            eos_token_ids=(eos,),
            priority=priority,
        )
        assert self.scheduler.add(request) == []
        self.requests[request.request_id] = request
        self.tokens[request.request_id] = []

    @precondition(lambda self: len(self.scheduler.in_flight) < 4)
    @rule()
    def schedule(self) -> None:
        plan = self.scheduler.schedule()
        if plan is not None:
            self.check_plan(plan)
            self.results.append(self.worker.execute(plan, 0.0))

    def check_plan(self, plan: StepPlan) -> None:
        assert 0 < sum(plan.num_tokens) <= self.limits.max_num_batched_tokens
        assert len(plan.slots) == len(set(plan.slots)) <= self.limits.max_num_seqs
        assert all(0 <= slot < self.limits.max_num_seqs for slot in plan.slots)
        assert min(plan.num_tokens) >= 1

    @precondition(lambda self: self.results)
    @rule()
    def deliver(self) -> None:
        self.take(self.scheduler.update(self.results.popleft()))

    @precondition(lambda self: self.results and self.results[0].slots)
    @rule(data=st.data())
    def deliver_with_an_error(self, data: st.DataObject) -> None:
        result = self.results.popleft()
        index = data.draw(st.integers(0, len(result.slots) - 1))
        bad = result.slots[index]
        chunks = self.scheduler.update(
            StepResult(
                result.step,
                result.slots[:index] + result.slots[index + 1 :],
                result.token_ids[:index] + result.token_ids[index + 1 :],
                errors={bad: "broken"},
            )
        )
        assert sum(chunk.finish_reason is FinishReason.ERROR for chunk in chunks) <= 1
        self.take(chunks)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.requests)))
        assert self.scheduler.abort(request_id)
        assert not self.scheduler.abort(request_id)
        del self.requests[request_id]

    @rule()
    def lose_the_worker(self) -> None:
        self.worker = SimWorker(self.sim, check_kv=True, num_stages=self.limits.num_stages)
        self.results.clear()
        self.take(self.scheduler.recover())
        assert len(self.scheduler.running) == 0
        assert self.scheduler.kv.pool.num_available == self.scheduler.kv.pool.num_blocks

    def take(self, chunks: list[TokenChunk]) -> None:
        for chunk in chunks:
            request = self.requests[chunk.request_id]
            self.tokens[chunk.request_id] += chunk.token_ids
            whole = expected_tokens(request, MAX_MODEL_LEN)
            so_far = self.tokens[chunk.request_id]
            assert so_far == whole[: len(so_far)]
            if chunk.finish_reason is not None:
                assert chunk.finish_reason is FinishReason.ERROR or so_far == whole
                del self.requests[chunk.request_id]

    @invariant()
    def always_true(self) -> None:
        scheduler = self.scheduler
        scheduler.kv.pool.check()
        self.cached.apply(msgspec.msgpack.encode(KVEventBatch(0.0, self.events.drain(), 0)))
        assert self.cached.keys == scheduler.kv.pool.keys()
        check_sums(scheduler)
        assert set(scheduler.requests) == set(self.requests)
        held: dict[int, int] = {}
        for request in scheduler.requests.values():
            assert 0 <= request.num_computed_tokens <= request.num_scheduled_tokens
            assert request.num_computed_tokens <= request.num_tokens <= MAX_MODEL_LEN
            assert request.num_pending_samples <= (4 if self.limits.num_stages == 1 else 1)
            assert request.num_scheduled_tokens <= len(request.table.blocks) * BLOCK_SIZE
            for block in request.table.blocks:
                held[block.block_id] = held.get(block.block_id, 0) + 1
                assert block.ref_count >= held[block.block_id]
        assert len(held) + scheduler.kv.pool.num_available == scheduler.kv.pool.num_blocks

    def teardown(self) -> None:
        """All requests that are left complete, nothing is stuck and nothing stays behind."""
        if not hasattr(self, "scheduler"):
            return
        for _ in range(5000):
            if not self.scheduler.requests and not self.results:
                break
            self.schedule()
            if self.results:
                self.deliver()
        assert not self.scheduler.requests
        assert self.scheduler.kv.pool.num_available == self.scheduler.kv.pool.num_blocks


TestSchedulerMachine = SchedulerMachine.TestCase
