"""Members of a group that are worse than the others for a while get nothing new, and then slowly more again.

Judged is what members do, not what they say of themselves: whether the requests that they have get on, and how
fast. As in Envoy's outlier detection, a member that is judged again is left out for longer, and never more than
half of a group are left out at once. Nobody is judged alone: what is slow for one model is fast for another.

How fast depends on how much is computed at once, so paces are compared for about equal work: for each power of
two of tokens that a member computes between two signs of life of one request, the time that it takes.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from statistics import median
from typing import NamedTuple

from pagoda.ipc.clock import Clock

SILENCE_S = 3.0
"""A member whose requests do not get on for so long, while others' do, gets no new ones."""
STUCK_S = 15.0
"""After so long, those that it has go on elsewhere."""
SILENT_STEPS = 20
"""Neither is shorter than so many times the longest step of others: large models take their time."""
REMOTE_KV_S = 30.0
"""Of silence more are allowed where all requests wait for KV that another engine computes and sends,"""
TIER_KV_S = 10.0
"""or may wait for KV that a tier has;"""
TOKEN_S = 0.005
"""and more for each token of the prompts there, up to"""
CHUNK_S = 10.0
"""where none waits for KV, since a step computes only so much at once, and"""
ALL_CHUNKS_S = 90.0
"""where all do."""
SLOWER = 5.0
"""Than others, in the mean, is too slow,"""
SLOW_STEP_S = 0.05
"""unless it is fast enough for anybody."""
FRESH_S = 30.0
"""What others took longer ago is not compared with."""
MAX_FAILURES = 2
"""In a row, with no request getting on in between."""
MAX_LOSSES = 2
"""Of all that a member had, no more than `FORGIVEN_S` apart."""
EJECTION_S = 5.0
"""The first time; the second time twice as long, and so on."""
MAX_EJECTION_S = 300.0
FORGIVEN_S = 60.0
"""Without being judged again takes one ejection off the count."""
RETURN_S = 10.0
"""From an ejection's end until a member has its full share."""
_FIRST_SHARE = 0.05
_MIN_SAMPLES = 16
_WEIGHT = 0.1
"""Of the latest sample in a mean."""
_CLASSES = 20


class Ejection(NamedTuple):
    """A member gets nothing new for a while."""

    member: int
    duration_s: float
    reason: str
    """One clause."""


class Waiting(NamedTuple):
    """What is waited for at a member."""

    since: float
    """When that began for the first of its requests."""
    num_prompt_tokens: int = 0
    """Of the requests that are before their first tokens there."""
    kv_s: float = 0.0
    """How long the first of its requests may take to fetch KV; 0 where one fetches none."""

    def beside(self, other: Waiting | None) -> Waiting:
        """Both, at one member."""
        if other is None:
            return self
        return Waiting(
            min(self.since, other.since),
            self.num_prompt_tokens + other.num_prompt_tokens,
            min(self.kv_s, other.kv_s),
        )

    @property
    def patience_s(self) -> float:
        """How long it may be silent, whatever others do."""
        most_s = ALL_CHUNKS_S if self.kv_s else CHUNK_S
        return SILENCE_S + self.kv_s + min(most_s, TOKEN_S * self.num_prompt_tokens)


class Verdicts(NamedTuple):
    ejected: list[Ejection]
    stuck: list[int]
    """Members whose requests should go on elsewhere."""


class OutlierDetector:
    """Is told what members do, and says who is left out. Has no timers: whoever asks decides when."""

    def __init__(self, clock: Clock, *, keeps_half: bool = True) -> None:
        """Half of a group at least is never left out, unless somebody else does the work of those that are."""
        self._clock = clock
        self._keeps_half = keeps_half
        self._members: dict[int, _Member] = {}

    def add(self, member: int, group: Hashable) -> None:
        """Members are compared with those of the same group."""
        self._members[member] = _Member(member, group)

    def regroup(self, member: int, group: Hashable) -> None:
        """It is to be compared with others; what it did as one of another kind is forgotten."""
        if self._members[member].group != group:
            self._members[member] = _Member(member, group)

    def remove(self, member: int) -> None:
        del self._members[member]

    # ---- what members do

    def end(self, member: int, request_id: str) -> None:
        """A request is not there any more."""
        one = self._members.get(member)
        if one is not None and one.probe == request_id:
            one.probe = None

    def progress(self, member: int, request_id: str, num_tokens: int, waited_s: float) -> None:
        """So many further tokens of a request are computed, after it was waited for so long.

        A client that takes its time does not make a member slow: that nobody waits meanwhile does not count.
        """
        one = self._members.get(member)
        if one is None:
            return
        one.heard_at = self._clock.now()
        one.num_failures = 0
        one.num_tokens += num_tokens
        if one.probe == request_id:
            one.pace.add(one.num_tokens, waited_s)
        elif one.probe is not None:
            return
        one.probe, one.num_tokens = request_id, 0

    def fail(self, member: int) -> Ejection | None:
        """It left a request unanswered. A refusal is an answer, and so is an error that the request has itself."""
        one = self._members.get(member)
        if one is None:
            return None
        one.num_failures += 1
        if one.num_failures < MAX_FAILURES:
            return None
        return self._eject(one, f"{one.num_failures} requests in a row were left unanswered")

    def lose(self, member: int) -> Ejection | None:
        """All that it had is lost; it may come back."""
        one = self._members.get(member)
        if one is None:
            return None
        now = self._clock.now()
        one.losses = [instant for instant in one.losses if now - instant < FORGIVEN_S] + [now]
        if len(one.losses) < MAX_LOSSES:
            return None
        return self._eject(one, f"it was lost {len(one.losses)} times in {FORGIVEN_S:g} s")

    # ---- what follows from it

    def check(self, waiting: Mapping[int, Waiting]) -> Verdicts:
        """Judges the members at which requests are waited for."""
        verdicts = Verdicts([], [])
        now = self._clock.now()
        for number, wait in waiting.items():
            one = self._members.get(number)
            if one is None:
                continue
            peers = self._peers(one)
            step_s = max((peer.pace.longest_s for peer in peers), default=0.0)
            silence_s = now - max(one.heard_at, wait.since)
            # When all are silent it is not because of one of them.
            if not step_s or all(self._is_silent(peer, waiting) for peer in peers):
                silence_s = 0.0
            if silence_s >= max(STUCK_S, 2 * SILENT_STEPS * step_s, wait.patience_s):
                verdicts.stuck.append(number)
            if self._is_out(one):
                continue
            slowness = one.pace.slowness(
                [peer.pace for peer in peers if now - peer.heard_at < FRESH_S]
            )
            reason = ""
            if silence_s >= max(SILENT_STEPS * step_s, wait.patience_s):
                reason = f"its requests have not got on for {silence_s:.1f} s, and others' have"
            elif slowness >= SLOWER:
                reason = f"it takes {slowness:.1f} times as long as others for the same work"
            ejection = self._eject(one, reason) if reason else None
            if ejection is not None:
                verdicts.ejected.append(ejection)
        return verdicts

    def share(self, member: int) -> float:
        """Of the requests that it would get otherwise: 0 while it is left out, and 1 long after."""
        one = self._members.get(member)
        if one is None or one.out_until is None:
            return 1.0
        back_s = self._clock.now() - one.out_until
        if back_s < 0:
            return 0.0
        return min(1.0, max(_FIRST_SHARE, back_s / RETURN_S))

    def _is_out(self, one: _Member) -> bool:
        return one.out_until is not None and self._clock.now() < one.out_until

    def _is_silent(self, one: _Member, waiting: Mapping[int, Waiting]) -> bool:
        wait = waiting.get(one.number)
        return wait is not None and self._clock.now() - max(one.heard_at, wait.since) >= SILENCE_S

    def _peers(self, one: _Member) -> list[_Member]:
        """Of its group, without it and those that are left out."""
        return [
            other
            for other in self._members.values()
            if other is not one and other.group == one.group and not self._is_out(other)
        ]

    def _eject(self, one: _Member, reason: str) -> Ejection | None:
        """Unless more of its group would be left out than may be."""
        now = self._clock.now()
        group = [other for other in self._members.values() if other.group == one.group]
        num_out = sum(self._is_out(other) for other in group)
        is_one_too_many = self._keeps_half and 2 * (num_out + 1) > len(group)
        if self._is_out(one) or is_one_too_many:
            return None
        if one.out_until is not None:
            one.num_ejections -= min(one.num_ejections, int((now - one.out_until) / FORGIVEN_S))
        one.num_ejections += 1
        duration_s = min(MAX_EJECTION_S, EJECTION_S * one.num_ejections)
        one.out_until = now + duration_s
        one.num_failures = 0
        one.pace = _Pace()
        return Ejection(one.number, duration_s, reason)


class _Member:
    """What is known about one."""

    def __init__(self, number: int, group: Hashable) -> None:
        self.number = number
        self.group = group
        self.heard_at = 0.0
        """When a request of it last got on."""
        self.num_failures = 0
        """Since then."""
        self.losses: list[float] = []
        self.probe: str | None = None
        """The request between whose signs of life the time is taken."""
        self.num_tokens = 0
        """That the member has computed since then, for all its requests."""
        self.pace = _Pace()
        self.out_until: float | None = None
        """When it is back, or was; None if it was never left out."""
        self.num_ejections = 0


class _Pace:
    """How long a member takes for how much, with the newest counting most."""

    def __init__(self) -> None:
        self.means_s: dict[int, float] = {}
        """By class of work, powers of two of tokens."""
        self._shares: dict[int, float] = {}
        """How much of the latest work was of a class."""
        self._num_samples = 0

    def add(self, num_tokens: int, duration_s: float) -> None:
        work = min(num_tokens.bit_length(), _CLASSES)
        mean_s = self.means_s.setdefault(work, duration_s)
        self.means_s[work] = mean_s + _WEIGHT * (duration_s - mean_s)
        for other in self._shares:
            self._shares[other] *= 1 - _WEIGHT
        self._shares[work] = self._shares.get(work, 0.0) + _WEIGHT
        self._num_samples += 1

    @property
    def longest_s(self) -> float:
        return max(self.means_s.values(), default=0.0)

    def slowness(self, peers: list[_Pace]) -> float:
        """Its time over that of a middling peer for the same work; 0.0 where there is nothing to complain of."""
        if self._num_samples < _MIN_SAMPLES:
            return 0.0
        mine_s = theirs_s = weight = 0.0
        for work, share in self._shares.items():
            others = [peer.means_s[work] for peer in peers if work in peer.means_s]
            if others:
                mine_s += share * self.means_s[work]
                theirs_s += share * median(others)
                weight += share
        return mine_s / theirs_s if mine_s > SLOW_STEP_S * weight and theirs_s > 0 else 0.0
