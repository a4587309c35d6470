# SPDX-License-Identifier: Apache-2.0
"""The short forms of the trials in which a disk, a router, an etcd or the head of a Ray cluster fails."""

from __future__ import annotations

import importlib.util
import shutil

import pytest

from benchmarks.chaos.disk import DISK
from benchmarks.chaos.ray_head import RAY_HEAD
from benchmarks.chaos.routers import ETCD, ROUTER
from benchmarks.chaos.trial import Trial


@pytest.mark.parametrize("trial", [DISK, ROUTER, ETCD, RAY_HEAD], ids=lambda trial: trial.name)
def test_the_service_goes_on(trial: Trial) -> None:
    if trial is ETCD and shutil.which("etcd") is None:
        pytest.skip("there is no etcd")
    if trial is RAY_HEAD and importlib.util.find_spec("ray") is None:
        pytest.skip("Ray is not installed")
    outcome = trial.run(True)
    assert outcome.holds, outcome.measured
