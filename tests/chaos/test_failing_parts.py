"""The short forms of the trials in which a disk, a router or an etcd fails."""

from __future__ import annotations

import shutil

import pytest

from benchmarks.chaos.disk import DISK
from benchmarks.chaos.routers import ETCD, ROUTER
from benchmarks.chaos.trial import Trial


@pytest.mark.parametrize("trial", [DISK, ROUTER, ETCD], ids=lambda trial: trial.name)
def test_the_service_goes_on(trial: Trial) -> None:
    if trial is ETCD and shutil.which("etcd") is None:
        pytest.skip("there is no etcd")
    outcome = trial.run(True)
    assert outcome.holds, outcome.measured
