"""State of sampling of a request: its rules, and the tokens that penalties are for.

The state lives as long as the request's slot and grows by one token a step; nothing is rebuilt from the context.
"""

from __future__ import annotations

from array import array

import torch
from torch import Tensor

from pagoda.backend.sampling import SamplingRow, SamplingRules
from pagoda.messages.worker import SlotStart


class SamplingState:
    def __init__(self, start: SlotStart, vocab_size: int) -> None:
        sampling = start.sampling
        self._num_words = -(-vocab_size // 32)
        output = start.token_ids[start.num_prompt_tokens :]
        bias = sampling.logit_bias or {}
        self._rules = SamplingRules(
            sampling=sampling,
            allowed=_mask(sampling.allowed_token_ids, vocab_size),
            stops=array("q", sorted({*start.eos_token_ids, *sampling.stop_token_ids})),
            bias_ids=array("q", bias),
            biases=array("f", bias.values()),
        )
        self._always_needs_logits = (
            not sampling.greedy
            or sampling.logprobs is not None
            or self._rules.allowed is not None
            or len(bias) > 0
        )
        self._mask: Tensor | None = None
        """Tokens that the grammar allows at the next position; None without one."""
        self._num_output_tokens = len(output)
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

    def needs_logits(self) -> bool:
        """False if the next token is the likeliest one, whatever was said, and nothing is reported of it."""
        return (
            self._always_needs_logits
            or self._mask is not None
            or len(self._seen) > 0
            or self._holds_back_stops()
        )

    def row(self) -> SamplingRow:
        """The state as it is now, which `append` changes."""
        return SamplingRow(
            rules=self._rules,
            position=self._num_output_tokens,
            allowed=self._rules.allowed if self._mask is None else self._mask,
            holds_back_stops=self._mask is None and self._holds_back_stops(),
            seen=self._seen,
            counts=self._counts,
        )

    def take_mask(self, mask: bytes) -> None:
        """Takes the mask of the next token, which also says what `min_tokens` does.
        Raises ValueError: it is of another vocabulary."""
        bits = torch.frombuffer(bytearray(mask), dtype=torch.int32)
        if len(bits) != self._num_words:
            raise ValueError(
                f"A mask of tokens has {len(bits)} words instead of {self._num_words}."
            )
        allowed = self._rules.allowed
        self._mask = bits if allowed is None else bits & allowed

    def append(self, token_id: int) -> None:
        self._mask = None
        self._num_output_tokens += 1
        if self._penalises:
            place = self._see(token_id)
            if self._counts_output:
                self._counts[place] += 1

    def _see(self, token_id: int) -> int:
        place = self._places.setdefault(token_id, len(self._seen))
        if place == len(self._seen):
            self._seen.append(token_id)
            self._counts.append(0)
        return place

    def _holds_back_stops(self) -> bool:
        held_back = self._num_output_tokens < self._rules.sampling.min_tokens
        return held_back and len(self._rules.stops) > 0


def _mask(allowed: tuple[int, ...] | None, vocab_size: int) -> Tensor | None:
    """The bits of tokens that may be sampled, as `SamplingRules.allowed`."""
    if allowed is None:
        return None
    bits = torch.zeros(-(-vocab_size // 32), 32, dtype=torch.int64)
    bits.view(-1)[torch.tensor(allowed)] = 1
    return (bits << torch.arange(32)).sum(1).to(torch.int32)
