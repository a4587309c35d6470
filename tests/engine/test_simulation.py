# SPDX-License-Identifier: Apache-2.0
"""Thousands of seeds: random arrivals, aborts, lost workers, tiny caches and tiers that fail, in virtual time.

Every seed is a whole life of an engine. Answers are compared with what the simulated model says without any
engine, the simulated worker refuses to read KV that is not the sequence's own, and in the end nothing is left.
"""

from __future__ import annotations

import random
from collections import Counter

import pytest
from group_models import NAMES
from group_models import grouped as model_groups
from harness import VOCAB_SIZE, Harness, expected_tokens
from mortal_executor import POISON, MortalExecutor, random_request

from benchmarks.simulation.books import check_books, in_state
from benchmarks.simulation.disk import SimDisk, disk_tiers
from pagoda.engine.request import RequestState
from pagoda.executor.base import ExecutorEvent, WorkerLost
from pagoda.ipc.clock import VirtualClock
from pagoda.kv.tiered_connector import LOAD_TIMEOUT_S, TieredKVConnector
from pagoda.messages.frontend import FinishReason, GenerateRequest, Work
from pagoda.messages.transfers import DeviceBlocks, HostSlots, TierBlocks, Transfer, TransferEnd
from pagoda.plugins.sim.executor import SimExecutor, TransferFate

SEEDS_PER_TEST = 50
FIRST_SEED = 1000
EVENTS = {
    "slow",
    "failed",
    "failed in part",
    "ended twice",
    "lost with the worker",
    "aborted while it was loaded",
    "loads behind a step",
    "loads slower than patience",
    "loads that ended after their request",
    "failed for want of KV",
}
HOST_EVENTS = EVENTS | {
    "stored in host",
    "removed from host",
    "failed in host",
    "loaded at once",
    "preempted",
}
DISK_EVENTS = EVENTS | {
    "stored in disk",
    "removed from disk",
    "failed in disk",
    "object removed by others",
    "unanswered at once",
    "aborted before it was known",
}


class FaultyTransfers:
    """A link between engine and simulated worker on which transfers are slow, fail, and end more than once."""

    def __init__(self, rng: random.Random, met: Counter[str]) -> None:
        self._rng = rng
        self._met = met
        self._slow = rng.choice([0.0, 0.0, 0.1, 0.3])
        self._failing = rng.choice([0.0, 0.0, 0.1, 0.5])
        self._repeated = rng.choice([0.0, 0.2])
        self._told: list[TransferEnd] = []
        self.open: dict[int, Transfer] = {}
        self.tiers: TieredKVConnector

    def fate(self, transfer: Transfer) -> TransferFate:
        self.open[transfer.transfer_id] = transfer
        rng = self._rng
        delay_s = 0.0
        if rng.random() < self._slow:
            delay_s = rng.choice([0.1, 1.0, LOAD_TIMEOUT_S + 1])
            self._met["slow"] += 1
        match transfer.source:
            case DeviceBlocks(block_ids):
                count = len(block_ids)
            case HostSlots(slots):
                count = len(slots)
            case TierBlocks("disk", keys):
                count = len(keys)
        match transfer.target:
            case DeviceBlocks():
                self._met["loads"] += 1
                self._met["loads slower than patience"] += delay_s > LOAD_TIMEOUT_S
                self._met["loads behind a step"] += transfer.after_step >= 0
            case HostSlots() if isinstance(transfer.source, TierBlocks):
                self._met["prefetches"] += 1
        failed: tuple[int, ...] = ()
        if rng.random() < self._failing:
            failed = tuple(sorted(rng.sample(range(count), rng.randint(1, count))))
            self._met["failed in part" if len(failed) < count else "failed"] += 1
        return TransferFate(delay_s, failed)

    def tell(self, events: list[ExecutorEvent]) -> list[ExecutorEvent]:
        told: list[ExecutorEvent] = []
        for event in events:
            told.append(event)
            if isinstance(event, WorkerLost):
                self._met["lost with the worker"] += len(self.open)
                self.open.clear()
            if not isinstance(event, TransferEnd):
                continue
            del self.open[event.transfer_id]
            part = self.tiers.parts.get(event.transfer_id)
            if part is not None and self.tiers.loads.get(part.load.request_id) is not part.load:
                self._met["loads that ended after their request"] += 1
            self._told.append(event)
            if self._rng.random() < self._repeated:
                again = self._rng.choice(self._told)
                self._met["ended twice"] += 1
                told.append(again)
        return told


class FaultyExecutor(MortalExecutor):
    """Loses its worker, and what it says of transfers is not always right."""

    faults: FaultyTransfers

    def poll(self) -> list[ExecutorEvent]:
        return self.faults.tell(super().poll())


class Life:
    """One seed's engines, and the faults that they met."""

    def __init__(self, seed: int, *, host: bool, disk: bool, grouped: bool = False) -> None:
        self.met: Counter[str] = Counter()
        rng = self._rng = random.Random(seed)
        self._death_rate = rng.choice([0.0, 0.0, 1.0 if host or disk else 2.0])
        self._max_model_len = rng.choice([24, 48, 64])
        self._documents = [
            [rng.randrange(VOCAB_SIZE) for _ in range(self._max_model_len)] for _ in range(4)
        ]
        self._disk = SimDisk(self._housekeeping_delay) if disk else None
        self._has_host, self._has_tiers = host, host or disk
        self._is_grouped = grouped
        self._requests: dict[str, GenerateRequest] = {}
        self._aborted: set[str] = set()
        self.harnesses: list[Harness] = []
        for _ in range(rng.choice([1, 1, 2]) if disk else 1):
            self._live()

    def _housekeeping_delay(self) -> float:
        return self._rng.choice([0.0, 0.001, 0.001, 0.05, 0.5, LOAD_TIMEOUT_S + 1])

    def _live(self) -> None:
        """One engine from start to end; the disk, if there is one, remains for the next."""
        rng = self._rng
        faults = FaultyTransfers(rng, self.met)
        block_size = rng.choice([1, 4, 8])
        needed = -(-self._max_model_len // block_size)
        groups = model_groups(rng.choice(NAMES), block_size) if self._is_grouped else ()
        if groups:
            needed = sum(group.most_blocks(0, self._max_model_len, 1) for group in groups)

        def wrap(inner: SimExecutor, clock: VirtualClock) -> FaultyExecutor:
            executor = FaultyExecutor(inner, clock, rng, self._death_rate)
            executor.faults = faults
            return executor

        self._fails = rng.random() < 0.2
        harness = self._harness = Harness(
            num_blocks=needed + rng.choice([0, 1, needed // 2, needed]),
            block_size=block_size,
            max_model_len=self._max_model_len,
            max_num_seqs=rng.choice([1, 2, 8]),
            max_num_batched_tokens=rng.choice([7, 16, 64]),
            prefix_caching=self._has_tiers or rng.random() < 0.8,
            num_stages=rng.choice([1, 1, 1, 2] if self._has_tiers else [1, 1, 2, 3]),
            wrap=wrap,
            kv_groups=groups,
            kv_host_slots=rng.choice([2, needed, 4 * needed]) if self._has_host else 0,
            disk=self._disk,
            kv_tiers=disk_tiers(rng.choice([needed, 10 * needed]), rng.choice([1, 2]), host_bytes=1)
            if self._has_tiers
            else None,
            fails=self._fails,
            transfer_fate=faults.fate,
        )
        lateness = rng.choice([(0.0,), (0.0, 0.02, 0.2) if self._has_tiers else (0.0,)])
        harness.late_s = lambda: rng.choice(lateness)
        self.harnesses.append(harness)
        if self._has_tiers:
            faults.tiers = harness.tiers
        first = len(self._requests)
        for index in range(first, first + rng.randint(2, 14)):
            request_id = self._add(index)
            self._watch(request_id)
            for _ in range(rng.choice([0, 0, 1, 3, 10, 30])):
                harness.tick()
            check_books(harness.scheduler)
            self._abort()
            if self._disk is not None and self._disk.objects and rng.random() < 0.05:
                self.met["object removed by others"] += 1
                del self._disk.objects[rng.choice(sorted(self._disk.objects))]
        harness.run()
        harness.check_nothing_left()
        self._check_answers()
        for tier in harness.core.load().tiers:
            self.met[f"loaded from {tier.name}"] += tier.num_loaded
            self.met[f"stored in {tier.name}"] += tier.num_stored
            self.met[f"failed in {tier.name}"] += tier.num_failed
            self.met[f"removed from {tier.name}"] += tier.num_removed
        self.met["prefix hits"] += harness.scheduler.counters.num_prefix_hit_tokens
        self.met["preempted"] += harness.scheduler.counters.num_preemptions
        self.met["worker lost"] += harness.core.load().num_worker_restarts

    def _add(self, index: int) -> str:
        rng = self._rng
        request = random_request(rng, index, self._max_model_len)
        if POISON not in request.prompt_token_ids and rng.random() < 0.8:
            document = rng.choice(self._documents)
            prompt = document[: rng.randint(self._max_model_len // 3, self._max_model_len - 1)]
            prompt += request.prompt_token_ids[: rng.choice([0, 1, 5])]
            request = GenerateRequest(
                request_id=request.request_id,
                prompt_token_ids=prompt[: self._max_model_len - 1],
                work=Work(request.work.sampling, eos_token_ids=request.work.eos_token_ids),
                priority=request.priority,
            )
        self._requests[request.request_id] = request
        self._harness.add(request, steps=rng.random() < 0.7)
        return request.request_id

    def _watch(self, request_id: str) -> None:
        request = self._harness.scheduler.requests.get(request_id)
        state = None if request is None else request.state
        self.met["unanswered at once"] += state is RequestState.AWAITING_KV
        self.met["loaded at once"] += state is RequestState.LOADING

    def _abort(self) -> None:
        """Now and then, and rather those that wait for KV."""
        harness, rng = self._harness, self._rng
        alive = sorted(harness.scheduler.requests)
        loading = sorted(in_state(harness.scheduler, RequestState.LOADING))
        unanswered = sorted(in_state(harness.scheduler, RequestState.AWAITING_KV))
        if loading and rng.random() < 0.3:
            victim = rng.choice(loading)
            self.met["aborted while it was loaded"] += 1
        elif unanswered and rng.random() < 0.2:
            victim = rng.choice(unanswered)
            self.met["aborted before it was known"] += 1
        elif alive and rng.random() < 0.15:
            victim = rng.choice(alive)
        else:
            return
        harness.core.abort(victim)
        if rng.random() < 0.5:
            harness.step()
        check_books(harness.scheduler)
        self._aborted.add(victim)

    def _check_answers(self) -> None:
        harness = self._harness
        for request_id in harness.tokens:
            request = self._requests[request_id]
            whole = expected_tokens(request, self._max_model_len)
            so_far = harness.tokens[request_id]
            assert so_far == whole[: len(so_far)]
            if request_id in self._aborted:
                assert request_id not in harness.finished
                continue
            last = harness.finished[request_id]
            if POISON in request.prompt_token_ids and not self._has_tiers:
                assert (last.finish_reason, so_far) == (FinishReason.ERROR, [])
                self.met["poisoned"] += 1
            if last.finish_reason is not FinishReason.ERROR:
                assert so_far == whole
            elif "could not be loaded" in (last.error or ""):
                assert self._fails
                self.met["failed for want of KV"] += 1
            else:
                assert "worker died" in (last.error or "")
                assert self._death_rate or POISON in request.prompt_token_ids


def live_all(first: int, *, host: bool, disk: bool, grouped: bool = False) -> None:
    for seed in range(first, first + SEEDS_PER_TEST):
        try:
            Life(seed, host=host, disk=disk, grouped=grouped)
        except Exception as error:
            raise AssertionError(f"seed {seed}: {type(error).__name__} {error}") from error


def seeds(count: int) -> range:
    """Returns the first seed of each test."""
    return range(FIRST_SEED, FIRST_SEED + count, SEEDS_PER_TEST)


@pytest.mark.parametrize("first", seeds(1000))
def test_no_tiers(first: int) -> None:
    live_all(first, host=False, disk=False)


@pytest.mark.parametrize("first", seeds(1000))
def test_several_kv_groups(first: int) -> None:
    live_all(first, host=False, disk=False, grouped=True)


@pytest.mark.parametrize("first", seeds(500))
def test_host_memory(first: int) -> None:
    live_all(first, host=True, disk=False)


@pytest.mark.parametrize("first", seeds(500))
def test_disk(first: int) -> None:
    live_all(first, host=False, disk=True)


@pytest.mark.parametrize("first", seeds(1500))
def test_both(first: int) -> None:
    live_all(first, host=True, disk=True)


WITHOUT_TIERS = dict.fromkeys(("preempted", "prefix hits", "worker lost", "poisoned"), 1)
OF_BOTH = {
    "loaded from host": 200,
    "loaded from disk": 200,
    "prefetches": 10,
    "worker lost": 100,
}


@pytest.mark.parametrize(
    ("tiers", "wanted"),
    [
        ({"host": False, "disk": False}, WITHOUT_TIERS),
        ({"host": False, "disk": False, "grouped": True}, WITHOUT_TIERS),
        ({"host": True, "disk": False}, dict.fromkeys(HOST_EVENTS, 1) | {"loaded from host": 300}),
        ({"host": False, "disk": True}, dict.fromkeys(DISK_EVENTS, 1) | {"loaded from disk": 300}),
        ({"host": True, "disk": True}, OF_BOTH),
    ],
)
def test_seeds_meet_what_can_go_wrong(tiers: dict[str, bool], wanted: dict[str, int]) -> None:
    met: Counter[str] = Counter()
    for seed in range(400):
        met += Life(seed, **tiers).met
        if all(met[event] >= count for event, count in wanted.items()):
            return
    pytest.fail(f"{[event for event in wanted if met[event] < wanted[event]]} in no life")


def test_the_same_seed_is_the_same_life() -> None:
    first, second = (Life(17, host=True, disk=True) for _ in range(2))
    assert first.met == second.met
    assert [h.tokens for h in first.harnesses] == [h.tokens for h in second.harnesses]
    assert [h.clock.now() for h in first.harnesses] == [h.clock.now() for h in second.harnesses]
