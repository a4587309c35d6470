# SPDX-License-Identifier: Apache-2.0
"""Short forms of the trials in which processes die, stop or hang: every stream is complete, token for token."""

from __future__ import annotations

import pytest

from benchmarks.chaos import deaths
from benchmarks.chaos.trial import Trial


@pytest.mark.parametrize(
    "trial",
    [
        deaths.KILL_WORKER,
        deaths.KILL_ENGINE,
        deaths.STOP_WORKER,
        deaths.STOP_ENGINE,
        deaths.HANG_LOADING,
        deaths.OOM,
        deaths.POISON,
        deaths.LOST_MESSAGES,
    ],
    ids=lambda trial: trial.name,
)
def test_short_form(trial: Trial) -> None:
    outcome = trial.run(True)
    assert outcome.holds, outcome.measured
