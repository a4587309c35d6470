# SPDX-License-Identifier: Apache-2.0
"""Short forms of the trials of resources: nothing that clients do is kept."""

from __future__ import annotations

import pytest

from benchmarks.chaos.drop import DROP
from benchmarks.chaos.idle import IDLE
from benchmarks.chaos.soak import SOAK
from benchmarks.chaos.trial import Trial


@pytest.mark.parametrize("trial", [DROP, SOAK, IDLE], ids=lambda trial: trial.name)
def test_the_short_form_holds(trial: Trial) -> None:
    outcome = trial.run(True)
    assert outcome.holds, outcome.measured
