from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pagoda.messages.sampling_params import SamplingParams
from pagoda.messages.worker import SlotStart
from pagoda.worker.input_batch import InputBatch

SLOTS, LONGEST, BLOCK_SIZE = 5, 30, 4
SAMPLING = SamplingParams(seed=0)


def _start(slot: int, tokens: list[int], computed: int, blocks: list[int]) -> SlotStart:
    return SlotStart(slot, tokens, len(tokens), computed, blocks, SAMPLING)


class InputBatchMachine(RuleBasedStateMachine):
    """Every token and block id is used once, so whatever an earlier request left would be noticed."""

    def __init__(self) -> None:
        super().__init__()
        self.batch = InputBatch(SLOTS, LONGEST, BLOCK_SIZE)
        self.tokens: dict[int, list[int]] = {}
        self.blocks: dict[int, list[int]] = {}
        self.computed: dict[int, int] = {}
        self.next_id = 0

    def fresh(self, count: int) -> list[int]:
        self.next_id += count
        return list(range(self.next_id - count, self.next_id))

    @precondition(lambda self: len(self.tokens) < SLOTS)
    @rule(data=st.data(), length=st.integers(1, LONGEST))
    def start(self, data: st.DataObject, length: int) -> None:
        slot = data.draw(st.sampled_from([s for s in range(SLOTS) if s not in self.tokens]))
        computed = data.draw(st.integers(0, length - 1))
        self.tokens[slot] = self.fresh(length)
        self.blocks[slot] = self.fresh(-(-computed // BLOCK_SIZE))
        self.computed[slot] = computed
        self.batch.start(_start(slot, self.tokens[slot], computed, self.blocks[slot]))

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(sorted(self.tokens)))
        self.batch.free(slot)
        del self.tokens[slot], self.blocks[slot], self.computed[slot]

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def step(self, data: st.DataObject) -> None:
        able = [s for s in self.tokens if self.computed[s] < min(len(self.tokens[s]), LONGEST)]
        if not able:
            return
        slots = data.draw(st.lists(st.sampled_from(able), min_size=1, unique=True))
        counts = []
        for slot in slots:
            left = min(len(self.tokens[slot]), LONGEST) - self.computed[slot]
            counts.append(data.draw(st.integers(1, left)))
            end = self.computed[slot] + counts[-1]
            new = self.fresh(-(-end // BLOCK_SIZE) - len(self.blocks[slot]))
            self.blocks[slot] += new
            self.batch.add_blocks(slot, new)
        self.check(slots, counts)
        for slot, count in zip(slots, counts, strict=True):
            samples = self.batch.will_sample(slot, count)
            self.computed[slot] += count
            assert samples == (self.computed[slot] == len(self.tokens[slot]))
            self.batch.advance(slot, count)
            if samples:
                (token_id,) = self.fresh(1)
                self.tokens[slot].append(token_id)
                self.batch.append(slot, token_id)

    def check(self, slots: list[int], counts: list[int]) -> None:
        made = self.batch.prepare(slots, counts)
        positions, tokens, sequences = [], [], []
        for index, (slot, count) in enumerate(zip(slots, counts, strict=True)):
            span = range(self.computed[slot], self.computed[slot] + count)
            positions += span
            tokens += [self.tokens[slot][position] for position in span]
            sequences += [index] * count
            used = -(-span.stop // BLOCK_SIZE)
            assert made.block_tables[index, :used].tolist() == self.blocks[slot][:used]
        assert made.token_ids.tolist() == tokens
        assert made.positions.tolist() == positions
        assert made.sequence_ids.tolist() == sequences
        assert made.query_lens.tolist() == counts
        assert made.context_lens.tolist() == [
            self.computed[slot] + count for slot, count in zip(slots, counts, strict=True)
        ]

    @invariant()
    def computed_tokens_are_counted(self) -> None:
        assert self.batch.num_computed_tokens(list(self.tokens)) == sum(self.computed.values())

    @invariant()
    def nothing_is_computed_beyond_what_is_known(self) -> None:
        for slot, tokens in self.tokens.items():
            with pytest.raises(ValueError, match=f"Slot {slot} is to compute"):
                self.batch.prepare([slot], [len(tokens) - self.computed[slot] + 1])
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
        (lambda batch: batch.add_blocks(0, [8, 9]), "Slot 0 is given 3 blocks, too many"),
        (lambda batch: batch.free(1), "Slot 1 is not in use"),
    ],
)
def test_a_plan_that_does_not_fit(change: Callable[[InputBatch], object], message: str) -> None:
    batch = InputBatch(2, 8, 4)
    batch.start(_start(0, [1, 2, 3, 4, 5], 0, [7]))
    with pytest.raises(ValueError, match=message):
        change(batch)
