# SPDX-License-Identifier: Apache-2.0
"""The replicas of a dispatcher: which there are, how they do, and what they have cached."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from itertools import islice
from typing import Protocol

import msgspec

from pagoda.concurrency.async_utils import cancel_all
from pagoda.errors import ConfigError, EngineDeadError
from pagoda.fleet.endpoint import CacheListener, Health, ReplicaState, StepListener
from pagoda.fleet.limits import LimitSums
from pagoda.fleet.outliers import Ejection, OutlierDetector
from pagoda.fleet.placement import ReplicaSlot
from pagoda.fleet.policies import Policy
from pagoda.fleet.prefix_index import CacheUnion, PrefixIndex
from pagoda.fleet.replica import Replica
from pagoda.fleet.takers import Takers
from pagoda.ipc.clock import Clock
from pagoda.kv.layout import KVLayout
from pagoda.messages.frontend import StepStatistics
from pagoda.messages.load import LoadReport, ReplicaLoad
from pagoda.messages.worker_config import Role

_NUM_HEALTH_QUERIES = 16
"""Replicas that are asked for their health at a time."""
_HEALTH_PATIENCE_S = 0.1
"""Seconds without an answer after which the next replicas are asked too."""
_ASKING_S = 0.5
"""Seconds after which no further replicas are asked; each that was asked has its time to answer."""
_log = logging.getLogger(__name__)


class ReplicaListener(Protocol):
    """The one who has the requests of replicas, and is told of what concerns these."""

    def on_engine_lost(self, slot: ReplicaSlot) -> None:
        """The engine is gone, and any request that it may have computed may have killed it."""

    def on_worker_lost(self, slot: ReplicaSlot) -> None:
        """The engine goes on without its worker, which is being replaced."""

    def on_stuck(self, slot: ReplicaSlot) -> None:
        """The requests of the replica do not get on; those of others do."""

    def on_end(self) -> None:
        """No replica will ever take requests again."""


class ReplicaSet:
    """Follows each replica from its start to its end, and tells the `ReplicaListener` what concerns requests."""

    def __init__(
        self,
        policy: Policy,
        clock: Clock,
        *,
        keeps_half: bool,
        needs_prefixes: Callable[[ReplicaSet], bool],
    ) -> None:
        """`keeps_half` is as in `OutlierDetector`. `needs_prefixes` says whether others than the policy must know
        what replicas have cached. `listener` is to be set before there is a replica."""
        self.listener: ReplicaListener
        self._clock = clock
        self._needs_prefixes = needs_prefixes
        self._cache = CacheUnion()
        self._outliers = OutlierDetector(clock, keeps_half=keeps_half)
        self._slots: dict[int, ReplicaSlot] = {}
        self._by_replica: dict[Replica, ReplicaSlot] = {}
        self._names: set[str] = set()
        self._num_added = 0
        self.sums = LimitSums()
        """The limits of the replicas together."""
        self.takers = Takers(policy, self._slots, self._cache, clock)
        """The replicas that take requests."""
        self._watchers: list[Callable[[], None]] = []
        self._watches: list[asyncio.Task[None]] = []
        self._num_failed = 0
        self.failure: EngineDeadError | None = None
        """The reason that no replica will ever take requests again; None as long as one may."""
        self._failed = asyncio.Event()
        self.is_subscribed = False
        """True while replicas tell what they have cached."""

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

    # ---- replicas come, change and go

    def add(self, replica: Replica) -> ReplicaSlot:
        """A slot for a replica that may not have started yet."""
        number = self._num_added
        self._num_added += 1
        name = replica.name or str(number)
        if name in self._names:
            name = f"{name}#{number}"
        slot = ReplicaSlot(number, name, replica, PrefixIndex(0, replica=number, union=self._cache))
        self._slots[number] = self._by_replica[replica] = slot
        self._names.add(name)
        ends = ExitStack()
        ends.callback(replica.watch(partial(self._on_change, slot)))
        ends.callback(replica.watch_work_of_others(partial(_on_work_of_others, slot)))
        slot.unwatch = ends.close
        return slot

    async def start(self) -> None:
        """Starts all replicas at once; returns when all are ready. Raises what `Replica.start` raises; of several
        replicas, the error names the one."""
        starts = [asyncio.create_task(self._start(slot)) for slot in self]
        try:
            await asyncio.gather(*starts)
        except BaseException:
            await cancel_all(starts)
            raise
        for slot in self:
            self._take_in(slot)
            self._watches.append(asyncio.create_task(self._watch(slot)))
        self.update_subscriptions()

    async def _start(self, slot: ReplicaSlot) -> None:
        try:
            await slot.replica.start()
        except (ConfigError, EngineDeadError) as error:
            raise type(error)(f"{self.prefix(slot)}{error}") from error

    def _take_in(self, slot: ReplicaSlot) -> None:
        """Takes a replica that has started into the sums."""
        self._take_limits(slot)
        if self.is_subscribed:
            self._subscribe(slot)

    def join(self, replica: Replica) -> None:
        """Takes in a replica that has started. The caller watches whether it fails, and removes it then."""
        slot = self.add(replica)
        self._take_in(slot)
        self.update_subscriptions()
        self._on_change(slot)

    def set_role(self, role: Role) -> None:
        """Gives all replicas together a role, which watchers see in `sums`. What they have goes on."""
        self.sums.set_role(role)
        self._notify()

    def set_leaving(self, replica: Replica, is_leaving: bool) -> None:
        """Gives a replica that leaves no new requests; those that it has go on there."""
        slot = self[replica]
        if slot.is_leaving is not is_leaving:
            slot.is_leaving = is_leaving
            self.takers.refit(slot)
            self._notify()

    def remove(self, replica: Replica) -> None:
        """Forgets a replica, which may have been forgotten already. What it still has goes on elsewhere when its
        streams end with EngineLostError."""
        slot = self.get(replica)
        if slot is None:
            return
        slot.unwatch()
        self._unsubscribe(slot)
        self.takers.remove(slot)
        del self._slots[slot.number], self._by_replica[slot.replica]
        self._names.discard(slot.name)
        self._outliers.remove(slot.health)
        self.sums.count(slot.limits, -1)
        self.update_subscriptions()
        self._notify()

    def _on_change(self, slot: ReplicaSlot) -> None:
        if slot not in self:
            return  # it was removed by another who was told the same
        is_ready = slot.replica.state is ReplicaState.READY
        is_end = self.failure is not None  # of all replicas; none was lost
        had_engine, slot.had_engine = slot.had_engine, slot.replica.is_open
        was_ready, slot.was_ready = slot.was_ready, is_ready
        if had_engine and not slot.replica.is_open and not is_end:
            slot.num_losses += 1
            if slot.replica.blames_requests:
                self.listener.on_engine_lost(slot)
        if was_ready and not is_ready and not is_end:
            self._eject(self._outliers.on_loss(slot.health))
        if is_ready and not was_ready:
            slot.health.heard_at = self._clock.now()  # it could not get on before
        if not is_ready:
            slot.prefixes.clear()
        if slot.limits is not None:
            self._take_limits(slot)
        self.takers.set_handicap(slot, slot.replica.handicap)
        self.takers.refit(slot)
        if slot.replica.state is ReplicaState.DEGRADED:
            self.listener.on_worker_lost(slot)
        self._notify()

    def watch(self, watcher: Callable[[], None]) -> Callable[[], None]:
        """Tells `watcher` of every change, as `Endpoint.watch` does."""
        self._watchers.append(watcher)
        return partial(self._watchers.remove, watcher)

    def _notify(self) -> None:
        for watcher in list(self._watchers):
            watcher()

    async def _watch(self, slot: ReplicaSlot) -> None:
        failure = await slot.replica.wait_failed()
        self._num_failed += 1
        if self._num_failed >= len(self):
            self._fail(EngineDeadError(f"{self.prefix(slot)}{failure}"))
        else:
            _log.error(
                "%s%s; %d of %d replicas go on",
                self.prefix(slot),
                str(failure).removesuffix("."),
                len(self) - self._num_failed,
                len(self),
            )

    async def wait_failed(self) -> EngineDeadError:
        """Returns when all replicas are given up (or this is closed), with the reason."""
        await self._failed.wait()
        return self.failure or EngineDeadError("The engine was closed.")

    def _fail(self, error: EngineDeadError) -> None:
        if self.failure is None:
            self.failure = error
            self._failed.set()
            self.listener.on_end()

    async def close(self) -> None:
        await cancel_all(self._watches)
        self._fail(EngineDeadError("The engine was closed."))
        closes = (slot.replica.close() for slot in self)
        for end in await asyncio.gather(*closes, return_exceptions=True):
            if isinstance(end, BaseException):
                raise end

    def _take_limits(self, slot: ReplicaSlot) -> None:
        """Takes the limits of a replica that has started into the sums, where they are others than before."""
        old, new = slot.limits, slot.replica.limits
        if old == new:
            return
        layout = KVLayout(new.block_size, () if new.kv_group is None else [new.kv_group])
        self.takers.move(slot, new)
        self.sums.count(new, 1)
        self.sums.count(old, -1)
        self._cache.layout = layout
        slot.prefixes.resize(new.num_blocks)
        if old is None or old.role is not new.role:
            self._outliers.add(slot.health, new.role)
        self.takers.refit(slot)

    # ---- what replicas have cached, and how they do

    def uses_prefixes(self) -> bool:
        """True if it matters to requests what replicas have cached."""
        return (self.takers.policy.uses_prefixes and len(self) > 1) or self._needs_prefixes(self)

    def update_subscriptions(self) -> None:
        """Subscribes to what replicas have cached as long as that matters: to the choice of a replica, to the
        offload of prompts, or to listeners."""
        matters = self.uses_prefixes() or bool(self._cache.listeners)
        if matters is not self.is_subscribed:
            self.is_subscribed = matters
            for slot in self:
                (self._subscribe if matters else self._unsubscribe)(slot)

    def _subscribe(self, slot: ReplicaSlot) -> None:
        slot.unsubscribe = slot.replica.subscribe_cache(slot.prefixes.apply)

    def _unsubscribe(self, slot: ReplicaSlot) -> None:
        if slot.unsubscribe is not None:
            slot.unsubscribe()
            slot.unsubscribe = None
        slot.prefixes.clear()

    def subscribe_cache(self, listener: CacheListener) -> Callable[[], None]:
        ends = ExitStack()
        ends.callback(self.update_subscriptions)
        ends.callback(self._cache.listen(listener))
        self.update_subscriptions()
        return ends.close

    def subscribe_steps(self, listener: StepListener) -> Callable[[], None]:
        """Subscribes to the steps of the replicas that there are. Replicas that come later are hosts, whose steps
        are told there."""

        def pass_on(replica: str, steps: StepStatistics) -> None:
            listener(msgspec.structs.replace(steps, replica=replica))

        ends = ExitStack()
        for slot in self:
            ends.callback(slot.replica.subscribe_steps(partial(pass_on, slot.name)))
        return ends.close

    async def loads(self) -> tuple[tuple[ReplicaLoad, ...], list[LoadReport]]:
        """The load of each replica, and the counters of those that do not answer."""
        slots = list(self)
        reports = await asyncio.gather(*(slot.load() for slot in slots))
        both = zip(slots, reports, strict=True)
        counted = [slot.replica.counters for slot, report in both if report is None]
        return tuple(map(self._load_of, slots, reports)), counted

    def _load_of(self, slot: ReplicaSlot, report: LoadReport | None) -> ReplicaLoad:
        state = slot.replica.state
        is_ejected = state is ReplicaState.READY and self.takers.share(slot) == 0
        return ReplicaLoad(
            name=slot.name,
            state="ejected" if is_ejected else state,
            num_requests=len(slot.requests),
            weighed_tokens=slot.work.pending_tokens,
            num_losses=slot.num_losses + slot.replica.counters.num_engine_restarts,
            report=report,
        )

    async def health(self) -> Health:
        """Ready as soon as one of the replicas says so, else why none is; those heard last are asked first."""
        reasons: dict[ReplicaSlot, str] = {}
        remaining = iter(sorted(self, key=lambda slot: -slot.latest_ns))
        pending: dict[asyncio.Task[Health], ReplicaSlot] = {}
        asks_until = asyncio.get_running_loop().time() + _ASKING_S
        try:
            while True:
                if asyncio.get_running_loop().time() < asks_until:
                    for slot in islice(remaining, _NUM_HEALTH_QUERIES):
                        pending[asyncio.ensure_future(slot.replica.health())] = slot
                if not pending:
                    break
                # Replicas that hang do not keep the others from being asked.
                done, _ = await asyncio.wait(
                    pending, timeout=_HEALTH_PATIENCE_S, return_when=asyncio.FIRST_COMPLETED
                )
                for answer in done:
                    slot = pending.pop(answer)
                    if answer.result().ready:
                        return Health(True)
                    reasons[slot] = answer.result().reason
        finally:
            await cancel_all(list(pending))
        told = (f"{self.prefix(slot)}{reasons.get(slot, 'it does not answer')}" for slot in self)
        return Health(False, "; ".join(told) or "there is no replica")

    def judge(self) -> None:
        """Compares all replicas once. New requests avoid the worst, and requests that hang there are moved."""
        ejected, stuck = self._outliers.check(lambda number: self._slots[number].waiting())
        for ejection in ejected:
            self._eject(ejection)
        for number in stuck:
            self.listener.on_stuck(self._slots[number])

    def on_unanswered(self, slot: ReplicaSlot) -> None:
        """Counts that the replica does not do in time what takes no time."""
        self._eject(self._outliers.on_failure(slot.health))

    def _eject(self, ejection: Ejection | None) -> None:
        if ejection is None:
            return
        slot = self._slots[ejection.replica]
        self.takers.refit(slot)
        _log.warning(
            "%sgets no new requests for %g s: %s",
            self.prefix(slot),
            ejection.duration_s,
            ejection.reason,
        )


def _on_work_of_others(slot: ReplicaSlot, pending_tokens: int) -> None:
    """Takes note of what others have at a replica. What they have no more was done in the time of the requests
    here, whose pace would seem slow else."""
    slot.health.work_for_others(max(0, slot.work.others - pending_tokens))
    slot.work.set_others(pending_tokens)
