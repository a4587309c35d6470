# SPDX-License-Identifier: Apache-2.0
"""Sampling: logits become tokens.

The sampler keeps the parameters of all slots in one table, by which the backend chooses the tokens of a step. A
row's token depends on its own logits, parameters, seed and position only, in every bit.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from pagoda.backend.sampling import SampledRows, SampleOutcome
from pagoda.backend.sampling_table import SamplingTable
from pagoda.messages.frontend import TokenLogprobs
from pagoda.messages.worker import SlotStart, most_sampled
from pagoda.worker.prompt_outputs import PromptOutputs
from pagoda.worker.sampling_state import SamplingState
from pagoda.worker.step_rows import Draft

NOT_FINITE = "the model produced NaN or infinite logits"
OVERFLOWN = "the penalties drove the logits to infinity; repetition_penalty must be closer to 1"
NOTHING_ALLOWED = (
    "the sampling parameters leave no token to choose from; "
    "allowed_token_ids must name a token that the grammar allows and min_tokens does not hold back"
)
BLAMED_FIELDS = {OVERFLOWN: "repetition_penalty", NOTHING_ALLOWED: "allowed_token_ids"}
"""Sampling parameters whose fault an error is."""
_ERRORS = {
    SampleOutcome.NOT_FINITE: NOT_FINITE,
    SampleOutcome.OVERFLOWN: OVERFLOWN,
    SampleOutcome.NOTHING_ALLOWED: NOTHING_ALLOWED,
}

SampleRows = Callable[[Tensor, SamplingTable, Sequence[int]], SampledRows]
"""`Backend.sample`."""


@dataclass(frozen=True)
class Sampled:
    """Tokens by slot, and of drafts by row of the sampling table; each is either in `token_ids` or in `errors`."""

    token_ids: dict[int, int] = field(default_factory=dict)
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    errors: dict[int, str] = field(default_factory=dict)
    prompts: PromptOutputs = field(default_factory=PromptOutputs)

    def take_right(self, drafts: Mapping[int, Draft]) -> dict[int, Right]:
        """The tokens that follow the first of each slot with a draft: one behind each token that is as drafted.

        Takes what was sampled behind drafts out of the rest; a row that failed is computed again as the next one.
        """
        found: dict[int, Right] = {}
        for slot, draft in drafts.items():
            right, token = Right([], []), self.token_ids.get(slot)
            for guess, row in zip(draft.token_ids, draft.table_rows, strict=True):
                follows = self.token_ids.pop(row, None)
                report = self.logprobs.pop(row, None)
                self.errors.pop(row, None)
                token = follows if token == guess else None
                if token is not None:
                    right.token_ids.append(token)
                    right.logprobs.extend([] if report is None else [report])
            if slot in self.token_ids:
                found[slot] = right
        return found


class Right(NamedTuple):
    """Tokens of a slot that were sampled behind drafts which are right, and their log-probabilities, if wanted."""

    token_ids: list[int]
    logprobs: list[TokenLogprobs]


def merged(parts: Iterable[Sampled]) -> Sampled:
    """The results of different slots together."""
    whole = Sampled()
    for part in parts:
        whole.token_ids.update(part.token_ids)
        whole.logprobs.update(part.logprobs)
        whole.errors.update(part.errors)
        whole.prompts.update(part.prompts)
    return whole


def argmax_tokens(slots: Collection[int], found: Tensor) -> Sampled:
    """Result of argmax sampling from `found` [slots, 3] int64, as `Decoder.argmax` gives it."""
    tokens, _, are_finite = found.T.tolist()
    if all(are_finite):
        return Sampled(dict(zip(slots, tokens, strict=True)))
    sampled = Sampled()
    for slot, token, is_finite in zip(slots, tokens, are_finite, strict=True):
        if is_finite:
            sampled.token_ids[slot] = token
        else:
            sampled.errors[slot] = NOT_FINITE
    return sampled


class Sampler:
    """State of sampling of all slots."""

    def __init__(self, num_slots: int, vocab_size: int, sample_rows: SampleRows) -> None:
        self.table = SamplingTable(num_slots + most_sampled(num_slots), vocab_size)
        self._reported = self.table.columns["logprobs"]
        self._sample_rows = sample_rows
        self._states: dict[int, SamplingState] = {}
        self._changing: set[int] = set()
        """Slots in which a further token changes more than the position."""
        self._with_logits: set[int] = set()
        """Slots whose next step needs more than the likeliest token."""
        self._reporting: set[int] = set()
        """Slots that report log-probabilities."""
        self._speaking: set[int] = set()
        """Slots whose answers are transcripts."""

    def start(self, start: SlotStart) -> None:
        state = self._states[start.slot] = SamplingState(start, self.table)
        if start.work.sampling.logprobs is not None:
            self._reporting.add(start.slot)
        if state.is_speech:
            self._speaking.add(start.slot)
        self._note(start.slot, state)

    def free(self, slot: int) -> None:
        """Forgets a slot, even one whose start failed."""
        self._states.pop(slot, None)
        for slots in (self._changing, self._with_logits, self._reporting, self._speaking):
            slots.discard(slot)

    def take_masks(self, masks: dict[int, bytes]) -> None:
        """Takes the masks of slots for their next tokens; `append` forgets them."""
        for slot, mask in masks.items():
            state = self._states.get(slot)
            if state is not None:
                state.take_mask(mask)
                self._note(slot, state)

    def needing_logits(self, slots: Iterable[int]) -> set[int]:
        """Slots among these whose next step needs more than the likeliest token."""
        return self._with_logits.intersection(slots)

    def foresee(self, slot: int, draft: Draft) -> None:
        """Fills the rows of the table by which tokens are sampled behind drafts, as if these had been said."""
        state = self._states[slot]
        for count, table_row in enumerate(draft.table_rows, start=1):
            row = state.behind(draft.token_ids[:count])
            self.table.put(table_row, row)
            _sort(table_row, self._with_logits, belongs=state.row_needs_logits(row))
            _sort(table_row, self._reporting, belongs=slot in self._reporting)

    def mask_draft(self, slot: int, draft: Draft, masks: Sequence[bytes]) -> None:
        """Holds what is sampled behind the first of a slot's drafts to masks."""
        for table_row, mask in zip(draft.table_rows, masks, strict=False):
            self._states[slot].mask_row(table_row, mask)
            self._with_logits.add(table_row)

    def sample(self, logits: Tensor, slots: list[int]) -> Sampled:
        """The next token of each slot from logits [slots, vocab] float32, which are used up.

        Nothing is remembered: sampling again gives the same tokens until `append` adds one.
        """
        if not self._speaking.isdisjoint(slots):
            for row, slot in enumerate(slots):
                if slot in self._speaking:
                    self._states[slot].weigh(logits[row])
        return self.outcome(self._sample_rows(logits, self.table, slots), slots)

    def outcome(self, rows: SampledRows, slots: list[int]) -> Sampled:
        """Results of rows of slots that the backend has sampled."""
        outcomes = rows.outcomes.tolist()
        sampled = Sampled(dict(zip(slots, rows.token_ids.tolist(), strict=True)))
        if any(outcomes):
            for slot, outcome in zip(slots, outcomes, strict=True):
                if outcome != SampleOutcome.DRAWN:
                    del sampled.token_ids[slot]
                    sampled.errors[slot] = _ERRORS[SampleOutcome(outcome)]
        reporting = self._reporting.intersection(sampled.token_ids)
        if reporting:
            chosen = [row for row, slot in enumerate(slots) if slot in reporting]
            counts = [int(self._reported[slots[row]]) for row in chosen]
            for row, report in zip(chosen, rows.token_logprobs(chosen, counts), strict=True):
                sampled.logprobs[slots[row]] = report
        return sampled

    def may_run_ahead(self, slots: Iterable[int]) -> bool:
        """False if the next tokens of slots depend on more than how many they have said."""
        return self._changing.isdisjoint(slots)

    def advance(self, slots: Iterable[int]) -> None:
        """Counts a further token of each slot, which `remember` is told later."""
        self.table.advance(slots)

    def append(self, token_ids: Mapping[int, int]) -> None:
        """Remembers a token of each of some slots."""
        self.advance(token_ids)
        self.remember(token_ids)

    def remember(self, token_ids: Mapping[int, int]) -> None:
        """Remembers tokens of slots that have been counted."""
        for slot in self._changing.intersection(token_ids):
            state = self._states[slot]
            state.append(token_ids[slot])
            self._note(slot, state)

    def _note(self, slot: int, state: SamplingState) -> None:
        """Sorts a slot whose state has changed."""
        _sort(slot, self._changing, belongs=state.changes)
        _sort(slot, self._with_logits, belongs=state.needs_logits)


def _sort(row: int, rows: set[int], *, belongs: bool) -> None:
    if belongs:
        rows.add(row)
    else:
        rows.discard(row)
