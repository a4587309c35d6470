"""Thousands of seeds of an engine whose blocks go to disk; `tier_lives` says what goes wrong there."""

from __future__ import annotations

from collections import Counter

import pytest
from tier_lives import SEEDS_PER_TEST, Life, live_all

NUM_SEEDS = 2500


@pytest.mark.parametrize("first", range(0, NUM_SEEDS, SEEDS_PER_TEST))
def test_seeds(first: int) -> None:
    live_all(first, host=False, disk=True)


def test_the_seeds_meet_what_can_go_wrong() -> None:
    met: Counter[str] = Counter()
    for seed in range(400):
        met += Life(seed, host=False, disk=True).met
    assert met["loaded from disk"] > 300
    for what in (
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
    ):
        assert met[what], what


def test_the_same_seed_is_the_same_life() -> None:
    first, second = (Life(17, host=True, disk=True) for _ in range(2))
    assert first.met == second.met
    assert [h.tokens for h in first.harnesses] == [h.tokens for h in second.harnesses]
    assert [h.clock.now() for h in first.harnesses] == [h.clock.now() for h in second.harnesses]
