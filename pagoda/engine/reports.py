# SPDX-License-Identifier: Apache-2.0
"""Reports of an engine to its frontends: its steps, and what is cached."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from itertools import chain, islice

import msgspec

from pagoda.ipc.clock import Clock
from pagoda.kv.block_keys import SHORT_KEY_BYTES
from pagoda.kv.block_pool import BlockPool
from pagoda.kv.events import CacheRecorder
from pagoda.messages.frontend import PrefixCacheUpdate, StepBin, StepStatistics
from pagoda.messages.load import STEP_SEQUENCE_BOUNDS, STEP_TOKEN_BOUNDS, StepTotals
from pagoda.messages.worker import StepPlan, StepResult

STATISTICS_INTERVAL_S = 0.5
"""Seconds between two `StepStatistics`; after a longer pause a message is sent at once."""
MAX_BINS = 64
"""Most bins in one message: steps that end close together share a bin."""
BIN_S = STATISTICS_INTERVAL_S / (MAX_BINS - 1)
REPORT_INTERVAL_S = 1.0
"""Steps are reported at most this long after they have ended: what an engine counted in the last moments before it
was killed is all that its frontend does not know."""
CACHE_INTERVAL_S = 0.05
"""Seconds between two `PrefixCacheUpdate`s; after a longer pause an update is sent at once."""
MAX_KEYS = 8192
"""Most keys in one update, some milliseconds of work; the rest comes with the next."""


class StepRecorder:
    """Adds up what `StepTotals` reports, and remembers the steps that followers have not been told of.

    Steps whose worker is lost count for the time that their plans took.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._in_flight: deque[StepBin] = deque()
        """Steps under way; `age_s` is the time at which each was submitted."""
        self._num_tokens = self._num_seqs = 0
        self._by_tokens = [0] * (len(STEP_TOKEN_BOUNDS) + 1)
        self._by_seqs = [0] * (len(STEP_SEQUENCE_BOUNDS) + 1)
        self._schedule_s = self._submit_s = self._wait_s = 0.0
        self._prepare_s = self._forward_s = self._sample_s = self._update_s = 0.0
        self._idle_s = 0.0
        self._has_followers = False
        self._bins: dict[int, StepBin] = {}
        """Bins by the end of their steps, in units of `BIN_S`; until a bin is sent, `age_s` is that time."""
        self._next_at = clock.now()
        self._is_reported = True
        """True if the last load report told of all steps that have ended."""
        self._report_at: float | None = None

    def submitted(self, plan: StepPlan, began: float, planned: float) -> None:
        """The plan was begun and ready at these times, and has been handed over now."""
        now, num_decodes = self._clock.now(), plan.num_tokens.count(1)
        self._schedule_s += planned - began
        self._submit_s += now - planned
        num_prefill_tokens = sum(plan.num_tokens) - num_decodes
        self._in_flight.append(
            StepBin(now, plan.step, 1, 0.0, num_prefill_tokens, num_decodes, len(plan.slots))
        )

    def finished(self, result: StepResult, taken: float) -> None:
        """The oldest step has a result, which was there at `taken` and has been dealt with now."""
        step = self._in_flight.popleft()
        num_tokens = step.num_prefill_tokens + step.num_decode_tokens
        self._num_tokens += num_tokens
        self._num_seqs += step.num_seqs
        self._by_tokens[bisect_left(STEP_TOKEN_BOUNDS, num_tokens)] += 1
        self._by_seqs[bisect_left(STEP_SEQUENCE_BOUNDS, step.num_seqs)] += 1
        # The clocks of workers are others, and the times of several stages overlap.
        self._wait_s += max(0.0, taken - step.age_s - result.step_time_s)
        self._prepare_s += result.prepare_time_s
        self._forward_s += result.forward_time_s
        self._sample_s += result.sample_time_s
        self._idle_s += result.idle_time_s
        self._update_s += self._clock.now() - taken
        self._is_reported = False
        if self._has_followers:
            step = msgspec.structs.replace(step, age_s=taken, step_time_s=result.step_time_s)
            index = int(taken / BIN_S)
            before = self._bins.get(index)
            self._bins[index] = step if before is None else before.joined(step)
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
            self._idle_s,
        )

    def follow(self) -> None:
        """Tells of steps that end from now on."""
        self._has_followers = True

    def unfollow(self) -> None:
        self._has_followers = False
        self._bins.clear()

    def drain(self) -> StepStatistics | None:
        """The message that is due now, if any."""
        now = self._clock.now()
        if not self._bins or now < self._next_at:
            return None
        self._next_at = now + STATISTICS_INTERVAL_S
        bins = [msgspec.structs.replace(one, age_s=now - one.age_s) for one in self._bins.values()]
        self._bins.clear()
        return StepStatistics(bins)

    def is_report_due(self) -> bool:
        """True `REPORT_INTERVAL_S` after it was first asked about a step of which no load report has told."""
        now = self._clock.now()
        if self._report_at is None and not self._is_reported:
            self._report_at = now + REPORT_INTERVAL_S
        return self._report_at is not None and now >= self._report_at

    def reported(self) -> None:
        """A load report tells of all steps that have ended."""
        self._is_reported, self._report_at = True, None

    def next_event_at(self) -> float | None:
        """The instant at which `drain` returns a message or a report is due; None if no step has ended."""
        instants = (self._next_at if self._bins else None, self._report_at)
        return min((at for at in instants if at is not None), default=None)


class CacheReporter:
    """Tells frontends of all blocks at first, then of what has changed.

    Unlike events, updates leave out what comes and goes in between; a block in two pools is one.
    """

    def __init__(self, pools: Sequence[BlockPool], recorder: CacheRecorder, clock: Clock) -> None:
        """`pools` are those where a request finds blocks at next to no cost; they tell `recorder`."""
        self._pools = pools
        self._recorder = recorder
        self._clock = clock
        self._starts_anew = False
        self._next_at = clock.now()

    def follow(self) -> None:
        """Tells all followers everything anew, and changes from then on."""
        self._recorder.changed = dict.fromkeys(chain(*(pool.keys() for pool in self._pools)))
        self._starts_anew = True

    def unfollow(self) -> None:
        self._recorder.changed, self._starts_anew = None, False

    def drain(self) -> PrefixCacheUpdate | None:
        """The update that is due now, if any."""
        changed, now = self._recorder.changed, self._clock.now()
        if changed is None or self.next_event_at() is None or now < self._next_at:
            return None
        self._next_at = now + CACHE_INTERVAL_S
        stored: list[bytes] = []
        removed: list[bytes] = []
        for key in list(islice(changed, MAX_KEYS)):
            del changed[key]
            is_cached = any(pool.holds(key) for pool in self._pools)
            (stored if is_cached else removed).append(key[:SHORT_KEY_BYTES])
        starts_anew, self._starts_anew = self._starts_anew, False
        return PrefixCacheUpdate(b"".join(stored), b"".join(removed), starts_anew=starts_anew)

    def next_event_at(self) -> float | None:
        """The instant at which `drain` returns an update; None if nothing has changed."""
        return self._next_at if self._starts_anew or self._recorder.changed else None
