# SPDX-License-Identifier: Apache-2.0
"""Tokens that may come next in a transcript: times come in pairs and go up (Radford et al. 2022, part 4.5)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pagoda.messages.audio import SpeechRules


def as_bits(chosen: Tensor) -> Tensor:
    """Tokens that are `chosen` [vocab] bool as `SamplingRules.allowed`: [ceil(vocab / 32)] int32."""
    bits = torch.zeros(-(-len(chosen) // 32), 32, dtype=torch.int64)
    bits.view(-1)[: len(chosen)] = chosen
    return (bits << torch.arange(32)).sum(1).to(torch.int32)


class SpeechState:
    """Place in a transcript, as far as it says what may follow."""

    def __init__(self, rules: SpeechRules, output: Sequence[int], vocab_size: int) -> None:
        """`output` are the tokens so far."""
        self._rules = rules
        self._ever = torch.ones(vocab_size, dtype=torch.bool)
        """[vocab], tokens that may be said at all."""
        self._ever[_within(rules.suppressed, vocab_size)] = False
        if rules.suppressed_from is not None:
            self._ever[rules.suppressed_from :] = False
        self._begins = True
        self._last: int | None = None
        self._before_last: int | None = None
        self._latest: int | None = None
        """The latest time."""
        for token_id in output:
            self.append(token_id)

    def append(self, token_id: int) -> None:
        """Takes a token that was said."""
        self._begins = False
        self._before_last, self._last = self._last, token_id
        if self._is_time(token_id):
            self._latest = token_id

    def allowed(self, logits: Tensor | None) -> Tensor:
        """Tokens that may come next: [vocab] bool.

        With its logits [vocab], it must be a time if all times together are likelier than any token of text.
        """
        chosen, rules = self._ever.clone(), self._rules
        if self._begins:
            chosen[_within(rules.begin_suppressed, len(chosen))] = False
        if rules.first_timestamp is None:
            return chosen
        first = rules.first_timestamp
        self._pair(chosen, first)
        if self._begins:
            chosen[:first] = False
            if rules.last_initial is not None:
                chosen[rules.last_initial + 1 :] = False
        if logits is not None and chosen[:first].any() and chosen[first:].any():
            possible = logits.masked_fill(~chosen, -torch.inf)
            if possible[first:].logsumexp(0) > possible[:first].max():
                chosen[:first] = False
        return chosen

    def _pair(self, chosen: Tensor, first: int) -> None:
        """Leaves out times that would be alone, or earlier than those before."""
        ends = self._is_time(self._last)
        opens = ends and (self._before_last is None or self._is_time(self._before_last))
        if opens:
            chosen[first:] = False
        elif ends:
            chosen[: self._rules.end] = False
        if self._latest is not None:
            # A segment may begin when the one before it ends, but takes some time itself.
            chosen[first : self._latest + (opens or not ends)] = False

    def _is_time(self, token_id: int | None) -> bool:
        first = self._rules.first_timestamp
        return token_id is not None and first is not None and token_id >= first


def _within(token_ids: Sequence[int], vocab_size: int) -> list[int]:
    """Tokens among these that a vocabulary has."""
    return [it for it in token_ids if it < vocab_size]
