"""Changes of a request's logits by its sampling parameters, before temperature.

The state lives as long as the request's slot and grows by one token a step; nothing is rebuilt from the context.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pagoda.messages.worker import SlotStart


class LogitsProcessor:
    """The rules of one request, in the order in which vLLM applies them."""

    def __init__(self, start: SlotStart, vocab_size: int) -> None:
        sampling = start.sampling
        output = start.token_ids[start.num_prompt_tokens :]
        self._sampling = sampling
        self._num_output_tokens = len(output)
        self._forbidden = _all_but(sampling.allowed_token_ids, vocab_size)
        self._stops = torch.tensor(
            sorted({*start.eos_token_ids, *sampling.stop_token_ids}), dtype=torch.int64
        )
        bias = sampling.logit_bias or {}
        self._bias_ids = torch.tensor(list(bias), dtype=torch.int64)
        self._bias_values = torch.tensor(list(bias.values()), dtype=torch.float32)
        self._seen: Tensor | None = None
        """[vocab] bool, whether a token is in prompt or output."""
        if sampling.repetition_penalty != 1:
            self._seen = torch.zeros(vocab_size, dtype=torch.bool)
            self._seen[torch.tensor(start.token_ids, dtype=torch.int64)] = True
        self._counts: Tensor | None = None
        """[vocab] float32, how often a token is in the output."""
        if sampling.presence_penalty or sampling.frequency_penalty:
            ids = torch.tensor(output, dtype=torch.int64)
            self._counts = torch.bincount(ids, minlength=vocab_size).float()

    @property
    def num_output_tokens(self) -> int:
        return self._num_output_tokens

    def change_logits(self) -> bool:
        """True if `apply` would change logits at this position."""
        return (
            self.forbid_tokens()
            or len(self._bias_ids) > 0
            or self._seen is not None
            or self._counts is not None
        )

    def forbid_tokens(self) -> bool:
        """True if `apply` would take tokens out altogether at this position."""
        return self._forbidden is not None or self._holds_back_stops()

    def apply(self, logits: Tensor) -> None:
        """Changes logits [vocab] in place."""
        if self._forbidden is not None:
            logits.masked_fill_(self._forbidden, -torch.inf)
        if self._holds_back_stops():
            logits[self._stops] = -torch.inf
        if len(self._bias_ids) > 0:
            logits[self._bias_ids] += self._bias_values
        if self._seen is not None:
            penalty = self._sampling.repetition_penalty
            penalised = torch.where(logits > 0, logits / penalty, logits * penalty)
            logits.copy_(torch.where(self._seen, penalised, logits))
        if self._counts is not None:
            logits.sub_(self._counts * self._sampling.frequency_penalty)
            logits.sub_((self._counts > 0) * self._sampling.presence_penalty)

    def append(self, token_id: int) -> None:
        self._num_output_tokens += 1
        if self._seen is not None:
            self._seen[token_id] = True
        if self._counts is not None:
            self._counts[token_id] += 1

    def _holds_back_stops(self) -> bool:
        return self._num_output_tokens < self._sampling.min_tokens and len(self._stops) > 0


def _all_but(allowed: tuple[int, ...] | None, vocab_size: int) -> Tensor | None:
    if allowed is None:
        return None
    forbidden = torch.ones(vocab_size, dtype=torch.bool)
    forbidden[torch.tensor(allowed, dtype=torch.int64)] = False
    return forbidden
