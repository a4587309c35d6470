# SPDX-License-Identifier: Apache-2.0
"""Replicas of one role by whether they take requests, so that a few good ones are found without a look at all."""

from __future__ import annotations

import hashlib
from bisect import bisect_left, insort
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from operator import itemgetter

from pagoda.fleet.load_tracker import LeastLoaded
from pagoda.fleet.placement import Fitness, ReplicaSlot
from pagoda.messages.worker_config import Role

GOLDEN_RATIO = 0.6180339887498949
"""Golden-ratio conjugate c: i · c mod 1 is a low-discrepancy sequence, which fills 0 to 1 evenly."""
_HASH_BYTES = 8
_MASK = 2 ** (8 * _HASH_BYTES) - 1
_NUM_PROBES = 21
_STEP = 0x9E3779B97F4A7C15
"""Multiplier that spreads the steps between probes over 64 bits."""


class SlotList:
    """A set of slots with random access; the order is arbitrary."""

    def __init__(self) -> None:
        self._slots: list[ReplicaSlot] = []
        self._positions: dict[ReplicaSlot, int] = {}

    def __len__(self) -> int:
        return len(self._slots)

    def __iter__(self) -> Iterator[ReplicaSlot]:
        return iter(self._slots)

    def __getitem__(self, position: int) -> ReplicaSlot:
        return self._slots[position]

    def add(self, slot: ReplicaSlot) -> None:
        self._positions[slot] = len(self._slots)
        self._slots.append(slot)

    def remove(self, slot: ReplicaSlot) -> None:
        position, last = self._positions.pop(slot), self._slots.pop()
        if last is not slot:
            self._slots[position] = last
            self._positions[last] = position


class HashRing:
    """Multi-probe consistent hashing (Appleton and O'Reilly 2015) of sessions to replicas, by their names.

    When a replica goes, only its own sessions move, and when it is back they return; every router finds the same.
    """

    def __init__(self) -> None:
        self._points: list[tuple[int, int, ReplicaSlot]] = []
        """Hashes of names, ascending, each with the number of the replica and the replica."""

    def add(self, slot: ReplicaSlot) -> None:
        insort(self._points, (stable_hash(slot.name), slot.number, slot))

    def remove(self, slot: ReplicaSlot) -> None:
        del self._points[bisect_left(self._points, (stable_hash(slot.name), slot.number))]

    def nearest(self, session: str, excluded: Container[int]) -> tuple[int, ReplicaSlot] | None:
        """The replica closest behind one of the session's probes, with the distance; None if all are excluded."""
        points, probe = self._points, stable_hash(session)
        best: tuple[int, ReplicaSlot] | None = None
        step = (probe >> 20 | 1) * _STEP
        for _ in range(_NUM_PROBES):
            probe = (probe + step) & _MASK
            position = bisect_left(points, (probe,))
            for offset in range(len(points)):
                point, number, slot = points[(position + offset) % len(points)]
                if number not in excluded:
                    distance = (point - probe) & _MASK
                    if best is None or distance < best[0]:
                        best = distance, slot
                    break
        return best


def stable_hash(text: str) -> int:
    """64 bits that are the same in every process."""
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=_HASH_BYTES)
    return int.from_bytes(digest.digest(), "little")


class RolePool:
    """The replicas of one role that take requests."""

    def __init__(self, role: Role) -> None:
        self.role = role
        self.by_fitness = {fitness: SlotList() for fitness in Fitness}
        self.least = LeastLoaded()
        """The fit replicas by their work."""
        self.ring = HashRing()
        """The fit replicas by their names."""

    @property
    def num_takers(self) -> int:
        return sum(map(len, self.by_fitness.values()))

    @property
    def num_ready(self) -> int:
        return self.num_takers - len(self.by_fitness[Fitness.DEGRADED])

    def add(self, slot: ReplicaSlot, fitness: Fitness) -> None:
        self.by_fitness[fitness].add(slot)
        if fitness is Fitness.FIT:
            self.least.add(slot.work)
            self.ring.add(slot)

    def remove(self, slot: ReplicaSlot, fitness: Fitness) -> None:
        self.by_fitness[fitness].remove(slot)
        if fitness is Fitness.FIT:
            self.least.discard(slot.work)
            self.ring.remove(slot)


class Shortlist:
    """Finds a few replicas of a fleet among those that have not refused the request."""

    def __init__(
        self,
        pools: Sequence[RolePool],
        refused: Container[int],
        slots: Mapping[int, ReplicaSlot],
        prefix_holders: Iterable[int],
    ) -> None:
        """`slots` has all replicas by number. `prefix_holders` are numbers of replicas with a prefix of the
        request."""
        self._pools = pools
        self._refused = refused
        self._slots = slots
        self._prefix_holders = prefix_holders

    def at(self, positions: Iterable[int], fitness: Fitness = Fitness.FIT) -> Iterator[ReplicaSlot]:
        """Replicas at positions of a list of them all, modulo its length."""
        lists = [pool.by_fitness[fitness] for pool in self._pools]
        total = sum(map(len, lists))
        for position in positions if total else ():
            index = position % total
            for one in lists:
                if index < len(one):
                    if one[index].number not in self._refused:
                        yield one[index]
                    break
                index -= len(one)

    def least_loaded(self, num_replicas: int) -> list[ReplicaSlot]:
        """The replicas with the least work, about `num_replicas` of them for each role."""
        return [
            self._slots[work.number]
            for pool in self._pools
            for work in pool.least.first(num_replicas, self._refused)
        ]

    def home_of(self, session: str) -> list[ReplicaSlot]:
        """The replica of a session."""
        homes = [pool.ring.nearest(session, self._refused) for pool in self._pools]
        home = min(filter(None, homes), key=itemgetter(0), default=None)
        return [home[1]] if home else []

    def with_prefix(self) -> list[ReplicaSlot]:
        """Replicas believed to have the longest prefixes of the request."""
        roles = {pool.role for pool in self._pools}
        found = [self._slots[number] for number in self._prefix_holders if number in self._slots]
        return [
            slot
            for slot in found
            if slot.fitness is Fitness.FIT
            and slot.number not in self._refused
            and slot.role in roles
        ]
