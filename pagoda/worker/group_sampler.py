# SPDX-License-Identifier: Apache-2.0
"""Sampling on the ranks of the last stage.

Each of several tensor-parallel ranks has the logits of a part of the vocabulary. The first rank announces which
rows are wanted in which mode, all ranks compute their parts together, the first rank samples and broadcasts the
tokens: so ranks agree by construction, and only the first keeps the state of sampling.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import msgspec
from torch import Tensor, tensor, zeros

from pagoda.backend.kv_store import DONE, DeviceEvent
from pagoda.backend.overlap import OverlapBackend, PendingOutput
from pagoda.backend.row_sampling import SamplesRows
from pagoda.backend.sampling import SampledRows
from pagoda.messages.worker import LostSegments, SlotStart, StepPlan, TokenMasks
from pagoda.model.decoder import Decoder
from pagoda.parallel.collectives import HostGroup
from pagoda.telemetry.tracer import Tracer
from pagoda.worker.pending_sample import PendingSample
from pagoda.worker.sampler import NOTHING_ALLOWED, Sampled, Sampler, argmax_tokens, merged
from pagoda.worker.step_rows import Draft

BROKE_A_STEP = "this request broke a step; the server's log says why"

Rows = dict[int, int]
"""Rows of hidden states by slot, and behind drafts by row of the sampling table."""
T = TypeVar("T")
_MODES = msgspec.msgpack.Decoder(tuple[Rows, Rows])
_DRAWN = msgspec.msgpack.Decoder(tuple[dict[int, int], dict[int, str]])
"""Made once: to look into the types takes longer than to decode."""

_NO_MASKS = TokenMasks(-1)
_ELSEWHERE = "another rank could not read its part"
_MOST_SEGMENTS = 2**22
"""Segments of a request, at most: twice as many are told apart in float32."""

_log = logging.getLogger(__name__)


AwaitMasks = Callable[[int], TokenMasks]
"""Waits for the masks of the step of that number."""


def no_masks(step: int) -> TokenMasks:
    """Stands for an engine that sends no masks."""
    raise RuntimeError(f"Nobody sends masks for step {step}.")


class GroupSampler:
    """One rank's part in sampling."""

    def __init__(
        self,
        sampler: Sampler,
        group: HostGroup,
        tracer: Tracer,
        await_masks: AwaitMasks,
        ahead: OverlapBackend | None = None,
    ) -> None:
        """`group` carries control messages; `sampler` and `await_masks` are used on its first rank only.

        A rank that is alone launches samples of the backend `ahead`, if there is one."""
        self._device = ahead
        self._ahead = ahead if group.size == 1 else None
        self._sampler = sampler
        self._tracer = tracer
        self._group = group
        self._leads = group.rank == 0
        self._await_masks = await_masks
        self._step = -1
        self._masked: frozenset[int] = frozenset()
        """Slots that sample with masks which are not here yet."""
        self._masked_slots: frozenset[int] = frozenset()
        """Slots of this step that sample with masks."""
        self._masked_drafts: dict[int, Draft] = {}
        """Drafts of slots that sample with masks, as far as they were asked for."""
        self._masks = _NO_MASKS
        """Masks of this step that are here."""
        self._unmasked_rows: set[int] = set()
        """Rows behind drafts for which there is no mask."""
        self._certain: dict[int, int] = {}
        """Tokens of this step that grammars force, by slot."""
        self._errors: dict[int, str] = {}
        """Errors of slots that could not start; reported when they sample, as all ranks must compute alike."""

    def begin(self, plan: StepPlan) -> None:
        """Begins a step, whose `masked_slots` sample with masks. Only the first rank is sent these."""
        self._certain.clear()
        self._masked_drafts.clear()
        self._unmasked_rows.clear()
        self._masks = _NO_MASKS
        self._masked_slots = self._masked = (
            frozenset(plan.masked_slots) if self._leads else frozenset()
        )
        self._step = plan.step

    def _known(self, rows: Rows) -> tuple[list[Sampled], Rows]:
        """Results that need no logits, and the other rows."""
        has_known = self._errors or self._certain or self._unmasked_rows
        if self._masked.isdisjoint(rows) and not has_known:
            return [], rows
        errors = {slot: self._errors[slot] for slot in rows if slot in self._errors}
        certain = self._take_masks(rows)
        errors |= dict.fromkeys(self._unmasked_rows.intersection(rows), NOTHING_ALLOWED)
        known = errors.keys() | certain.keys()
        unknown = {slot: row for slot, row in rows.items() if slot not in known}
        return [Sampled(errors=errors), Sampled(certain)], unknown

    def _take_masks(self, rows: Rows) -> dict[int, int]:
        """Awaits the step's masks if rows need them; returns the tokens of rows that are certain, by slot.

        The forward pass is done: meanwhile the engine has made the masks.
        """
        if not self._masked.isdisjoint(rows):
            masks, self._masked = self._await_masks(self._step), frozenset()
            self._sampler.take_masks(masks.masks)
            self._masks = masks
            for slot, draft in self._masked_drafts.items():
                self._mask_draft(slot, draft)
            self._certain.update(masks.tokens)
        return {slot: self._certain[slot] for slot in rows if slot in self._certain}

    def start(self, start: SlotStart) -> None:
        """Takes a request; if that fails, `sample` says so."""
        if not self._leads:
            return
        try:
            self._sampler.start(start)
        except Exception:
            _log.exception("cannot be started", extra={"request_id": start.request_id})
            self._errors[start.slot] = BROKE_A_STEP

    def free(self, slot: int) -> None:
        self._errors.pop(slot, None)
        self._sampler.free(slot)

    @property
    def overlaps(self) -> bool:
        """Samples may be launched, and read later."""
        return self._ahead is not None

    def launched(self) -> DeviceEvent:
        """The event of all that was launched so far."""
        return DONE if self._ahead is None else self._ahead.launched()

    def may_run_ahead(self, plan: StepPlan) -> bool:
        """True if a step may be launched while what its slots said last has not been read."""
        return (
            self._ahead is not None
            and not plan.masked_slots
            and not plan.drafts
            and not self._errors
            and self._sampler.may_run_ahead(plan.slots)
        )

    def grouped(self, slots: Collection[int]) -> Collection[int]:
        """Slots in the order in which `sample` should have their rows.

        On a device that computes by itself, rows that are sampled in one way lie one behind the other: numbers of
        rows go there behind its work, and the host would wait for that."""
        if self._ahead is None:
            return slots
        return sorted(slots, key=self._sampler.needing_logits(slots).__contains__)

    def with_drafts(self, rows: Rows, drafts: Mapping[int, Draft]) -> Rows:
        """Rows that slots with drafts sample from, where `rows` are the last ones."""
        spread: Rows = {}
        for slot, last in rows.items():
            draft = drafts.get(slot)
            if draft is None:
                spread[slot] = last
                continue
            first = last - len(draft.token_ids)
            spread |= zip((slot, *draft.table_rows), range(first, last + 1), strict=True)
            if self._leads and slot in self._errors:
                self._certain.update(dict.fromkeys(draft.table_rows, 0))  # nobody looks at them
            elif self._leads:
                self._sampler.foresee(slot, draft)
                if slot in self._masked_slots:
                    self._masked_drafts[slot] = draft
                    if not self._masked:  # the masks are here
                        self._mask_draft(slot, draft)
        return spread

    def _mask_draft(self, slot: int, draft: Draft) -> None:
        masks = self._masks.draft_masks.get(slot, [])
        self._sampler.mask_draft(slot, draft, masks)
        self._unmasked_rows.update(draft.table_rows[len(masks) :])

    def sample(self, model: Decoder[Any, Any], hidden: Tensor, rows: Rows) -> PendingSample:
        """The next token of each slot from its row of hidden states [n, hidden].

        Sampling again gives the same tokens until one is counted for a slot's answer.
        """
        if self._ahead is not None:
            return self._launched(self._ahead, model, hidden, rows)
        own = model.row_sampler if self._group.size == 1 else None
        if own is not None:
            return PendingSample.of(self._sampled_by(own, hidden, rows))
        return PendingSample.of(self._sampled(model, hidden, rows))

    def _launched(
        self, ahead: OverlapBackend, model: Decoder[Any, Any], hidden: Tensor, rows: Rows
    ) -> PendingSample:
        """The same, to be read later; masks are awaited."""
        parts, unknown = self._known(rows)
        pending, sampler = PendingSample(), self._sampler
        for part in parts:
            pending.add(part)
        likeliest, whole = self._modes(unknown, has_argmax=model.has_argmax)
        if likeliest:
            found = ahead.launch_read(self._computed("argmax", model.argmax, hidden, likeliest))
            slots = list(likeliest)
            read = partial(_read_argmax, found, slots)
            pending.add_pending(read, slots, found.token_ids)
        if whole:
            logits, slots = self._computed("logits", model.logits, hidden, whole), list(whole)
            rows_drawn = ahead.launch_sample(logits, sampler.table, slots)
            read = partial(_read_rows, rows_drawn, sampler, slots)
            pending.add_pending(read, slots, rows_drawn.token_ids)
        return pending

    def _sampled_by(self, own: SamplesRows, hidden: Tensor, rows: Rows) -> Sampled:
        """The same by a decoder that reads of the logits what it needs."""
        parts, unknown = self._known(rows)
        if unknown:
            slots = list(unknown)
            draw = partial(own.sample, table=self._sampler.table, slots=slots)
            drawn = self._computed("sampler", draw, hidden, unknown)
            parts.append(self._sampler.outcome(drawn, slots))
        return merged(parts)

    def _sampled(self, model: Decoder[Any, Any], hidden: Tensor, rows: Rows) -> Sampled:
        parts, unknown = self._known(rows)
        modes = self._modes(unknown, has_argmax=model.has_argmax)
        likeliest, whole = self._of_first(modes, _MODES)
        if not (likeliest or whole):
            self.meet()
        if likeliest:
            found = self._computed("argmax", model.argmax, hidden, likeliest)
            if self._leads:
                parts.append(argmax_tokens(likeliest, found))
        if whole:
            logits = self._computed("logits", model.logits, hidden, whole)
            if self._leads:
                began = self._tracer.kernel()
                parts.append(self._sampler.sample(logits, list(whole)))
                if began:
                    self._tracer.span("sampler", began, {"rows": len(whole)})
        sampled = parts[0] if len(parts) == 1 else merged(parts)
        if self._group.size == 1:
            return sampled
        drawn = (sampled.token_ids, sampled.errors)
        token_ids, errors = self._of_first(drawn, _DRAWN)
        return Sampled(token_ids, sampled.logprobs, errors)

    def meet(self) -> None:
        """Returns when all ranks, and their devices, have computed as far as this one.

        A step of which no row is wanted, or all tokens are known before, ends without a sum over the ranks behind
        its last layer. Its answer, which one rank gives, tells that the KV of all ranks may be copied, also by
        networks, which await no device.
        """
        if self._group.size > 1:
            if self._device is not None:
                self._device.launched().wait()
            self._group.all_gather(zeros(1))

    def lost_anywhere(
        self, slots: Sequence[int], lost: dict[int, LostSegments]
    ) -> dict[int, LostSegments]:
        """Slots of a step of which any rank has lost segments; `lost` are those of this rank."""
        if self._group.size == 1:
            return lost
        own = tensor([_as_number(lost.get(slot)) for slot in slots])
        found = self._group.all_gather(own).amax(0).tolist()
        return {
            slot: _of_number(int(number), lost.get(slot))
            for slot, number in zip(slots, found, strict=True)
            if number
        }

    def append(self, token_ids: Mapping[int, int]) -> None:
        """Remembers a token of each of some slots."""
        if self._leads:
            self._sampler.append(token_ids)

    def advance(self, slots: Iterable[int]) -> None:
        """Counts a further token of each slot, which `remember` is told once it is read."""
        if self._leads:
            self._sampler.advance(slots)

    def remember(self, token_ids: Mapping[int, int]) -> None:
        """Remembers tokens that were counted."""
        if self._leads:
            self._sampler.remember(token_ids)

    def _modes(self, rows: Rows, *, has_argmax: bool) -> tuple[Rows, Rows]:
        """Slots that need the likeliest token only, and slots that need all logits; unknown to other ranks."""
        if not self._leads:
            return {}, {}
        if not has_argmax:
            return {}, rows
        needing = self._sampler.needing_logits(rows)
        if not needing:
            return rows, {}
        if len(needing) == len(rows):
            return {}, rows
        logits = {slot: row for slot, row in rows.items() if slot in needing}
        return {slot: row for slot, row in rows.items() if slot not in needing}, logits

    def _of_first(self, value: T, decoder: msgspec.msgpack.Decoder[T]) -> T:
        """The first rank's value, on all ranks."""
        if self._group.size == 1:
            return value
        payload = self._group.broadcast(msgspec.msgpack.encode(value) if self._leads else None)
        return value if self._leads else decoder.decode(payload)

    def _computed(self, name: str, compute: Callable[[Tensor], T], hidden: Tensor, rows: Rows) -> T:
        began = self._tracer.kernel()
        computed = compute(_chosen(hidden, list(rows.values())))
        if began:
            self._tracer.span(name, began, {"rows": len(rows)})
        return computed


def _chosen(hidden: Tensor, rows: list[int]) -> Tensor:
    """Rows of hidden states, without a copy where they lie one behind the other."""
    begin, end = rows[0], rows[0] + len(rows)
    return hidden[begin:end] if rows == list(range(begin, end)) else hidden[rows]


def _read_argmax(found: PendingOutput[Tensor], slots: list[int]) -> Sampled:
    return argmax_tokens(slots, found.read())


def _read_rows(drawn: PendingOutput[SampledRows], sampler: Sampler, slots: list[int]) -> Sampled:
    return sampler.outcome(drawn.read(), slots)


def _as_number(lost: LostSegments | None) -> float:
    """A loss as a whole number, which is the higher the more it tells of; 0 for none."""
    return 0.0 if lost is None else 2.0 * (_MOST_SEGMENTS - lost.first) + (not lost.hangs)


def _of_number(number: int, own: LostSegments | None) -> LostSegments:
    left, is_known = divmod(number, 2)
    reason = _ELSEWHERE if own is None else own.reason
    return LostSegments(reason, _MOST_SEGMENTS - left, hangs=not is_known)
