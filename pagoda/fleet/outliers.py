# SPDX-License-Identifier: Apache-2.0
"""Ejection of replicas: those that do worse than others get nothing new for a while, then slowly more again.

Replicas are judged by whether their requests get on, and how fast; each against the others, as what is slow for
one model is fast for another. Paces are compared for about equal work: for each power of two of tokens that a
replica computes between two signs of life of one request, the time that it takes. As in Envoy's outlier detection,
a replica that is judged again is ejected for longer.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable
from functools import cached_property
from typing import NamedTuple

from pagoda.ipc.clock import Clock

SILENCE_S = 3.0
"""A replica whose requests do not get on for this long, while those of others do, gets no new ones."""
STUCK_S = 15.0
"""A replica whose requests do not get on for this long loses them to others."""
SILENT_STEPS = 20
"""Both times are at least this many of the longest step of others: large models take their time."""
REMOTE_KV_S = 30.0
"""Further silence allowed where all requests wait for KV that another engine computes and sends."""
TIER_KV_S = 10.0
"""Further silence allowed where all requests may wait for KV that a tier has."""
TOKEN_S = 0.005
"""Further silence allowed for each token of the prompts at the replica, up to `CHUNK_S` or `ALL_CHUNKS_S`."""
CHUNK_S = 10.0
"""The most for prompts where a request waits for no KV: a step computes only so much at once."""
ALL_CHUNKS_S = 90.0
"""The most for prompts where all requests wait for KV."""
SLOWER = 5.0
"""A replica that takes this many times as long as others in the mean is too slow."""
SLOW_STEP_S = 0.05
"""A replica whose steps are this short is fast enough for anybody."""
FRESH_S = 30.0
"""Replicas that were heard longer ago are not compared."""
MAX_FAILURES = 2
"""A replica is ejected after this many unanswered requests in a row, with no request getting on in between."""
MAX_LOSSES = 2
"""A replica is ejected after losing all that it had this many times, no more than `FORGIVEN_S` apart."""
EJECTION_S = 5.0
"""Seconds that a replica is ejected the first time; the second time twice as many, and so on."""
MAX_EJECTION_S = 300.0
FORGIVEN_S = 60.0
"""Seconds without another ejection that take one off the count."""
RETURN_S = 10.0
"""Seconds from an ejection's end until a replica has its full share."""
_FIRST_SHARE = 0.05
_MIN_SAMPLES = 16
_WEIGHT = 0.1
"""Weight of the latest sample in a mean."""
_CLASSES = 20


class Ejection(NamedTuple):
    """A replica gets nothing new for a while."""

    replica: int
    duration_s: float
    reason: str
    """One clause."""


class Waiting(NamedTuple):
    """The requests that clients wait for at a replica."""

    since: float
    """Instant at which the wait for the first of the requests began."""
    num_prompt_tokens: int = 0
    """Prompt tokens of the requests that are before their first tokens there."""
    kv_s: float = 0.0
    """Seconds that the first of the requests may take to fetch KV; 0 where one fetches none."""

    def merge(self, other: Waiting | None) -> Waiting:
        """The wait for the requests of both, at one replica."""
        if other is None:
            return self
        return Waiting(
            min(self.since, other.since),
            self.num_prompt_tokens + other.num_prompt_tokens,
            min(self.kv_s, other.kv_s),
        )

    @property
    def patience_s(self) -> float:
        """Seconds that the replica may be silent, whatever others do."""
        most_s = ALL_CHUNKS_S if self.kv_s else CHUNK_S
        return SILENCE_S + self.kv_s + min(most_s, TOKEN_S * self.num_prompt_tokens)


WaitingAt = Callable[[int], Waiting | None]
"""Says what clients wait for at the replica of a number, None where none does; asked only about replicas that are
silent or slow."""


class ReplicaHealth:
    """The deeds of one replica. Records in the path of each token; `OutlierDetector` judges."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.join(None)

    def join(self, group: _PeerGroup | None) -> None:
        """Begins anew, as a member of `group`."""
        self.group = group
        self.heard_at = 0.0
        """Instant at which a request at the replica last got on."""
        self.num_failures = 0
        """Unanswered requests since then."""
        self.losses: list[float] = []
        self.probe: str | None = None
        """The request between whose signs of life the time is taken; None when it has left."""
        self.num_tokens = 0
        """Tokens that the replica has computed since the probe's last sign of life, for all its requests."""
        self.pace = _Pace()
        self.ejected_until = -math.inf
        """Instant at which the replica is back, or was."""
        self.num_ejections = 0

    @property
    def recovered_at(self) -> float:
        """Instant at which the replica has its full share again, or had."""
        return self.ejected_until + RETURN_S

    def progress(
        self, request_id: str, num_tokens: int, now: float, waited_s: float | None
    ) -> None:
        """Records that `num_tokens` more of a request are computed, after its client waited for `waited_s`; None
        where it waited for another replica, whose KV it needs.

        A client that takes its time does not make a replica slow: time in which nobody waits does not count.
        """
        self.heard_at = now
        self.num_failures = 0
        self.num_tokens += num_tokens
        if self.probe == request_id:
            if waited_s is not None:
                self.pace.add(self.num_tokens, waited_s)
        elif self.probe is not None:
            return
        self.probe, self.num_tokens = request_id, 0

    def work_for_others(self, num_tokens: int) -> None:
        """Records tokens that the replica has computed meanwhile for others than the requests that are judged."""
        self.num_tokens += num_tokens

    def is_ejected(self, now: float) -> bool:
        return now < self.ejected_until

    def share(self, now: float) -> float:
        """The share of requests that the replica gets of those that it would get otherwise: 0 while it is ejected,
        and 1 long after."""
        grown = (now - self.ejected_until) / RETURN_S
        return 0.0 if self.is_ejected(now) else min(1.0, max(_FIRST_SHARE, grown))


class _PeerGroup:
    """Replicas that are compared with each other."""

    def __init__(self) -> None:
        self.members: dict[ReplicaHealth, None] = {}
        self.ends: list[float] = []
        """A heap of when ejected members are back."""

    def num_ejected(self, now: float) -> int:
        while self.ends and self.ends[0] <= now:
            heapq.heappop(self.ends)
        return len(self.ends)


class OutlierDetector:
    """Judges replicas by what their `ReplicaHealth` has recorded. Has no timers: the caller decides when."""

    def __init__(self, clock: Clock, *, keeps_half: bool = True) -> None:
        """Half of a group at least is never ejected, unless `keeps_half` is False because others do the work of
        ejected replicas."""
        self._clock = clock
        self._keeps_half = keeps_half
        self._groups: defaultdict[Hashable, _PeerGroup] = defaultdict(_PeerGroup)

    def add(self, health: ReplicaHealth, group: Hashable) -> None:
        """Compares a replica with those of a group from now on; what it did in another group is forgotten."""
        self.remove(health)
        health.join(self._groups[group])
        self._groups[group].members[health] = None

    def remove(self, health: ReplicaHealth) -> None:
        """Forgets a replica, which may have been forgotten already."""
        group, now = health.group, self._clock.now()
        if group is not None:
            del group.members[health]
            if group.num_ejected(now) and health.is_ejected(now):
                group.ends.remove(health.ejected_until)
                heapq.heapify(group.ends)
        health.group = None

    def on_failure(self, health: ReplicaHealth) -> Ejection | None:
        """Counts a request left unanswered. A refusal is an answer, and so is an error of the request itself."""
        health.num_failures += 1
        if health.num_failures < MAX_FAILURES:
            return None
        return self._eject(health, f"{health.num_failures} requests in a row were left unanswered")

    def on_loss(self, health: ReplicaHealth) -> Ejection | None:
        """Counts that all the replica had is lost; it may come back."""
        now = self._clock.now()
        health.losses = [instant for instant in health.losses if now - instant < FORGIVEN_S] + [now]
        if len(health.losses) < MAX_LOSSES:
            return None
        return self._eject(health, f"it was lost {len(health.losses)} times in {FORGIVEN_S:g} s")

    def check(self, waiting: WaitingAt) -> tuple[list[Ejection], list[int]]:
        """Judges the replicas at which clients wait, all by what is known now.

        Returns also the numbers of replicas whose requests should go on elsewhere.
        """
        ejections: list[Ejection] = []
        stuck: list[int] = []
        for group in self._groups.values():
            comparison = _Comparison(group.members, waiting, self._clock.now())
            for health in comparison.suspects:
                reason = comparison.silence(health) or comparison.slowness(health)
                if comparison.is_stuck(health):
                    stuck.append(health.number)
                if reason and (ejection := self._eject(health, reason)) is not None:
                    ejections.append(ejection)
        return ejections, stuck

    def _eject(self, health: ReplicaHealth, reason: str) -> Ejection | None:
        """Ejects a replica, unless more of its group would be ejected than may be."""
        now, group = self._clock.now(), health.group
        if group is None or health.is_ejected(now):
            return None
        num_ejected = group.num_ejected(now)  # without this replica's last ejection, which is over
        if self._keeps_half and 2 * (num_ejected + 1) > len(group.members):
            return None
        if health.num_ejections:
            forgiven = int((now - health.ejected_until) / FORGIVEN_S)
            health.num_ejections -= min(health.num_ejections, forgiven)
        health.num_ejections += 1
        duration_s = min(MAX_EJECTION_S, EJECTION_S * health.num_ejections)
        health.ejected_until = now + duration_s
        health.num_failures = 0
        health.pace = _Pace()
        heapq.heappush(group.ends, health.ejected_until)
        return Ejection(health.number, duration_s, reason)


class _Comparison:
    """Facts about the replicas of a group, all of one instant, to compare each with the others."""

    def __init__(self, members: Iterable[ReplicaHealth], waiting: WaitingAt, now: float) -> None:
        self._waiting = waiting
        self.suspects: list[ReplicaHealth] = []
        """Members of which there may be a reason to eject them: few of those that do well."""
        self._slowest = [(0.0, -1), (0.0, -1)]
        """The longest steps, and whose they are."""
        self._silent: dict[ReplicaHealth, tuple[float, Waiting]] = {}
        """Members whose requests have not got on for long: for how many seconds, and what clients wait for."""
        self._fresh: list[ReplicaHealth] = []
        self._slow: set[ReplicaHealth] = set()
        """Fresh members whose steps are long enough to be compared."""
        self._is_any_heard = False
        for health in members:
            heard_s, longest_s = now - health.heard_at, health.pace.longest_s
            is_silent = heard_s >= SILENCE_S and self._note_silence(health, now)
            if now >= health.ejected_until:
                self._is_any_heard |= not is_silent
                if longest_s > self._slowest[1][0]:
                    self._slowest = sorted([*self._slowest, (longest_s, health.number)])[:0:-1]
                if heard_s < FRESH_S:
                    self._fresh.append(health)
                    if longest_s > SLOW_STEP_S and health.pace.num_samples >= _MIN_SAMPLES:
                        self._slow.add(health)
            if is_silent or health in self._slow:
                self.suspects.append(health)

    def _note_silence(self, health: ReplicaHealth, now: float) -> bool:
        wait = self._waiting(health.number)
        if wait is None or now - max(health.heard_at, wait.since) < SILENCE_S:
            return False
        self._silent[health] = now - max(health.heard_at, wait.since), wait
        return True

    @cached_property
    def _means_s(self) -> dict[int, list[float]]:
        """Sorted means of fresh replicas by class of work."""
        found: defaultdict[int, list[float]] = defaultdict(list)
        for health in self._fresh:
            for work, mean_s in health.pace.means_s.items():
                found[work].append(mean_s)
        for means_s in found.values():
            means_s.sort()
        return found

    def _is_silent(self, health: ReplicaHealth, steps: int, least_s: float = 0.0) -> bool:
        """True if requests have not got on for as long as that many of the longest step of others would take."""
        # When all others are silent too it is not because of this one.
        if health not in self._silent or not self._is_any_heard:
            return False
        step_s = next((s for s, number in self._slowest if number != health.number), 0.0)
        silence_s, wait = self._silent[health]
        return step_s > 0 and silence_s >= max(least_s, steps * step_s, wait.patience_s)

    def is_stuck(self, health: ReplicaHealth) -> bool:
        return self._is_silent(health, 2 * SILENT_STEPS, STUCK_S)

    def silence(self, health: ReplicaHealth) -> str:
        """The reason to eject a replica whose requests do not get on; empty where there is none."""
        if not self._is_silent(health, SILENT_STEPS):
            return ""
        return f"its requests have not got on for {self._silent[health][0]:.1f} s, and others' have"

    def slowness(self, health: ReplicaHealth) -> str:
        """The reason to eject a replica that takes longer than a middling other one; empty where there is none."""
        pace, mine_s, theirs_s, weight = health.pace, 0.0, 0.0, 0.0
        for work, share in pace.shares.items() if health in self._slow else ():
            others_s = self._median_of_others(work, pace.means_s[work])
            if others_s is not None:
                mine_s += share * pace.means_s[work]
                theirs_s += share * others_s
                weight += share
        is_slow = mine_s > SLOW_STEP_S * weight and mine_s >= SLOWER * theirs_s > 0
        if not is_slow or self._waiting(health.number) is None:
            return ""
        return f"it takes {mine_s / theirs_s:.1f} times as long as others for the same work"

    def _median_of_others(self, work: int, own_s: float) -> float | None:
        """The median of the means of a class, less a replica's own; None if no other is left."""
        means_s = self._means_s[work]
        num_others, own = len(means_s) - 1, bisect_left(means_s, own_s)
        if not num_others:
            return None
        middle = [(num_others - 1) // 2, num_others // 2]
        low, high = (means_s[i + (i >= own)] for i in middle)
        return (low + high) / 2


class _Pace:
    """The time that a replica takes for its work; the newest samples count most."""

    def __init__(self) -> None:
        self.means_s: dict[int, float] = {}
        """Means by class of work: powers of two of tokens."""
        self.shares: dict[int, float] = {}
        """The share of each class in the latest work."""
        self.num_samples = 0
        self.longest_s = 0.0
        """The highest of the means."""

    def add(self, num_tokens: int, duration_s: float) -> None:
        work = min(num_tokens.bit_length(), _CLASSES)
        mean_s = self.means_s.setdefault(work, duration_s)
        self.means_s[work] = mean_s + _WEIGHT * (duration_s - mean_s)
        self.longest_s = max(self.means_s.values())
        for other in self.shares:
            self.shares[other] *= 1 - _WEIGHT
        self.shares[work] = self.shares.get(work, 0.0) + _WEIGHT
        self.num_samples += 1
