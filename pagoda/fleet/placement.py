# SPDX-License-Identifier: Apache-2.0
"""State of a dispatcher: its requests with their tokens so far, its replicas, and the replica of each request."""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from pagoda.errors import EngineDeadError, EngineLostError, PagodaError
from pagoda.fleet.endpoint import ReplicaState
from pagoda.fleet.load_tracker import ReplicaWork, RequestWork
from pagoda.fleet.outliers import REMOTE_KV_S, TIER_KV_S, ReplicaHealth, Waiting
from pagoda.fleet.prefix_index import PrefixIndex
from pagoda.fleet.replica import Replica
from pagoda.messages.frontend import EngineReady, FinishReason, GenerateRequest, TokenChunk
from pagoda.messages.load import LoadReport
from pagoda.messages.worker_config import Role

QUARANTINE_CRASHES = 2
"""A request with this crash count is tried while no other such request is, so that a request that kills
engines is told from requests that were only near it."""
LONE_CRASHES = QUARANTINE_CRASHES + 1
"""A request with this crash count is tried at a replica that has no other request."""
MAX_CRASHES = LONE_CRASHES + 1
"""A request that crashed an engine that had no other request is not tried again."""


class TrackedState(enum.Enum):
    QUEUED = enum.auto()
    """No replica is known to have computed anything of the request."""
    COMPUTING = enum.auto()
    """The replica has told that it computes the request."""
    MOVING = enum.auto()
    """The replica was told to end the request, so that another one takes it."""
    ABORTED = enum.auto()
    """The request was ended by its client or an operator."""


@dataclass(eq=False, slots=True)
class Placement:
    """A request at one replica, from the choice of the replica until the request leaves there."""

    slot: ReplicaSlot
    work: RequestWork
    began_at: float
    """Instant of the choice."""
    keys: list[int]
    """Keys that the replica's `PrefixIndex` counts for the request, under `number`."""
    number: int
    num_told_tokens: int
    """Prompt tokens that the replica tells it has in its cache."""
    after_ns: int
    """`ReplicaSlot.latest_ns` when the request was sent."""
    fetches_kv: bool
    """True if the replica was told that another engine has the KV of the prompt."""
    num_tokens: int = 0
    """Tokens of the answer that came from the replica."""
    waits_since: float | None = None
    """Instant at which the replica was last asked for more; None while the client does not ask."""

    def waiting(self, block_size: int) -> Waiting | None:
        """The wait of the client; None if it does not wait."""
        if self.waits_since is None:
            return None
        # The first token may be that of the engine which computed the prompt.
        if self.num_tokens > 1:
            return Waiting(self.waits_since)
        num_tokens = self.work.num_tokens
        kv_s = REMOTE_KV_S if self.fetches_kv else TIER_KV_S
        return Waiting(self.waits_since, num_tokens, kv_s if num_tokens > block_size else 0.0)


@dataclass(frozen=True)
class Counted:
    """A request that is counted at a replica, to which somebody else brings it."""

    slot: ReplicaSlot
    work: RequestWork

    def began(self) -> None:
        """Counts that the answer has begun: the prompt is computed."""
        self.work.prompt_progress(self.work.num_tokens)


class TrackedRequest:
    """A request, the tokens so far, and the replica that has it."""

    def __init__(self, request: GenerateRequest, accepted_at: float) -> None:
        self.request = request
        self.request_id = request.request_id
        self.state = TrackedState.QUEUED
        self.token_ids = list(request.output_token_ids)
        self.num_scored_tokens = request.num_scored_tokens
        """Prompt tokens whose log-probabilities went to the client."""
        self.accepted_at = accepted_at
        self.placement: Placement | None = None
        """The replica that has the request; None while it waits for one."""
        self.deadline = None if request.timeout_s is None else accepted_at + request.timeout_s
        """Instant at which the request ends, complete or not."""
        self.ending: PagodaError | None = None
        """The reason that the request was ended here, which its client gets instead of a last chunk."""
        self.has_begun = request.returns
        """An engine has told that it computes the request, so it does not wait any more."""
        self.returns = request.returns
        """An engine took the request before, so none refuses it for want of room any more."""
        self.has_waited = False
        """The request was accepted while no engine ran: it is not refused for want of room either, but waits."""
        self.is_held = False
        """The request is part of a body that is taken, and waits until more of it may wait at engines."""
        self.keys: list[int] | None = None
        """Short keys of the blocks of the prompt; None until they are needed."""
        self.num_cached_tokens: int | None = None
        """Cached tokens that the first engine found; those of later ones say nothing about the client's prompt."""
        self.refusals: dict[int, int] = {}
        """Numbers of replicas that were full, and after how many seconds to try them again."""
        self.crash_count = 0
        """Engines that died while they may have computed the request, since its last token."""
        self.blamed_up_to = 0
        """The crash count to which the loss of the engine or worker that has the request may raise it; 0 while
        there is none, and if it is no fault of the request."""
        self.received_ns = 0
        """Instant of the latest chunk, as `TokenChunk.received_ns`; 0 before the first."""
        self.problem = ""
        """The reason that the request is given up, as a sentence."""
        self._woken = asyncio.Event()

    @property
    def num_tokens(self) -> int:
        """Tokens of the request so far, with what an encoder computes for it."""
        return self.request.num_prompt_positions + len(self.token_ids)

    @property
    def is_suspect(self) -> bool:
        return self.crash_count >= QUARANTINE_CRASHES

    @property
    def return_order(self) -> tuple[bool, int]:
        """Sorts requests that lost their engine: those that have begun before others, and of these first who got
        nothing for longest, so that pauses stay short when engines die again and again."""
        return not self.has_begun, self.received_ns

    @property
    def is_over(self) -> bool:
        """True if the request is not tried again."""
        return (
            self.state is TrackedState.ABORTED
            or self.crash_count >= MAX_CRASHES
            or bool(self.problem)
        )

    @property
    def moves_if_aborted(self) -> bool:
        """True if the request goes on elsewhere when its replica ends it. A prompt that is computed for another
        engine ends when that does not want it any more."""
        if self.state is TrackedState.ABORTED:
            return False
        return self.state is TrackedState.MOVING or not self.request.holds_kv

    def value(self, now: float) -> GenerateRequest:
        """The request as a replica is given it: with the tokens so far, and the time that is left."""
        request = self.request
        if self.deadline is not None:
            left_s = max(0.0, self.deadline - now)
            request = msgspec.structs.replace(request, timeout_s=left_s)
        if not self.returns:
            return request
        has_moved_on = len(self.token_ids) > len(request.output_token_ids)
        return msgspec.structs.replace(
            request,
            output_token_ids=list(self.token_ids),
            num_scored_tokens=self.num_scored_tokens,
            returns=True,
            # The KV held there ends with a token that has come already.
            kv_source=None if has_moved_on else request.kv_source,
        )

    def final_chunk(self) -> TokenChunk:
        """The last chunk of a request that is not tried again."""
        if self.state is TrackedState.ABORTED:
            return TokenChunk(self.request_id, [], FinishReason.ABORT)
        deaths = f"{self.crash_count} engines in a row died while this request was running."
        return TokenChunk(self.request_id, [], FinishReason.ERROR, error=self.problem or deaths)

    def count_crash(self) -> None:
        """Counts the loss for which the request is blamed, if it is."""
        if self.crash_count < self.blamed_up_to:
            self.crash_count += 1
        self.blamed_up_to = 0

    async def wait(self, timeout_s: float | None = None) -> bool:
        """Returns when `wake` is called or the time is over; False for the latter."""
        self._woken.clear()
        try:
            async with asyncio.timeout(timeout_s):
                return await self._woken.wait()
        except TimeoutError:
            return False

    def wake(self) -> None:
        self._woken.set()


class Fitness(enum.Enum):
    """Classes of replicas that take requests, best first."""

    FIT = enum.auto()
    RETURNING = enum.auto()
    """Ejected, or back from that and not yet with its full share."""
    DEGRADED = enum.auto()
    """The worker is being replaced."""
    FULL = enum.auto()
    """The replica has refused a request for want of room. Only replicas of large fleets get on this list."""


class ReplicaSlot:
    """A replica and what is known about it."""

    def __init__(self, number: int, name: str, replica: Replica, prefixes: PrefixIndex) -> None:
        self.number = number
        """Counts all replicas that the dispatcher ever had; never given again."""
        self.name = name
        self.replica = replica
        self.prefixes = prefixes
        self.health = ReplicaHealth(number)
        self.work = ReplicaWork(number)
        self.requests: dict[TrackedRequest, Placement] = {}
        """Requests at the replica, in the order in which they came."""
        self.num_streams = 0
        """Requests at the replica whose answers have begun."""
        self.limits: EngineReady | None = None
        """The limits that the fleet's sums have; None before the replica has started."""
        self.fitness: Fitness | None = None
        """The list that the replica is in; None while it takes no requests."""
        self.full_until = 0.0
        """Instant until which the replica counts as full."""
        self.is_leaving = False
        self.was_ready = False
        self.had_engine = False
        self.num_losses = 0
        """Number of times that the replica's engine was lost."""
        self.left = asyncio.Event()
        """Set whenever a request has left the replica."""
        self.unwatch: Callable[[], None] = lambda: None
        self.unsubscribe: Callable[[], None] | None = None
        """Ends the updates of the replica's cache; None while there are none."""
        self.latest_ns = 0
        """Instant at which the latest chunks came, on the clock of `TokenChunk.received_ns`."""
        self._earlier_ns = 0
        """Instant at which the chunks before those came."""
        self.quarantined_for: TrackedRequest | None = None
        """The only request that the replica takes, as it is tried alone; None for all requests."""

    @property
    def role(self) -> Role:
        return Role.NONE if self.limits is None else self.limits.role

    def waiting(self) -> Waiting | None:
        """The requests that clients wait for; None where nobody waits, or the replica computes nothing."""
        if not self.requests or self.limits is None:
            return None
        if self.replica.state is not ReplicaState.READY:
            return None
        total: Waiting | None = None
        for placement in self.requests.values():
            one = placement.waiting(self.limits.block_size)
            if one is not None:
                total = one.merge(total)
        return total

    def received(self, received_ns: int) -> None:
        """Notes when chunks of a new message came."""
        self._earlier_ns, self.latest_ns = self.latest_ns, received_ns

    def may_have_computed(self) -> set[TrackedRequest]:
        """Requests that the engine may have had in a step, or had just received, when it was lost.

        An engine tells what it computes only after a step. So besides requests that it has told of, as many others
        count as may have got a place since, first come first; and requests that it may have received since it last
        told anything: two messages after one was sent, the engine had handled it and lived.
        """
        there = [r for r in self.requests if self.replica.has_request(r.request_id)]
        computing = [r for r in there if r.state is not TrackedState.QUEUED]
        queued = [r for r in there if r.state is TrackedState.QUEUED]
        queued.sort(key=lambda tracked: tracked.request.priority)
        max_num_seqs = 1 if self.limits is None else self.limits.max_num_seqs
        num_places = max(1, max_num_seqs - len(computing))
        unread = [r for r in queued if self.requests[r].after_ns >= self._earlier_ns]
        return {*computing, *queued[:num_places], *unread}

    async def load(self) -> LoadReport | None:
        """The report of the replica; None if it does not answer."""
        try:
            return await self.replica.load()
        except (TimeoutError, EngineLostError, EngineDeadError):
            return None


def has_part_in(role: Role, request: GenerateRequest) -> bool:
    """True if requests like this one are meant for replicas of this role in prefill/decode handoff."""
    if request.holds_kv:
        return role.holds_kv
    if request.kv_source is not None:
        return role.fetches_kv
    return role not in (Role.PREFILL, Role.STANDBY)
