# SPDX-License-Identifier: Apache-2.0
"""Rules and invariants that state machines of the scheduler have in common."""

from __future__ import annotations

from collections import deque
from itertools import pairwise
from typing import Any

from harness import VOCAB_SIZE, expected_tokens
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from small_grammars import constraint_of

from pagoda.engine.scheduler import Scheduler
from pagoda.messages.engine_config import SimConfig
from pagoda.messages.frontend import (
    FinishReason,
    GenerateRequest,
    Grammar,
    Pooling,
    TokenChunk,
    Work,
)
from pagoda.messages.sampling_params import SamplingParams
from pagoda.messages.worker import StepPlan, StepResult
from pagoda.parallel.segments import BlockRanks
from pagoda.plugins.sim.executor import Cells, SimWorker
from pagoda.plugins.sim.model import sim_embedding, sim_logprob

MAX_MODEL_LEN = 32
_POOLINGS = [one for one in Pooling if one is not Pooling.PLACES]  # places are those in an audio
WANTED: list[dict[str, Any]] = [{}, {}, {"num_top": 2}, *({"pooling": one} for one in _POOLINGS)]
"""What requests ask of their prompts, as arguments of `arrive`."""
BLOCK_SIZE = 4


class SchedulerRules(RuleBasedStateMachine):
    """Steps, results, aborts and lost workers in any order; machines add arrivals and whatever else happens."""

    scheduler: Scheduler
    max_in_flight = 4
    may_fail = True
    """Requests may fail for other reasons than workers that died."""

    def begin(self, scheduler: Scheduler, disk: dict[bytes, Cells] | None = None) -> None:
        self.scheduler = scheduler
        self.disk_objects = disk
        self.requests: dict[str, GenerateRequest] = {}
        self.tokens: dict[str, list[int]] = {}
        self.scores: dict[str, list[float]] = {}
        self.start_the_worker()

    def start_the_worker(self) -> None:
        self.worker = SimWorker(
            SimConfig(
                block_size=BLOCK_SIZE, vocab_size=VOCAB_SIZE, kv_groups=self.scheduler.kv.groups
            ),
            check_kv=True,
            num_stages=self.scheduler.limits.num_stages,
            disk=self.disk_objects,
        )
        self.plans: deque[StepPlan] = deque()
        """Plans that await masks, or are behind one that does."""
        self.results: deque[StepResult] = deque()
        self.executed_step = self.scheduler.batcher.next_step - 1

    def arrive(
        self,
        prompt: list[int],
        max_tokens: int,
        priority: int,
        eos: tuple[int, ...] = (),
        grammar: Grammar | None = None,
        *,
        num_top: int | None = None,
        pooling: Pooling | None = None,
        **sampling: Any,
    ) -> None:
        """`num_top` asks for log-probabilities of the prompt; a pooled prompt has no answer."""
        number = len(self.tokens) + 1
        request = GenerateRequest(
            request_id=f"r{number}",
            prompt_token_ids=prompt,
            work=Work(
                SamplingParams(
                    seed=number,
                    max_tokens=0 if pooling else max_tokens,
                    prompt_logprobs=num_top,
                    **sampling,
                ),
                eos_token_ids=eos,
                pooling=pooling,
            ),
            priority=priority,
            grammar=grammar,
        )
        assert self.scheduler.add(request, constraint_of(request)) == []
        self.requests[request.request_id] = request
        self.tokens[request.request_id] = []
        self.scores[request.request_id] = []

    def turn(self) -> None:
        """Happens before a step is planned."""

    def submit_transfers(self) -> None:
        """Happens after all that may begin transfers."""

    @precondition(lambda self: len(self.scheduler.in_flight) < self.max_in_flight)
    @rule()
    def schedule(self) -> None:
        self.turn()
        plan = self.scheduler.schedule()
        if plan is not None:
            self.check_plan(plan)
            self.plans.append(plan)
            self.execute()
        self.submit_transfers()

    @precondition(lambda self: self.plans)
    @rule()
    def send_masks(self) -> None:
        messages, chunks = self.scheduler.take_masks()
        for masks in messages:
            self.worker.take_masks(masks)
        self.take(chunks)
        self.execute()

    def execute(self) -> None:
        """The worker goes on, until it needs masks."""
        while self.plans and self.worker.has_masks_for(self.plans[0]):
            self.results.append(self.worker.execute(self.plans.popleft(), 0.0))

    def check_plan(self, plan: StepPlan) -> None:
        limits = self.scheduler.limits
        assert 0 < sum(plan.num_tokens) <= limits.max_num_batched_tokens
        assert len(plan.slots) == len(set(plan.slots)) <= limits.max_num_seqs
        assert all(0 <= slot < limits.max_num_seqs for slot in plan.slots)
        assert min(plan.num_tokens) >= 1
        scheduled = [part.request.table.rank for part in self.scheduler.in_flight[-1].scheduled]
        assert scheduled == sorted(scheduled), "slots are in the order of their ranks"

    @precondition(lambda self: self.results)
    @rule()
    def deliver(self) -> None:
        self.hand_in(self.results.popleft())

    def hand_in(self, result: StepResult) -> None:
        self.worker.step_done(result.step)
        self.executed_step = result.step
        self.take(self.scheduler.update(result))
        self.submit_transfers()

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.requests)))
        assert self.scheduler.abort(request_id)
        assert not self.scheduler.abort(request_id)
        del self.requests[request_id]

    @rule()
    def lose_the_worker(self) -> None:
        self.take(self.scheduler.recover())
        assert len(self.scheduler.running) == 0
        assert self.scheduler.kv.pool.num_available == self.scheduler.kv.pool.num_blocks
        self.start_the_worker()

    def take(self, chunks: list[TokenChunk]) -> None:
        for chunk in chunks:
            request = self.requests[chunk.request_id]
            self.tokens[chunk.request_id] += chunk.token_ids
            self._take_scores(request, chunk)
            whole = expected_tokens(request, MAX_MODEL_LEN)
            so_far = self.tokens[chunk.request_id]
            assert so_far == whole[: len(so_far)]
            if chunk.finish_reason is FinishReason.ERROR:
                assert "worker died" in (chunk.error or "") or self.may_fail
            elif chunk.finish_reason is not None:
                assert so_far == whole
                self._check_end(request, chunk)
            if chunk.finish_reason is not None:
                del self.requests[chunk.request_id]

    def _take_scores(self, request: GenerateRequest, chunk: TokenChunk) -> None:
        """Positions come in order, each once, and before the answer."""
        scores, part = self.scores[request.request_id], chunk.prompt_logprobs
        if part is not None:
            assert part.first == 1 + len(scores)
            scores += [entry.logprob for entry in part.entries()]
        if request.work.sampling.prompt_logprobs is not None and chunk.token_ids:
            assert len(scores) == len(request.prompt_token_ids) - 1

    def _check_end(self, request: GenerateRequest, chunk: TokenChunk) -> None:
        prompt, expected = request.prompt_token_ids, list[float]()
        if request.work.sampling.prompt_logprobs is not None:
            expected = [sim_logprob(one, other) for one, other in pairwise(prompt)]
        assert self.scores[request.request_id] == expected
        assert chunk.embedding == (sim_embedding(prompt) if request.work.pooling else None)

    @invariant()
    def requests_are_where_they_should_be(self) -> None:
        assert set(self.scheduler.requests) == set(self.requests)
        for request in self.scheduler.requests.values():
            assert 0 <= request.num_computed_tokens <= request.num_scheduled_tokens
            table, kv = request.table, self.scheduler.kv
            found = [block.rank for block in table.blocks]
            first = found[0] if kv.spread is not None and found else table.rank
            ranks = BlockRanks(first, kv.shares, kv.block_size)
            assert kv.spread is not None or set(found) <= {first}
            assert kv.spread is None or found == list(map(ranks.of, range(len(found))))

    @property
    def is_busy(self) -> bool:
        return bool(self.scheduler.requests or self.results or self.plans)

    def go_on(self) -> None:
        """Nothing goes wrong for a moment."""
        self.schedule()
        if self.plans:
            self.send_masks()
        if self.results:
            self.deliver()

    def teardown(self) -> None:
        """All requests that are left complete, nothing is stuck and nothing stays behind."""
        if not hasattr(self, "scheduler"):
            return
        self.turn()
        for _ in range(5000):
            if not self.is_busy:
                break
            self.go_on()
        assert not self.scheduler.requests
        assert self.scheduler.kv.pool.num_available == self.scheduler.kv.pool.num_blocks
