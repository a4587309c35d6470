# SPDX-License-Identifier: Apache-2.0
"""The scheduler makes the plans of the plain one, step by step, where that one can do what is asked."""

from __future__ import annotations

from harness import make_request
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from plain_blocks import Blocks
from plain_scheduler import PlainScheduler, Plan, Request

from pagoda.engine.batching import SchedulerLimits
from pagoda.engine.scheduler import Scheduler
from pagoda.ipc.clock import VirtualClock
from pagoda.kv.manager import UNLIMITED_RUN, KVManager
from pagoda.messages.worker import StepPlan, StepResult

BLOCK_SIZE = 4
MAX_MODEL_LEN = 32
STOP = 3


class BothSchedulers(RuleBasedStateMachine):
    @initialize(
        extra_blocks=st.integers(0, 24),
        max_num_seqs=st.integers(1, 6),
        budget=st.integers(1, 24),
        max_chunk=st.sampled_from([UNLIMITED_RUN, 1, 3, 8]),
    )
    def build(self, extra_blocks: int, max_num_seqs: int, budget: int, max_chunk: int) -> None:
        num_blocks = MAX_MODEL_LEN // BLOCK_SIZE + extra_blocks
        limits = SchedulerLimits(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            max_model_len=MAX_MODEL_LEN,
            max_chunk_tokens=max_chunk,
        )
        self.scheduler = Scheduler(limits, KVManager(num_blocks, BLOCK_SIZE), VirtualClock())
        self.plain = PlainScheduler(Blocks(num_blocks, BLOCK_SIZE), max_num_seqs, budget, max_chunk)
        self.requests: list[Request] = []

    @rule(
        beginning=st.integers(0, 3),
        num_common=st.sampled_from([0, 4, 9, 16]),
        own=st.lists(st.integers(0, 1), max_size=12),
        max_tokens=st.integers(1, 12),
        count=st.sampled_from([1, 1, 1, 2, 5]),
    )
    def arrive(
        self, beginning: int, num_common: int, own: list[int], max_tokens: int, count: int
    ) -> None:
        """Equal requests arrive together; others may begin as they do."""
        prompt = [beginning] * num_common + own or [beginning]
        for _ in range(count):
            arrival = len(self.requests)
            message = make_request(
                str(arrival), prompt, max_tokens=max_tokens, eos_token_ids=(STOP,)
            )
            assert self.scheduler.add(message) == []
            most = min(MAX_MODEL_LEN, len(prompt) + max_tokens)
            request = Request(str(arrival), arrival, [*prompt], most, frozenset([STOP]))
            self.requests.append(request)
            self.plain.add(request)

    @precondition(lambda self: len(self.scheduler.in_flight) < 3)
    @rule()
    def schedule(self) -> None:
        assert parts(self.scheduler.schedule()) == plain_parts(self.plain.schedule())

    @precondition(lambda self: self.scheduler.in_flight)
    @rule(token_id=st.integers(0, STOP))
    def deliver(self, token_id: int) -> None:
        step = self.scheduler.in_flight[0].step
        sampling = [slot for _, _, slot, _, samples in self.plain.in_flight[0].scheduled if samples]
        sampled = {slot: (token_id + slot * (token_id % 2)) % (STOP + 1) for slot in sampling}
        chunks = self.scheduler.update(
            StepResult(step, list(sampled), [[token] for token in sampled.values()])
        )
        before = {request.name: len(request.tokens) for request in self.requests}
        self.plain.update(sampled)
        said = {it.name: it.tokens[before[it.name] :] for it in self.requests}
        assert {it.request_id: it.token_ids for it in chunks if it.token_ids} == {
            name: tokens for name, tokens in said.items() if tokens
        }

    @precondition(lambda self: self.scheduler.requests)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.scheduler.requests)))
        assert self.scheduler.abort(name)
        self.plain.finish(self.requests[int(name)])

    @invariant()
    def both_are_alike(self) -> None:
        if not hasattr(self, "plain"):
            return
        waiting, running = self.scheduler.waiting, self.scheduler.running
        assert [it.request_id for it in waiting] == [it.name for it in self.plain.waiting]
        assert [it.request_id for it in running] == [it.name for it in self.plain.running]
        for ours, plain in zip(running, self.plain.running, strict=True):
            assert ours.table.block_ids() == [plain.blocks]
            assert (ours.slot, ours.admission) == (plain.slot, plain.admission)
            assert ours.token_ids == plain.tokens
            assert ours.num_computed_tokens == plain.num_computed
        assert self.scheduler.kv.pool.num_available == self.plain.blocks.num_available
        assert self.scheduler.kv.pool.num_cached == len(self.plain.blocks.by_prefix)

    def teardown(self) -> None:
        """All requests that are left complete in the same steps."""
        if not hasattr(self, "plain"):
            return
        for step in range(3000):
            if not self.scheduler.requests and not self.scheduler.in_flight:
                break
            self.schedule()
            self.both_are_alike()
            if self.scheduler.in_flight:
                self.deliver(step % (STOP + 1))
                self.both_are_alike()
        assert not self.scheduler.requests
        assert not self.plain.running


def parts(plan: StepPlan | None) -> tuple[object, ...] | None:
    if plan is None:
        return None
    return (
        list(zip(plan.slots, plan.num_tokens, strict=True)),
        [(it.request_id, it.slot, it.num_computed_tokens, it.block_ids) for it in plan.starts],
        [(it.slot, it.block_ids) for it in plan.new_blocks],
        plan.freed_slots,
    )


def plain_parts(plan: Plan | None) -> tuple[object, ...] | None:
    if plan is None:
        return None
    starts = [(name, slot, computed, [blocks]) for name, slot, computed, blocks in plan.starts]
    scheduled = [(slot, count) for _, _, slot, count, _ in plan.scheduled]
    return scheduled, starts, plan.new_blocks, plan.freed_slots


TestBothSchedulers = BothSchedulers.TestCase
