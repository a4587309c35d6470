"""Hundreds of seeds of two engines between which KV goes (part 2 of 2, for two cores)."""

from __future__ import annotations

import pytest
from handoff_lives import SEEDS_PER_TEST, live_all

FIRST_SEED, NUM_SEEDS = 225, 300


@pytest.mark.parametrize("first", range(FIRST_SEED, FIRST_SEED + NUM_SEEDS, SEEDS_PER_TEST))
def test_seeds(first: int) -> None:
    live_all(first)
