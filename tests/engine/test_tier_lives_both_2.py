"""Thousands of seeds of an engine whose blocks go to host memory and to disk (part 2 of 2, for two cores)."""

from __future__ import annotations

import pytest
from tier_lives import SEEDS_PER_TEST, live_all

FIRST_SEED, NUM_SEEDS = 2500, 2500


@pytest.mark.parametrize("first", range(FIRST_SEED, FIRST_SEED + NUM_SEEDS, SEEDS_PER_TEST))
def test_seeds(first: int) -> None:
    live_all(first, host=True, disk=True)
