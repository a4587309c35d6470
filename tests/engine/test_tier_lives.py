"""Hundreds of seeds of an engine whose blocks go to host memory and to disk; `tier_lives` says what goes wrong."""

from __future__ import annotations

from collections import Counter

import pytest
from tier_lives import SEEDS_PER_TEST, Life, live_all

FIRST_SEED = 1000
HOST_EVENTS = (
    "stored in host",
    "removed from host",
    "failed in host",
    "slow",
    "failed",
    "failed in part",
    "ended twice",
    "lost with the worker",
    "aborted while it was loaded",
    "loaded at once",
    "loads behind a step",
    "loads slower than patience",
    "loads that ended after their request",
    "failed for want of KV",
    "preempted",
)
DISK_EVENTS = (
    "stored in disk",
    "removed from disk",
    "failed in disk",
    "slow",
    "failed",
    "failed in part",
    "ended twice",
    "lost with the worker",
    "object removed by others",
    "unanswered at once",
    "aborted before it was known",
    "aborted while it was loaded",
    "loads behind a step",
    "loads slower than patience",
    "loads that ended after their request",
    "failed for want of KV",
)


def seeds(count: int) -> range:
    """Returns the first seed of each test."""
    return range(FIRST_SEED, FIRST_SEED + count, SEEDS_PER_TEST)


def events_of(num_seeds: int, *, host: bool, disk: bool) -> Counter[str]:
    met: Counter[str] = Counter()
    for seed in range(num_seeds):
        met += Life(seed, host=host, disk=disk).met
    return met


@pytest.mark.parametrize("first", seeds(500))
def test_host_memory(first: int) -> None:
    live_all(first, host=True, disk=False)


@pytest.mark.parametrize("first", seeds(500))
def test_disk(first: int) -> None:
    live_all(first, host=False, disk=True)


@pytest.mark.parametrize("first", seeds(1500))
def test_both(first: int) -> None:
    live_all(first, host=True, disk=True)


def test_seeds_of_host_memory_meet_what_can_go_wrong() -> None:
    met = events_of(150, host=True, disk=False)
    assert met["loaded from host"] > 300
    assert [event for event in HOST_EVENTS if not met[event]] == []


def test_seeds_of_a_disk_meet_what_can_go_wrong() -> None:
    met = events_of(400, host=False, disk=True)
    assert met["loaded from disk"] > 300
    assert [event for event in DISK_EVENTS if not met[event]] == []


def test_seeds_of_both_load_from_both_and_from_one_into_the_other() -> None:
    met = events_of(150, host=True, disk=True)
    assert met["loaded from host"] > 200
    assert met["loaded from disk"] > 200
    assert met["prefetches"] > 10
    assert met["worker lost"] > 100


def test_the_same_seed_is_the_same_life() -> None:
    first, second = (Life(17, host=True, disk=True) for _ in range(2))
    assert first.met == second.met
    assert [h.tokens for h in first.harnesses] == [h.tokens for h in second.harnesses]
    assert [h.clock.now() for h in first.harnesses] == [h.clock.now() for h in second.harnesses]
