# SPDX-License-Identifier: Apache-2.0
"""The replicas of a dispatcher that take requests, by how fit they are, and which of them takes a request."""

from __future__ import annotations

import heapq
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import attrgetter

from pagoda.fleet.endpoint import ReplicaState
from pagoda.fleet.load_tracker import ReplicaWork
from pagoda.fleet.placement import Fitness, ReplicaSlot, TrackedRequest, has_part_in
from pagoda.fleet.policies import NUM_HOLDERS, Candidate, Policy, RoutingRequest
from pagoda.fleet.prefix_index import CacheUnion
from pagoda.fleet.replica_pool import GOLDEN_RATIO, RolePool, Shortlist
from pagoda.ipc.clock import Clock
from pagoda.messages.frontend import EngineReady, GenerateRequest
from pagoda.messages.worker_config import Role

_NUM_IDLE_HELPERS = 2
SMALL_FLEET = 16
"""The largest fleet of which all replicas are looked at for each request; of a larger one it is a shortlist."""


class Takers:
    """Keeps lists up to date as replicas change, so that nothing looks at all replicas for one request."""

    def __init__(
        self,
        policy: Policy,
        slots: Mapping[int, ReplicaSlot],
        cache: CacheUnion,
        clock: Clock,
    ) -> None:
        """`slots` has all replicas by number, those that take no requests, too."""
        self.policy = policy
        self.on_room: Callable[[int], None] = lambda _: None
        """Listener for replicas that begin to take requests, called with how many may find room there."""
        self._slots = slots
        self._cache = cache
        self._clock = clock
        self._num_placed = 0
        self._pools = {role: RolePool(role) for role in Role}
        self._held: dict[TrackedRequest, ReplicaSlot] = {}
        """The replicas that take no other request than this one."""
        self._returns: list[tuple[float, int]] = []
        """A heap of when replicas have room or their full share again, and their numbers."""

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
        slot.quarantined_for, self._held[tracked] = tracked, slot
        self.refit(slot)

    def release(self, tracked: TrackedRequest) -> None:
        """Ends `hold`. May be called twice."""
        slot = self._held.pop(tracked, None)
        if slot is not None:
            slot.quarantined_for = None
            self.refit(slot)

    def remove(self, slot: ReplicaSlot) -> None:
        """Forgets a replica."""
        if slot.quarantined_for is not None:
            self.release(slot.quarantined_for)
        self._list(slot, None)

    def move(self, slot: ReplicaSlot, limits: EngineReady) -> None:
        """Gives a replica its limits, and with them its role."""
        self._list(slot, None)
        slot.limits = limits

    def set_handicap(self, slot: ReplicaSlot, num_tokens: int) -> None:
        """Weighs the place of the replica from now on; `refit` follows."""
        if num_tokens != slot.work.handicap:
            self._list(slot, None)
            slot.work.handicap = num_tokens

    def refit(self, slot: ReplicaSlot) -> None:
        """Puts the replica on the list where it belongs after a change."""
        was_taker, had_takers = slot.fitness is not None, self.num_takers > 0
        now, is_known = self._clock.now(), slot.number in self._slots and slot.limits is not None
        if slot.quarantined_for is not None:
            slot.quarantined_for.wake()
        if slot.quarantined_for is not None and slot.replica.state is ReplicaState.FAILED:
            self.release(slot.quarantined_for)
        elif (
            slot.quarantined_for is not None
            or not is_known
            or slot.is_leaving
            or not slot.replica.is_open
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
        holders = self._holders(keys) if keys else ()
        fleet = Shortlist([self._pools[Role.BOTH]], (slot.number,), self._slots, holders)
        return dict.fromkeys([*fleet.with_prefix(), *fleet.least_loaded(_NUM_IDLE_HELPERS)])

    def _holders(self, keys: Sequence[int]) -> list[int]:
        """A few replicas with the longest prefix of `keys`, those with the least work."""

        def cost(number: int) -> float:
            slot = self._slots.get(number)
            return math.inf if slot is None else slot.work.cost

        return self._cache.holders(keys, NUM_HOLDERS, cost, self._num_placed)

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
        holders = () if is_small or not keys else self._holders(keys)
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
        num_cached_tokens = num_cached * slot.limits.block_size if slot.limits else 0
        return Candidate(slot.name, slot.work.cost, num_cached_tokens, num_sharing)
