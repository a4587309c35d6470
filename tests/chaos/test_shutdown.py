# SPDX-License-Identifier: Apache-2.0
"""The short forms of the trials of shutdown."""

from __future__ import annotations

import pytest

from benchmarks.chaos.shutdown import SIGKILL, SIGTERM
from benchmarks.chaos.trial import Trial


@pytest.mark.parametrize("trial", [SIGTERM, SIGKILL], ids=lambda trial: trial.name)
def test_it_ends_as_it_should(trial: Trial) -> None:
    outcome = trial.run(True)
    assert outcome.holds, outcome.measured
