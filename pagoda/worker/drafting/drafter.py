# SPDX-License-Identifier: Apache-2.0
"""A drafter in the worker: a small model that proposes greedily what may follow, behind each step.

It keeps K and V of its own layers in the blocks of the sequence, so prefix cache, preemption and tiers hold for
them too. Of what it computes nothing but proposals leaves it: KV of it that is missing or wrong costs time only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pagoda.backend.base import TokenBatch
from pagoda.model.decoder import Decoder
from pagoda.worker.input_batch import InputBatch, StepTokens

_MOST_BEHIND = 16
"""Tokens that a draft model is behind a slot at most: then it computes those of all slots in one pass."""


class SlotText(NamedTuple):
    """A slot behind a step, and as much as is known of its text."""

    slot: int
    place: int
    """Number of the slot in the step."""
    first: int
    """Position of the first token that the step computed."""
    end: int
    """Leading tokens that the model has computed, of drafts the right ones."""
    num_known: int
    """Leading tokens that are known: one more where the step sampled."""


@dataclass(frozen=True)
class DraftLimits:
    vocab_size: int
    """Tokens that may be proposed: no others are known to both models."""
    max_len: int
    """Tokens of the longest sequence."""
    max_tokens: int
    """Tokens of a pass at most."""
    begins_anew: bool = False
    """K and V of prompts may come from other hosts, which have none of the drafter: all are computed here."""


class _Part(NamedTuple):
    """Rows of a pass: tokens of one slot at these positions."""

    text: SlotText
    positions: range


class Drafter:
    """A draft model: a whole decoder of the same vocabulary."""

    def __init__(self, model: Decoder[Any, Any], batch: InputBatch, limits: DraftLimits) -> None:
        """`batch` has the token ids of slots; the model's layers use the blocks of its first KV group."""
        self.model = model
        self._batch = batch
        self._limits = limits
        self._computed: dict[int, int] = {}
        """Leading tokens of each slot that the model has computed."""
        self._fed: dict[int, list[int]] = {}
        """Drafts of each slot that were computed behind these."""

    def start(self, slot: int, num_computed_tokens: int) -> None:
        """A request begins, whose first tokens have K and V in its blocks."""
        self._computed[slot] = 0 if self._limits.begins_anew else num_computed_tokens

    def free(self, slot: int) -> None:
        self._computed.pop(slot, None)
        self._fed.pop(slot, None)

    def propose(
        self, tokens: StepTokens, texts: Sequence[SlotText], wanted: Mapping[int, int]
    ) -> dict[int, list[int]]:
        """Tokens that may follow what is known of slots behind a step, `texts`: at most `wanted[slot]` of each.

        Called behind every step: tokens of all slots are computed sooner or later.
        """
        tables = tokens.batch.block_tables[0]
        for text in texts:
            self._keep_right(text, is_wanted=text.slot in wanted)
        counts = {text.slot: self._count(text, tokens.room, wanted) for text in texts}
        parts = [_Part(text, self._open(text, tokens.room)) for text in texts]
        longest = max((len(part.positions) for part in parts), default=0)
        if longest < _MOST_BEHIND:
            parts = [part for part in parts if counts[part.text.slot]]
        drafts: dict[int, list[int]] = {}
        for piece in _pieces(parts, self._limits.max_tokens):
            ends = (it.text for it in piece if it.positions.stop == it.text.num_known)
            last = {text.slot for text in ends if counts[text.slot]}
            ids = [self._ids(part) for part in piece]
            drafts |= self._pass(piece, torch.cat(ids), tables, last)
            for part in piece:
                self._computed[part.text.slot] = part.positions.stop
        going = [text for text in texts if drafts.get(text.slot)]
        while going := [text for text in going if len(drafts[text.slot]) < counts[text.slot]]:
            parts = [
                _Part(it, range(place, place + 1))
                for it in going
                for place in (it.num_known + len(drafts[it.slot]) - 1,)
            ]
            last_ids = torch.tensor([drafts[it.slot][-1] for it in going])
            more = self._pass(parts, last_ids, tables, {it.slot for it in going})
            for it in going:
                self._fed.setdefault(it.slot, []).append(drafts[it.slot][-1])
            going = [it for it in going if more[it.slot]]
            for it in going:
                drafts[it.slot] += more[it.slot]
        return {slot: draft for slot, draft in drafts.items() if draft}

    def _keep_right(self, text: SlotText, *, is_wanted: bool) -> None:
        """Counts drafts that were computed as far as they are what was said."""
        slot = text.slot
        fed, begin = self._fed.pop(slot, []), self._computed.get(slot, 0)
        if fed:
            said = self._batch.known(slot, begin, min(begin + len(fed), text.num_known)).tolist()
            for draft, token in zip(fed, said, strict=False):
                if draft != token:
                    break
                begin += 1
        self._computed[slot] = min(begin, text.num_known - is_wanted)

    def _open(self, text: SlotText, room: Sequence[int]) -> range:
        """Positions of known tokens that are not computed yet."""
        end = min(text.num_known, room[text.place], self._limits.max_len)
        return range(self._computed[text.slot], max(end, self._computed[text.slot]))

    def _count(self, text: SlotText, room: Sequence[int], wanted: Mapping[int, int]) -> int:
        """Drafts that are sought of a slot: all but the last one are computed, and need a place."""
        places = min(room[text.place], self._limits.max_len)
        return max(0, min(wanted.get(text.slot, 0), places - text.num_known + 1))

    def _ids(self, part: _Part) -> Tensor:
        """The tokens [n] int64 of a part; the draft model does not have those behind its vocabulary."""
        known = self._batch.known(part.text.slot, part.positions.start, part.positions.stop)
        return known.long().clamp(max=self.model.vocab_size - 1)

    def _pass(
        self, parts: Sequence[_Part], ids: Tensor, tables: Tensor, sought: set[int]
    ) -> dict[int, list[int]]:
        """The likeliest token, if it may be proposed, behind the last row of each slot that is `sought`."""
        if not parts:
            return {}
        lens = torch.tensor([len(part.positions) for part in parts])
        rows = dict(
            zip((part.text.slot for part in parts), (lens.cumsum(0) - 1).tolist(), strict=True)
        )
        rows = {slot: row for slot, row in rows.items() if slot in sought}
        batch = TokenBatch(
            token_ids=ids,
            positions=torch.cat([_positions(part.positions) for part in parts]),
            sequence_ids=torch.arange(len(parts)).repeat_interleave(lens),
            query_lens=lens,
            context_lens=torch.tensor([part.positions.stop for part in parts]),
            block_tables=(tables[[part.text.place for part in parts]],),
        )
        hidden = self.model.forward(self.model.plan(batch), None, list(rows.values()))
        if not rows:
            return {}
        found = self.model.argmax(hidden).tolist()
        return {
            slot: [token] if is_finite and token < self._limits.vocab_size else []
            for slot, (token, _, is_finite) in zip(rows, found, strict=True)
        }


def _positions(positions: range) -> Tensor:
    return torch.arange(positions.start, positions.stop)


def _pieces(parts: Sequence[_Part], most: int) -> Iterator[list[_Part]]:
    """Passes of at most so many rows each that compute all parts, and every slot in its order."""
    piece, room = list[_Part](), most
    for text, positions in parts:
        while positions:
            count = min(room, len(positions))
            piece.append(_Part(text, positions[:count]))
            positions, room = positions[count:], room - count
            if not room:
                yield piece
                piece, room = [], most
    if piece:
        yield piece
