# SPDX-License-Identifier: Apache-2.0
"""Requests whose KV does not fit the device: what of it goes to the storeys below, and when they compute.

A step of such a request reads its cold segments where they lie (streaming), which may take as long as many other
steps. It goes into any step that it makes longer by a small part only, and otherwise into a few of them: so few
that others' 99th percentile between two tokens does not show them, and that they take a part of the time only.
"""

from __future__ import annotations

from math import ceil
from typing import TYPE_CHECKING

from pagoda.engine.request import Request
from pagoda.engine.request_queue import RequestQueue
from pagoda.kv.block_table import PrefixHit
from pagoda.kv.manager import UNLIMITED_RUN, KVManager
from pagoda.kv.rates import Rate
from pagoda.messages.segments import ColdSegment

if TYPE_CHECKING:
    from pagoda.engine.plans import InFlightStep, PlanBuilder

_SMALL = 0.2
"""Part of a step by which streaming may make it longer in any case."""
_SPACING = 128
"""Steps from one that streams for longer to the next: more than a hundred, of which one does not move the 99th
percentile."""
_SHARE = 0.2
"""The most of the time that these take, beside others."""
_LOOKAHEAD_SHARE = 16
"""A segment leaves the device when less than this part of one is left of the request's room there."""
_BLOCKED_STEPS = 16
"""Steps after which a request that waits for room below is looked at again when nothing changed."""
_PROMPT_TOKENS = 4
"""Tokens for each request of a step that tells how fast prompts are computed."""


def no_room_below(trouble: str) -> str:
    """Sentence for a request that no storey has room for; `trouble` is a clause that says why, or empty."""
    reason = f" ({trouble})" if trouble else ""
    return (
        f"The KV of this request fits neither the device nor what is left of the tiers below it{reason}; raise "
        "--kv-host-bytes or --kv-disk-bytes, or look at the disk."
    )


class Streams:
    """Keeps requests that are streamed within their part of the device."""

    def __init__(self, kv: KVManager, queue: RequestQueue) -> None:
        self._kv = kv
        self._queue = queue
        self._reading = Rate()
        """Seconds by which a cold block makes a step longer."""
        self._steps = Rate()
        """Seconds of a step of others, without streaming."""
        self.prompts = Rate()
        """Seconds per token of a prompt, without streaming."""
        self._next_turn = 0
        """Step from which on requests may stream for long again."""
        self._waits_turn: tuple[Request | None, int] = None, 0
        """The last request in line that may not stream before this step: a long prefix is not sought till then."""
        self._untold: list[tuple[Request, int, ColdSegment]] = []
        """Cold segments that the worker has not been told of, with the admissions of their requests."""
        self._waits_below: tuple[Request | None, int, bool, int] = None, 0, False, 0
        """The last request for which there was no room below, the blocks held then, whether a storey rested, and
        when to look again."""
        self.stuck: list[Request] = []
        """Requests that no storey has room for, though nobody else is there to make any."""

    # ---- room on the device

    def is_streamed(self, request: Request) -> bool:
        return self._kv.is_streamed(request.num_tokens)

    def room(self, request: Request) -> int:
        """Tokens of a request that the next step may compute, as far as its part of the device goes."""
        if not self.is_streamed(request):
            return UNLIMITED_RUN
        end = len(request.table.cold) * self._kv.segment_tokens + self._kv.resident_tokens
        return max(0, end - request.num_scheduled_tokens)

    def room_behind(self, request: Request, hit: PrefixHit) -> int:
        """The same for a request that is admitted with a cached prefix."""
        if not self.is_streamed(request):
            return UNLIMITED_RUN
        end = hit.num_cold * self._kv.segment_tokens + self._kv.resident_tokens
        return max(0, end - hit.num_blocks * self._kv.block_size)

    def cold_parts(self, request: Request, slot: int) -> list[ColdSegment]:
        """All cold segments of a request."""
        cold = self._kv.cold
        parts = [] if cold is None else [cold.places(it) for it in request.table.cold]
        return [ColdSegment(slot, group, place) for it in parts for group, place in it]

    def advance(self, request: Request, slot: int, plan: PlanBuilder) -> bool:
        """Tells the worker of the segment that has become cold, and begins with the next one when its room will be
        needed. False if a segment should go and no storey has room for it."""
        cold, table = self._kv.cold, request.table
        if cold is None or not self.is_streamed(request):
            return True
        lookahead = self._kv.segment_tokens // _LOOKAHEAD_SHARE
        wanted = max(lookahead, min(2 * plan.budget, request.num_schedulable_tokens))
        self._take_cooled(request, slot, plan.step - 1)
        while self.room(request) < wanted and cold.may_cool(table):
            if not cold.cool(table, request.token_ids):
                return not self._is_full
            self._take_cooled(request, slot, plan.step - 1)  # where all of it was there already
        return True

    def makes_room(self, request: Request) -> bool:
        """True if blocks of a streamed request that lacks some will be free soon, as it gives a segment away."""
        cold, table = self._kv.cold, request.table
        if cold is None or not self.is_streamed(request):
            return False
        return table.cooling is not None or (
            cold.may_cool(table) and cold.cool(table, request.token_ids)
        )

    def _take_cooled(self, request: Request, slot: int, last_step: int) -> None:
        cold = self._kv.cold
        segment = None if cold is None else cold.take_cooled(request.table, last_step)
        if cold is not None and segment is not None:
            for group, place in cold.places(segment):
                self._untold.append((request, request.admission, ColdSegment(slot, group, place)))
            self._queue.update(request)

    @property
    def _is_full(self) -> bool:
        return self._kv.cold is not None and not self._kv.cold.has_room_for(1)

    def victim_for(self, request: Request) -> Request | None:
        """The request that makes room in the storeys for a segment of `request`: the last one behind it that has
        some there, or `request` itself where others in front of it have; None if nobody has any in a storey that
        would take another one in its place."""
        cold = self._kv.cold
        running = self._queue.running
        holders = [
            it
            for it in running
            if it is not request and cold is not None and cold.may_give(it.table)
        ]
        if not holders:
            return None
        last = holders[-1]
        return last if last.order_key > request.order_key else request

    @property
    def awaits_room(self) -> bool:
        """True if room below comes without anybody making way: steps in flight still read segments that were given
        back, loads of others are under way, or a storey rests."""
        cold = self._kv.cold
        return cold is not None and (
            not cold.is_idle or cold.is_back_soon or self._queue.num_loading > 0
        )

    def has_room_below(self, request: Request, step: int) -> bool:
        """True if the storeys have room for what a waiting request will have to give them of its known tokens."""
        kv = self._kv
        if kv.cold is None or not self.is_streamed(request):
            return True
        *before, until = self._waits_below
        now = [request, kv.cold.num_held, rests := kv.cold.is_back_soon]
        if before == now and step < until:
            return False
        holders = sum(bool(it.table.cold or it.table.cooling) for it in self._queue.running)
        # One more for each that runs and will give away another one, lest the newcomer be preempted for it.
        num_segments = holders - (kv.resident_tokens - request.num_tokens) // kv.segment_tokens
        if kv.cold.has_room_for(num_segments):
            return True
        num_segments -= kv.cold.num_shared(request.table, request.token_ids, num_segments)
        if kv.cold.has_room_for(num_segments):
            return True
        if not (rests or holders) and kv.cold.is_idle and kv.cold.trouble:
            self.stuck.append(request)
        self._waits_below = request, kv.cold.num_held, rests, step + _BLOCKED_STEPS
        return False

    # ---- turns

    def may_stream(
        self, request: Request, num_cold_blocks: int, count: int, plan: PlanBuilder
    ) -> bool:
        """True if the step of a plan may compute `count` tokens of a request with so many cold blocks."""
        if not num_cold_blocks or self._is_free(request, plan):
            return True
        own_s = self._steps.seconds(1) + (self.prompts.seconds(count) if count > 1 else 0.0)
        if self._reading.seconds(plan.num_cold_blocks + num_cold_blocks) <= _SMALL * own_s:
            return True
        if request.slot is None:
            self._waits_turn = request, self._next_turn
        plan.turns.gave_way = True
        return False

    def awaits_turn(self, request: Request, plan: PlanBuilder) -> bool:
        """True of a request in line that was refused till a later step, and would be again."""
        if self._waits_turn != (request, self._next_turn) or self._is_free(request, plan):
            return False
        plan.turns.gave_way = True
        return True

    def _is_free(self, request: Request, plan: PlanBuilder) -> bool:
        """True if streaming holds up nobody, or it is the turn of those that stream."""
        if plan.step >= self._next_turn or not plan.turns.in_turn:
            return True
        return all(it.table.cold or it is request for it in self._queue.running)

    def planned(self, plan: PlanBuilder) -> None:
        """The plan is made, and will be told what has become cold. After a step that streams for long, others have
        their turn."""
        for request, admission, segment in self._untold:
            if request.slot is not None and request.admission == admission:
                plan.cold.append(segment)
        self._untold.clear()
        added_s, own_s = self._reading.seconds(plan.num_cold_blocks), self._steps.seconds(1)
        if plan.step >= self._next_turn and added_s > _SMALL * own_s > 0.0:
            self._next_turn = plan.step + max(_SPACING, ceil(added_s / (_SHARE * own_s)))

    def observe(self, step: InFlightStep, seconds: float, streaming_s: float) -> None:
        """A step took so many seconds, `streaming_s` of them for cold segments."""
        if step.num_cold_blocks:
            self._reading.observe(step.num_cold_blocks, streaming_s)
        num_tokens = sum(part.num_tokens for part in step.scheduled)
        if num_tokens >= _PROMPT_TOKENS * len(step.scheduled):
            self.prompts.observe(num_tokens, seconds - streaming_s)
        else:
            self._steps.observe(1, seconds - streaming_s)
