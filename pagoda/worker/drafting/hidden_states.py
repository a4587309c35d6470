# SPDX-License-Identifier: Apache-2.0
"""Hidden states of a model that a head has not computed yet, by slot."""

from __future__ import annotations

import torch
from torch import Tensor


class HiddenStates:
    """The hidden state in front of each token of a slot, from some token on; zeros stand for those that are lost.

    Those of tokens whose K and V came from elsewhere were never there.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._held: dict[int, tuple[int, list[Tensor]]] = {}
        """First token of each slot, and states [n, hidden] from there on."""

    def add(self, slot: int, first: int, states: Tensor) -> None:
        """Adds those in front of the tokens from `first` on; [n, hidden]."""
        begin, held = self._held.get(slot, (first, []))
        if begin + sum(map(len, held)) != first:
            begin, held = first, []
        self._held[slot] = begin, [*held, states]

    def of(self, slot: int, tokens: range) -> Tensor:
        """States [n, hidden] in front of these tokens."""
        begin, held = self._held.get(slot, (tokens.stop, []))
        end = begin + sum(map(len, held))
        wanted = range(min(max(tokens.start, begin), tokens.stop), min(tokens.stop, end))
        known = torch.cat(held)[wanted.start - begin : wanted.stop - begin] if wanted else None
        if known is not None and len(known) == len(tokens):
            return known
        found = torch.zeros(len(tokens), self._size)
        if known is not None:
            found[wanted.start - tokens.start : wanted.stop - tokens.start] = known.cpu()
        return found

    def drop(self, slot: int, end: int | None = None) -> None:
        """Forgets those in front of tokens before `end`, by default all."""
        begin, held = self._held.pop(slot, (0, []))
        if end is not None and held and end < begin + sum(map(len, held)):
            rest = torch.cat(held)[max(0, end - begin) :]
            self._held[slot] = max(begin, end), [rest]
