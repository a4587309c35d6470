"""Which replica takes a request: pure functions of the request and of what is known about the replicas.

None of them asks for the time or draws random numbers of its own: the same arguments give the same choice in
every process and in every simulation. Ties go round by the number of the request, so that idle replicas share
the work.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple

import msgspec


class Arrival(msgspec.Struct, frozen=True):
    """A request that needs a replica, for the first time or again."""

    request_id: str
    number: int
    """How many requests were placed before it."""
    num_tokens: int
    """Prompt and output so far: what has to be computed where nothing of it is cached."""
    session: str | None = None


class Candidate(msgspec.Struct, frozen=True):
    """A replica that takes requests."""

    replica: str
    """Its name, which stays its own however many others are there, in all routers and when it comes back."""
    pending_tokens: int
    """The work of the requests that it has."""
    num_cached_tokens: int = 0
    """Leading tokens of the arrival that are believed to be in its prefix cache."""
    num_sharing: int = 0
    """Requests there that begin with these tokens too."""


_COPY_COST = 3
"""What others lose by each token that is computed though it is cached elsewhere, in tokens of pending work. With
conversations, hits grow up to about here, and first tokens come no later."""

Choose = Callable[[Arrival, Sequence[Candidate]], int]
"""The index of the candidate that takes the arrival; there is at least one."""


class Policy(NamedTuple):
    choose: Choose
    uses_prefixes: bool = False
    """Whether it needs `Candidate.num_cached_tokens`, which costs a digest over the prompt."""


def round_robin(arrival: Arrival, candidates: Sequence[Candidate]) -> int:
    """One after the other, whatever they have to do."""
    return arrival.number % len(candidates)


def least_pending_tokens(arrival: Arrival, candidates: Sequence[Candidate]) -> int:
    """The one with the least work."""
    return _least([candidate.pending_tokens for candidate in candidates], arrival.number)


def power_of_two(arrival: Arrival, candidates: Sequence[Candidate]) -> int:
    """The one with less work of two drawn at random (Mitzenmacher 2001); the request's id is the seed."""
    count = len(candidates)
    if count == 1:
        return 0
    draw = _digest(arrival.request_id)
    first = draw % count
    second = (first + 1 + draw // count % (count - 1)) % count
    return min(first, second, key=lambda index: candidates[index].pending_tokens)


def prefix_affinity(arrival: Arrival, candidates: Sequence[Candidate]) -> int:
    """The one with the least work before the first token; what of it could be spared elsewhere counts more.

    To compute what is cached elsewhere costs more than the time of this request: those behind it wait too, and
    other prefixes are evicted for the copy. So a cached prefix draws a request to its replica until that is behind
    another by several times as many tokens as are cached. A copy of a prefix that many requests have in common
    will serve the next ones too, so it costs the less the more of them there are.
    """
    work = [
        candidate.pending_tokens - _worth_of_a_copy(candidate) * candidate.num_cached_tokens
        for candidate in candidates
    ]
    return _least(work, arrival.number)


def _worth_of_a_copy(candidate: Candidate) -> float:
    """In tokens of pending work, for each cached token."""
    return 1 + _COPY_COST / (1 + candidate.num_sharing)


def session_affinity(arrival: Arrival, candidates: Sequence[Candidate]) -> int:
    """The session's own replica; requests without a session go where the least work is.

    By rendezvous hashing (Thaler and Ravishankar 1998): when a replica goes, only its own sessions move, and
    when it is back they return.
    """
    if arrival.session is None:
        return least_pending_tokens(arrival, candidates)
    session = arrival.session
    return max(
        range(len(candidates)),
        key=lambda index: _digest(f"{candidates[index].replica}:{session}"),
    )


def _least(work: Sequence[float], number: int) -> int:
    """The index of the least; among equals, each gets its turn."""
    least = min(work)
    equals = [index for index, value in enumerate(work) if value == least]
    return equals[number % len(equals)]


def _digest(text: str) -> int:
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little")


PolicyName = Literal[
    "prefix-affinity", "least-pending-tokens", "power-of-two", "session-affinity", "round-robin"
]
DEFAULT_POLICY: PolicyName = "prefix-affinity"

POLICIES: Mapping[PolicyName, Policy] = {
    "prefix-affinity": Policy(prefix_affinity, uses_prefixes=True),
    "least-pending-tokens": Policy(least_pending_tokens),
    "power-of-two": Policy(power_of_two),
    "session-affinity": Policy(session_affinity),
    "round-robin": Policy(round_robin),
}
