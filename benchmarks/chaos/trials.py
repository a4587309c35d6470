"""All trials, in the order of the table."""

from __future__ import annotations

from benchmarks.chaos.fuzz.trial import FUZZ
from benchmarks.chaos.idle import IDLE
from benchmarks.chaos.simulation import SIMULATION
from benchmarks.chaos.trial import Trial
from benchmarks.chaos.two_users import TWO_USERS

TRIALS: tuple[Trial, ...] = (SIMULATION, FUZZ, TWO_USERS, IDLE)
