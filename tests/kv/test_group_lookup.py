# SPDX-License-Identifier: Apache-2.0
"""Lookups of prefixes of several groups: the longest that can be loaded, and what is loaded of it."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest
from group_models import EVERY, grouped
from hypothesis import given
from hypothesis import strategies as st
from kv_tiers import READY, end_of
from operations import assert_linear
from scripted_tier import ScriptedTier

from pagoda.ipc.clock import VirtualClock
from pagoda.kv.block_keys import group_key, prefix_keys
from pagoda.kv.block_pool import BlockPool
from pagoda.kv.connector import PrefixRequest
from pagoda.kv.group_lookup import PendingLookup, other_blocks
from pagoda.kv.layout import KVLayout
from pagoda.kv.tiered_connector import TieredKVConnector, TierMatch
from pagoda.kv.transfers import TransferLedger

NUM_BLOCKS = 12
PREFIX = PrefixRequest("r", prefix_keys(list(range(49)), 4, None, 100), list(range(48)))
Where = dict[tuple[int, int], int]
"""Places of blocks by group and index: the device is 0, the near tier 1, the far one 2."""


class Stack:
    def __init__(self, layout: KVLayout, prefix: PrefixRequest = PREFIX) -> None:
        self.layout, self.prefix = layout, prefix
        self.pool = BlockPool(4 * len(layout.groups) * len(prefix.keys))
        ledger = TransferLedger(self.pool)
        self.near, self.far = ScriptedTier("near", ledger), ScriptedTier("far", ledger)
        self.tiers = TieredKVConnector(
            [self.near, self.far], self.pool, ledger, VirtualClock(), layout=layout
        )
        self.tiers.workers_ready(READY)

    def key(self, group: int, index: int) -> bytes:
        return group_key(self.prefix.keys[(index + 1) * self.layout.ratios[group] - 1], group)

    def put(self, where: Where) -> None:
        for (group, index), place in where.items():
            key = self.key(group, index)
            if place == 0:
                (block,) = self.pool.allocate(1)
                self.pool.publish(block, key, group=group)
                self.pool.release([block])
            else:
                (self.near if place == 1 else self.far).has.add(key)

    def longest(self, is_there: Callable[[int, int], bool]) -> int:
        """The longest usable prefix, by trying all."""
        layout = self.layout
        ends = range(0, len(self.prefix.keys) + 1, layout.multiple)
        return max(
            end
            for end in ends
            if all(
                is_there(group, index)
                for group in range(len(layout.groups))
                for index in layout.needed(group, end)
            )
        )

    def lookup(self, start: int) -> TierMatch:
        found = self.tiers.lookup(self.prefix, start)
        assert isinstance(found, TierMatch)
        return found


def places(name: str) -> st.SearchStrategy[Where]:
    """Blocks somewhere; most are."""
    layout = KVLayout(4, grouped(name, 4))
    each = {
        (group, index): st.sampled_from([0, 0, 1, 1, 2, 2, 3])
        for group, ratio in enumerate(layout.ratios)
        for index in range(NUM_BLOCKS // ratio)
    }
    return st.fixed_dictionaries(each).map(
        lambda where: {one: place for one, place in where.items() if place < 3}
    )


@given(st.data())
def test_the_longest_prefix_is_found_and_just_what_the_device_lacks_is_loaded(
    data: st.DataObject,
) -> None:
    name = data.draw(st.sampled_from(EVERY[1:]))
    where = data.draw(places(name))
    stack = Stack(KVLayout(4, grouped(name, 4)))
    stack.put(where)
    start = stack.longest(lambda group, index: where.get((group, index)) == 0)
    found = stack.lookup(start)
    assert found.end == stack.longest(lambda group, index: (group, index) in where)
    needed = [
        (group, index)
        for group in range(len(stack.layout.groups))
        for index in stack.layout.needed(group, found.end)
    ]
    missing = [one for one in needed if where[one] != 0] if found.end > start else []
    assert found.targets == missing
    for segment in found.segments:
        place = 1 if segment.connector is stack.near else 2
        indices = range(segment.start, segment.end)
        assert {where[segment.group, index] for index in indices} == {place}
    if missing:
        blocks = stack.pool.allocate(len(missing))
        stack.tiers.load(found, blocks)
        for transfer in stack.tiers.drain_transfers():
            stack.tiers.transfer_ended(end_of(transfer))
        ((request_id, num_loaded, failure),) = stack.tiers.drain_load_ends()
        assert (request_id, num_loaded, failure) == ("r", len(missing), None)


def test_a_block_of_a_window_on_its_way_is_waited_for() -> None:
    stack = Stack(KVLayout(4, grouped("mixed", 4)))
    stack.put({(group, index): 1 for group in range(3) for index in range(NUM_BLOCKS)})
    found = stack.lookup(0)
    stack.tiers.load(found, stack.pool.allocate(found.num_blocks))
    other = msgspec.structs.replace(PREFIX, request_id="other")
    assert stack.tiers.lookup(other, 0) == PendingLookup(stack.near)
    for transfer in stack.tiers.drain_transfers():
        stack.tiers.transfer_ended(end_of(transfer))
    assert stack.tiers.poll() == {"r", "other"}
    assert isinstance(stack.tiers.lookup(other, 0), TierMatch)


def test_a_tier_that_does_not_know_yet_is_waited_for() -> None:
    stack = Stack(KVLayout(4, grouped("mixed", 4)))
    stack.put({(0, index): 1 for index in range(NUM_BLOCKS)})
    stack.far.is_unsure = True
    assert stack.tiers.lookup(PREFIX, 0) == PendingLookup(stack.far)
    stack.far.is_unsure = False
    assert stack.lookup(0).end == 0


def near(stack: Stack) -> Callable[[bytes], bool]:
    """True for keys of blocks on the device and in the near tier."""
    return lambda key: stack.pool.find(key) is not None or key in stack.near.has


@given(st.data())
def test_what_is_found_of_other_groups_completes_the_longest_prefix(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(EVERY[1:]))
    where = data.draw(places(name))
    layout = KVLayout(4, grouped(name, 4))
    stack = Stack(layout)
    stack.put(where)
    leading = next((i for i in range(NUM_BLOCKS) if (0, i) not in where), NUM_BLOCKS)
    asked: list[bytes] = []

    def is_there(key: bytes) -> bool:
        asked.append(key)
        return key in stack.far.has

    found = other_blocks(layout, PREFIX, 0, near(stack), leading, is_there)
    end = stack.longest(lambda group, index: (group, index) in where)
    others = range(layout.groups[0].keeps_all, len(layout.groups))
    wanted = {
        stack.key(group, index)
        for group in others
        for index in layout.needed(group, end)
        if where[group, index] == 2
    }
    assert wanted <= set(found) <= stack.far.has
    assert len(asked) == len(set(asked))


@pytest.mark.parametrize(("name", "count"), [("mixed", 2 * 2), ("window", 2), ("all", 2 + 1)])
def test_no_more_is_looked_for_than_the_end_of_the_prefix_needs(name: str, count: int) -> None:
    layout = KVLayout(4, grouped(name, 4))
    asked: list[bytes] = []

    def is_there(key: bytes) -> bool:
        asked.append(key)
        return True

    found = other_blocks(layout, PREFIX, 0, lambda _: False, 6, is_there)
    assert found == asked
    assert len(asked) == count


def long_prefix(name: str) -> Callable[[int], Callable[[], None]]:
    """Lookups of a prefix of which some tier has everything but the windows at its end, or every other block."""

    def prepare(count: int) -> Callable[[], None]:
        keys = prefix_keys(list(range(4 * count + 1)), 4, None, count)
        stack = Stack(KVLayout(4, grouped(name, 4)), PrefixRequest("r", keys, []))
        last = len(stack.layout.groups) - 1
        for group, ratio in enumerate(stack.layout.ratios):
            step = 2 if group == last else 1
            stack.put({(group, index): 1 for index in range(0, count // ratio, step)})

        def look() -> None:
            stack.tiers.on_queued(stack.prefix, 0)
            stack.lookup(0)

        return look

    return prepare


@pytest.mark.parametrize("name", ["window", "mixed", "all"])
def test_a_lookup_costs_as_many_operations_as_the_prefix_has_blocks(name: str) -> None:
    assert_linear(long_prefix(name), (256, 512, 2048))
