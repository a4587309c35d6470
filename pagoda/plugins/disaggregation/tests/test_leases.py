# SPDX-License-Identifier: Apache-2.0
"""Leases end once, however they end, in any order and any number of times, and none looks at the others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from operations import assert_linear
from pair import LEASE_S, READY, make_exporter

from pagoda.kv.block_pool import Block
from pagoda.plugins.disaggregation.exporter import Lease
from pagoda.plugins.disaggregation.messages import (
    DecodeMessage,
    KVCheck,
    KVRelease,
    KVRenew,
    KVSubscribe,
)

NUMBERS = st.integers(0, 5)
"""Transfers, by the order in which they were opened; the last of them are the ones that there are."""


class Leases(RuleBasedStateMachine):
    """Compares leases with a model of their blocks and ends."""

    def __init__(self) -> None:
        super().__init__()
        self.exporter, self.listener, self.pool, self.clock = make_exporter(num_blocks=32)
        self.exporter.workers_ready(READY)
        self.transfers = [""]
        self.held: dict[str, list[Block]] = {}
        self.ends: dict[str, float | None] = {}
        """None while the prompt is being computed."""
        self.num_expired = 0

    def pick(self, number: int) -> str:
        return self.transfers[-1 - number % len(self.transfers)]

    def ask(self, message: DecodeMessage) -> None:
        self.listener.inbox.put((b"asker", message), 0.0)
        self.exporter.step()

    @rule()
    def open(self) -> None:
        transfer_id = self.exporter.open("r", 4).transfer_id
        self.transfers.append(transfer_id)
        self.held[transfer_id], self.ends[transfer_id] = [], None

    @rule(number=NUMBERS, count=st.integers(0, 4), shared=st.booleans())
    def hold(self, number: int, count: int, shared: bool) -> None:
        """Blocks of a request that ends soon after; or those that another lease holds already."""
        transfer_id = self.pick(number)
        others = [block for blocks in self.held.values() for block in blocks]
        mine = self.held.get(transfer_id, [])
        blocks = [block for block in dict.fromkeys(others) if block not in mine][:count]
        if not shared:
            blocks = self.pool.allocate(min(count, self.pool.num_available))
        self.exporter.hold(transfer_id, [blocks], [b"key"] * len(blocks))
        if not shared:
            self.pool.release(blocks)
        mine.extend(blocks)

    @rule(number=NUMBERS)
    def finish(self, number: int) -> None:
        transfer_id = self.pick(number)
        if transfer_id not in self.held or self.ends[transfer_id] is None:  # requests end once
            source = self.exporter.finish(transfer_id, b"key", 1, b"conditions")
            assert (source is not None) == (transfer_id in self.held)
            if source is not None:
                self.ends[transfer_id] = self.clock.now() + LEASE_S

    @rule(number=NUMBERS, kind=st.sampled_from([KVSubscribe, KVRenew, KVCheck]))
    def renew(self, number: int, kind: type[KVSubscribe | KVRenew | KVCheck]) -> None:
        transfer_id = self.pick(number)
        if kind is KVSubscribe:
            self.ask(KVSubscribe(transfer_id, 0, 4))
        else:
            self.ask(KVRenew([transfer_id]) if kind is KVRenew else KVCheck(transfer_id))
        if self.ends.get(transfer_id) is not None:
            self.ends[transfer_id] = self.clock.now() + LEASE_S

    @rule(number=NUMBERS, by_message=st.booleans())
    def end(self, number: int, by_message: bool) -> None:
        transfer_id = self.pick(number)
        if by_message:
            self.ask(KVRelease([transfer_id, transfer_id]))
        else:
            self.exporter.drop(transfer_id, "why")
        self._forget(transfer_id)

    @rule()
    def lose_workers(self) -> None:
        self.exporter.workers_lost()
        self.exporter.workers_ready(READY)
        self.held.clear()
        self.ends.clear()

    @rule(seconds=st.sampled_from([0.0, 1.0, 12.0, LEASE_S, 2 * LEASE_S]))
    def pass_time(self, seconds: float) -> None:
        self.clock.advance_to(self.clock.now() + seconds)
        due = [it for it, at in self.ends.items() if at is not None and at <= self.clock.now()]
        self.exporter.step()
        self.num_expired += len(due)
        for transfer_id in due:
            self._forget(transfer_id)

    def _forget(self, transfer_id: str) -> None:
        self.held.pop(transfer_id, None)
        self.ends.pop(transfer_id, None)

    @invariant()
    def references_are_those_of_leases(self) -> None:
        self.pool.check()
        wanted = Counter(block.block_id for blocks in self.held.values() for block in blocks)
        assert self.pool.references() == wanted

    @invariant()
    def leases_are_those_of_the_model(self) -> None:
        leases: dict[str, Lease] = self.exporter.leases
        assert {it: lease.blocks() for it, lease in leases.items()} == self.held
        assert self.exporter.num_leased_blocks == sum(map(len, self.held.values()))
        assert self.exporter.num_wanted == sum(it.asker is not None for it in leases.values())
        assert self.exporter.num_expired == self.num_expired
        ends = [at for at in self.ends.values() if at is not None]
        assert self.exporter.next_event_at() == min(ends, default=None)


Leases.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
test_leases = Leases.TestCase


def exports(count: int) -> Callable[[], None]:
    """A burst of prompts: half are fetched and released, half make room one after the other or expire."""
    exporter, listener, pool, clock = make_exporter(count)
    exporter.workers_ready(READY)
    blocks = pool.allocate(count)

    def live() -> None:
        sources = [exporter.open(str(number), 1) for number in range(count)]
        for source, block in zip(sources, blocks, strict=True):
            exporter.hold(source.transfer_id, [[block]], [b"key"])
        for source in sources[: count // 2]:
            listener.inbox.put((b"asker", KVSubscribe(source.transfer_id, 0, 1)), 0.0)
        exporter.step()
        for source in sources:
            exporter.finish(source.transfer_id, b"key", 1, b"conditions")
        for _ in range(count // 4):
            assert exporter.make_room()
            assert exporter.num_wanted == count // 2
        for source in sources[: count // 2]:
            listener.inbox.put((b"asker", KVRelease([source.transfer_id])), 0.0)
            exporter.step()
        clock.advance_to(clock.now() + LEASE_S + 1)
        exporter.step()
        assert not exporter.leases

    return live


def test_operations_of_a_burst_of_prompts() -> None:
    assert_linear(exports, (512, 1024, 4096))
