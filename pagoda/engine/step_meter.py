"""Sizes of an engine's steps, and the time of each phase of a step."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from typing import NamedTuple

from pagoda.ipc.clock import Clock
from pagoda.messages.load import STEP_SEQUENCE_BOUNDS, STEP_TOKEN_BOUNDS, StepTotals
from pagoda.messages.worker import StepPlan, StepResult


class _Flight(NamedTuple):
    num_tokens: int
    num_sequences: int
    submitted_at: float


class StepMeter:
    """Adds up what `StepTotals` reports. Steps whose worker is lost count for the time that their plans took."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._in_flight: deque[_Flight] = deque()
        self._num_tokens = self._num_sequences = 0
        self._by_tokens = [0] * (len(STEP_TOKEN_BOUNDS) + 1)
        self._by_sequences = [0] * (len(STEP_SEQUENCE_BOUNDS) + 1)
        self._schedule_s = self._submit_s = self._wait_s = 0.0
        self._prepare_s = self._forward_s = self._sample_s = self._update_s = 0.0

    def submitted(self, plan: StepPlan, began: float, planned: float) -> None:
        """The plan was begun and ready at these times, and has been handed over now."""
        now = self._clock.now()
        self._schedule_s += planned - began
        self._submit_s += now - planned
        self._in_flight.append(_Flight(sum(plan.num_tokens), len(plan.slots), now))

    def finished(self, result: StepResult, taken: float) -> None:
        """The oldest step has a result, which was there at `taken` and has been dealt with now."""
        flight = self._in_flight.popleft()
        self._num_tokens += flight.num_tokens
        self._num_sequences += flight.num_sequences
        self._by_tokens[bisect_left(STEP_TOKEN_BOUNDS, flight.num_tokens)] += 1
        self._by_sequences[bisect_left(STEP_SEQUENCE_BOUNDS, flight.num_sequences)] += 1
        # The clocks of workers are others, and the times of several stages overlap.
        self._wait_s += max(0.0, taken - flight.submitted_at - result.step_time_s)
        self._prepare_s += result.prepare_time_s
        self._forward_s += result.forward_time_s
        self._sample_s += result.sample_time_s
        self._update_s += self._clock.now() - taken

    def lost(self) -> None:
        """No result of a step under way will come."""
        self._in_flight.clear()

    def totals(self) -> StepTotals:
        has_steps = any(self._by_tokens)
        return StepTotals(
            num_tokens=self._num_tokens,
            num_sequences=self._num_sequences,
            by_tokens=list(self._by_tokens) if has_steps else [],
            by_sequences=list(self._by_sequences) if has_steps else [],
            schedule_s=self._schedule_s,
            submit_s=self._submit_s,
            wait_s=self._wait_s,
            prepare_s=self._prepare_s,
            forward_s=self._forward_s,
            sample_s=self._sample_s,
            update_s=self._update_s,
        )
