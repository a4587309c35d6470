# SPDX-License-Identifier: Apache-2.0
"""State of sampling of a request: what the tokens that it says change in its slot of the sampling table.

The state lives as long as the request's slot and grows by one token a step; nothing is rebuilt from the context.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import torch
from torch import Tensor

from pagoda.backend.sampling import SamplingRow, SamplingRules
from pagoda.backend.sampling_table import SamplingTable
from pagoda.messages.worker import SlotStart
from pagoda.worker.speech import SpeechState, as_bits

_LEAST_LOGIT = -1e30
"""Logit of tokens that rules leave out: it is finite behind any temperature."""


class SamplingState:
    def __init__(self, start: SlotStart, table: SamplingTable) -> None:
        sampling = start.work.sampling
        self._slot, self._table = start.slot, table
        output = start.token_ids[start.num_prompt_tokens :]
        bias = sampling.logit_bias or {}
        self._rules = SamplingRules(
            sampling=sampling,
            allowed=_mask(sampling.allowed_token_ids, start.work.never, table.vocab_size),
            stops=array("q", sorted({*start.work.eos_token_ids, *sampling.stop_token_ids})),
            bias_ids=array("q", bias),
            biases=array("f", bias.values()),
        )
        self._always_needs_logits = (
            not sampling.greedy
            or sampling.logprobs is not None
            or self._rules.allowed is not None
            or len(bias) > 0
            or start.work.speech is not None
        )
        speech = start.work.speech
        self._speech = None if speech is None else SpeechState(speech, output, table.vocab_size)
        self._is_masked = False
        """True if a grammar says what the next token may be."""
        self._counts_output = bool(sampling.presence_penalty or sampling.frequency_penalty)
        repeats = sampling.repetition_penalty != 1
        self._penalises = repeats or self._counts_output
        self._places: dict[int, int] = {}
        """Places of tokens in `_seen`."""
        self._seen, self._counts = array("q"), array("f")
        if repeats:
            for token_id in dict.fromkeys(start.token_ids):
                self._see(token_id)
        if self._counts_output:
            for token_id in output:
                self._counts[self._see(token_id)] += 1
        self._holds_back_stops = self._must_go_on(len(output))
        table.put(start.slot, self._row(len(output), self._seen, self._counts))
        self._allow_speech(None)

    @property
    def is_speech(self) -> bool:
        """True if the answer is a transcript, whose next token depends on all logits."""
        return self._speech is not None

    def weigh(self, logits: Tensor) -> None:
        """Lets the next token of a transcript be a time, if the logits [vocab] say that it is one.

        Logits of tokens that may not come next are lowered: log-probabilities are those among the others."""
        chosen = self._allow_speech(logits)
        if chosen is not None:
            logits.masked_fill_(~chosen.to(logits.device), _LEAST_LOGIT)

    def _allow_speech(self, logits: Tensor | None) -> Tensor | None:
        """Tokens [vocab] bool that may come next in a transcript; None of an answer that is none."""
        if self._speech is None:
            return None
        chosen = self._speech.allowed(logits)
        allowed, own = as_bits(chosen), self._rules.allowed
        self._table.allow(self._slot, allowed if own is None else allowed & own)
        return chosen

    def _row(self, position: int, seen: array[int], counts: array[float]) -> SamplingRow:
        return SamplingRow(
            rules=self._rules,
            position=position,
            allowed=self._rules.allowed,
            holds_back_stops=self._must_go_on(position),
            seen=seen,
            counts=counts,
        )

    def behind(self, token_ids: Sequence[int]) -> SamplingRow:
        """The row of the token that is sampled once these have been said too, without a mask."""
        seen, counts = self._seen, self._counts
        if self._penalises:
            seen, counts, added = seen[:], counts[:], dict[int, int]()
            for token_id in token_ids:
                place = self._places.get(token_id, added.get(token_id, len(seen)))
                if place == len(seen):
                    added[token_id] = place
                    seen.append(token_id)
                    counts.append(0)
                counts[place] += self._counts_output
        return self._row(self._table.position(self._slot) + len(token_ids), seen, counts)

    def row_needs_logits(self, row: SamplingRow) -> bool:
        """`needs_logits` for a row of `behind`."""
        return self._always_needs_logits or len(row.seen) > 0 or row.holds_back_stops

    @property
    def changes(self) -> bool:
        """False if a further token changes nothing but the position, so that it need not be appended."""
        return self._penalises or self._holds_back_stops or self._is_masked or self.is_speech

    @property
    def needs_logits(self) -> bool:
        """False if the next token is the likeliest one, whatever was said, and nothing is reported of it."""
        return (
            self._always_needs_logits
            or self._is_masked
            or len(self._seen) > 0
            or self._holds_back_stops
        )

    def take_mask(self, mask: bytes) -> None:
        """Takes the mask of the next token, which also says what `min_tokens` does.
        Raises ValueError: it is of another vocabulary."""
        self.mask_row(self._slot, mask)
        self._is_masked = True

    def mask_row(self, row: int, mask: bytes) -> None:
        """The same for a row of the table."""
        self._table.allow_bytes(row, mask, self._rules.allowed)
        self._table.hold_back_stops(row, held=False)

    def append(self, token_id: int) -> None:
        """Takes a token that was said, once the table counts it."""
        table, slot = self._table, self._slot
        if self._is_masked or self._holds_back_stops:
            if self._is_masked:
                table.allow(slot, self._rules.allowed)
            self._is_masked = False
            self._holds_back_stops = self._must_go_on(table.position(slot))
            table.hold_back_stops(slot, held=self._holds_back_stops)
        if self._penalises:
            place = self._see(token_id)
            if self._counts_output:
                self._counts[place] += 1
            table.seen_more(slot)
        if self._speech is not None:
            self._speech.append(token_id)
            self._allow_speech(None)

    def _see(self, token_id: int) -> int:
        place = self._places.setdefault(token_id, len(self._seen))
        if place == len(self._seen):
            self._seen.append(token_id)
            self._counts.append(0)
        return place

    def _must_go_on(self, num_output_tokens: int) -> bool:
        """True if the answer may not end with the next token."""
        held_back = num_output_tokens < self._rules.sampling.min_tokens
        return held_back and len(self._rules.stops) > 0


def _mask(
    allowed: tuple[int, ...] | None, never: tuple[int, ...], vocab_size: int
) -> Tensor | None:
    """The bits of tokens that may be sampled, as `SamplingRules.allowed`."""
    if allowed is None and not never:
        return None
    chosen = torch.full([vocab_size], allowed is None)
    if allowed is not None:
        chosen[torch.tensor(allowed)] = True
    chosen[torch.tensor(never, dtype=torch.int64)] = False
    return as_bits(chosen)
