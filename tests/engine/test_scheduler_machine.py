# SPDX-License-Identifier: Apache-2.0
"""The scheduler as a state machine: arrivals, aborts, results, errors and lost workers in any order."""

from __future__ import annotations

from typing import Any

import msgspec
from group_models import EVERY, grouped
from harness import VOCAB_SIZE
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule
from kv_subscriber import CacheView, assert_knows
from scheduler_rules import BLOCK_SIZE, MAX_MODEL_LEN, WANTED, SchedulerRules
from small_grammars import EOS, GRAMMARS

from benchmarks.simulation.books import check_sums
from pagoda.engine.batching import SchedulerLimits
from pagoda.engine.scheduler import Scheduler
from pagoda.ipc.clock import VirtualClock
from pagoda.kv.events import CacheRecorder
from pagoda.kv.manager import KVManager
from pagoda.messages.frontend import Grammar
from pagoda.plugins.kv_events.publisher import KVEventBatch


class SchedulerMachine(SchedulerRules):
    @initialize(
        extra_blocks=st.integers(0, 8),
        max_num_seqs=st.integers(1, 4),
        budget=st.integers(4, 24),
        multiple=st.sampled_from([1, 4]),
        mixed=st.booleans(),
        num_stages=st.sampled_from([1, 1, 2, 3]),
        model=st.sampled_from(["full", *EVERY]),
        num_ranks=st.sampled_from([1, 1, 2, 3]),
    )
    def build(
        self,
        extra_blocks: int,
        max_num_seqs: int,
        budget: int,
        multiple: int,
        mixed: bool,
        num_stages: int,
        model: str,
        num_ranks: int,
    ) -> None:
        groups = grouped(model, BLOCK_SIZE)
        least = sum(group.most_blocks(0, MAX_MODEL_LEN, multiple) for group in groups)
        num_blocks = (least + extra_blocks) * num_ranks
        limits = SchedulerLimits(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            max_model_len=MAX_MODEL_LEN,
            batch_multiple=multiple,
            mixed_steps=mixed,
            num_stages=num_stages,
        )
        self.events = CacheRecorder()
        self.cached = CacheView()
        kv = KVManager(
            num_blocks,
            BLOCK_SIZE,
            groups=groups,
            run_tokens=2 * budget,
            recorder=self.events,
            num_ranks=num_ranks,
        )
        self.begin(Scheduler(limits, kv, VirtualClock()))

    @rule(
        prompt=st.lists(st.integers(0, 1), min_size=1, max_size=MAX_MODEL_LEN - 1),
        max_tokens=st.integers(0, 12),
        priority=st.integers(-1, 1),
        eos=st.integers(0, VOCAB_SIZE - 1),
        wanted=st.sampled_from(WANTED),
    )
    def add(
        self,
        prompt: list[int],
        max_tokens: int,
        priority: int,
        eos: int,
        wanted: dict[str, Any],
    ) -> None:
        self.arrive(prompt, max_tokens, priority, (eos,), **wanted)

    @rule(
        prompt=st.lists(st.integers(0, 1), min_size=1, max_size=12),
        max_tokens=st.integers(1, 30),
        priority=st.integers(-1, 1),
        grammar=st.sampled_from(GRAMMARS),
        min_tokens=st.sampled_from([0, 0, 1, 7]),
        stop=st.sampled_from([(), (), (4,), (35,)]),
        ignore_eos=st.booleans(),
        logprobs=st.sampled_from([None, None, 1]),
    )
    def add_with_a_grammar(
        self,
        prompt: list[int],
        max_tokens: int,
        priority: int,
        grammar: Grammar,
        min_tokens: int,
        stop: tuple[int, ...],
        ignore_eos: bool,
        logprobs: int | None,
    ) -> None:
        self.arrive(
            prompt,
            max_tokens,
            priority,
            () if ignore_eos else (EOS,),
            grammar,
            min_tokens=min(min_tokens, max_tokens),
            stop_token_ids=stop,
            ignore_eos=ignore_eos,
            logprobs=logprobs,
        )

    @precondition(lambda self: self.results and self.results[0].slots)
    @rule(data=st.data())
    def deliver_with_an_error(self, data: st.DataObject) -> None:
        result = self.results.popleft()
        index = data.draw(st.integers(0, len(result.slots) - 1))
        bad = result.slots[index]
        self.hand_in(
            msgspec.structs.replace(
                result,
                slots=result.slots[:index] + result.slots[index + 1 :],
                token_ids=result.token_ids[:index] + result.token_ids[index + 1 :],
                errors={bad: "broken"},
            )
        )

    @invariant()
    def always_true(self) -> None:
        scheduler = self.scheduler
        scheduler.kv.pool.check()
        self.cached.apply(msgspec.msgpack.encode(KVEventBatch(0.0, self.events.drain(), 0)))
        assert_knows(self.cached.keys, scheduler.kv.pool)
        check_sums(scheduler)
        held: dict[int, int] = {}
        for request in scheduler.requests.values():
            assert request.num_computed_tokens <= request.num_tokens <= MAX_MODEL_LEN
            assert request.num_pending_samples <= (4 if scheduler.limits.num_stages == 1 else 1)
            assert scheduler.kv.has_room_for(request.table, request.num_scheduled_tokens)
            for group, table in zip(scheduler.kv.groups, request.table.groups, strict=True):
                assert table.first <= group.first_block(request.num_computed_tokens)
            for block in request.table.blocks:
                held[block.block_id] = held.get(block.block_id, 0) + 1
                assert block.ref_count >= held[block.block_id]
        assert len(held) + scheduler.kv.pool.num_available == scheduler.kv.pool.num_blocks


TestSchedulerMachine = SchedulerMachine.TestCase
