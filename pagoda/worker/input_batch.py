# SPDX-License-Identifier: Apache-2.0
"""The input batch: the flat arrays of a step (token ids, positions, block tables), made of each slot's tokens and
blocks.

A step is prepared while the one before it runs. So what is counted (tokens, blocks) is as it will be once all
steps before are done, and moves on as soon as a step is prepared; token ids are written and read when the step
runs: that of a token that the step before samples is found in its slot's row only then.
"""

from __future__ import annotations

import ctypes
import sys
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import compress
from operator import add, eq, gt, sub
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from pagoda.backend.base import EmbeddedRows, ToEncode, TokenBatch
from pagoda.messages.encoder_input import EncoderInput
from pagoda.messages.segments import SEGMENT, ColdSegment
from pagoda.messages.spans import EmbeddedSpan
from pagoda.messages.transfers import HostSlots, TierBlocks
from pagoda.messages.worker import SlotStart, StepPlan, most_sampled
from pagoda.parallel.segments import ALL_HERE, BlockNumbers
from pagoda.worker.block_table import SlotBlockTables
from pagoda.worker.kv.segments import SegmentStreams, StepSegments
from pagoda.worker.step_rows import Draft, SlotRows


def input_batch_bytes(max_num_seqs: int, max_model_len: int, block_sizes: Sequence[int]) -> int:
    """Bytes of an `InputBatch`: four per place of a token id, eight per block id and copy of it."""
    max_blocks = sum(-(-max_model_len // block_size) for block_size in block_sizes)
    return max_num_seqs * (4 * (max_model_len + 1) + 8 * (1 + MAX_STEPS) * max_blocks)


_NO_DRAFTS: Mapping[int, list[int]] = MappingProxyType({})
MAX_STEPS = 2
"""Steps that may be prepared and not done: one that runs, and the next."""
_NO_ADAPTER = -1


@dataclass(frozen=True)
class StepTokens:
    """Tokens that a step computes: `counts[i]` further ones of `slots[i]`."""

    slots: list[int]
    counts: list[int]
    samples: list[bool]
    """True where nothing is left to compute behind the step."""
    firsts: list[int]
    """Positions of the slots' first tokens in the step."""
    batch: TokenBatch
    """Input of the step; `token_ids` are there once `InputBatch.read` has been called."""
    places: Tensor
    """[n] int64, of the token ids in the flat table of all slots."""
    ends: list[int]
    """Places of the tokens behind those that are known, in the same table."""
    room: list[int]
    """Tokens for which the slots have blocks."""
    drafts: dict[int, Draft] = field(default_factory=dict)
    """Drafts by slot; a slot without samples behind its last row alone."""
    writes: list[tuple[int, Tensor]] = field(default_factory=list)
    """(place, ids [m] int32) of tokens that the plan brings."""
    segments: StepSegments | None = None
    """Cold segments of the slots; None where they have none."""

    @property
    def num_context_tokens(self) -> int:
        """Tokens of all slots that have K and V behind the step."""
        return sum(self.firsts) + sum(self.counts)

    def rows(self) -> Iterator[SlotRows]:
        """The rows of each slot."""
        end = 0
        for slot, position, count in zip(self.slots, self.firsts, self.counts, strict=True):
            end += count
            yield SlotRows(slot, position, range(end - count, end))

    def of(self, chosen: Sequence[bool]) -> StepTokens:
        """The part of the slots that are chosen, whose tokens have been read."""
        kept = torch.tensor(chosen)
        segments = None if self.segments is None else self.segments.of(chosen)
        return StepTokens(
            slots=list(compress(self.slots, chosen)),
            counts=list(compress(self.counts, chosen)),
            samples=list(compress(self.samples, chosen)),
            firsts=list(compress(self.firsts, chosen)),
            batch=self.batch.of(kept, {} if segments is None else segments.contexts),
            places=self.places[kept.repeat_interleave(self.batch.query_lens)],
            ends=list(compress(self.ends, chosen)),
            room=list(compress(self.room, chosen)),
            drafts=self.drafts,
            segments=segments,
        )


class _Span(NamedTuple):
    """Places of a slot whose embeddings are given."""

    start: int
    vectors: Tensor
    """[length, hidden] float32."""

    @property
    def end(self) -> int:
        return self.start + len(self.vectors)

    @classmethod
    def of(cls, span: EmbeddedSpan) -> _Span:
        values = array("f", span.vectors)
        if sys.byteorder == "big":
            values.byteswap()
        return cls(span.start, torch.frombuffer(values, dtype=torch.float32).view(span.length, -1))


class _Firsts(NamedTuple):
    """Beginnings of arrays: fields of a `TokenBatch`, and the places of its token ids."""

    token_ids: Tensor
    positions: Tensor
    sequence_ids: Tensor
    ones: Tensor
    context_lens: Tensor
    places: Tensor


class _Arrays:
    """Input of steps that compute one token of each slot: arrays that stay where they are.

    There are `MAX_STEPS` of them, which take turns.
    """

    def __init__(self, max_num_seqs: int) -> None:
        self.token_ids = torch.empty(max_num_seqs, dtype=torch.int64)
        self.positions, self._positions = _shared(max_num_seqs)
        self.context_lens, self._context_lens = _shared(max_num_seqs)
        self.places, self._places = _shared(max_num_seqs)
        self.ones = torch.ones(max_num_seqs, dtype=torch.int64)
        self.sequence_ids = torch.arange(max_num_seqs)
        self._firsts, self._num_firsts = _Firsts(*[self.ones[:0]] * 6), 0

    def first(self, n: int) -> _Firsts:
        """The beginnings of the arrays, [n] each, which are mostly those of the step before."""
        if self._num_firsts != n:
            self._num_firsts = n
            self._firsts = _Firsts(
                self.token_ids[:n],
                self.positions[:n],
                self.sequence_ids[:n],
                self.ones[:n],
                self.context_lens[:n],
                self.places[:n],
            )
        return self._firsts

    def write(self, positions: list[int], context_lens: list[int], places: list[int]) -> None:
        """Writes the beginnings of arrays, equally many elements of each."""
        n = len(positions)
        self._positions[:n] = array("q", positions)
        self._context_lens[:n] = array("q", context_lens)
        self._places[:n] = array("q", places)


def _shared(size: int) -> tuple[Tensor, array[int]]:
    """A tensor [size] int64 and an array that is the same memory, which takes lists without a tensor of each."""
    memory = array("q", bytes(8 * size))
    return torch.frombuffer(memory, dtype=torch.int64), memory


class InputBatch:
    """Token ids, counts and block tables by slot, in tables that are allocated once.

    Only what a slot's counts cover is ever read, and a start sets all of them, so nothing of an earlier request in
    the same slot can be seen. A plan that does not fit the slots raises ValueError.

    Steps are prepared in their order, then `read` and written (`write`) in the same order, each before the step
    after next is prepared.
    """

    def __init__(
        self,
        max_num_seqs: int,
        max_model_len: int,
        block_sizes: Sequence[int],
        adapter_number: Callable[[str], int] | None = None,
        *,
        embeds_spans: bool = True,
        blocks: BlockNumbers = ALL_HERE,
        keeps_states: bool = False,
        segment: int = SEGMENT,
        rank_blocks: int | None = None,
        encodes_text: bool = False,
    ) -> None:
        """`block_sizes` are those of the KV groups, in tokens. Only the first stage of a model embeds spans. With
        `keeps_states`, states stay behind known tokens: drafts that were right are computed again. Where ranks
        attend to requests of their own, each has `rank_blocks` blocks.

        `adapter_number` finds the number of a loaded adapter by its digest; None where there are none. `blocks`
        says which blocks are this rank's. With `encodes_text`, what an encoder gives of a request
        is as long as its text.
        """
        self._adapter_number = adapter_number
        self.segment = segment
        self.streams: SegmentStreams | None = None
        """Source of cold segments; None where slots have none."""
        self._cold: dict[int, dict[int, list[HostSlots | TierBlocks]]] = {}
        """Places of cold segments by slot and KV group."""
        self._embeds_spans = embeds_spans
        self._blocks = blocks
        self.keeps_states = keeps_states
        self._rank_blocks = rank_blocks
        self._ranks = [0] * max_num_seqs
        """The rank that attends to each slot."""
        # The last token of a full context is sampled but never computed: one more place for it.
        self._stride = max_model_len + 1
        self._token_ids = torch.empty(max_num_seqs * self._stride, dtype=torch.int32)
        self._view = (ctypes.c_int32 * len(self._token_ids)).from_address(
            self._token_ids.data_ptr()
        )
        """Token ids as memory that takes single ones without a tensor each."""
        self._tables = [
            SlotBlockTables(max_num_seqs, max_model_len, block_size, MAX_STEPS)
            for block_size in block_sizes
        ]
        # Counts are lists: a step of a few tokens would take longer in calls of torch than in loops over them.
        self._num_tokens = [0] * max_num_seqs
        """Tokens of each slot once all steps before are done."""
        self._num_computed = [0] * max_num_seqs
        self._room = [0] * max_num_seqs
        """Tokens for which each slot has blocks of all groups."""
        self._adapters = [_NO_ADAPTER] * max_num_seqs
        self._num_adapted = 0
        """Slots with an adapter."""
        self._second_texts = [0] * max_num_seqs
        """Places of the second of two texts; 0 for none."""
        self._pairs: set[int] = set()
        """Slots with two texts."""
        self._to_encode: dict[int, EncoderInput] = {}
        """Inputs of the encoder of slots that have not begun."""
        self._encodes_text = encodes_text
        self._encoded_lens = [1] * max_num_seqs
        """Positions of each slot that its encoder gives."""
        self._spans: dict[int, list[_Span]] = {}
        """Embedded spans of slots whose places are not all computed."""
        self._slots: set[int] = set()
        """Slots in use."""
        self._drafted: dict[int, Draft] = {}
        """Drafts of slots of which it is not known yet how many are right."""
        self._writes: list[tuple[int, Tensor]] = []
        """Writes of token ids for the step that is prepared next."""
        self._arrays = [_Arrays(max_num_seqs) for _ in range(MAX_STEPS)]
        self._turn = 0
        """Arrays and copies of block tables that the next step takes."""

    # ---- what plans say

    @property
    def block_sizes(self) -> list[int]:
        """Tokens of a block of each KV group, which has a block table for every slot."""
        return [table.block_size for table in self._tables]

    def apply(self, plan: StepPlan) -> None:
        """Frees slots, starts requests and appends blocks, as the plan says."""
        for slot in plan.freed_slots:
            self.free(slot)
        for start in plan.starts:
            self.start(start)
        for new in plan.new_blocks:
            self.add_blocks(new.slot, new.group, new.block_ids)
        for cold in plan.cold:
            self.add_cold(cold)

    def start(self, start: SlotStart) -> None:
        """Puts a request into a slot."""
        slot = start.slot
        if slot in self._slots:
            raise ValueError(f"Slot {slot} is started while it is in use.")
        if not 0 <= slot < len(self._num_tokens):
            raise ValueError(f"Slot {slot} does not exist.")
        num_tokens = len(start.token_ids)
        if num_tokens >= self._stride:
            raise ValueError(f"Slot {slot} is started with {num_tokens} tokens, too many.")
        if len(start.block_ids) != len(self._tables):
            raise ValueError(
                f"Slot {slot} is started with {len(start.block_ids)} block tables, there are "
                f"{len(self._tables)} KV groups."
            )
        adapter = self._adapter_of(start)
        self._slots.add(slot)
        self._ranks[slot] = start.rank
        self._num_tokens[slot] = 0
        self._num_computed[slot] = start.num_computed_tokens
        self._adapters[slot] = adapter
        self._num_adapted += adapter != _NO_ADAPTER
        self._second_texts[slot] = start.work.second_text_at
        if start.work.second_text_at:
            self._pairs.add(slot)
        if start.work.spans and self._embeds_spans:
            self._spans[slot] = list(map(_Span.of, start.work.spans))
        if (beside := start.work.encoder_input) is not None:
            if start.num_computed_tokens == 0:
                self._to_encode[slot] = beside
            self._encoded_lens[slot] = beside.positions
        self.append(slot, start.token_ids)
        for group, block_ids in enumerate(start.block_ids):
            self._tables[group].clear(slot)
            self.add_blocks(slot, group, block_ids)
        for cold in start.cold:
            self.add_cold(cold)

    def add_cold(self, cold: ColdSegment) -> None:
        """Notes where the next segment of a slot lies from now on, instead of in its blocks."""
        self._check_use(cold.slot)
        if self.streams is None:
            raise ValueError(f"Slot {cold.slot} has a cold segment, which cannot be streamed here.")
        self.streams.check(cold)
        places = self._cold.setdefault(cold.slot, {}).setdefault(cold.group, [])
        if (len(places) + 1) * self.segment > self._num_computed[cold.slot]:
            raise ValueError(f"A segment of slot {cold.slot} is cold that is not computed.")
        places.append(cold.place)

    def _adapter_of(self, start: SlotStart) -> int:
        if not start.work.adapter:
            return _NO_ADAPTER
        if self._adapter_number is None:
            raise ValueError(f"Slot {start.slot} is started with an adapter, but there are none.")
        return self._adapter_number(start.work.adapter)

    def add_blocks(self, slot: int, group: int, block_ids: list[int]) -> None:
        """Appends to a slot's block table of a group."""
        self._check_use(slot)
        if self._rank_blocks is not None:
            block_ids = [block_id % self._rank_blocks for block_id in block_ids]
        if not self._tables[group].append(slot, self._blocks.seen(block_ids)):
            raise ValueError(f"Slot {slot} is given too many blocks of group {group}.")
        self._room[slot] = min(table.room[slot] for table in self._tables)

    def free(self, slot: int) -> None:
        """Raises ValueError when the slot is not in use."""
        self._check_use(slot)
        self._slots.remove(slot)
        self._drafted.pop(slot, None)
        self._cold.pop(slot, None)
        self._pairs.discard(slot)
        self._spans.pop(slot, None)
        self._to_encode.pop(slot, None)
        if self._num_adapted:
            self._num_adapted -= self._adapters[slot] != _NO_ADAPTER

    def append(self, slot: int, token_ids: list[int]) -> None:
        """Appends tokens that the plan brings; `read` writes them."""
        self._check_use(slot)
        begin = self._num_tokens[slot]
        if begin + len(token_ids) > self._stride:
            raise ValueError(f"Slot {slot} is given {begin + len(token_ids)} tokens, too many.")
        place = slot * self._stride + begin
        self._writes.append((place, torch.tensor(token_ids, dtype=torch.int32)))
        self._num_tokens[slot] = begin + len(token_ids)

    def append_forced(self, plan: StepPlan) -> None:
        """Appends the tokens that grammars force."""
        for slot, token_ids in plan.forced_tokens:
            self.append(slot, token_ids)

    # ---- steps

    def prepare(
        self,
        slots: list[int],
        num_tokens: list[int],
        *,
        samples: bool = True,
        drafts: Mapping[int, list[int]] = _NO_DRAFTS,
        ahead: int = 0,
    ) -> StepTokens:
        """The next `num_tokens[i]` tokens of each slot, which from now on count as computed.

        The last ones of slots with `drafts` are these; `settle` says how many of them are right. With `samples`, a
        token is counted that each slot samples which has all its tokens computed. Tables reach `ahead` further.
        """
        if not self._slots.issuperset(slots):
            self._refuse(slots, num_tokens, drafts)
        firsts = [self._num_computed[slot] for slot in slots]
        ends = list(map(add, firsts, num_tokens))
        known = [self._num_tokens[slot] for slot in slots]
        room = [self._room[slot] for slot in slots]
        if drafts:
            self._check_drafts(slots, num_tokens, drafts)
            known = list(map(add, known, (len(drafts.get(slot, ())) for slot in slots)))
        if min(num_tokens, default=1) < 1 or any(map(gt, ends, known)) or any(map(gt, ends, room)):
            self._refuse(slots, num_tokens, drafts)
        samples_now = list(map(eq, known, ends))
        for slot, end in zip(slots, ends, strict=True):
            self._num_computed[slot] = end
        drafted = self._append_drafts(drafts) if drafts else {}
        if samples:
            for slot in compress(slots, samples_now):
                self._num_tokens[slot] += 1
        writes, self._writes = self._writes, []
        turn, self._turn = self._turn, (self._turn + 1) % MAX_STEPS
        longest = min(max(ends, default=0) + ahead, self._stride - 1)
        tables = tuple(table.of(turn, slots, longest) for table in self._tables)
        stride = self._stride
        places = [slot * stride + first for slot, first in zip(slots, firsts, strict=True)]
        arrays, n = self._arrays[turn], len(slots)
        if num_tokens.count(1) == n:
            arrays.write(firsts, ends, places)
            it = arrays.first(n)
            token_places = it.places
            batch = TokenBatch(
                it.token_ids, it.positions, it.sequence_ids, it.ones, it.context_lens, tables
            )
        else:
            query_lens, context_lens = torch.tensor(num_tokens), torch.tensor(ends)
            sequence_ids = arrays.sequence_ids[:n].repeat_interleave(query_lens)
            before = (query_lens.cumsum(0) - query_lens)[sequence_ids]
            offsets = torch.arange(len(sequence_ids)) - before
            positions = offsets + torch.tensor(firsts)[sequence_ids]
            token_places = offsets + torch.tensor(places)[sequence_ids]
            ids = torch.empty_like(token_places)
            batch = TokenBatch(ids, positions, sequence_ids, query_lens, context_lens, tables)
        if self._num_adapted:
            numbers = [self._adapters[slot] for slot in slots]
            if max(numbers) != _NO_ADAPTER:
                batch = replace(batch, adapters=torch.tensor(numbers)[batch.sequence_ids])
        if not self._pairs.isdisjoint(slots):
            begins = torch.tensor([self._second_texts[slot] for slot in slots])[batch.sequence_ids]
            types = ((begins > 0) & (batch.positions >= begins)).long()
            batch = replace(batch, token_types=types)
        if self._rank_blocks is not None:
            ranks = [self._ranks[slot] for slot in slots]
            if ranks != sorted(ranks):
                raise ValueError("The slots of a step are not in the order of their ranks.")
            batch = replace(batch, ranks=torch.tensor(ranks))
        behind = list(map(add, places, num_tokens))
        if drafted:
            lens = [len(drafts.get(slot, ())) for slot in slots]
            behind = list(map(sub, behind, lens))
            batch = replace(batch, draft_lens=torch.tensor(lens))
        if not self._spans.keys().isdisjoint(slots):
            batch = replace(batch, embedded=self._embedded(slots, firsts, ends))
        if not self._to_encode.keys().isdisjoint(slots):
            batch = replace(batch, to_encode=self._beginning(slots))
        if self._encodes_text:
            encoded = torch.tensor([self._encoded_lens[slot] for slot in slots])
            batch = replace(batch, encoded_lens=encoded)
        if self.segment != SEGMENT:
            batch = replace(batch, segment=self.segment)
        segments = self._segments(slots) if self._cold else None
        if segments is not None:
            batch = replace(batch, cold=segments.contexts)
        return StepTokens(
            slots=slots,
            counts=num_tokens,
            samples=samples_now,
            firsts=firsts,
            batch=batch,
            places=token_places,
            ends=behind,
            room=room,
            drafts=drafted,
            writes=writes,
            segments=segments,
        )

    def _segments(self, slots: Sequence[int]) -> StepSegments | None:
        """Cold segments of slots; None where they have none."""
        groups = {group for slot in slots for group in self._cold.get(slot, ())}
        if self.streams is None or not groups:
            return None
        cold = [self._cold.get(slot, {}) for slot in slots]
        return self.streams.open(
            {group: [tuple(of_slot.get(group, ())) for of_slot in cold] for group in sorted(groups)}
        )

    def _check_drafts(
        self, slots: list[int], num_tokens: list[int], drafts: Mapping[int, list[int]]
    ) -> None:
        """Raises ValueError: drafts are not the last tokens of slots, or more than may be sampled."""
        self._refuse(slots, num_tokens, drafts)
        num_drafts, most = sum(map(len, drafts.values())), most_sampled(len(self._num_tokens))
        if not drafts.keys() <= set(slots) or len(slots) + num_drafts > most:
            raise ValueError(f"{num_drafts} drafts are not of {len(slots)} slots, or too many.")

    def _append_drafts(self, drafts: Mapping[int, list[int]]) -> dict[int, Draft]:
        """Writes drafts behind the tokens of their slots, which do not count them."""
        drafted: dict[int, Draft] = {}
        table_row = len(self._num_tokens)
        for slot, token_ids in drafts.items():
            place = slot * self._stride + self._num_tokens[slot]
            self._writes.append((place, torch.tensor(token_ids, dtype=torch.int32)))
            drafted[slot] = Draft(token_ids, range(table_row, table_row + len(token_ids)))
            table_row += len(token_ids)
        self._drafted |= drafted
        return drafted

    def settle(self, slot: int, draft: Draft | None = None, num_right: int = 0) -> None:
        """Counts the drafts of a slot that are right, and behind which a token was sampled, if they are still its
        own; without a `draft`, all tokens that were appended since. Others count as computed no longer, and all of
        them where there are states."""
        found = self._drafted.get(slot)
        if found is not None and (draft is None or draft is found):
            del self._drafted[slot]
            self._num_tokens[slot] += num_right
            if self.keeps_states:
                self._num_computed[slot] -= len(found.token_ids)
            else:
                self._num_computed[slot] = self._num_tokens[slot] - 1

    def _embedded(
        self, slots: list[int], firsts: list[int], ends: list[int]
    ) -> EmbeddedRows | None:
        """The tokens of a step that lie in spans; spans that end in it are forgotten."""
        rows, vectors, row = list[Tensor](), list[Tensor](), 0
        for slot, first, end in zip(slots, firsts, ends, strict=True):
            for span in self._spans.get(slot, ()):
                begin, stop = max(first, span.start), min(end, span.end)
                if begin < stop:
                    rows.append(torch.arange(row + begin - first, row + stop - first))
                    vectors.append(span.vectors[begin - span.start : stop - span.start])
            row += end - first
        for slot, end in zip(slots, ends, strict=True):
            if slot in self._spans and self._spans[slot][-1].end <= end:
                del self._spans[slot]
        return EmbeddedRows(torch.cat(rows), torch.cat(vectors)) if rows else None

    def _beginning(self, slots: list[int]) -> tuple[ToEncode, ...]:
        """Inputs of the encoder of the slots that begin, which are forgotten."""
        return tuple(
            ToEncode(place, self._to_encode.pop(slot))
            for place, slot in enumerate(slots)
            if slot in self._to_encode
        )

    def _refuse(
        self, slots: list[int], num_tokens: list[int], drafts: Mapping[int, list[int]]
    ) -> None:
        """Raises ValueError about the first slot that cannot compute so many tokens."""
        for slot, count in zip(slots, num_tokens, strict=True):
            problem = self.misfit(slot, count, len(drafts.get(slot, ())))
            if problem:
                raise ValueError(problem)

    def misfit(self, slot: int, num_tokens: int, num_drafts: int = 0) -> str:
        """Sentence that says why a slot cannot compute so many tokens; empty where it can."""
        if slot not in self._slots:
            return f"Slot {slot} is not in use."
        computed = self._num_computed[slot]
        end, left = computed + num_tokens, self._num_tokens[slot] + num_drafts - computed
        if not 1 <= num_tokens <= left or (num_drafts and num_tokens < left):
            return f"Slot {slot} is to compute {num_tokens} tokens and has {left}."
        if num_drafts and end >= self._stride:
            return f"Slot {slot} is given {num_drafts} drafts, too many."
        for table in self._tables:
            room = table.room[slot]
            if end > room:
                blocks = room // table.block_size
                return (
                    f"Slot {slot} is to hold {end} tokens in {blocks} blocks of {table.block_size}."
                )
        return ""

    def _check_use(self, slot: int) -> None:
        if slot not in self._slots:
            raise ValueError(f"Slot {slot} is not in use.")

    # ---- token ids, when a step runs

    def read(self, tokens: StepTokens) -> None:
        """Writes the tokens that the step's plan brings, then reads the ids of those that it computes."""
        for place, token_ids in tokens.writes:
            self._token_ids[place : place + len(token_ids)] = token_ids
        tokens.batch.token_ids.copy_(self._token_ids.index_select(0, tokens.places))

    def known(self, slot: int, first: int, end: int) -> Tensor:
        """Ids [end - first] int32 of tokens of a slot, which have been written."""
        begin = slot * self._stride
        return self._token_ids[begin + first : begin + end]

    def write(self, places: list[int], token_ids: list[int]) -> None:
        """Puts sampled tokens behind those that were computed (`StepTokens.ends`)."""
        for place, token_id in zip(places, token_ids, strict=True):
            self._view[place] = token_id
