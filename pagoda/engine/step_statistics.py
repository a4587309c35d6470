"""Reports of an engine on its steps: totals for load reports, statistics for subscribers, and when to report."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from typing import NamedTuple

import msgspec

from pagoda.ipc.clock import Clock
from pagoda.messages.frontend import StepBin, StepStatistics
from pagoda.messages.load import STEP_SEQUENCE_BOUNDS, STEP_TOKEN_BOUNDS, StepTotals
from pagoda.messages.worker import StepPlan, StepResult

INTERVAL_S = 0.5
"""Seconds between two `StepStatistics`; after a longer pause a message is sent at once."""
MAX_BINS = 64
"""Most bins in one message: steps that end close together share a bin."""
BIN_S = INTERVAL_S / (MAX_BINS - 1)
REPORT_INTERVAL_S = 1.0
"""Steps are reported at most this long after they have ended: what an engine counted in the last moments before it
was killed is all that its frontend does not know."""


class _InFlight(NamedTuple):
    num_prefill_tokens: int
    num_decode_tokens: int
    num_seqs: int
    submitted_at: float


class StepRecorder:
    """Adds up what `StepTotals` reports, and remembers the steps that followers have not been told of.

    Steps whose worker is lost count for the time that their plans took.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._in_flight: deque[_InFlight] = deque()
        self._num_tokens = self._num_seqs = 0
        self._by_tokens = [0] * (len(STEP_TOKEN_BOUNDS) + 1)
        self._by_seqs = [0] * (len(STEP_SEQUENCE_BOUNDS) + 1)
        self._schedule_s = self._submit_s = self._wait_s = 0.0
        self._prepare_s = self._forward_s = self._sample_s = self._update_s = 0.0
        self._followers: set[bytes] = set()
        self._bins: dict[int, StepBin] = {}
        """Bins by the end of their steps, in units of `BIN_S`; until a bin is sent, `age_s` is that time."""
        self._next_at = clock.now()

    def submitted(self, plan: StepPlan, began: float, planned: float) -> None:
        """The plan was begun and ready at these times, and has been handed over now."""
        now, num_decodes = self._clock.now(), plan.num_tokens.count(1)
        self._schedule_s += planned - began
        self._submit_s += now - planned
        num_prefill_tokens = sum(plan.num_tokens) - num_decodes
        self._in_flight.append(_InFlight(num_prefill_tokens, num_decodes, len(plan.slots), now))

    def finished(self, result: StepResult, taken: float) -> None:
        """The oldest step has a result, which was there at `taken` and has been dealt with now."""
        prefill, decode, num_seqs, submitted_at = self._in_flight.popleft()
        self._num_tokens += prefill + decode
        self._num_seqs += num_seqs
        self._by_tokens[bisect_left(STEP_TOKEN_BOUNDS, prefill + decode)] += 1
        self._by_seqs[bisect_left(STEP_SEQUENCE_BOUNDS, num_seqs)] += 1
        # The clocks of workers are others, and the times of several stages overlap.
        self._wait_s += max(0.0, taken - submitted_at - result.step_time_s)
        self._prepare_s += result.prepare_time_s
        self._forward_s += result.forward_time_s
        self._sample_s += result.sample_time_s
        self._update_s += self._clock.now() - taken
        if self._followers:
            step = StepBin(taken, result.step, 1, result.step_time_s, prefill, decode, num_seqs)
            index = int(taken / BIN_S)
            before = self._bins.get(index)
            self._bins[index] = step if before is None else _together(before, step)
            if len(self._bins) > MAX_BINS:  # nobody has asked for a while
                del self._bins[next(iter(self._bins))]

    def lost(self) -> None:
        """No result of a step under way will come."""
        self._in_flight.clear()

    def totals(self) -> StepTotals:
        has_steps = any(self._by_tokens)
        return StepTotals(
            self._num_tokens,
            self._num_seqs,
            list(self._by_tokens) if has_steps else [],
            list(self._by_seqs) if has_steps else [],
            self._schedule_s,
            self._submit_s,
            self._wait_s,
            self._prepare_s,
            self._forward_s,
            self._sample_s,
            self._update_s,
        )

    def follow(self, frontend: bytes) -> None:
        """Tells `frontend` of steps that end from now on."""
        self._followers.add(frontend)

    def unfollow(self, frontend: bytes) -> None:
        self._followers.discard(frontend)
        if not self._followers:
            self._bins.clear()

    def drain(self) -> list[tuple[bytes, StepStatistics]]:
        """Messages that are due, each with its frontend."""
        now = self._clock.now()
        if not self._bins or now < self._next_at:
            return []
        self._next_at = now + INTERVAL_S
        bins = [msgspec.structs.replace(one, age_s=now - one.age_s) for one in self._bins.values()]
        self._bins.clear()
        return [(frontend, StepStatistics(bins)) for frontend in self._followers]

    def next_event_at(self) -> float | None:
        """The instant at which `drain` returns a message; None if no step has ended."""
        return self._next_at if self._bins else None


def _together(before: StepBin, step: StepBin) -> StepBin:
    return StepBin(
        step.age_s,
        step.step,
        before.num_steps + step.num_steps,
        max(before.step_time_s, step.step_time_s),
        before.num_prefill_tokens + step.num_prefill_tokens,
        before.num_decode_tokens + step.num_decode_tokens,
        max(before.num_seqs, step.num_seqs),
    )


class LoadReportSchedule:
    """Decides when a report is due: at once when the worker changes, and `REPORT_INTERVAL_S` after a step."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._reported = 0, True
        """Number of steps and `is_worker_ready` in the last report; `EngineReady` counts as the first one."""
        self._due_at: float | None = None

    def is_due(self, num_steps: int, *, is_worker_ready: bool) -> bool:
        """True if a report is to be sent now, with these values."""
        now = self._clock.now()
        if self._due_at is None and num_steps != self._reported[0]:
            self._due_at = now + REPORT_INTERVAL_S
        is_late = self._due_at is not None and now >= self._due_at
        if not is_late and is_worker_ready == self._reported[1]:
            return False
        self._reported, self._due_at = (num_steps, is_worker_ready), None
        return True

    def next_event_at(self) -> float | None:
        return self._due_at
