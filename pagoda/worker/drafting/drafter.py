# SPDX-License-Identifier: Apache-2.0
"""A drafter in the worker: a small model, or a head of the model, that proposes greedily what may follow a step.

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
from pagoda.model.decoder import LAST_HIDDEN, Decoder, layer_input
from pagoda.worker.drafting.hidden_states import HiddenStates
from pagoda.worker.input_batch import InputBatch, StepTokens

MOST_BEHIND = 16
"""Tokens that a drafter is behind a slot at most: then it computes those of all slots in one pass."""


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


class _Found(NamedTuple):
    drafts: dict[int, list[int]]
    """The likeliest token behind each slot, if it may be proposed."""
    passed: dict[int, Tensor]
    """The hidden state [1, hidden] that a head goes on from."""


class Drafter:
    """A draft model, a whole decoder of the same vocabulary, or a head (`pagoda.checkpoints.draft_heads`).

    A head computes a token with the model's hidden state in front of it, at the place of that one. From there it
    drafts with its own hidden states, and computes these tokens anew with the model's once they are said.
    """

    def __init__(self, model: Decoder[Any, Any], batch: InputBatch, limits: DraftLimits) -> None:
        """`batch` has the token ids of slots; the model's layers use the blocks of its first KV group."""
        self.model = model
        self._batch = batch
        self._limits = limits
        self._computed: dict[int, int] = {}
        """Leading tokens of each slot that the model has computed."""
        self._fed: dict[int, list[int]] = {}
        """Drafts of each slot that were computed behind these."""
        head = model.draft_head
        self._states = None if head is None else HiddenStates(model.hidden_size)
        self._shift = 0 if head is None else 1
        """Places that a token's K and V lie in front of its own."""
        self.needs: Sequence[str] = ()
        """Results of the model, of all rows of a step, that `states` takes."""
        if head is not None:
            self.needs = [*map(layer_input, head.fused_layers)] or [LAST_HIDDEN]

    def start(self, slot: int, num_computed_tokens: int) -> None:
        """A request begins, whose first tokens have K and V in its blocks."""
        computed = 0 if self._limits.begins_anew else num_computed_tokens
        self._computed[slot] = computed + self._shift

    def free(self, slot: int) -> None:
        self._computed.pop(slot, None)
        self._fed.pop(slot, None)
        if self._states is not None:
            self._states.drop(slot)

    def states(self, needed: Sequence[Tensor]) -> Tensor:
        """Hidden states [n, hidden] for a head, of the results of the model that it needs."""
        head = self.model.draft_head
        return self.model.fuse(needed) if head is not None and head.fused else needed[0]

    def propose(
        self,
        tokens: StepTokens,
        texts: Sequence[SlotText],
        wanted: Mapping[int, int],
        states: Mapping[int, Tensor],
    ) -> dict[int, list[int]]:
        """Tokens that may follow what is known of slots behind a step, `texts`: at most `wanted[slot]` of each.

        Called behind every step: tokens of all slots are computed sooner or later. `states` [n, hidden] are those
        of the step's tokens, for a head.
        """
        tables = tokens.batch.block_tables[0]
        wanted = {
            it.slot: wanted[it.slot] for it in texts if it.slot in wanted and it.num_known > it.end
        }
        if self._states is not None:
            texts = [self._with_states(text, self._states, states) for text in texts]
        for text in texts:
            self._keep_right(text, is_wanted=text.slot in wanted)
        counts = {text.slot: self._count(text, tokens.room, wanted) for text in texts}
        parts = [_Part(text, self._open(text, tokens.room)) for text in texts]
        longest = max((len(part.positions) for part in parts), default=0)
        if longest < MOST_BEHIND:
            parts = [part for part in parts if counts[part.text.slot]]
        drafts: dict[int, list[int]] = {}
        passed: dict[int, Tensor] = {}
        for piece in _pieces(parts, self._limits.max_tokens):
            ends = (it.text for it in piece if it.positions.stop == it.text.num_known)
            last = {text.slot for text in ends if counts[text.slot]}
            ids = [self._ids(part) for part in piece]
            hidden = None
            if self._states is not None:
                hidden = _joined([self._states.of(it.text.slot, it.positions) for it in piece])
            found = self._pass(piece, torch.cat(ids), tables, last, hidden)
            drafts |= found.drafts
            passed |= found.passed
            for part in piece:
                self._computed[part.text.slot] = part.positions.stop
                if self._states is not None:
                    self._states.drop(part.text.slot, part.positions.stop)
        going = [text for text in texts if drafts.get(text.slot)]
        while going := [text for text in going if len(drafts[text.slot]) < counts[text.slot]]:
            parts = [
                _Part(it, range(place, place + 1))
                for it in going
                for place in (it.num_known + len(drafts[it.slot]) - 1,)
            ]
            last_ids = torch.tensor([drafts[it.slot][-1] for it in going])
            hidden = None if self._states is None else _joined([passed[it.slot] for it in going])
            more = self._pass(parts, last_ids, tables, {it.slot for it in going}, hidden)
            passed = more.passed
            for it in going:
                if self._states is None:
                    self._fed.setdefault(it.slot, []).append(drafts[it.slot][-1])
            going = [it for it in going if more.drafts[it.slot]]
            for it in going:
                drafts[it.slot] += more.drafts[it.slot]
        return {slot: draft for slot, draft in drafts.items() if draft}

    def _with_states(
        self, text: SlotText, held: HiddenStates, states: Mapping[int, Tensor]
    ) -> SlotText:
        """Keeps the states behind which the step's tokens were right. The token behind them is known: it was
        sampled, or the prompt has it."""
        own = states.get(text.slot)
        if own is not None:
            held.add(text.slot, text.first + 1, own[: text.end - text.first])
        return text._replace(num_known=text.end + 1)

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
        end = min(text.num_known, self._end(text, room))
        return range(self._computed[text.slot], max(end, self._computed[text.slot]))

    def _count(self, text: SlotText, room: Sequence[int], wanted: Mapping[int, int]) -> int:
        """Drafts that are sought of a slot: all but the last one are computed, and need a place."""
        left = self._end(text, room) - text.num_known + 1
        return max(0, min(wanted.get(text.slot, 0), left))

    def _end(self, text: SlotText, room: Sequence[int]) -> int:
        """Tokens whose K and V have a place."""
        return min(room[text.place], self._limits.max_len) + self._shift

    def _ids(self, part: _Part) -> Tensor:
        """The tokens [n] int64 of a part; the draft model does not have those behind its vocabulary."""
        known = self._batch.known(part.text.slot, part.positions.start, part.positions.stop)
        return known.long().clamp(0, self.model.vocab_size - 1)

    def _pass(
        self,
        parts: Sequence[_Part],
        ids: Tensor,
        tables: Tensor,
        sought: set[int],
        hidden: Tensor | None,
    ) -> _Found:
        """Tokens behind the last row of each slot that is `sought`. A head has `hidden` states [n, hidden]."""
        if not parts:
            return _Found({}, {})
        lens = torch.tensor([len(part.positions) for part in parts])
        rows = dict(
            zip((part.text.slot for part in parts), (lens.cumsum(0) - 1).tolist(), strict=True)
        )
        rows = {slot: row for slot, row in rows.items() if slot in sought}
        batch = TokenBatch(
            token_ids=ids,
            positions=torch.cat([_positions(part.positions) for part in parts]) - self._shift,
            sequence_ids=torch.arange(len(parts)).repeat_interleave(lens),
            query_lens=lens,
            context_lens=torch.tensor([part.positions.stop for part in parts]) - self._shift,
            block_tables=(tables[[part.text.place for part in parts]],),
            segment=self._batch.segment,
        )
        results = [LAST_HIDDEN] if hidden is None else [LAST_HIDDEN, self.model.passed_hidden]
        last, *passed = self.model.compute(
            self.model.plan(batch), hidden, list(rows.values()), results=results
        )
        if not rows:
            return _Found({}, {})
        found, offsets = self.model.argmax(last), self.model.token_offsets
        drafts: dict[int, list[int]] = {}
        for slot, (token, _, is_finite) in zip(rows, found.tolist(), strict=True):
            if offsets is not None and is_finite:
                token += int(offsets[token])
            known = 0 <= token < self._limits.vocab_size
            drafts[slot] = [token] if is_finite and known else []
        each = passed[0].split_with_sizes([1] * len(rows)) if passed else ()
        return _Found(drafts, dict(zip(rows, each, strict=False)))


def _joined(states: Sequence[Tensor]) -> Tensor | None:
    """States [n, hidden] together; zeros among them are on the host."""
    if len({it.device for it in states}) > 1:
        states = [it.cpu() for it in states]
    return torch.cat([*states]) if states else None


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
