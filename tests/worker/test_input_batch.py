# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import compress

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pagoda.messages.frontend import Work
from pagoda.messages.sampling_params import SamplingParams
from pagoda.messages.worker import SlotStart
from pagoda.worker.input_batch import MAX_STEPS, InputBatch, StepTokens

SLOTS, LONGEST = 5, 30
BLOCK_SIZES = (4, 2)
"""Those of two KV groups."""
SAMPLING = SamplingParams(seed=0)


def _start(slot: int, tokens: list[int], computed: int, *blocks: list[int]) -> SlotStart:
    return SlotStart(slot, tokens, len(tokens), computed, list(blocks), Work(SAMPLING))


@dataclass
class _Expected:
    """What a step must be given, and the rows that its samples go to."""

    slots: list[int]
    counts: list[int]
    rows: list[list[int]]
    """Tokens of each slot's request; those that are sampled are appended as the step runs."""
    firsts: list[int]
    blocks: list[list[list[int]]]
    """Those of each slot, by group."""
    samples: list[bool]


class InputBatchMachine(RuleBasedStateMachine):
    """Every token and block id is used once, so whatever an earlier request left would be noticed.

    One step may be prepared behind another that has not run; slots may be freed and started again in between.
    """

    def __init__(self) -> None:
        super().__init__()
        self.batch = InputBatch(SLOTS, LONGEST, BLOCK_SIZES)
        self.tokens: dict[int, list[int]] = {}
        self.num_tokens: dict[int, int] = {}
        """Tokens of each slot once all steps that are prepared have run."""
        self.blocks: dict[int, list[list[int]]] = {}
        self.computed: dict[int, int] = {}
        self.next_id = 0
        self.under_way: deque[tuple[StepTokens, _Expected]] = deque()

    def fresh(self, count: int) -> list[int]:
        self.next_id += count
        return list(range(self.next_id - count, self.next_id))

    @precondition(lambda self: len(self.tokens) < SLOTS)
    @rule(data=st.data(), length=st.integers(1, LONGEST))
    def start(self, data: st.DataObject, length: int) -> None:
        slot = data.draw(st.sampled_from([s for s in range(SLOTS) if s not in self.tokens]))
        computed = data.draw(st.integers(0, length - 1))
        self.tokens[slot], self.num_tokens[slot] = self.fresh(length), length
        self.blocks[slot] = [self.fresh(-(-computed // size)) for size in BLOCK_SIZES]
        self.computed[slot] = computed
        self.batch.start(_start(slot, list(self.tokens[slot]), computed, *self.blocks[slot]))

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(sorted(self.tokens)))
        self.batch.free(slot)
        del self.tokens[slot], self.num_tokens[slot], self.blocks[slot], self.computed[slot]

    @rule(data=st.data(), count=st.integers(1, 3))
    def append(self, data: st.DataObject, count: int) -> None:
        """Appends tokens that a grammar forces, which is known when all before them are."""
        able = [
            slot
            for slot, tokens in self.tokens.items()
            if len(tokens) == self.num_tokens[slot] <= LONGEST + 1 - count
        ]
        if able:
            slot = data.draw(st.sampled_from(able))
            forced = self.fresh(count)
            self.tokens[slot] += forced
            self.num_tokens[slot] += count
            self.batch.append(slot, forced)

    @precondition(lambda self: len(self.under_way) < MAX_STEPS)
    @rule(data=st.data(), one_each=st.booleans())
    def prepare(self, data: st.DataObject, *, one_each: bool) -> None:
        able = [s for s, n in self.num_tokens.items() if self.computed[s] < min(n, LONGEST)]
        if not able:
            return
        slots = data.draw(st.lists(st.sampled_from(able), min_size=1, unique=True))
        counts = []
        for slot in slots:
            left = min(self.num_tokens[slot], LONGEST) - self.computed[slot]
            counts.append(1 if one_each else data.draw(st.integers(1, left)))
            end = self.computed[slot] + counts[-1]
            for group, (size, blocks) in enumerate(
                zip(BLOCK_SIZES, self.blocks[slot], strict=True)
            ):
                new = self.fresh(-(-end // size) - len(blocks))
                blocks += new
                self.batch.add_blocks(slot, group, new)
        expected = _Expected(
            slots=slots,
            counts=counts,
            rows=[self.tokens[slot] for slot in slots],
            firsts=[self.computed[slot] for slot in slots],
            blocks=[[list(blocks) for blocks in self.blocks[slot]] for slot in slots],
            samples=[],
        )
        for slot, count in zip(slots, counts, strict=True):
            self.computed[slot] += count
            expected.samples.append(self.computed[slot] == self.num_tokens[slot])
            self.num_tokens[slot] += expected.samples[-1]
        self.under_way.append((self.batch.prepare(slots, counts), expected))

    @precondition(lambda self: self.under_way)
    @rule(data=st.data())
    def run(self, data: st.DataObject) -> None:
        made, expected = self.under_way.popleft()
        self.batch.read(made)
        everyone = [True] * len(expected.slots)
        self.check(made, expected, everyone)
        assert made.samples == expected.samples
        assert made.firsts == expected.firsts
        some = data.draw(st.lists(st.booleans(), min_size=len(everyone), max_size=len(everyone)))
        if any(some):
            self.check(made.of(some), expected, some)
        places, drawn = [], []
        for row, end, samples in zip(expected.rows, made.ends, expected.samples, strict=True):
            if samples:
                (token_id,) = self.fresh(1)
                row.append(token_id)
                places.append(end)
                drawn.append(token_id)
        self.batch.write(places, drawn)

    def check(self, made: StepTokens, expected: _Expected, chosen: list[bool]) -> None:
        positions, tokens, sequences, counts, ends = [], [], [], [], []
        batch = made.batch
        columns = (expected.counts, expected.rows, expected.firsts, expected.blocks)
        for count, row, first, blocks in compress(zip(*columns, strict=True), chosen):
            span = range(first, first + count)
            positions += span
            tokens += row[span.start : span.stop]
            sequences += [len(counts)] * count
            for size, table, of_group in zip(BLOCK_SIZES, batch.block_tables, blocks, strict=True):
                used = -(-span.stop // size)
                assert table[len(counts), :used].tolist() == of_group[:used]
            counts.append(count)
            ends.append(span.stop)
        assert batch.token_ids.tolist() == tokens
        assert batch.positions.tolist() == positions
        assert batch.sequence_ids.tolist() == sequences
        assert batch.query_lens.tolist() == made.counts == counts
        assert batch.context_lens.tolist() == ends
        assert made.slots == list(compress(expected.slots, chosen))
        assert made.num_context_tokens == sum(ends)

    @precondition(lambda self: len(self.under_way) < MAX_STEPS)
    @invariant()
    def nothing_is_computed_beyond_what_is_known(self) -> None:
        for slot, num_tokens in self.num_tokens.items():
            count = num_tokens - self.computed[slot] + 1
            assert f"Slot {slot} is to compute {count}" in self.batch.misfit(slot, count)
            with pytest.raises(ValueError, match=f"Slot {slot} is to compute"):
                self.batch.prepare([slot], [count])
        for slot in set(range(SLOTS)) - set(self.tokens):
            with pytest.raises(ValueError, match=f"Slot {slot} is not in use"):
                self.batch.prepare([slot], [1])


TestInputBatch = InputBatchMachine.TestCase
TestInputBatch.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda batch: batch.start(_start(0, [1], 0, [])), "0 is started while it is in use"),
        (lambda batch: batch.start(_start(2, [1], 0, [])), "Slot 2 does not exist"),
        (lambda batch: batch.start(_start(1, [3] * 9, 0, [])), "with 9 tokens, too many"),
        (lambda batch: batch.prepare([0], [5]), "0 is to hold 5 tokens in 1 blocks of 4"),
        (lambda batch: batch.add_blocks(0, 0, [8, 9]), "0 is given too many blocks of group 0"),
        (
            lambda batch: batch.start(_start(1, [3], 0)),
            "with 0 block tables, there are 1 KV groups",
        ),
        (lambda batch: batch.free(1), "Slot 1 is not in use"),
    ],
)
def test_a_plan_that_does_not_fit(change: Callable[[InputBatch], object], message: str) -> None:
    batch = InputBatch(2, 8, [4])
    batch.start(_start(0, [1, 2, 3, 4, 5], 0, [7]))
    with pytest.raises(ValueError, match=message):
        change(batch)
