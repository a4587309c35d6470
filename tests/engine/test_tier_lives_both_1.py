"""Thousands of seeds of an engine whose blocks go to host memory and to disk (part 1 of 2, for two cores)."""

from __future__ import annotations

from collections import Counter

import pytest
from tier_lives import SEEDS_PER_TEST, Life, live_all

FIRST_SEED, NUM_SEEDS = 0, 2500


@pytest.mark.parametrize("first", range(FIRST_SEED, FIRST_SEED + NUM_SEEDS, SEEDS_PER_TEST))
def test_seeds(first: int) -> None:
    live_all(first, host=True, disk=True)


def test_the_seeds_load_from_both_and_from_one_into_the_other() -> None:
    met: Counter[str] = Counter()
    for seed in range(150):
        met += Life(seed, host=True, disk=True).met
    assert met["loaded from host"] > 200
    assert met["loaded from disk"] > 200
    assert met["prefetches"] > 10
    assert met["worker lost"] > 100
