# SPDX-License-Identifier: Apache-2.0
"""Another user of the machine, in the short form of the trial."""

from __future__ import annotations

import os

import pytest

from benchmarks.chaos.two_users import TWO_USERS


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_reads_and_writes_nothing() -> None:
    outcome = TWO_USERS.run(True)
    assert outcome.holds, outcome.measured
