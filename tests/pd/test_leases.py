"""Leases end once, however they end, in any order and any number of times."""

from __future__ import annotations

from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from pagoda.ipc.clock import VirtualClock
from pagoda.kv.block_pool import Block, BlockPool
from pagoda.pd.leases import LeaseBook

LEASE_S = 30.0
NUM_BLOCKS = 32

IDS = st.sampled_from([f"t{number}" for number in range(6)])


class Leases(RuleBasedStateMachine):
    """Compares leases with a model of their blocks and ends."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = VirtualClock()
        self.pool = BlockPool(NUM_BLOCKS)
        self.book = LeaseBook(self.pool, self.clock, LEASE_S)
        self.held: dict[str, list[Block]] = {}
        self.ends: dict[str, float | None] = {}
        """None while the prompt is being computed."""
        self.num_expired = 0

    @rule(transfer_id=IDS)
    def open(self, transfer_id: str) -> None:
        if transfer_id not in self.held:  # ids are never given twice
            self.book.open(transfer_id)
            self.held[transfer_id], self.ends[transfer_id] = [], None

    @rule(transfer_id=IDS, count=st.integers(0, 4), shared=st.booleans())
    def hold(self, transfer_id: str, count: int, shared: bool) -> None:
        """Blocks of a request that ends soon after; or those that another lease holds already."""
        others = [block for blocks in self.held.values() for block in blocks]
        mine = self.held.get(transfer_id, [])
        if shared:
            blocks = [block for block in dict.fromkeys(others) if block not in mine][:count]
            assert self.book.hold(transfer_id, blocks) == (transfer_id in self.held)
        else:
            blocks = self.pool.allocate(min(count, self.pool.num_available))
            assert self.book.hold(transfer_id, blocks) == (transfer_id in self.held)
            self.pool.release(blocks)
        mine.extend(blocks)

    @rule(transfer_id=IDS)
    def finish(self, transfer_id: str) -> None:
        assert self.book.finish(transfer_id) == (transfer_id in self.held)
        if transfer_id in self.held and self.ends[transfer_id] is None:
            self.ends[transfer_id] = self.clock.now() + LEASE_S

    @rule(transfer_id=IDS)
    def renew(self, transfer_id: str) -> None:
        assert self.book.renew(transfer_id) == (transfer_id in self.held)
        if self.ends.get(transfer_id) is not None:
            self.ends[transfer_id] = self.clock.now() + LEASE_S

    @rule(transfer_id=IDS)
    def end(self, transfer_id: str) -> None:
        assert self.book.end(transfer_id) == (transfer_id in self.held)
        self._forget(transfer_id)

    @rule()
    def lose_all(self) -> None:
        for transfer_id in list(self.held):
            assert self.book.end(transfer_id)
        self.held.clear()
        self.ends.clear()

    @rule(seconds=st.sampled_from([0.0, 1.0, 12.0, LEASE_S, 2 * LEASE_S]))
    def pass_time(self, seconds: float) -> None:
        self.clock.advance_to(self.clock.now() + seconds)
        due = {it for it, at in self.ends.items() if at is not None and at <= self.clock.now()}
        expired = self.book.expire()
        assert len(expired) == len(set(expired))
        assert set(expired) == due
        assert self.book.expire() == []
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
        given = self.pool.references()
        assert given == wanted

    @invariant()
    def what_it_says_is_so(self) -> None:
        assert self.book.num_leases == len(self.held)
        assert self.book.num_blocks == sum(map(len, self.held.values()))
        assert self.book.num_expired == self.num_expired
        assert self.book.next_end == min((at for at in self.ends.values() if at), default=None)
        for transfer_id in ("t0", "t1", "t2"):
            assert list(self.book.blocks(transfer_id)) == self.held.get(transfer_id, [])
            assert (transfer_id in self.book) == (transfer_id in self.held)


Leases.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
test_leases = Leases.TestCase
