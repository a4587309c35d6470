# SPDX-License-Identifier: Apache-2.0
"""The index against a model of it: a dictionary, sorted whenever somebody asks for the oldest."""

from __future__ import annotations

import hashlib
import itertools

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pagoda.plugins.disk_tier.index import DiskIndex

KEYS = [hashlib.sha256(bytes([number])).digest() for number in range(24)]
KEYS += [KEYS[0][:1] + key[1:] for key in KEYS[1:8]]  # some in one fan-out directory
SIZES = {0: 100, 1: 30, 7: 5}
PERIOD = 64


class IndexMachine(RuleBasedStateMachine):
    """Objects come from scans with old times and from stores, are used, and go."""

    def __init__(self) -> None:
        super().__init__()
        self.index = DiskIndex()
        self.model: dict[tuple[int, bytes], tuple[int, int]] = {}
        """Time of the last use, and order in which the index learnt of it, by object."""
        self.steps = itertools.count()
        self.now = 1000
        for directory, size in SIZES.items():
            self.index.add_directory(directory, size)

    def order(self) -> list[tuple[int, bytes]]:
        return sorted(self.model, key=lambda it: (self.model[it][0] // PERIOD, self.model[it][1]))

    @rule(
        directory=st.sampled_from(list(SIZES)), key=st.sampled_from(KEYS), age=st.integers(0, 1000)
    )
    def find_on_disk(self, directory: int, key: bytes, age: int) -> None:
        used_at = self.now - age
        known = self.model.get((directory, key))
        assert self.index.add(directory, key, used_at) == (known is None)
        if known is None or used_at > known[0]:
            self.model[directory, key] = used_at, next(self.steps)

    @rule(
        directory=st.sampled_from(list(SIZES)),
        key=st.sampled_from(KEYS),
        seconds=st.integers(-20, 200),
    )
    def use(self, directory: int, key: bytes, seconds: int) -> None:
        now = self.now + seconds  # clocks may go back
        self.now = max(self.now, now)
        self.index.touch(directory, key, now)
        if (directory, key) in self.model:
            newest = self.model[self.order()[-1]][0]
            self.model[directory, key] = max(now, newest), next(self.steps)

    @rule(directory=st.sampled_from(list(SIZES)), key=st.sampled_from(KEYS))
    def remove(self, directory: int, key: bytes) -> None:
        is_known = self.model.pop((directory, key), None) is not None
        assert self.index.remove(directory, key) == is_known

    @precondition(lambda self: self.model)
    @rule(count=st.integers(1, 5))
    def evict(self, count: int) -> None:
        for expected in self.order()[:count]:
            assert self.index.oldest() == expected
            self.index.remove(*expected)
            del self.model[expected]

    @rule(
        directory=st.sampled_from(list(SIZES)),
        kept=st.sets(st.sampled_from(KEYS)),
        age=st.integers(0, 300),
    )
    def list_a_fan_out_directory(self, directory: int, kept: set[bytes], age: int) -> None:
        fan_out, since = KEYS[0][0], self.now - age
        there = {key for key in kept if key[0] == fan_out}
        unknown, missing = self.index.compare(directory, fan_out, there, since)
        assert unknown == {key for key in there if (directory, key) not in self.model}
        assert len(set(missing)) == len(missing)
        assert set(missing) == {
            key
            for (home, key), (used_at, _) in self.model.items()
            if home == directory and key[0] == fan_out and key not in kept and used_at < since
        }

    @invariant()
    def everything_is_found_and_counted(self) -> None:
        for directory in SIZES:
            known = {key for key in KEYS if self.index.has(directory, key)}
            assert known == {key for home, key in self.model if home == directory}
            assert self.index.count(directory) == len(known)
        assert self.index.num_bytes == sum(SIZES[home] for home, _ in self.model)
        assert self.index.oldest() == next(iter(self.order()), None)

    def teardown(self) -> None:
        """The whole ring, in its order."""
        for expected in self.order():
            assert self.index.oldest() == expected
            self.index.remove(*expected)
        assert self.index.oldest() is None
        assert self.index.num_bytes == 0


TestIndexMachine = IndexMachine.TestCase


def test_slots_are_used_again() -> None:
    index = DiskIndex()
    index.add_directory(0, 1)
    for number in range(1000):
        index.add(0, KEYS[number % len(KEYS)], number)
        index.remove(0, KEYS[number % len(KEYS)])
    assert index.num_slots == 1
