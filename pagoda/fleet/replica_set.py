# SPDX-License-Identifier: Apache-2.0
"""The replicas of a dispatcher: which there are, what they can take together, and which takes a request."""

from __future__ import annotations

import heapq
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import attrgetter
from typing import TypeVar

import msgspec

from pagoda.fleet.endpoint import ReplicaState
from pagoda.fleet.load_tracker import ReplicaWork
from pagoda.fleet.outliers import OutlierDetector
from pagoda.fleet.placement import Fitness, ReplicaSlot, TrackedRequest, has_part_in
from pagoda.fleet.policies import NUM_HOLDERS, Candidate, Policy, RoutingRequest
from pagoda.fleet.prefix_index import CacheUnion, PrefixIndex
from pagoda.fleet.replica import Replica
from pagoda.fleet.replica_pool import GOLDEN_RATIO, RolePool, Shortlist
from pagoda.ipc.clock import Clock
from pagoda.kv.layout import KVLayout
from pagoda.messages.frontend import MAX_ROUTERS, EngineReady, GenerateRequest
from pagoda.messages.ranges import MAX_ITEMS, capped
from pagoda.messages.sampling_params import ALL_LOGPROBS
from pagoda.messages.worker_config import Role

T = TypeVar("T")

_NUM_IDLE_HELPERS = 2
SMALL_FLEET = 16
"""The largest fleet of which all replicas are looked at for each request; of a larger one it is a shortlist."""


class ReplicaSet:
    """Keeps sums and lists up to date as replicas change, so that nothing looks at all replicas for one
    request."""

    def __init__(
        self,
        policy: Policy,
        cache: CacheUnion,
        outliers: OutlierDetector,
        clock: Clock,
    ) -> None:
        self.policy = policy
        self._cache = cache
        self._outliers = outliers
        self._clock = clock
        self.on_room: Callable[[int], None] = lambda _: None
        """Listener for replicas that begin to take requests, called with how many may find room there."""
        self._slots: dict[int, ReplicaSlot] = {}
        self._by_replica: dict[Replica, ReplicaSlot] = {}
        self._names: set[str] = set()
        self._num_added = 0
        self._num_placed = 0
        self._pools = {role: RolePool(role) for role in Role}
        self._limits: Counter[EngineReady] = Counter()
        """The number of replicas with the same limits, apart from the ids in them."""
        self._routers: Counter[str] = Counter()
        """Ids of routers, and behind how many replicas they are."""
        self._sum: EngineReady | None = None
        """The sum of limits, or the last one of replicas that have gone; None when it has to be made anew."""
        self._held: dict[TrackedRequest, ReplicaSlot] = {}
        """The replicas that take no other request than this one."""
        self._returns: list[tuple[float, int]] = []
        """A heap of when replicas have room or their full share again, and their numbers."""

    def __len__(self) -> int:
        return len(self._slots)

    def __iter__(self) -> Iterator[ReplicaSlot]:
        return iter(self._slots.values())

    def __contains__(self, slot: ReplicaSlot) -> bool:
        return slot.number in self._slots

    def __getitem__(self, replica: Replica) -> ReplicaSlot:
        return self._by_replica[replica]

    def get(self, replica: Replica) -> ReplicaSlot | None:
        return self._by_replica.get(replica)

    def by_number(self, number: int) -> ReplicaSlot:
        return self._slots[number]

    def prefix(self, slot: ReplicaSlot) -> str:
        """The replica's name as the beginning of a sentence; empty for the only one without a name."""
        if slot.replica.name:
            return f"host {slot.name}: "
        return "" if len(self._slots) == 1 else f"replica {slot.name}: "

    def new_slot(self, replica: Replica) -> ReplicaSlot:
        """A slot for a replica that may not have started yet."""
        number = self._num_added
        self._num_added += 1
        name = replica.name or str(number)
        if name in self._names:
            name = f"{name}#{number}"
        slot = ReplicaSlot(number, name, replica, PrefixIndex(0, replica=number, union=self._cache))
        self._slots[number] = self._by_replica[replica] = slot
        self._names.add(name)
        return slot

    def remove(self, slot: ReplicaSlot) -> None:
        if slot.held_for is not None:
            self.release(slot.held_for)
        self._list(slot, None)
        del self._slots[slot.number], self._by_replica[slot.replica]
        self._names.discard(slot.name)
        self._outliers.remove(slot.health)
        self._count(slot.limits, -1)

    # ---- limits

    @property
    def limits(self) -> EngineReady:
        """The limits of all replicas together, of requests that each of them can take.

        Without any replica the last limits hold: requests wait for another one of the same kind.

        Raises RuntimeError if no replica has ever started.
        """
        if not self.has_limits:
            raise RuntimeError("The replicas have not started.")
        if self._sum is None:
            self._sum = _sum_of(self._limits, self._routers)
        return self._sum

    @property
    def has_limits(self) -> bool:
        return bool(self._limits) or self._sum is not None

    def take_limits(self, slot: ReplicaSlot) -> None:
        """Takes the limits of a replica that has started into the sums, where they are others than before."""
        old, new = slot.limits, slot.replica.limits
        if old == new:
            return
        layout = KVLayout(new.block_size, () if new.kv_group is None else [new.kv_group])
        self._list(slot, None)
        self._count(new, 1)
        self._count(old, -1)
        slot.limits = new
        self._cache.layout = layout
        slot.prefixes.resize(new.num_blocks)
        if old is None or old.role is not new.role:
            self._outliers.add(slot.health, new.role)
        self.refit(slot)

    def _count(self, limits: EngineReady | None, change: int) -> None:
        if limits is None:
            return
        self._pools[limits.role].room += change * (limits.max_num_seqs + limits.max_num_waiting)
        before = self.limits if change < 0 and len(self._limits) == 1 else None
        _add(self._limits, msgspec.structs.replace(limits, host_id="", routers=()), change)
        for router in limits.routers:
            _add(self._routers, router, change)
        self._sum = None if self._limits else before

    def room_for(self, request: GenerateRequest) -> int:
        """Requests of this kind that all replicas meant for them can have, running and waiting."""
        room = sum(p.room for p in self._pools.values() if has_part_in(p.role, request))
        return room or self.limits.max_num_seqs + self.limits.max_num_waiting

    @property
    def max_queued_tokens(self) -> int:
        """Prompt tokens of requests that have not begun, for all replicas: those that may wait there, and those
        that begin at once, of which replicas tell after a step."""
        limits = self.limits
        return limits.max_num_waiting_tokens + limits.num_blocks * limits.block_size

    # ---- who takes requests

    @property
    def num_takers(self) -> int:
        return sum(pool.num_takers for pool in self._pools.values())

    @property
    def num_ready(self) -> int:
        return sum(pool.num_ready for pool in self._pools.values())

    def least_pending_tokens(self) -> int | None:
        """The least work of a replica that takes requests, computes and is not ejected; None if there is none."""
        self._refit_returned()
        works: list[ReplicaWork] = []
        for pool in self._pools.values():
            works += pool.least.first(1, ())
            works += [s.work for s in pool.by_fitness[Fitness.RETURNING] if self.share(s) > 0]
        return min((work.pending_tokens for work in works), default=None)

    def has_other(self, slot: ReplicaSlot, request: GenerateRequest) -> bool:
        """True if a ready replica besides `slot` is meant for requests like this one."""
        num_ready = sum(p.num_ready for p in self._pools.values() if has_part_in(p.role, request))
        is_one = slot.fitness not in (None, Fitness.DEGRADED)
        return num_ready > (is_one and has_part_in(slot.role, request))

    def others_may_help(self, slot: ReplicaSlot) -> bool:
        """True if some request of the replica could go on at another one."""
        return any(self.has_other(slot, tracked.request) for tracked in slot.requests)

    def share(self, slot: ReplicaSlot) -> float:
        """The share of requests that the replica gets of those that it would get otherwise, from 0 to 1."""
        return slot.health.share(self._clock.now())

    def on_full(self, slot: ReplicaSlot, for_s: float) -> None:
        """Spares a replica that had no room further requests for so long, or until one leaves it. In a small
        fleet each request asks for itself."""
        if self.num_takers > SMALL_FLEET:
            slot.full_until = self._clock.now() + for_s
            self.refit(slot)

    def on_leave(self, slot: ReplicaSlot) -> None:
        """Takes note that the replica has room for another request."""
        if slot.full_until:
            slot.full_until = 0.0
            self.refit(slot)

    def hold(self, slot: ReplicaSlot, tracked: TrackedRequest) -> None:
        """Lets the replica take this request alone, and the request no other replica, until `release`."""
        self.release(tracked)
        slot.held_for, self._held[tracked] = tracked, slot
        self.refit(slot)

    def release(self, tracked: TrackedRequest) -> None:
        """Ends `hold`. May be called twice."""
        slot = self._held.pop(tracked, None)
        if slot is not None:
            slot.held_for = None
            self.refit(slot)

    def refit(self, slot: ReplicaSlot) -> None:
        """Puts the replica on the list where it belongs after a change."""
        was_taker, had_takers = slot.fitness is not None, self.num_takers > 0
        now, is_known = self._clock.now(), slot.number in self._slots and slot.limits is not None
        if slot.held_for is not None:
            slot.held_for.wake()
        if slot.held_for is not None and slot.replica.state is ReplicaState.FAILED:
            self.release(slot.held_for)
        elif (
            slot.held_for is not None or not is_known or slot.is_leaving or not slot.replica.is_open
        ):
            self._list(slot, None)
        elif slot.replica.state is not ReplicaState.READY:
            self._list(slot, Fitness.DEGRADED)
        elif now < slot.full_until:
            self._list(slot, Fitness.FULL)
            heapq.heappush(self._returns, (slot.full_until, slot.number))
        elif now < slot.health.recovered_at:
            self._list(slot, Fitness.RETURNING)
            heapq.heappush(self._returns, (slot.health.recovered_at, slot.number))
        else:
            self._list(slot, Fitness.FIT)
        if slot.fitness is not None and slot.limits is not None and not was_taker:
            room = slot.limits.max_num_seqs + slot.limits.max_num_waiting
            self.on_room(room if had_takers else sys.maxsize)

    def _list(self, slot: ReplicaSlot, fitness: Fitness | None) -> None:
        if slot.fitness is fitness:
            return
        pool = self._pools[slot.role]
        if slot.fitness is not None:
            pool.remove(slot, slot.fitness)
        if fitness is not None:
            pool.add(slot, fitness)
        slot.fitness = fitness

    def _refit_returned(self) -> None:
        now = self._clock.now()
        while self._returns and self._returns[0][0] <= now:
            slot = self._slots.get(heapq.heappop(self._returns)[1])
            if slot is not None:
                self.refit(slot)

    # ---- placement

    def choose(
        self, tracked: TrackedRequest, keys: Sequence[int]
    ) -> tuple[ReplicaSlot, int] | None:
        """The replica that takes the request, and how many tokens are believed to be cached there.

        `keys` are short keys of the prompt's blocks, where it matters what is cached. Returns None where no
        replica takes requests, or all have refused this one.
        """
        held = self._held.get(tracked)
        if held is not None:
            return (held, 0) if held.replica.is_open else None
        self._refit_returned()
        if len(self._slots) == 1 and not keys:
            [only] = self._slots.values()
            is_taker = only.fitness is not None and only.number not in tracked.refusals
            return (only, 0) if is_taker else None
        named = self._named(tracked)
        if named is not None:
            is_full = named.number in tracked.refusals
            return None if is_full else (named, self._candidate(named, keys).num_cached_tokens)
        request = RoutingRequest(tracked.request_id, self._num_placed, tracked.request.session)
        slots = self._candidates(tracked, request, keys)
        if not slots:
            return None
        self._num_placed += 1
        candidates = [self._candidate(slot, keys) for slot in slots]
        chosen = self.policy.choose(request, candidates)
        return slots[chosen], candidates[chosen].num_cached_tokens

    def _named(self, tracked: TrackedRequest) -> ReplicaSlot | None:
        """The replica that the client names, as long as it computes; what had to leave it goes anywhere."""
        rank = tracked.request.data_parallel_rank
        slot = None if rank is None or tracked.returns else self._slots.get(rank)
        return None if slot is None or slot.fitness in (None, Fitness.DEGRADED) else slot

    @property
    def num_helpers(self) -> int:
        """Replicas that may compute prompts for one another, as they answer as well."""
        return self._pools[Role.BOTH].num_takers

    def helpers(self, slot: ReplicaSlot, keys: Sequence[int]) -> Iterable[ReplicaSlot]:
        """A few of them beside `slot`: those that have the most of the blocks of `keys`, and the least work."""
        holders = self._cache.holders(keys, NUM_HOLDERS) if keys else ()
        fleet = Shortlist([self._pools[Role.BOTH]], (slot.number,), self._slots, holders)
        return dict.fromkeys([*fleet.with_prefix(), *fleet.least_loaded(_NUM_IDLE_HELPERS)])

    def _candidates(
        self, tracked: TrackedRequest, request: RoutingRequest, keys: Sequence[int]
    ) -> list[ReplicaSlot]:
        """Ready replicas that have not refused the request, else degraded ones.

        Replicas that were ejected for doing worse than others get some of the first requests after that. Replicas
        not meant for such requests get this one only where no other takes requests, not where others are full.
        """
        takers = [pool for pool in self._pools.values() if pool.num_takers]
        pools = [pool for pool in takers if has_part_in(pool.role, tracked.request)] or takers
        is_small = sum(pool.num_takers for pool in pools) <= SMALL_FLEET
        holders = () if is_small or not keys else self._cache.holders(keys, NUM_HOLDERS)
        fleet = Shortlist(pools, tracked.refusals, self._slots, holders)

        def some(fitness: Fitness) -> list[ReplicaSlot]:
            """All replicas of a small fleet's list."""
            positions = range(request.number, request.number + SMALL_FLEET)
            return list(dict.fromkeys(fleet.at(positions, fitness)))

        chosen = some(Fitness.FIT) if is_small else list(self.policy.shortlist(request, fleet))
        returning, draw = some(Fitness.RETURNING), request.number * GOLDEN_RATIO % 1
        chosen += [slot for slot in returning if self.share(slot) > draw]
        chosen = chosen or returning or some(Fitness.DEGRADED)
        if not chosen and len(tracked.refusals) < SMALL_FLEET:
            chosen = some(Fitness.FULL)
        return sorted(chosen, key=attrgetter("number"))

    def _candidate(self, slot: ReplicaSlot, keys: Sequence[int]) -> Candidate:
        num_cached = slot.prefixes.num_cached(keys)
        num_sharing = slot.prefixes.num_sharing(keys[num_cached - 1]) if num_cached else 0
        num_cached_tokens = num_cached and num_cached * self.limits.block_size
        return Candidate(slot.name, slot.work.pending_tokens, num_cached_tokens, num_sharing)


def _add(counter: Counter[T], item: T, change: int) -> None:
    counter[item] += change
    if not counter[item]:
        del counter[item]


def _sum_of(limits: Counter[EngineReady], routers: Iterable[str]) -> EngineReady:
    """The limits of replicas together, by how many have which."""
    num_replicas = limits.total()
    summaries = dict.fromkeys(limit.summary for limit in limits)
    prefix = f"{num_replicas} replicas, each " if num_replicas > 1 else ""
    return EngineReady(
        max_model_len=min(limit.max_model_len for limit in limits),
        vocab_size=min(limit.vocab_size for limit in limits),
        num_blocks=capped(sum(limit.num_blocks * count for limit, count in limits.items())),
        block_size=next(iter(limits)).block_size,
        max_num_seqs=capped(sum(limit.max_num_seqs * count for limit, count in limits.items())),
        max_num_waiting=capped(
            sum(limit.max_num_waiting * count for limit, count in limits.items())
        ),
        max_num_waiting_tokens=capped(
            sum(limit.max_num_waiting_tokens * count for limit, count in limits.items())
        ),
        summary=(prefix + "; ".join(summaries))[:MAX_ITEMS],
        role=_sum_of_roles({limit.role for limit in limits}),
        max_logprobs=_least_logprobs({limit.max_logprobs for limit in limits}),
        routers=tuple(sorted(routers))[:MAX_ROUTERS],
        kv_group=next(iter(limits)).kv_group,
    )


def _least_logprobs(limits: set[int]) -> int:
    """The least of the limits, of which -1 is the highest."""
    return min(limits - {ALL_LOGPROBS}, default=ALL_LOGPROBS)


def _sum_of_roles(roles: set[Role]) -> Role:
    """The role of all replicas together: whatever some of them can do."""
    holds = any(role.holds_kv for role in roles)
    fetches = any(role.fetches_kv for role in roles)
    if holds and fetches:
        return Role.BOTH
    return Role.PREFILL if holds else Role.DECODE if fetches else Role.NONE
