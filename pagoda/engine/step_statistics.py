"""Statistics of steps for frontends that subscribe. Without a subscriber nothing is recorded.

Steps that end close together share a bin, so that the messages of one second are bounded.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from pagoda.ipc.clock import Clock
from pagoda.messages.frontend import StepBin, StepStatistics
from pagoda.messages.worker import StepPlan, StepResult

INTERVAL_S = 0.5
"""Seconds between two messages; after a longer pause a message is sent at once."""
MAX_BINS = 64
"""Most bins in one message."""
BIN_S = INTERVAL_S / (MAX_BINS - 1)


class _Planned(NamedTuple):
    """Contents of a step in flight."""

    num_prefill_tokens: int
    num_decode_tokens: int
    num_seqs: int


class StepReporter:
    """Remembers the steps that followers have not been told of."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._followers: set[bytes] = set()
        self.in_flight: dict[int, _Planned] = {}
        """Steps in flight by number, in order. Steps of lost workers stay until a later step ends."""
        self._bins: dict[int, StepBin] = {}
        """Bins by the end of their steps, in units of `BIN_S`; until a bin is sent, `age_s` is that time."""
        self._next_at = clock.now()

    def follow(self, frontend: bytes) -> None:
        """Tells `frontend` of steps that begin from now on."""
        self._followers.add(frontend)

    def unfollow(self, frontend: bytes) -> None:
        self._followers.discard(frontend)
        if not self._followers:
            self.in_flight.clear()
            self._bins.clear()

    def begin(self, plan: StepPlan) -> None:
        """A step is handed out."""
        if not self._followers:
            return
        num_decodes = plan.num_tokens.count(1)
        self.in_flight[plan.step] = _Planned(
            sum(plan.num_tokens) - num_decodes, num_decodes, len(plan.slots)
        )

    def end(self, result: StepResult) -> None:
        """The result of a step is there."""
        if not self.in_flight:
            return
        for number in [number for number in self.in_flight if number < result.step]:
            del self.in_flight[number]
        planned = self.in_flight.pop(result.step, None)
        if planned is None:
            return
        now = self._clock.now()
        index = int(now / BIN_S)
        before = self._bins.get(index)
        step = StepBin(now, result.step, 1, result.step_time_s, *planned)
        self._bins[index] = step if before is None else _together(before, step)
        if len(self._bins) > MAX_BINS:  # nobody has asked for a while
            del self._bins[next(iter(self._bins))]

    def drain(self) -> list[tuple[bytes, StepStatistics]]:
        """Messages that are due, each with its frontend."""
        now = self._clock.now()
        if not self._bins or now < self._next_at:
            return []
        self._next_at = now + INTERVAL_S
        news = StepStatistics(
            [msgspec.structs.replace(one, age_s=now - one.age_s) for one in self._bins.values()]
        )
        self._bins.clear()
        return [(frontend, news) for frontend in self._followers]

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
