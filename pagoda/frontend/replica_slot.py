"""A replica as a dispatcher sees it."""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Callable

from pagoda.errors import EngineDeadError, EngineLostError
from pagoda.frontend.endpoint import ReplicaState
from pagoda.frontend.load_tracker import ReplicaWork
from pagoda.frontend.outliers import ReplicaHealth, Waiting
from pagoda.frontend.prefix_index import PrefixIndex
from pagoda.frontend.replica import Replica
from pagoda.frontend.tracked_request import Placement, RequestState, TrackedRequest
from pagoda.messages.frontend import EngineReady, GenerateRequest
from pagoda.messages.load import LoadReport
from pagoda.messages.worker_config import Role


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
        self.crash_suspects: set[TrackedRequest] = set()
        """Requests that the lost engine may have computed."""

    @property
    def role(self) -> Role:
        return Role.NONE if self.limits is None else self.limits.role

    def waiting(self) -> Waiting | None:
        """The requests that clients wait for; None where nobody waits, or the replica computes nothing."""
        if self.limits is None or self.replica.state is not ReplicaState.READY:
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
        computing = [r for r in self.requests if r.state is not RequestState.QUEUED]
        queued = [r for r in self.requests if r.state is RequestState.QUEUED]
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
    return role is not Role.PREFILL
