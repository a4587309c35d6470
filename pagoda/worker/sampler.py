"""Sampling: logits become tokens.

The sampler keeps what the requests of all slots have said so far; the backend chooses the tokens. A row's token
depends on its own logits, parameters, seed and position only, in every bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from pagoda.backend.sampling import Outcome, SampledRow, SamplingRow
from pagoda.messages.frontend import TokenLogprobs
from pagoda.messages.worker import SlotStart
from pagoda.worker.prompt_outputs import PromptOutputs
from pagoda.worker.sampling_state import SamplingState

NOT_FINITE = "the model produced NaN or infinite logits"
OVERFLOWN = "the penalties drove the logits to infinity; repetition_penalty must be closer to 1"
NOTHING_ALLOWED = (
    "the sampling parameters leave no token to choose from; "
    "allowed_token_ids must name a token that min_tokens does not hold back"
)
_ERRORS = {
    Outcome.NOT_FINITE: NOT_FINITE,
    Outcome.OVERFLOWN: OVERFLOWN,
    Outcome.NOTHING_ALLOWED: NOTHING_ALLOWED,
}

SampleRows = Callable[[Tensor, Sequence[SamplingRow]], list[SampledRow]]
"""`Backend.sample`."""


@dataclass(frozen=True)
class Sampled:
    """Tokens by slot; a slot is either in `token_ids` or in `errors`."""

    token_ids: dict[int, int] = field(default_factory=dict)
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    errors: dict[int, str] = field(default_factory=dict)
    prompts: PromptOutputs = field(default_factory=PromptOutputs)


def merged(parts: Iterable[Sampled]) -> Sampled:
    """The results of different slots together."""
    whole = Sampled()
    for part in parts:
        whole.token_ids.update(part.token_ids)
        whole.logprobs.update(part.logprobs)
        whole.errors.update(part.errors)
        whole.prompts.update(part.prompts)
    return whole


def argmax_tokens(slots: Iterable[int], found: Tensor) -> Sampled:
    """Result of argmax sampling from `found` [slots, 3] int64, as `Decoder.argmax` gives it."""
    sampled = Sampled()
    for slot, (token, _, is_finite) in zip(slots, found.tolist(), strict=True):
        if is_finite:
            sampled.token_ids[slot] = token
        else:
            sampled.errors[slot] = NOT_FINITE
    return sampled


class Sampler:
    """State of sampling of all slots."""

    def __init__(self, vocab_size: int, sample_rows: SampleRows) -> None:
        self._vocab_size = vocab_size
        self._sample_rows = sample_rows
        self._states: dict[int, SamplingState] = {}

    def start(self, start: SlotStart) -> None:
        self._states[start.slot] = SamplingState(start, self._vocab_size)

    def free(self, slot: int) -> None:
        """Forgets a slot, even one whose start failed."""
        self._states.pop(slot, None)

    def take_masks(self, masks: dict[int, bytes]) -> None:
        """Takes the masks of slots for their next tokens; `append` forgets them."""
        for slot, mask in masks.items():
            if slot in self._states:
                self._states[slot].take_mask(mask)

    def needs_logits(self, slot: int) -> bool:
        """False if the slot's next step needs the likeliest token only."""
        return self._states[slot].needs_logits()

    def sample(self, logits: Tensor, slots: list[int]) -> Sampled:
        """The next token of each slot from logits [slots, vocab] float32, which are used up.

        Nothing is remembered: sampling again gives the same tokens until `append` adds one.
        """
        rows = self._sample_rows(logits, [self._states[slot].row() for slot in slots])
        sampled = Sampled()
        for slot, row in zip(slots, rows, strict=True):
            if row.outcome is not Outcome.DRAWN:
                sampled.errors[slot] = _ERRORS[row.outcome]
                continue
            sampled.token_ids[slot] = row.token_id
            if row.logprobs is not None:
                sampled.logprobs[slot] = row.logprobs
        return sampled

    def append(self, slot: int, token_id: int) -> None:
        self._states[slot].append(token_id)
