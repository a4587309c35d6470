# SPDX-License-Identifier: Apache-2.0
"""Leaps: many steps that only decode, and in which nothing else can happen, as one step with drafts.

The scheduler is not told: to it these are steps of speculation whose drafts are right, since the simulated model's
answers are known. The executor gives such a step the time of as many steps, one after the other. Whatever comes
meanwhile, a request or the end of one, cuts the leap behind the step that is computed; the drafts beyond count as
wrong. The scheduler plans a step ahead, so a request that comes is told to it behind the plan of the next step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from pagoda.engine.drafting.planner import StepSize
from pagoda.engine.plans import InFlightStep, Scheduled
from pagoda.engine.request import Request
from pagoda.engine.scheduler import Scheduler
from pagoda.executor.base import ExecutorEvent
from pagoda.ipc.clock import Clock
from pagoda.messages.adapters import Adapter
from pagoda.messages.engine_config import SimConfig
from pagoda.messages.transfers import Transfers
from pagoda.messages.worker import StepPlan, StepResult, TokenMasks
from pagoda.plugins.sim.executor import SimExecutor
from pagoda.plugins.sim.model import length_of_seed, token_by_seed
from pagoda.telemetry.tracer import TraceSession

_WRONG = -1
"""No token: a draft that is not right."""


class Leaper:
    """The `DraftPlanner` of an engine whose model answers by seed (`SimConfig.answers_by_seed`)."""

    num_bytes = 0
    num_ahead = 0

    def __init__(self, scheduler: Scheduler, most: int) -> None:
        """`most` tokens of a request in a leap."""
        self.size = StepSize(1, 1)
        self._scheduler = scheduler
        self._most = most
        self.is_ahead = False
        """The next plan is one that the scheduler would have made before, of a single step."""
        self._stuck: tuple[int, int] | None = None
        """Numbers of requests that wait and run since a plan admitted none of those."""

    def holds_back(self, running: Sequence[Request], room: int) -> bool:
        return self.is_ahead or self._num_tokens(running, room, num_unknown=1) > 1

    def draft(self, running: Sequence[Request], room: int) -> None:
        count = self._num_tokens(running, room, num_unknown=0) - 1
        for request in running:
            seed = request.work.sampling.seed or 0
            request.drafts = [token_by_seed(seed, 0)] * count if count > 0 else []

    def _num_tokens(self, running: Sequence[Request], room: int, num_unknown: int) -> int:
        """Tokens that every running request gets before anything else happens; 1 without a leap. Each has at most
        `num_unknown` samples under way."""
        if not running or self.is_ahead or not all(request.is_decoding for request in running):
            return 1
        num_waiting = len(self._scheduler.waiting)
        if num_waiting and self._stuck != (num_waiting, len(running)):
            return 1
        budget = self._scheduler.limits.max_num_batched_tokens
        most = min(self._most, 1 + room // len(running), budget // len(running))
        for request in running:
            left = length_of_seed(request.work.sampling.seed or 0) - request.num_output_tokens
            if request.num_pending_samples > num_unknown or request.num_output_tokens == 0:
                return 1
            most = min(most, left - request.num_pending_samples)
        return most

    def ask(self, scheduled: Sequence[Scheduled]) -> dict[int, int]:
        """Notes who was left waiting: nothing is proposed."""
        running = self._scheduler.running
        # While prompts are computed, somebody may wait for a prefix that is coming.
        if len(scheduled) == len(running) and all(it.num_output_tokens for it in running):
            self._stuck = len(self._scheduler.waiting), len(running)
        else:
            self._stuck = None
        return {}

    def observe(self, step: InFlightStep, result: StepResult) -> None:
        """Costs are known, and all drafts are right."""

    def finished(self, request: Request) -> None:  # noqa: ARG002
        """Nothing is kept of requests; there is room for those that wait."""
        self._stuck = None


@dataclass
class Leap:
    """A step with drafts under way."""

    plan: StepPlan
    begin: float
    first_s: float
    """Seconds of the first of its steps."""
    more_s: float
    """Seconds by which each is longer than the one before."""
    num_steps: int

    def end(self, num_steps: int) -> float:
        """The instant at which so many of its steps have ended."""
        growth = self.more_s * num_steps * (num_steps - 1) / 2
        return self.begin + self.first_s * num_steps + growth

    def num_begun(self, now: float) -> int:
        """Steps that have begun by now; 1 at least."""
        low, high = 1, self.num_steps
        while low < high:
            middle = (low + high) // 2
            if self.end(middle) > now:
                high = middle
            else:
                low = middle + 1
        return low


class LeapExecutor:
    """An `Executor` over the simulated one, which takes steps with drafts for leaps."""

    def __init__(self, inner: SimExecutor, config: SimConfig, clock: Clock) -> None:
        self._inner = inner
        self._config = config
        self._clock = clock
        self._leap: Leap | None = None
        self._transfers: list[Transfers] = []
        """Transfers that wait until a leap has ended."""
        self.max_in_flight = inner.max_in_flight

    def start(self, num_blocks: int | None = None) -> None:
        self._inner.start(num_blocks)

    def submit(self, plan: StepPlan) -> None:
        # Room that nobody foresaw may have let somebody in: then this is one step, and no draft is right.
        if not plan.drafts or plan.starts:
            self._inner.submit(_with_wrong(plan, 0) if plan.drafts else plan)
            return
        config, slots, count = self._config, self._inner.worker.slots, len(plan.slots)
        context = sum(slots[slot].num_computed_tokens for slot in plan.slots)
        tokens_s = max(config.floor_s, config.per_token_s * count)
        first_s = config.base_s + tokens_s + config.per_sequence_s * count
        # A request that was given fewer drafts, for want of blocks, ends the leap of all.
        lengths = dict.fromkeys(plan.slots, 0) | {slot: len(draft) for slot, draft in plan.drafts}
        self._leap = Leap(
            plan,
            self._clock.now(),
            first_s + config.per_context_token_s * context,
            config.per_context_token_s * count,
            1 + min(lengths.values()),
        )

    def cut(self) -> bool:
        """Ends a leap behind the step that is being computed; False without one."""
        if self._leap is None:
            return False
        self._leap.num_steps = self._leap.num_begun(self._clock.now())
        return True

    @property
    def is_leaping(self) -> bool:
        return self._leap is not None

    def submit_masks(self, masks: TokenMasks) -> None:
        self._inner.submit_masks(masks)

    def submit_transfers(self, message: Transfers) -> None:
        if self._leap is None:
            self._inner.submit_transfers(message)
        else:
            self._transfers.append(message)
            self.cut()

    def load_adapter(self, adapter: Adapter) -> None:
        self._inner.load_adapter(adapter)

    def unload_adapter(self, digest: str) -> None:
        self._inner.unload_adapter(digest)

    def start_trace(self, session: TraceSession) -> None:
        self._inner.start_trace(session)

    def stop_trace(self) -> None:
        self._inner.stop_trace()

    def poll(self) -> list[ExecutorEvent]:
        leap = self._leap
        if leap is not None and self._clock.now() >= leap.end(leap.num_steps):
            self._leap = None
            kept = _with_wrong(leap.plan, leap.num_steps - 1)
            self._inner.submit_done(kept, leap.end(leap.num_steps) - leap.begin)
            messages, self._transfers = self._transfers, []
            for message in messages:
                self._inner.submit_transfers(message)
        return self._inner.poll()

    def pollables(self) -> list[object]:
        return []

    def pids(self) -> dict[str, int]:
        return {}

    def next_event_at(self) -> float | None:
        leap, instant = self._leap, self._inner.next_event_at()
        if leap is None:
            return instant
        return min(leap.end(leap.num_steps), math.inf if instant is None else instant)

    def close(self) -> None:
        self._leap = None
        self._transfers.clear()
        self._inner.close()


def _with_wrong(plan: StepPlan, place: int) -> StepPlan:
    """The plan with drafts of which only those before a place are right."""
    drafts = [
        (slot, [*draft[:place], _WRONG, *draft[place + 1 :]] if place < len(draft) else draft)
        for slot, draft in plan.drafts
    ]
    return msgspec.structs.replace(plan, drafts=drafts)
