"""Sampling: logits become tokens.

A row's token depends on its own logits, parameters, seed and position only, in every bit: what is done for
several rows at once works on each row by itself, and what might not is done row by row.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from pagoda.messages.frontend import TokenLogprobs
from pagoda.messages.sampling_params import SamplingParams
from pagoda.messages.worker import SlotStart
from pagoda.worker.draw import draw, uniform
from pagoda.worker.logits_processor import LogitsProcessor

NOT_FINITE = "the model produced NaN or infinite logits"
OVERFLOWN = "the penalties drove the logits to infinity; repetition_penalty must be closer to 1"
NOTHING_ALLOWED = (
    "the sampling parameters leave no token to choose from; "
    "allowed_token_ids must name a token that min_tokens does not hold back"
)


@dataclass(frozen=True)
class Sampled:
    """Tokens by slot; a slot is either in `token_ids` or in `errors`."""

    token_ids: dict[int, int] = field(default_factory=dict)
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    errors: dict[int, str] = field(default_factory=dict)


def merged(parts: Iterable[Sampled]) -> Sampled:
    """The results of different slots together."""
    whole = Sampled()
    for part in parts:
        whole.token_ids.update(part.token_ids)
        whole.logprobs.update(part.logprobs)
        whole.errors.update(part.errors)
    return whole


def argmax_tokens(slots: list[int], tokens: Tensor, finite: Tensor) -> Sampled:
    """Result of argmax sampling: the tokens [slots], or errors where `finite` [slots] is false."""
    sampled = Sampled()
    for slot, token, ok in zip(slots, tokens.tolist(), finite.tolist(), strict=True):
        if ok:
            sampled.token_ids[slot] = token
        else:
            sampled.errors[slot] = NOT_FINITE
    return sampled


class Sampler:
    """Sampling parameters and logits processors of all slots."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._params: dict[int, SamplingParams] = {}
        self._rules: dict[int, LogitsProcessor] = {}

    def start(self, start: SlotStart) -> None:
        self._params[start.slot] = start.sampling
        self._rules[start.slot] = LogitsProcessor(start, self._vocab_size)

    def free(self, slot: int) -> None:
        """Forgets a slot, even one whose start failed."""
        self._params.pop(slot, None)
        self._rules.pop(slot, None)

    def needs_logits(self, slot: int) -> bool:
        """False if the slot's next step needs the likeliest token only."""
        params = self._params[slot]
        return not params.greedy or params.logprobs is not None or self._rules[slot].change_logits()

    def sample(self, logits: Tensor, slots: list[int]) -> Sampled:
        """The next token of each slot from logits [slots, vocab] float32, which are used up.

        Nothing is remembered: sampling again gives the same tokens until `append` adds one.
        """
        low, high = torch.aminmax(logits, dim=1)
        finite = (low.isfinite() & high.isfinite()).tolist()
        errors = {slot: NOT_FINITE for slot, ok in zip(slots, finite, strict=True) if not ok}
        reported = {
            slot: torch.log_softmax(logits[row], dim=0)
            for row, slot in enumerate(slots)
            if finite[row] and self._params[slot].logprobs is not None
        }
        errors |= self._apply_rules(logits, slots, finite)
        token_ids = self._choose(
            logits, {slot: row for row, slot in enumerate(slots) if slot not in errors}
        )
        logprobs = {
            slot: _token_logprobs(values, token_ids[slot], self._params[slot].logprobs or 0)
            for slot, values in reported.items()
            if slot in token_ids
        }
        return Sampled(token_ids, logprobs, errors)

    def append(self, slot: int, token_id: int) -> None:
        self._rules[slot].append(token_id)

    def _apply_rules(self, logits: Tensor, slots: list[int], finite: list[bool]) -> dict[int, str]:
        errors = {}
        for row, slot in enumerate(slots):
            rules = self._rules[slot]
            if finite[row] and rules.change_logits():
                rules.apply(logits[row])
                highest = float(logits[row].max())
                if highest == -math.inf and rules.forbid_tokens():
                    errors[slot] = NOTHING_ALLOWED
                elif not math.isfinite(highest):
                    errors[slot] = OVERFLOWN
        return errors

    def _choose(self, logits: Tensor, rows: dict[int, int]) -> dict[int, int]:
        """The token of each slot; `rows` maps slots to rows of logits."""
        likeliest = logits.argmax(dim=1).tolist()
        chosen: dict[int, int] = {slot: likeliest[row] for slot, row in rows.items()}
        random_slots = [slot for slot in rows if not self._params[slot].greedy]
        if random_slots:
            params = [self._params[slot] for slot in random_slots]
            uniforms = [
                uniform(own.seed or 0, self._rules[slot].num_output_tokens)
                for slot, own in zip(random_slots, params, strict=True)
            ]
            drawn = draw(logits[[rows[slot] for slot in random_slots]], params, uniforms)
            chosen |= zip(random_slots, drawn, strict=True)
        return chosen


def _token_logprobs(logprobs: Tensor, token_id: int, num_top: int) -> TokenLogprobs:
    """Report on the chosen token and the `num_top` likeliest ones, from log-probabilities [vocab]."""
    own = logprobs[token_id]
    top = torch.topk(logprobs, min(num_top, logprobs.shape[0]))
    rank = int((logprobs > own).sum()) + 1
    return TokenLogprobs(float(own), rank, top.indices.tolist(), top.values.tolist())
