"""From logits to tokens.

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
from pagoda.worker.logits_processor import LogitsProcessor
from pagoda.worker.philox import uniform

NOT_FINITE = "the model produced NaN or infinite logits"
OVERFLOWN = "the penalties drove the logits to infinity; repetition_penalty must be closer to 1"
NOTHING_ALLOWED = (
    "the sampling parameters leave no token to choose from; "
    "allowed_token_ids must name a token that min_tokens does not hold back"
)


@dataclass(frozen=True)
class Sampled:
    """What each slot drew; a slot is either in `token_ids` or in `errors`."""

    token_ids: dict[int, int] = field(default_factory=dict)
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    errors: dict[int, str] = field(default_factory=dict)


def joined(parts: Iterable[Sampled]) -> Sampled:
    """What different slots drew, together."""
    whole = Sampled()
    for part in parts:
        whole.token_ids.update(part.token_ids)
        whole.logprobs.update(part.logprobs)
        whole.errors.update(part.errors)
    return whole


def take_likeliest(slots: list[int], tokens: Tensor, sound: Tensor) -> Sampled:
    """For each slot its token of [slots], or an error where its logits were not `sound`."""
    sampled = Sampled()
    for slot, token, ok in zip(slots, tokens.tolist(), sound.tolist(), strict=True):
        if ok:
            sampled.token_ids[slot] = token
        else:
            sampled.errors[slot] = NOT_FINITE
    return sampled


class Sampler:
    """Keeps what each slot's sampling needs to know."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._params: dict[int, SamplingParams] = {}
        self._rules: dict[int, LogitsProcessor] = {}

    def start(self, start: SlotStart) -> None:
        self._params[start.slot] = start.sampling
        self._rules[start.slot] = LogitsProcessor(start, self._vocab_size)

    def free(self, slot: int) -> None:
        """Also of a slot whose start failed."""
        self._params.pop(slot, None)
        self._rules.pop(slot, None)

    def needs_logits(self, slot: int) -> bool:
        """Whether the likeliest token is not all that the slot's next step asks for."""
        params = self._params[slot]
        return not params.greedy or params.logprobs is not None or self._rules[slot].change_logits()

    def sample(self, logits: Tensor, slots: list[int]) -> Sampled:
        """The next token of each slot from logits [slots, vocab] float32, which are used up.

        Nothing is remembered: sampling again gives the same tokens until `append` says what was drawn.
        """
        low, high = torch.aminmax(logits, dim=1)
        sound = (low.isfinite() & high.isfinite()).tolist()
        errors = {slot: NOT_FINITE for slot, ok in zip(slots, sound, strict=True) if not ok}
        reported = {
            slot: torch.log_softmax(logits[row], dim=0)
            for row, slot in enumerate(slots)
            if sound[row] and self._params[slot].logprobs is not None
        }
        errors |= self._apply_rules(logits, slots, sound)
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
        """The slot's answer has grown by this token."""
        self._rules[slot].append(token_id)

    def _apply_rules(self, logits: Tensor, slots: list[int], sound: list[bool]) -> dict[int, str]:
        errors = {}
        for row, slot in enumerate(slots):
            rules = self._rules[slot]
            if sound[row] and rules.change_logits():
                rules.apply(logits[row])
                highest = float(logits[row].max())
                if highest == -math.inf and rules.forbid_tokens():
                    errors[slot] = NOTHING_ALLOWED
                elif not math.isfinite(highest):
                    errors[slot] = OVERFLOWN
        return errors

    def _choose(self, logits: Tensor, rows: dict[int, int]) -> dict[int, int]:
        """The token of each slot in `rows`, which says where its logits are."""
        likeliest = logits.argmax(dim=1).tolist()
        chosen: dict[int, int] = {slot: likeliest[row] for slot, row in rows.items()}
        random_slots = [slot for slot in rows if not self._params[slot].greedy]
        if random_slots:
            drawn = self._draw(logits[[rows[slot] for slot in random_slots]], random_slots)
            chosen |= zip(random_slots, drawn, strict=True)
        return chosen

    def _draw(self, logits: Tensor, slots: list[int]) -> list[int]:
        """Inverts the distribution function, in the order of the vocabulary, at each slot's random number."""
        params = [self._params[slot] for slot in slots]
        # With the highest at zero, no quotient can overflow, however low the temperature.
        logits = logits - logits.amax(dim=1, keepdim=True)
        logits /= torch.tensor([[p.temperature] for p in params], dtype=torch.float32)
        for row, one in enumerate(params):
            _truncate(logits[row], one)
        cumulative = torch.softmax(logits, dim=1).double().cumsum(dim=1)
        total = cumulative[:, -1:]
        numbers = [
            [uniform(p.seed or 0, self._rules[slot].num_output_tokens)]
            for slot, p in zip(slots, params, strict=True)
        ]
        target = torch.tensor(numbers, dtype=torch.float64) * total
        # Below the total even when the product is rounded up, so that there is always a token above it.
        target = torch.minimum(target, torch.nextafter(total, torch.zeros_like(total)))
        found: list[int] = torch.searchsorted(cumulative, target, right=True).flatten().tolist()
        return found


def _truncate(logits: Tensor, params: SamplingParams) -> None:
    """Takes unlikely tokens out of logits [vocab], in place: min-p, then top-k, then top-p, as in vLLM."""
    if params.min_p > 0:
        logits.masked_fill_(logits < logits.max() + math.log(params.min_p), -torch.inf)
    if 0 < params.top_k < logits.shape[0]:
        smallest = torch.topk(logits, params.top_k).values[-1]
        logits.masked_fill_(logits < smallest, -torch.inf)
    if params.top_p < 1:
        _keep_nucleus(logits, params.top_p)


def _keep_nucleus(logits: Tensor, top_p: float) -> None:
    """Keeps the most likely tokens until they add up to `top_p`; of equal ones the lower id comes first."""
    probabilities = torch.softmax(logits, dim=0)
    # Tokens below this add up to less than 1 - top_p, so none of them is needed; the others are few to sort.
    enough = min((1 - top_p) / logits.shape[0], float(probabilities.max()))
    candidates = (probabilities >= enough).nonzero().flatten()
    ordered, order = probabilities[candidates].sort(descending=True, stable=True)
    before = ordered.double().cumsum(dim=0) - ordered
    kept = candidates[order[before < top_p]]
    values = logits[kept]
    logits.fill_(-torch.inf)
    logits[kept] = values


def _token_logprobs(logprobs: Tensor, token_id: int, num_top: int) -> TokenLogprobs:
    """Of the chosen token and the most likely ones, from log-probabilities [vocab]."""
    own = logprobs[token_id]
    top = torch.topk(logprobs, min(num_top, logprobs.shape[0]))
    rank = int((logprobs > own).sum()) + 1
    return TokenLogprobs(float(own), rank, top.indices.tolist(), top.values.tolist())
