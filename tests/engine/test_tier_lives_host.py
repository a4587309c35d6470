"""Thousands of seeds of an engine whose blocks go to host memory; `tier_lives` says what goes wrong there."""

from __future__ import annotations

from collections import Counter

import pytest
from tier_lives import SEEDS_PER_TEST, Life, live_all

NUM_SEEDS = 2500


@pytest.mark.parametrize("first", range(0, NUM_SEEDS, SEEDS_PER_TEST))
def test_seeds(first: int) -> None:
    live_all(first, host=True, disk=False)


def test_the_seeds_meet_what_can_go_wrong() -> None:
    met: Counter[str] = Counter()
    for seed in range(150):
        met += Life(seed, host=True, disk=False).met
    assert met["loaded from host"] > 300
    for what in (
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
    ):
        assert met[what], what
