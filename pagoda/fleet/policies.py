# SPDX-License-Identifier: Apache-2.0
"""Routing policies: pure functions that choose the replica of a request, without a clock or random numbers.

Small fleets are looked at as a whole. Of a large one, the policy first names a few replicas that are found without
a look at all others (`Policy.shortlist`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from typing import Literal, NamedTuple

import msgspec

from pagoda.fleet.placement import ReplicaSlot
from pagoda.fleet.replica_pool import Shortlist, stable_hash


class RoutingRequest(msgspec.Struct, frozen=True):
    request_id: str
    number: int
    """Number of requests placed before this one."""
    session: str | None = None


class Candidate(msgspec.Struct, frozen=True):
    """The load of a replica that takes requests, seen from one request."""

    replica: str
    """The name, which stays the same however many replicas there are, in all routers, and when it comes back."""
    pending_tokens: int
    """Work of the replica's requests, and the tokens of waiting that its distance and price are worth."""
    num_cached_tokens: int = 0
    """Leading tokens of the request that are believed to be in the replica's prefix cache."""
    num_sharing: int = 0
    """Requests at the replica that begin with these tokens too."""


_COPY_COST = 3
"""Cost, in pending tokens, of computing one token that another replica has cached. With conversations, hits grow
up to about here, and first tokens come no later."""
_NUM_LEAST = 2
"""Replicas with the least work that a large fleet's shortlist has."""
NUM_HOLDERS = 8
"""Replicas with a prefix of the request that a large fleet's shortlist has."""

_MAX_LOOKS = 32
"""Replicas that are looked at for one that has not refused the request."""


class Policy(NamedTuple):
    choose: Callable[[RoutingRequest, Sequence[Candidate]], int]
    """Returns the index of the candidate that takes the request; there is at least one."""
    shortlist: Callable[[RoutingRequest, Shortlist], Iterable[ReplicaSlot]]
    uses_prefixes: bool = False
    """The policy needs `Candidate.num_cached_tokens`, which costs a digest over the prompt."""


def round_robin(request: RoutingRequest, candidates: Sequence[Candidate]) -> int:
    """One replica after the other, whatever they have to do."""
    return request.number % len(candidates)


def least_pending_tokens(request: RoutingRequest, candidates: Sequence[Candidate]) -> int:
    return _least([candidate.pending_tokens for candidate in candidates], request.number)


def power_of_two(request: RoutingRequest, candidates: Sequence[Candidate]) -> int:
    """The replica with less work of two drawn at random (Mitzenmacher 2001); the request's id is the seed."""
    num_candidates = len(candidates)
    if num_candidates == 1:
        return 0
    draw = stable_hash(request.request_id)
    first = draw % num_candidates
    second = (first + 1 + draw // num_candidates % (num_candidates - 1)) % num_candidates
    return min(first, second, key=lambda index: candidates[index].pending_tokens)


def prefix_affinity(request: RoutingRequest, candidates: Sequence[Candidate]) -> int:
    """The replica with the least work before the first token, where cached tokens count more than their work.

    To compute what another replica has cached costs more than the time of this request: the requests behind it
    wait too, and other prefixes are evicted for the copy. So a cached prefix draws a request to its replica until
    that is behind another by several times as many tokens as are cached. A copy of a prefix that many requests
    have in common will serve the next ones too, so the copy costs the less the more of them there are.
    """
    work = [
        one.pending_tokens - (1 + _COPY_COST / (1 + one.num_sharing)) * one.num_cached_tokens
        for one in candidates
    ]
    return _least(work, request.number)


def session_affinity(request: RoutingRequest, candidates: Sequence[Candidate]) -> int:
    """The session's own replica; requests without a session go where the least work is.

    The replica is found by rendezvous hashing (Thaler and Ravishankar 1998): when a replica goes, only its own
    sessions move, and when it is back they return.
    """
    if request.session is None:
        return least_pending_tokens(request, candidates)
    session = request.session
    return max(
        range(len(candidates)),
        key=lambda index: stable_hash(f"{candidates[index].replica}:{session}"),
    )


def _least(work: Sequence[float], number: int) -> int:
    """The index of the least; among equals, each gets its turn."""
    least = min(work)
    equals = [index for index, value in enumerate(work) if value == least]
    return equals[number % len(equals)]


# ---- of a large fleet


def _next(request: RoutingRequest, fleet: Shortlist) -> Iterable[ReplicaSlot]:
    return islice(fleet.at(range(request.number, request.number + _MAX_LOOKS)), 1)


def _least_loaded(_request: RoutingRequest, fleet: Shortlist) -> Iterable[ReplicaSlot]:
    return fleet.least_loaded(_NUM_LEAST)


def _two_drawn(request: RoutingRequest, fleet: Shortlist) -> Iterable[ReplicaSlot]:
    draw = stable_hash(request.request_id)
    first, step = draw % 2**32, 1 + draw // 2**32
    return islice(dict.fromkeys(fleet.at(range(first, first + _MAX_LOOKS * step, step))), 2)


def _home(request: RoutingRequest, fleet: Shortlist) -> Iterable[ReplicaSlot]:
    if request.session is None:
        return fleet.least_loaded(_NUM_LEAST)
    return fleet.home_of(request.session)


def _with_prefix(_request: RoutingRequest, fleet: Shortlist) -> Iterable[ReplicaSlot]:
    return dict.fromkeys([*fleet.with_prefix(), *fleet.least_loaded(_NUM_LEAST)])


PolicyName = Literal[
    "prefix-affinity", "least-pending-tokens", "power-of-two", "session-affinity", "round-robin"
]
DEFAULT_POLICY: PolicyName = "prefix-affinity"

POLICIES: Mapping[PolicyName, Policy] = {
    "prefix-affinity": Policy(prefix_affinity, _with_prefix, uses_prefixes=True),
    "least-pending-tokens": Policy(least_pending_tokens, _least_loaded),
    "power-of-two": Policy(power_of_two, _two_drawn),
    "session-affinity": Policy(session_affinity, _home),
    "round-robin": Policy(round_robin, _next),
}
